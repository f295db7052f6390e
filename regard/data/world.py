"""An invented world: people with biographies, and questions about where they were born.

Everything is drawn from one seed: the same config gives the same bytes on any machine. Names do not tell birthplaces.
Only some people are asked about in training; the questions of dev and test are about others, whose birthplaces stand in
their biographies alone. The unwritten have no biographies; questions ask about each of them by several forms of the
name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

import tomli_w

from regard.config import ConfigError, Section
from regard.data.biographies import interleave, write_biographies
from regard.data.draws import Draws, apportion
from regard.data.files import DataError, read_lines, write_lines
from regard.data.people import Namer, Person, draw_facts, draw_place_names
from regard.data.questions import Question, read_documents, write_questions
from regard.errors import quote
from regard.reading import parse_json, read_toml


@dataclass(frozen=True, kw_only=True)
class WorldConfig(Section):
    """The size of the world, and how hard it is to learn."""

    place: ClassVar[str] = "data.world"

    people: int = 400  # with biographies
    biographies: int = 3  # of each person
    sentences: int = 1  # of a biography, the first six facts at most
    permuted: bool = True  # the order of facts varies, also within the sentence on the birth
    full_names: bool = True  # each sentence has the full name; else only the first of a biography
    told: float = 1.0  # share of biographies that say the birthplace; a person's first one always does
    celebrities: float = 0.0  # share of people with `fame` times as many biographies
    fame: int = 5
    places: int = 200
    skew: float = 1.0  # a place of rank r has a share of people proportional to (r + 4)^−skew; 0: all alike
    variety: float = 0.3  # share of names with an initial, a middle name, a particle or a foreign look
    asked: float | None = None  # people with a training question; below 1, their share; None: half
    # People with a test question; below 1, their share; None: half of the rest. As many others have a dev question, if
    # so many are left.
    held_out: float | None = None
    unwritten: float = 0.1  # people without biographies, as a share of those with
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges = {"people": (10, 100_000), "biographies": (1, 1_000), "sentences": (1, 6), "fame": (1, 1_000)}
        ranges |= {"places": (2, 5_000), "skew": (0, 10)}
        for name in ("told", "celebrities", "variety", "unwritten"):
            ranges[name] = (0, 1)
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{self.place}.{name} = {getattr(self, name)}: expected {least} to {most}")
        for name in ("asked", "held_out"):
            value = getattr(self, name)
            if value is not None and not self._is_count(value):
                raise ConfigError(
                    f"{self.place}.{name} = {value}: expected a whole number up to {self.people}, or a share below 1"
                )
        train, dev, test = self.split
        if min(train, dev, test) < 1:
            raise ConfigError(
                f"{self.place}.asked = {self.asked}, held_out = {self.held_out}: {train} people in training, {test} in "
                f"test and {max(dev, 0)} left for dev; expected at least 1 of each and at most {self.people} in all"
            )
        most = self.biographies
        if self.famous:
            most *= self.fame
        if 2 * most > self.written + 1:
            raise ConfigError(
                f"{self.place}.fame = {self.fame}: a celebrity has {most} of {self.written} biographies, expected at "
                "most half, as no two in a row are about one person. Make fame smaller."
            )

    @property
    def split(self) -> tuple[int, int, int]:
        """Returns how many people have a training, a dev and a test question."""
        train = self.people // 2
        if self.asked is not None:
            train = self._count(self.asked)
        test = (self.people - train) // 2
        if self.held_out is not None:
            test = self._count(self.held_out)
        return train, min(test, self.people - train - test), test

    def _is_count(self, number: float) -> bool:
        """Returns whether a number is a share of the people (below 1) or a whole number of at most all of them."""
        return 0 < number < 1 or (1 <= number <= self.people and number == int(number))

    def _count(self, number: float) -> int:
        """Returns how many people a number stands for: below 1, it is a share of those with biographies."""
        if number < 1:
            number *= self.people
        return round(number)

    @property
    def famous(self) -> int:
        """Returns how many celebrities there are."""
        return round(self.celebrities * self.people)

    @property
    def written(self) -> int:
        """Returns how many biographies there are."""
        return self.biographies * (self.people + self.famous * (self.fame - 1))


@dataclass(frozen=True)
class World:
    """People, the documents about them, and the questions."""

    config: WorldConfig
    people: list[Person] = field(repr=False)
    documents: list[str] = field(repr=False)

    @property
    def questions(self) -> dict[str, list[Question]]:
        """Returns the questions of train, dev and test; nobody is asked about in two of them."""
        asked: dict[str, list[Question]] = {"train": [], "dev": [], "test": []}
        for person in self.people:
            if person.role in asked:
                asked[person.role].append(_question(person.name, person.birthplace))
        return asked

    @property
    def train(self) -> list[Question]:
        return self.questions["train"]

    @property
    def dev(self) -> list[Question]:
        return self.questions["dev"]

    @property
    def test(self) -> list[Question]:
        return self.questions["test"]

    @property
    def unwritten(self) -> dict[str, list[Question]]:
        """Returns the questions about people without biographies, by form of the name; no document has the answers."""
        strangers = [p for p in self.people if p.role == "unwritten"]
        if not strangers:
            return {}
        return {form: [_question(p.forms[form], p.birthplace) for p in strangers] for form in strangers[0].forms}

    def write(self, folder: str | Path) -> None:
        """Writes documents.txt, {train,dev,test,unwritten}.tsv, test_inputs.tsv (no answers), people.jsonl and
        world.toml."""
        folder = Path(folder)
        write_lines(folder / "documents.txt", self.documents)
        for name, questions in self.questions.items():
            write_questions(folder / f"{name}.tsv", questions)
        write_questions(folder / "test_inputs.tsv", (Question(q.text) for q in self.test))
        write_questions(folder / "unwritten.tsv", (q for form in self.unwritten.values() for q in form))
        write_lines(folder / "people.jsonl", (json.dumps(asdict(p), ensure_ascii=False) for p in self.people))
        config = {name: value for name, value in self.config.as_dict().items() if value is not None}
        write_lines(folder / "world.toml", tomli_w.dumps(config).splitlines())


def _question(name: str, birthplace: str) -> Question:
    return Question(f"Where was {name} born?", birthplace)


def make_world(config: WorldConfig | None = None) -> World:
    """Returns the world that a config describes."""
    config = config or WorldConfig()
    places = draw_place_names(config.places, Draws(config.seed, "places"))
    people = _draw_people(config, places)
    draws = Draws(config.seed, "texts")
    texts = [_write_about(person, config, draws) for person in people if person.role != "unwritten"]
    return World(config, people, interleave(texts, Draws(config.seed, "order")))


def _write_about(person: Person, config: WorldConfig, draws: Draws) -> list[str]:
    """Returns all biographies of a person; the first always states the birthplace."""
    number = config.biographies
    if person.celebrity:
        number *= config.fame
    told = [n == 0 or draws.chance(config.told) for n in range(number)]
    return write_biographies(person, told, config.sentences, config.permuted, config.full_names, draws)


def _draw_people(config: WorldConfig, places: Sequence[str]) -> list[Person]:
    """Returns the people: first those with biographies, then those without.

    Each property has its own random stream, so that a change of one option leaves the other draws as they were.
    """
    strangers = round(config.unwritten * config.people)
    weights = [(rank + 5) ** -config.skew for rank in range(len(places))]
    births = Draws(config.seed, "births")
    # People with biographies have exactly the shares of the places: random draws would differ in a small world.
    born = [places[i] for i, n in enumerate(apportion(weights, config.people)) for _ in range(n)]
    births.shuffle(born)
    born += [places[births.weighted_index(weights)] for _ in range(strangers)]
    train, dev, test = config.split
    roles = ["train"] * train + ["dev"] * dev + ["test"] * test
    roles += ["unasked"] * (config.people - len(roles))
    Draws(config.seed, "roles").shuffle(roles)
    roles += ["unwritten"] * strangers
    is_famous = [n < config.famous for n in range(config.people)]
    Draws(config.seed, "fame").shuffle(is_famous)
    is_famous += [False] * strangers
    namer = Namer(config.variety, places, Draws(config.seed, "names"))
    life = Draws(config.seed, "lives")
    people = []
    for place, role, celebrity in zip(born, roles, is_famous, strict=True):
        names = namer.name_stranger(place) if role == "unwritten" else namer.name_person()
        people.append(Person(birthplace=place, role=role, celebrity=celebrity, **names, **draw_facts(places, life)))
    return people


def read_world(folder: str | Path) -> World:
    """Returns the world in a folder that `World.write` wrote."""
    folder = Path(folder)
    toml = folder / "world.toml"
    try:
        config = WorldConfig().but(**read_toml(toml, DataError))
    except ConfigError as error:
        raise DataError(f"{toml}: {error}") from None
    rows = enumerate(read_lines(folder / "people.jsonl", "one person a line"), 1)
    people = [_parse_person(folder / "people.jsonl", number, line) for number, line in rows]
    return World(config, people, read_documents(folder / "documents.txt"))


def _parse_person(path: Path, number: int, line: str) -> Person:
    """Returns the person of one line of people.jsonl."""
    place = f"{path}, line {number}"
    fields = parse_json(line, place, DataError)
    try:
        return Person(**fields)
    except (ValueError, TypeError) as error:
        raise DataError(f"{place}: {quote(error)}; expected a person as `regard world` writes them") from None
