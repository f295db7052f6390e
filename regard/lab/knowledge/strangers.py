"""Names of people whom no document mentions ("strangers"), for users' own questions: made from the names in these.

Where questions differ in a name alone ("Where was X born?"), names are taken apart and put together anew, so that they
have the letters and the look of the data. No name occurs in a document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from regard.data.draws import Draws
from regard.data.files import DataError
from regard.data.questions import Question, read_questions

TRIES = 50  # for each stranger, since few names may have too few combinations


class QuestionTemplate(NamedTuple):
    """What all questions have in common, before and behind the name."""

    before: str
    behind: str

    def name(self, question: str) -> str:
        """Returns the name in a question of this template."""
        return question[len(self.before) : len(question) - len(self.behind)]

    def ask(self, name: str) -> Question:
        """Returns the question about somebody."""
        return Question(f"{self.before}{name}{self.behind}")


def find_template(questions: Iterable[str]) -> QuestionTemplate | None:
    """Returns the common words before and behind the name in questions; None if they differ in more than a name."""
    texts = list(dict.fromkeys(questions))
    if len(texts) < 2:
        return None
    before = _common_start(texts)
    before = before[: before.rfind(" ") + 1]
    behind = _common_start([text[len(before) :][::-1] for text in texts])[::-1]
    space = behind.find(" ")
    behind = behind[space:] if space >= 0 else ""
    template = QuestionTemplate(before, behind)
    if not (before or behind) or not all(template.name(text).strip() for text in texts):
        return None
    return template


def _common_start(texts: Sequence[str]) -> str:
    """Returns the longest common prefix of all texts, which is that of the first and the last in sorted order."""
    first = min(texts)
    last = max(texts)
    n = 0
    while n < len(first) and first[n] == last[n]:
        n += 1
    return first[:n]


class StrangerNames:
    """Makes names that occur in no document from names that are asked about."""

    def __init__(self, names: Sequence[str], documents: Sequence[str]) -> None:
        self.draws = Draws(0, "strangers")  # the same people for every model that is compared
        words = [name.split() for name in names]
        self.given = sorted({parts[0] for parts in words if len(parts) > 1})
        self.family = sorted({parts[-1] for parts in words if len(parts) > 1})
        self.single = sorted({parts[0] for parts in words})
        self.text = "\n".join(documents)
        self.written = set(re.findall(r"\w+", self.text)) | {word for parts in words for word in parts}
        self.taken = set(names)

    def forms(self) -> dict[str, Callable[[], str]]:
        """Returns a function for each form of name, which makes a name; single words have one form only."""
        choice = self.draws.choice
        if not self.family:
            return {"one new word": lambda: self.new_word(self.single)}
        return {
            "known names, new pair": lambda: f"{choice(self.given)} {choice(self.family)}",
            "with an initial": lambda: f"{choice(self.given)} {choice(self.given)[0]}. {choice(self.family)}",
            "new family name": lambda: f"{choice(self.given)} {self.new_word(self.family)}",
            "new given name": lambda: f"{self.new_word(self.given)} {choice(self.family)}",
            "both names new": lambda: f"{self.new_word(self.given)} {self.new_word(self.family)}",
        }

    def new_word(self, words: Sequence[str]) -> str:
        """Returns the head of one word with the tail of another: one written nowhere, if TRIES tries find one."""
        for _ in range(TRIES):
            head = self.draws.choice(words)
            tail = self.draws.choice(words)
            word = head[: (len(head) + 1) // 2] + tail[len(tail) // 2 :]
            if word not in self.written:
                return word
        return word

    def draw(self, make: Callable[[], str], count: int, known_words: bool) -> list[str]:
        """Returns at most `count` different names that are in no document and in no question.

        Without `known_words`, at least one word of a name is in no document either.
        """
        names: list[str] = []
        for _ in range(TRIES * count):
            if len(names) == count:
                break
            name = make()
            is_new = known_words or any(word not in self.written for word in name.split())
            if is_new and name not in self.taken and name not in self.text:
                self.taken.add(name)
                names.append(name)
        return names


def invent_strangers(asked: Sequence[Question], documents: Sequence[str], count: int) -> dict[str, list[Question]]:
    """Returns questions about `count` people of each form of name whom no document names; none where questions have
    no template."""
    template = find_template(question.text for question in asked)
    if template is None or not count:
        return {}
    names = StrangerNames([template.name(question.text) for question in asked], documents)
    strangers = {}
    for form, make in names.forms().items():
        found = names.draw(make, count, "new" not in form.replace("new pair", ""))
        if found:
            strangers[form] = [template.ask(name) for name in found]
    return strangers


def read_strangers(path: str | Path, asked: Sequence[Question], documents: Sequence[str]) -> dict[str, list[Question]]:
    """Returns a file's questions about people, by the form of their names; a name that a document has is an error."""
    questions = read_questions(path, answers=False)
    template = find_template(question.text for question in (*asked, *questions))
    strangers: dict[str, list[Question]] = {}
    for number, question in enumerate(questions, 1):
        name = question.text
        if template is not None:
            name = template.name(question.text)
        whole_name = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
        place = next((n for n, document in enumerate(documents, 1) if whole_name.search(document)), None)
        if place is not None:
            raise DataError(
                f"{path}, line {number}: '{name}' occurs in document {place}; expected people whom no document names"
            )
        strangers.setdefault(name_form(name), []).append(Question(question.text))
    return strangers


def name_form(name: str) -> str:
    """Returns the form of a name in words: one word, two words, with an initial, …"""
    words = name.split()
    if any(re.fullmatch(r"\w\.", word) for word in words):
        return "with an initial"
    if any(word[:1].islower() for word in words):
        return "with a particle"
    return {1: "one word", 2: "two words"}.get(len(words), "three words or more")
