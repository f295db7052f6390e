"""Biographies of a few sentences, and their order in a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from regard.data.draws import Draws
from regard.data.people import Person
from regard.data.phrases import BIRTH, FACTS, MONTHS


def biographies(
    person: Person, told: Sequence[bool], sentences: int, permuted: bool, full_names: bool, draws: Draws
) -> list[str]:
    """One biography for each of `told`, which says whether it names the birthplace. No two are worded alike while there
    are templates left. Not permuted: facts in one order, and the name before the birthplace."""
    births = BIRTH if permuted else [t for t in BIRTH if t.index("{name}") < t.index("{place}")]
    others = ["date", "school", "job", "employer", "city" if person.died is None else "died"]
    wordings = {"birth": draws.some(births, len(told))}
    wordings |= {fact: draws.some(FACTS[fact], len(told)) for fact in others}
    made = []
    for n, says_where in enumerate(told):
        chosen = (["birth", *others] if says_where else others)[:sentences]
        if permuted:
            draws.shuffle(chosen)
        texts = []
        for at, fact in enumerate(chosen):
            short = at > 0 and not full_names
            texts.append(_sentence(wordings[fact][n], person, fact, short, draws))
        made.append(" ".join(texts))
    return made


def _sentence(template: str, person: Person, fact: str, short: bool, draws: Draws) -> str:
    name = person.name
    if short:
        pronoun = "She" if person.sex == "f" else "He"
        name = pronoun if template.startswith("{name} ") and draws.chance(0.5) else person.family
    year, month, day = map(int, person.born.split("-"))
    text = template.format(
        name=name,
        place=person.city if fact == "city" else person.birthplace,
        job=person.job,
        a_job=f"{'an' if person.job[0] in 'aeiou' else 'a'} {person.job}",
        year=year,
        date=f"{day} {MONTHS[month - 1]} {year}",
        school=person.school,
        employer=person.employer,
        died=person.died,
    )
    return text[0].upper() + text[1:]


def interleaved(written: Sequence[Sequence[str]], draws: Draws) -> list[str]:
    """The texts about all people in a random order in which no two in a row are about one person.

    A person's texts are spread over the whole. Those that still meet their like are put where they do not.
    """
    spread = sorted(
        ((n + draws.number()) / len(own), who, text) for who, own in enumerate(written) for n, text in enumerate(own)
    )
    order: list[tuple[int, str]] = []
    left: deque[tuple[int, str]] = deque()
    for _, who, text in spread:
        (left if order and order[-1][0] == who else order).append((who, text))
    while left:
        who, text = left.popleft()
        free = [n for n in range(len(order) + 1) if all(w != who for w, _ in order[max(n - 1, 0) : n + 1])]
        if free:
            order.insert(draws.pick(free), (who, text))
        else:  # there will be room once others are in
            left.append((who, text))
    return [text for _, text in order]
