"""The people of an invented world: names in several forms, places, and facts of a life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.data import phrases
from regard.data.draws import Draws

FORMS = ("plain", "initial", "middle", "particle", "foreign", "region")
"""Nella Corterham, Nella T. Corterham, Nella Thea Corterham, Nella van Corterham, a name from other syllables, and one
whose family name is made from a place. No written name has the last form."""


@dataclass(frozen=True, kw_only=True)
class Person:
    """Who somebody is, and everything that could be written about them."""

    name: str  # as it is written and asked
    form: str
    given: str
    middle: str
    family: str  # with its particle
    sex: str  # "f" or "m"
    birthplace: str
    born: str  # year-month-day
    job: str
    school: str
    employer: str
    city: str
    died: int | None  # a year
    role: str  # train, dev, test, unasked or unwritten
    celebrity: bool
    forms: dict[str, str] = field(default_factory=dict)  # the unwritten: their names in all forms
    hint: str | None = None  # the unwritten: the place that the name of form "region" is made from


class Namer:
    """Gives out names; no two people share given and family name. Birthplaces play no part in them."""

    def __init__(self, variety: float, places: Sequence[str], draws: Draws) -> None:
        self.variety, self.places, self.draws = variety, places, draws
        self.taken: set[tuple[str, str]] = set()

    def person(self) -> dict[str, Any]:
        """The name of somebody written about."""
        form = self.draws.pick(FORMS[1:-1]) if self.draws.chance(self.variety) else "plain"
        sex = self.draws.pick("fm")
        given, middle, family = self._parts(sex, form == "foreign")
        if form == "particle":
            family = f"{self.draws.pick(phrases.PARTICLES)} {family}"
        name = _full(form, given, middle, family)
        return {"name": name, "form": form, "given": given, "middle": middle, "family": family, "sex": sex}

    def stranger(self, birthplace: str) -> dict[str, Any]:
        """The names of somebody never written about. The one that hints at a region hints at a wrong one."""
        sex = self.draws.pick("fm")
        given, middle, family = self._parts(sex)
        names = {form: _full(form, given, middle, family) for form in ("plain", "initial", "middle")}
        names["particle"] = _full("particle", given, middle, f"{self.draws.pick(phrases.PARTICLES)} {family}")
        names["foreign"] = _full("foreign", *self._parts(sex, foreign=True))
        hint = self.draws.pick([p for p in self.places if p != birthplace])
        names["region"] = f"{given} {hint.split()[-1].rstrip('aeiouy')}er"
        who = {"name": names["plain"], "form": "plain", "given": given, "middle": middle, "family": family, "sex": sex}
        return who | {"forms": names, "hint": hint}

    def _parts(self, sex: str, foreign: bool = False) -> tuple[str, str, str]:
        if foreign:
            first, parts = (phrases.FOREIGN_WOMEN if sex == "f" else phrases.FOREIGN_MEN), phrases.FOREIGN_FAMILY
        else:
            first, parts = (phrases.WOMEN if sex == "f" else phrases.MEN), phrases.FAMILY
        while True:
            given, family = self.draws.pick(first), _joined(parts, self.draws)
            if (given, family) not in self.taken:
                self.taken.add((given, family))
                return given, self.draws.pick([n for n in first if n != given]), family


def _full(form: str, given: str, middle: str, family: str) -> str:
    between = {"initial": f" {middle[0]}. ", "middle": f" {middle} "}.get(form, " ")
    return f"{given}{between}{family}"


def place_names(n: int, draws: Draws) -> list[str]:
    """n different places, a fifth of them of two words."""
    stems: dict[str, None] = {}
    while len(stems) < n:
        stems[_joined(phrases.PLACE, draws)] = None
    return [f"{draws.pick(phrases.BEFORE_PLACE)} {s}" if draws.chance(0.2) else s for s in stems]


def facts(places: Sequence[str], draws: Draws) -> dict[str, Any]:
    """A life, apart from name and birthplace."""
    year = 1850 + draws.below(150)
    age = 40 + draws.below(50)
    return {
        "born": f"{year}-{1 + draws.below(12):02}-{1 + draws.below(28):02}",
        "job": draws.pick(phrases.JOBS),
        "school": draws.pick(phrases.SCHOOLS).format(stem=_stem(draws)),
        "employer": draws.pick(phrases.EMPLOYERS).format(stem=_stem(draws)),
        "city": draws.pick(places),
        "died": year + age if year + age < 2020 else None,
    }


def _stem(draws: Draws) -> str:
    return draws.pick(phrases.FAMILY[0]) + draws.pick(phrases.STEM_ENDS)


def _joined(parts: Sequence[Sequence[str]], draws: Draws) -> str:
    return "".join(draws.pick(part) for part in parts)
