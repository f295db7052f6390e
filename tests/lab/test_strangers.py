"""Strangers for data of one's own: names that no document has, by form, in the letters of the data."""

import re

import pytest

from regard.data.files import DataError
from regard.data.questions import Question
from regard.lab.knowledge.strangers import find_template, invent_strangers, name_form, read_strangers

GIVEN = ["Ada", "Grace", "Alan", "Emmy", "Kurt", "Sofja", "Émilie", "Niels", "Marie", "Srinivasa"]
FAMILY = ["Lovelace", "Hopper", "Turing", "Noether", "Gödel", "Kowalewskaja", "Bohr", "Curie", "Ramanujan", "Châtelet"]
NAMES = [f"{given} {family}" for n, given in enumerate(GIVEN) for family in (FAMILY[n], FAMILY[n - 1])]
DOCUMENTS = [f"{name} was born in Elm and died in Oak." for name in NAMES] + ["Ada Hopper, whom nobody asks about."]
ASKED = [Question(f"Where was {name} born?", "Elm") for name in NAMES]


def test_strangers_are_in_no_document_and_asked_by_nobody():
    strangers = invent_strangers(ASKED, DOCUMENTS, 12)
    assert len(strangers) == 5 and all(len(questions) == 12 for questions in strangers.values())
    names = [re.fullmatch(r"Where was (.*) born\?", q.text)[1] for group in strangers.values() for q in group]
    assert len(set(names)) == 60 and not any(name in "\n".join(DOCUMENTS) for name in names)
    written = set(" ".join(DOCUMENTS).split())
    by_form = {form: [q.text[10:-6].split() for q in group] for form, group in strangers.items()}
    assert all(a in written and b in written for a, b in by_form["known names, new pair"])
    assert all(a in written and b not in written for a, b in by_form["new family name"])
    assert all(a not in written and b in written for a, b in by_form["new given name"])
    assert all(a not in written and b not in written for a, b in by_form["both names new"])
    letters = set("".join(DOCUMENTS))
    assert all(set(name) <= letters for name in names)  # the model can read them
    assert all(q.answer is None for group in strangers.values() for q in group)


def test_strangers_are_the_same_each_time():
    assert invent_strangers(ASKED, DOCUMENTS, 9) == invent_strangers(ASKED, DOCUMENTS, 9)
    assert invent_strangers(ASKED, DOCUMENTS, 0) == {}


def test_few_names_give_few_strangers_and_never_a_known_one():
    asked = ASKED[:2]
    strangers = invent_strangers(asked, DOCUMENTS[:2], 50)
    names = [q.text for group in strangers.values() for q in group]
    assert len(names) == len(set(names)) and not set(names) & {q.text for q in asked}


def test_names_of_one_word():
    names = ["Platon", "Sokrates", "Hypatia", "Euklid", "Thales", "Sappho"]
    documents = [f"{name} lived." for name in names]
    asked = [Question(f"Who was {name}", "x") for name in names]
    (form,) = strangers = invent_strangers(asked, documents, 5)
    assert form == "one new word" and len(strangers[form]) == 5


@pytest.mark.parametrize(
    "texts, template",
    [
        (["Where was Ada born?", "Where was Alan Turing born?"], ("Where was ", " born?")),
        (["Who is Ada?", "Who is Bob?"], ("Who is ", "")),  # a name is a whole word
        (["Ada?", "Bob?"], None),
        (["Where was Ada born?"], None),
        (["How old is Ada?", "Where was Bob born?"], None),
    ],
)
def test_what_questions_have_in_common(texts, template):
    assert find_template(texts) == template


def test_strangers_of_a_file_are_checked_and_told_by_form(tmp_path):
    path = tmp_path / "strangers.tsv"
    rows = ["Bo Hansen", "Bo T. Hansen", "Bo van Hansen", "Bo Ada Hansen", "Bo"]
    path.write_text("".join(f"Where was {name} born?\tElm\n" for name in rows))
    found = read_strangers(path, ASKED, DOCUMENTS)
    assert list(found) == ["two words", "with an initial", "with a particle", "three words or more", "one word"]
    assert found["two words"] == [Question("Where was Bo Hansen born?")]  # what nobody can know is not expected
    path.write_text("Where was Bo Hansen born?\nWhere was Ada Hopper born?\n")
    with pytest.raises(
        DataError, match=r"line 2: 'Ada Hopper' occurs in document 21; expected people whom no document"
    ):
        read_strangers(path, ASKED, DOCUMENTS)
    assert name_form("Ada Lovelace") == "two words"
