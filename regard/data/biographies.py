"""Biographies of a few sentences, and their order in a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from regard.data.draws import Draws
from regard.data.people import Person
from regard.data.phrases import BIRTH, FACTS, MONTHS

PRONOUNS = {"f": "She", "m": "He"}


def write_biographies(
    person: Person, told: Sequence[bool], sentences: int, permuted: bool, full_names: bool, draws: Draws
) -> list[str]:
    """Returns one biography of at most `sentences` sentences for each entry of `told`: whether it names the birthplace.

    A template is used again only when all have been used. `permuted` shuffles the facts; without it they have a fixed
    order, and the name stands before the birthplace. `full_names`: each sentence has the full name, else the first.
    """
    births: Sequence[str] = BIRTH
    if not permuted:
        births = [t for t in BIRTH if t.index("{name}") < t.index("{place}")]
    others = ["date", "school", "job", "employer"]
    others.append("city" if person.died is None else "died")
    wordings = {"birth": draws.sample(births, len(told))}
    wordings |= {fact: draws.sample(FACTS[fact], len(told)) for fact in others}
    texts = []
    for n, says_where in enumerate(told):
        chosen = ["birth", *others]
        if not says_where:
            chosen = list(others)
        chosen = chosen[:sentences]
        if permuted:
            draws.shuffle(chosen)
        written = []
        for place, fact in enumerate(chosen):
            short = place > 0 and not full_names
            written.append(_fill_template(wordings[fact][n], person, fact, short, draws))
        texts.append(" ".join(written))
    return texts


def _fill_template(template: str, person: Person, fact: str, short: bool, draws: Draws) -> str:
    """Returns the sentence of a template; `short`: with a pronoun or the family name instead of the full name."""
    name = person.name
    if short:
        name = person.family
        # Keep the order of the two conditions: whether a number is drawn changes all later draws.
        if template.startswith("{name} ") and draws.chance(0.5):
            name = PRONOUNS[person.sex]
    article = "an" if person.job[0] in "aeiou" else "a"
    year, month, day = map(int, person.born.split("-"))
    text = template.format(
        name=name,
        place=person.city if fact == "city" else person.birthplace,
        job=person.job,
        a_job=f"{article} {person.job}",
        year=year,
        date=f"{day} {MONTHS[month - 1]} {year}",
        school=person.school,
        employer=person.employer,
        died=person.died,
    )
    return text[0].upper() + text[1:]


def interleave(texts_by_person: Sequence[Sequence[str]], draws: Draws) -> list[str]:
    """Returns the texts about all people in a random order in which no two in a row are about one person.

    A person's texts are spread over the whole. A text that would still follow one about the same person is moved
    elsewhere.
    """
    # The n-th of k texts gets a random place in the n-th k-th of the whole.
    spread = sorted(
        ((n + draws.uniform()) / len(texts), who, text)
        for who, texts in enumerate(texts_by_person)
        for n, text in enumerate(texts)
    )
    order: list[tuple[int, str]] = []
    left: deque[tuple[int, str]] = deque()
    for _, who, text in spread:
        if order and order[-1][0] == who:
            left.append((who, text))
        else:
            order.append((who, text))
    while left:
        who, text = left.popleft()
        free = [n for n in range(len(order) + 1) if all(w != who for w, _ in order[max(n - 1, 0) : n + 1])]
        if free:
            order.insert(draws.choice(free), (who, text))
        else:  # there will be room once others are in
            left.append((who, text))
    return [text for _, text in order]
