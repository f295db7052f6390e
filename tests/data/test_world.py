"""The invented world: the same bytes from the same seed, and what its knobs promise."""

import hashlib
import json
import math
import re
from collections import Counter
from itertools import pairwise

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from regard.cli import data as commands
from regard.config import ConfigError
from regard.data import DataError, WorldConfig, make_world, read_documents, read_questions, read_world
from regard.data.draws import Draws, apportion
from regard.data.people import FORMS
from regard.data.phrases import BIRTH, FACTS

HARDEST = {"people": 3000, "biographies": 1, "asked": 2000}


def owners(world):
    """Whom each document is about, by the full names in it."""
    people = {p.name: p for p in world.people}
    names = re.compile("|".join(rf"(?<!\w){re.escape(n)}(?!\w)" for n in sorted(people, key=len, reverse=True)))
    return [people[names.search(document)[0]] for document in world.documents]


configs = st.builds(
    WorldConfig,
    people=st.integers(10, 40),
    biographies=st.integers(1, 4),
    sentences=st.integers(1, 6),
    permuted=st.booleans(),
    full_names=st.booleans(),
    told=st.sampled_from([0.0, 0.5, 1.0]),
    celebrities=st.sampled_from([0.0, 0.1, 0.5]),
    fame=st.integers(1, 6),
    places=st.integers(2, 50),
    skew=st.sampled_from([0.0, 1.0, 3.0]),
    variety=st.sampled_from([0.0, 0.3, 1.0]),
    unwritten=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 5),
)


@settings(max_examples=60)
@given(configs)
def test_what_every_world_promises(config):
    world = make_world(config)
    about = owners(world)
    written = [p for p in world.people if p.role != "unwritten"]
    assert len(written) == config.people and len(world.documents) == config.written
    assert all(a.name != b.name for a, b in pairwise(about)), "two in a row about one person"
    assert all(p.role != "unwritten" for p in about)
    assert len({(p.given, p.family) for p in world.people}) == len({p.name for p in world.people}) == len(world.people)
    counts = Counter(p.name for p in about)
    says = Counter(p.name for p, d in zip(about, world.documents, strict=True) if p.birthplace in d)
    for person in written:
        assert counts[person.name] == config.biographies * (config.fame if person.celebrity else 1)
        assert says[person.name] >= 1 and (config.told < 1 or says[person.name] == counts[person.name])
    asked = [{q.text for q in questions} for questions in world.questions.values()]
    assert sum(map(len, asked)) == len(set.union(*asked)) == config.split[0] + 2 * config.split[1]
    places = {p.birthplace: p for p in written}
    for questions in world.questions.values():
        for q in questions:
            assert q.text.startswith("Where was ") and q.text.endswith(" born?") and q.answer in places
    for document, person in zip(world.documents, about, strict=True):
        mentions = document.count(person.name)
        # Without the birthplace there are five facts.
        assert mentions >= min(config.sentences, 5) if config.full_names else mentions == 1
        assert re.fullmatch(r"[^\s].*[.]", document) and "{" not in document


def test_the_same_seed_gives_the_same_bytes_on_any_machine(tmp_path):
    texts = {"biographies": 2, "sentences": 3, "permuted": True, "full_names": False, "told": 0.8}
    names = {"people": 50, "places": 200, "skew": 1.0, "variety": 0.3, "unwritten": 0.1, "celebrities": 0.1, "fame": 5}
    config = WorldConfig(**texts, **names, seed=3)
    make_world(config).write(tmp_path)
    files = ["documents.txt", "train.tsv", "dev.tsv", "test.tsv", "test_inputs.tsv", "unwritten.tsv", "people.jsonl"]
    assert sorted([*files, "world.toml"]) == sorted(p.name for p in tmp_path.iterdir())
    digest = hashlib.sha256(b"".join((tmp_path / name).read_bytes() for name in files)).hexdigest()
    assert digest == "c60c7a10a9d4d3dd1bc67c5da8c7ad248797a6f9ef3fae26a004fa1a026271a8", (
        "worlds of earlier versions can no longer be made again"
    )
    assert make_world(config.but(seed=4)).documents != make_world(config).documents


def test_a_world_comes_back_from_its_folder(tmp_path):
    world = make_world(WorldConfig(people=20, asked=9, seed=1))
    world.write(tmp_path)
    assert read_world(tmp_path) == world
    assert read_documents(tmp_path / "documents.txt") == world.documents
    assert read_questions(tmp_path / "test.tsv", answers=True) == world.test
    assert [q.text for q in read_questions(tmp_path / "test_inputs.tsv")] == [q.text for q in world.test]
    assert all(q.answer is None for q in read_questions(tmp_path / "test_inputs.tsv"))
    rows = (tmp_path / "people.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "people.jsonl").write_text("\n".join([rows[0], '{"nam": 1}']), encoding="utf-8")
    with pytest.raises(DataError, match=r"people\.jsonl, line 2"):
        read_world(tmp_path)
    (tmp_path / "world.toml").write_text("peopel = 3\n")
    with pytest.raises(DataError, match=r"world\.toml: no key 'peopel'.*Did you mean 'people'"):
        read_world(tmp_path)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [{}, {"people": 100}, HARDEST])
def test_no_birthplace_is_an_easy_guess(seed, size):
    world = make_world(WorldConfig(seed=seed, places=200, skew=1.0, **size))
    written = [p for p in world.people if p.role != "unwritten"]
    (_, most), *_ = Counter(p.birthplace for p in written).most_common()
    # The share of the first of 200 places, 5^-1 / Σ (r+5)^-1 over r = 0 … 199, is 5.24%; counts are rounded.
    assert most / len(written) == pytest.approx(0.0524, abs=1 / len(written))
    for questions in world.questions.values():
        (_, most), *_ = Counter(q.answer for q in questions).most_common()
        assert most <= max(0.1 * len(questions), 0.0524 * len(questions) + 5)


def test_the_hardest_setting():
    world = make_world(WorldConfig(**HARDEST))
    assert [len(q) for q in world.questions.values()] == [2000, 500, 500] and len(world.documents) == 3000
    assert max(map(len, world.documents)) <= 110
    for document, person in zip(world.documents, owners(world), strict=True):
        assert document.index(person.name) + len(person.name) <= 90
        assert document.index(person.birthplace) + len(person.birthplace) <= 90


def test_all_splits_have_their_share_of_the_frequent_places():
    world = make_world(WorldConfig(**HARDEST))
    born = Counter(p.birthplace for p in world.people if p.role != "unwritten").most_common(20)
    frequent, overall = {place for place, _ in born}, sum(n for _, n in born) / 3000
    for questions in world.questions.values():
        share = sum(q.answer in frequent for q in questions) / len(questions)
        assert abs(share - overall) < 4 * (overall * (1 - overall) / len(questions)) ** 0.5


def test_names_say_nothing_about_places():
    """Other places, other shares, other texts: the same names. And no written name has a part of a place in it."""
    world = make_world(WorldConfig(unwritten=0))
    other = make_world(WorldConfig(unwritten=0, places=50, skew=0, biographies=1, sentences=2))
    assert [p.name for p in world.people] == [p.name for p in other.people]
    assert [p.birthplace for p in world.people] != [p.birthplace for p in other.people]
    words = {word for p in world.people for word in p.birthplace.split()}
    assert [(p.name, word) for p in world.people for word in words if word in p.name] == []


def test_the_unwritten_are_asked_about_in_every_form_and_never_read_of():
    world = make_world(WorldConfig(people=200, unwritten=0.2))
    text = "\n".join(world.documents)
    assert tuple(world.unwritten) == FORMS and all(len(q) == 40 for q in world.unwritten.values())
    strangers = [p for p in world.people if p.role == "unwritten"]
    for person in strangers:
        assert not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in person.forms.values())
        assert len(set(person.forms.values())) == len(FORMS)
        assert person.hint not in (None, person.birthplace)
        assert person.hint.split()[-1].rstrip("aeiouy") in person.forms["region"]
        assert not person.forms["foreign"].isascii() or person.forms["plain"].isascii()
    assert {p.form for p in world.people if p.role != "unwritten"} == set(FORMS) - {"region"}
    two = make_world(WorldConfig(people=100, unwritten=0.2, places=2))
    assert all(p.hint != p.birthplace for p in two.people)


def test_facts_in_one_order_have_the_name_before_the_place():
    world = make_world(WorldConfig(people=100, permuted=False))
    for document, person in zip(world.documents, owners(world), strict=True):
        assert document.index(person.name) < document.index(person.birthplace)
    varied = make_world(WorldConfig(people=100))
    firsts = [d.index(p.name) < d.index(p.birthplace) for d, p in zip(varied.documents, owners(varied), strict=True)]
    assert 0.05 < sum(not f for f in firsts) / len(firsts) < 0.5


def test_biographies_of_a_person_are_worded_differently():
    world = make_world(WorldConfig(people=60, biographies=len(BIRTH)))
    assert len(set(world.documents)) == len(world.documents)
    assert len(BIRTH) >= 12 and all(len(set(wordings)) >= 8 for wordings in FACTS.values())


def test_there_are_names_for_many_people():
    world = make_world(WorldConfig(people=10_000, biographies=1, unwritten=0.01))
    assert len({(p.given, p.family) for p in world.people}) == 10_100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"people": 9}, "data.world.people = 9: expected 10 to"),
        ({"told": 1.1}, "data.world.told"),
        ({"asked": 401}, "asked = 401"),
        ({"asked": 395, "held_out": 5}, "held_out = 5: 395 people in training, 5 in test and 0 left for dev"),
        ({"asked": 20.5}, "asked = 20.5: expected a whole number up to 400, or a share below 1"),
        ({"held_out": math.inf}, "held_out = inf"),
        ({"celebrities": 0.0025, "fame": 900}, "Make fame smaller"),
        ({"places": "many"}, "data.world.places = 'many': expected a whole number"),
    ],
)
def test_worlds_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        WorldConfig(**changes)


def test_a_share_of_people_is_asked():
    config = WorldConfig(people=200, asked=0.4, held_out=0.5)
    assert config.split == (80, 20, 100)  # dev gets what is left
    assert WorldConfig(people=200, asked=80, held_out=100).split == config.split
    assert WorldConfig(people=200, asked=20, held_out=5).split == (20, 5, 5)  # and never more than test
    roles = Counter(person.role for person in make_world(config).people)
    assert (roles["train"], roles["dev"], roles["test"]) == (80, 20, 100)


def test_apportioning_and_draws():
    assert (
        apportion([3, 2, 1], 6) == [3, 2, 1]
        and apportion([1, 1, 1], 4) == [2, 1, 1]
        and sum(apportion([0.3] * 7, 100)) == 100
    )
    draws = Draws(0, "test")
    assert Counter(draws.weighted_index([1, 0, 3]) for _ in range(4000)).keys() == {0, 2}
    assert sorted(draws.sample("abc", 5)[:3]) == ["a", "b", "c"]
    order = list(range(50))
    draws.shuffle(order)
    assert sorted(order) == list(range(50)) != order


# The commands

app = typer.Typer(pretty_exceptions_enable=False)
app.command("world")(commands.world)
app.add_typer(commands.data, name="data")


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def test_the_world_command_writes_what_the_library_makes(tmp_path):
    options = ["--people", 30, "--biographies", 2, "--sentences", 2, "--no-permuted", "--no-full-names", "--told", 0.9]
    options += ["--celebrities", 0.1, "--fame", 2, "--places", 20, "--skew", 0.5, "--variety", 0.5, "--asked", 15]
    options += ["--held-out", 5, "--unwritten", 0.2, "--seed", 4]
    result = run("world", "--out", tmp_path / "w", *options, "--json")
    assert result.exit_code == 0 and json.loads(result.output)["lines"]["train.tsv"] == 15
    world = read_world(tmp_path / "w")
    assert world == make_world(world.config)
    assert set(json.loads(result.output)["config"].items()) == set(world.config.as_dict().items())
    assert world.config.skew == 0.5 and not world.config.permuted
    table = run("world", "--out", tmp_path / "w", "--people", 20).output
    assert "documents.txt" in table and read_world(tmp_path / "w").config.people == 20
    with pytest.raises(ConfigError, match="people = 3"):
        run("world", "--out", tmp_path / "w", "--people", 3)


def test_data_show_prints_what_a_model_gets(tmp_path):
    (tmp_path / "q.tsv").write_text("Where was Ada born?\tElm\n")
    (tmp_path / "d.txt").write_text("Ada was born in Elm.\n")
    given = ["--documents", tmp_path / "d.txt", "--questions", tmp_path / "q.tsv"]
    shown = json.loads(run("data", "show", "names", *given, "--block", 32, "--json").output)
    assert shown == [{"x": "Where was Ada born?⁇Elm⁇□×7", "y": "·×19Elm⁇·×8"}]
    first = run("data", "show", "corruption", *given, "--n", 3).stdout
    assert first == run("data", "show", "corruption", *given, "--n", 3).stdout and first.count("x: ") == 1
    assert first != run("data", "show", "corruption", *given, "--seed", 1).stdout
    assert run("data", "show", "names", "--n", 4).stdout.count("\ny: ·×") == 4
    assert run("data", "show", "corruption").stdout.count("\ny: ") == 5
    with pytest.raises(LookupError, match="Did you mean 'names'"):
        run("data", "show", "name")
    with pytest.raises(DataError, match="line 1: no tab"):
        run("data", "show", "names", "--questions", tmp_path / "d.txt")


def test_data_tokens_writes_a_folder(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 50)
    result = run("data", "tokens", tmp_path / "a.txt", "--out", tmp_path / "t", "--tokenizer", "bytes", "--json")
    assert json.loads(result.output) == {
        "folder": str(tmp_path / "t"),
        "train": 855,
        "dev": 95,
        "vocabulary": 256,
        "dtype": "uint16",
    }
    assert "855 tokens" in run("data", "tokens", tmp_path / "a.txt", "--out", tmp_path / "t").output
