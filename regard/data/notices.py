"""Generated pairs: a biography of six sentences, and the line that a register would print of it.

    Nella Corterham (1901–1978), botanist from Abalin

The facts about each person are known, so every fact that a summary states can be judged: right, confused with another
of the article, or invented. Some articles do not state the birthplace, so a summary that states one has invented it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from regard.config import ConfigError, Section
from regard.data.biographies import write_biographies
from regard.data.draws import Draws
from regard.data.pairs import Pair, PairSplit
from regard.data.people import Person
from regard.data.world import WorldConfig, make_world

# The facts that a notice states.
FACTS = ("name", "born", "died", "job", "place")
_NOTICE = re.compile(
    r"(?P<name>.+?) \((?:born (?P<alive>\d+)|(?P<born>\d+)–(?P<died>\d+))\), (?P<job>.+?)(?: from (?P<place>.+))?"
)


@dataclass(frozen=True, kw_only=True)
class NoticesConfig(Section):
    """How many people, how many of them are held out for dev (and as many for test), and how they are drawn."""

    place: ClassVar[str] = "data.notices"

    people: int = 3000
    held_out: int = 200
    places: int = 100
    variety: float = 0.2  # share of names with an initial, a middle name, a particle or a foreign look
    told: float = 0.8  # share of articles that say the birthplace
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.told <= 1:
            raise ConfigError(f"{self.place}.told = {self.told}: expected 0 to 1")
        self.world  # noqa: B018  the world's config checks the other numbers

    @property
    def world(self) -> WorldConfig:
        """Returns the config of the world whose people the articles are about; nothing else of it is used."""
        try:
            return WorldConfig(
                people=self.people,
                asked=self.people - 2 * self.held_out,
                held_out=self.held_out,
                places=self.places,
                variety=self.variety,
                biographies=1,
                unwritten=0.0,
                seed=self.seed,
            )
        except ConfigError as error:
            raise ConfigError(f"{self.place}: {error}") from None


class Judgement(NamedTuple):
    """How many facts a summary gets right, confuses with another of the article, invents, and leaves out."""

    right: int
    confused: int
    invented: int
    missing: int


def notices(config: NoticesConfig | None = None) -> PairSplit:
    """Returns the articles and notices that a config describes, the same on every machine."""
    config = config or NoticesConfig()
    people = make_world(config.world).people
    draws = Draws(config.seed, "notices")
    split = PairSplit([], [], [])
    for person in people:
        told = draws.chance(config.told)
        (article,) = write_biographies(person, [told], 6, True, False, draws)
        facts = article_facts(person, told)
        getattr(split, person.role).append(Pair(article, notice(facts), facts))
    return split


def article_facts(person: Person, told: bool) -> dict[str, str | None]:
    """Returns the facts for a notice by name, None if the article does not state one; `told`: it has the birthplace."""
    facts: dict[str, str | None] = {
        "name": person.name,
        "born": person.born.split("-")[0],
        "died": None,
        "job": person.job,
        "place": None,
    }
    if person.died is not None:
        facts["died"] = str(person.died)
    if told:
        facts["place"] = person.birthplace
    return facts


def notice(facts: Mapping[str, str | None]) -> str:
    """Returns the notice that states these facts."""
    years = f"born {facts['born']}"
    if facts["died"] is not None:
        years = f"{facts['born']}–{facts['died']}"
    line = f"{facts['name']} ({years}), {facts['job']}"
    if facts["place"]:
        line += f" from {facts['place']}"
    return line


def parse_notice(summary: str) -> dict[str, str | None] | None:
    """Returns the facts that a notice states; None for a text that does not have the form of a notice."""
    match = _NOTICE.fullmatch(summary)
    if match is None:
        return None
    facts = match.groupdict()
    facts["born"] = facts["born"] or facts["alive"]
    return {name: facts[name] or None for name in FACTS}


def judge(summary: str, article: str, facts: Mapping[str, str | None]) -> Judgement | None:
    """Returns how many facts of a summary are right, confused, invented or missing; None if it is no notice.

    A wrong fact is confused if its words stand in the article (in another role), else invented.
    """
    stated = parse_notice(summary)
    if stated is None:
        return None
    wrong = [value for name, value in stated.items() if value is not None and value != facts[name]]
    confused = sum(_contains_words(article, value) for value in wrong)
    right = sum(value is not None and value == facts[name] for name, value in stated.items())
    missing = sum(facts[name] is not None and value is None for name, value in stated.items())
    return Judgement(right, confused, len(wrong) - confused, missing)


def _contains_words(text: str, words: str) -> bool:
    """Returns whether the words occur in a text as whole words, not as parts of longer ones."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None
