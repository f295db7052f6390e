"""The people of an invented world: names in several forms, places, and facts of a life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.data import phrases
from regard.data.draws import Draws

FORMS = ("plain", "initial", "middle", "particle", "foreign", "region")
"""The forms of a name: Nella Corterham, Nella T. Corterham, Nella Thea Corterham, Nella van Corterham, a name of other
syllables, and one with a family name made from a place. No name in a biography has the last form."""


@dataclass(frozen=True, kw_only=True)
class Person:
    """A person, with all the facts that biographies may state."""

    name: str  # as in biographies and questions
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
    forms: dict[str, str] = field(default_factory=dict)  # of a person without biographies: the name in all forms
    hint: str | None = None  # of such a person: the place that the name of form "region" is made from


class Namer:
    """Draws names; no two people share given and family name, and no name tells the birthplace."""

    def __init__(self, variety: float, places: Sequence[str], draws: Draws) -> None:
        self.variety = variety
        self.places = places
        self.draws = draws
        self.taken: set[tuple[str, str]] = set()

    def name_person(self) -> dict[str, Any]:
        """Returns the fields of a `Person` that make up the name, for a person with biographies."""
        form = "plain"
        if self.draws.chance(self.variety):
            form = self.draws.choice(FORMS[1:-1])
        sex = self.draws.choice("fm")
        given, middle, family = self._draw_parts(sex, form == "foreign")
        if form == "particle":
            family = f"{self.draws.choice(phrases.PARTICLES)} {family}"
        name = _full_name(form, given, middle, family)
        return {"name": name, "form": form, "given": given, "middle": middle, "family": family, "sex": sex}

    def name_stranger(self, birthplace: str) -> dict[str, Any]:
        """Returns the fields that make up the name of a person without biographies, in all forms; that of form "region"
        hints at a place other than the birthplace."""
        sex = self.draws.choice("fm")
        given, middle, family = self._draw_parts(sex)
        names = {form: _full_name(form, given, middle, family) for form in ("plain", "initial", "middle")}
        names["particle"] = _full_name("particle", given, middle, f"{self.draws.choice(phrases.PARTICLES)} {family}")
        names["foreign"] = _full_name("foreign", *self._draw_parts(sex, foreign=True))
        hint = self.draws.choice([p for p in self.places if p != birthplace])
        names["region"] = f"{given} {hint.split()[-1].rstrip('aeiouy')}er"
        who = {"name": names["plain"], "form": "plain", "given": given, "middle": middle, "family": family, "sex": sex}
        return who | {"forms": names, "hint": hint}

    def _draw_parts(self, sex: str, foreign: bool = False) -> tuple[str, str, str]:
        """Returns a given, a middle and a family name; nobody yet has this given name with this family name."""
        given_names = _GIVEN_NAMES[sex, foreign]
        family_parts = phrases.FAMILY
        if foreign:
            family_parts = phrases.FOREIGN_FAMILY
        while True:
            given = self.draws.choice(given_names)
            family = _draw_joined(family_parts, self.draws)
            if (given, family) not in self.taken:
                self.taken.add((given, family))
                return given, self.draws.choice([n for n in given_names if n != given]), family


_GIVEN_NAMES = {
    ("f", False): phrases.WOMEN,
    ("m", False): phrases.MEN,
    ("f", True): phrases.FOREIGN_WOMEN,
    ("m", True): phrases.FOREIGN_MEN,
}


def _full_name(form: str, given: str, middle: str, family: str) -> str:
    between = {"initial": f" {middle[0]}. ", "middle": f" {middle} "}.get(form, " ")
    return f"{given}{between}{family}"


def draw_place_names(n: int, draws: Draws) -> list[str]:
    """Returns n different names of places, about a fifth of them of two words."""
    stems: dict[str, None] = {}
    while len(stems) < n:
        stems[_draw_joined(phrases.PLACE, draws)] = None
    names = []
    for stem in stems:
        name = stem
        if draws.chance(0.2):
            name = f"{draws.choice(phrases.BEFORE_PLACE)} {stem}"
        names.append(name)
    return names


def draw_facts(places: Sequence[str], draws: Draws) -> dict[str, Any]:
    """Returns the facts of a life, apart from name and birthplace."""
    year = 1850 + draws.randrange(150)
    age = 40 + draws.randrange(50)
    died = year + age
    return {
        "born": f"{year}-{1 + draws.randrange(12):02}-{1 + draws.randrange(28):02}",
        "job": draws.choice(phrases.JOBS),
        "school": draws.choice(phrases.SCHOOLS).format(stem=_draw_stem(draws)),
        "employer": draws.choice(phrases.EMPLOYERS).format(stem=_draw_stem(draws)),
        "city": draws.choice(places),
        "died": died if died < 2020 else None,
    }


def _draw_stem(draws: Draws) -> str:
    return draws.choice(phrases.FAMILY[0]) + draws.choice(phrases.STEM_ENDS)


def _draw_joined(parts: Sequence[Sequence[str]], draws: Draws) -> str:
    return "".join(draws.choice(part) for part in parts)
