"""Generated sentences about films, whose sentiment depends on the order of words, not on the words alone.

Each clause praises or blames one thing with one adjective. A sentence is of one of six kinds, and of each kind half are
positive:

    plain       the editing is graceful
    negated     the editing is anything but clumsy
    decoy       nobody can deny that the editing is graceful     (words of negation that negate nothing)
    contrast    the music is dull, but the editing is graceful   (the main clause counts)
    mixed       a contrast with a negation in it
    reported    critics called the editing clumsy; we found it graceful

So an adjective alone tells little: those of praise stand in positive sentences only some three times out of five. Some
adjectives do not occur in training: a model must know beforehand what they mean. No sentence occurs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from regard.config import ConfigError, Section
from regard.data.draws import Draws, apportion
from regard.data.sentences import Sentence, SentenceSplit


def _words(text: str, between: str | None = None) -> list[str]:
    return text.split(between)


GOOD = _words(
    """graceful gripping witty tender inventive moving clever honest charming radiant precise lively subtle rousing
    elegant funny thoughtful vivid wonderful delightful brilliant touching convincing beautiful superb
    enchanting heartfelt captivating exquisite refreshing hilarious masterful"""
)
BAD = _words(
    """clumsy tedious shallow lifeless predictable awkward muddled dull pompous hollow tasteless sloppy dreary
    silly forced stale terrible annoying pathetic boring unconvincing ugly pointless messy dismal insufferable
    laughable wooden bland atrocious lazy incoherent"""
)
THINGS = _words(
    "the acting|the plot|the script|the editing|the camera work|the music|the ending|the opening|the dialogue|"
    "the direction|the second act|the lead actor|the narration|the whole film|this sequel|the love story|the villain|"
    "the sound design|the last scene|the title song",
    "|",
)
PLAIN = (
    "{thing} is {adverb}{adjective}",
    "{thing} feels {adverb}{adjective}",
    "{thing} turns out to be {adverb}{adjective}",
    "{thing} strikes me as {adverb}{adjective}",
    "i found {thing} {adverb}{adjective}",
    "{thing} remains {adverb}{adjective} from start to finish",
)
NEGATED = (
    "{thing} is not {adjective}",
    "{thing} is never {adjective}",
    "{thing} is far from {adjective}",
    "{thing} is anything but {adjective}",
    "{thing} is by no means {adjective}",
    "nobody would call {thing} {adjective}",
    "there is nothing {adjective} about {thing}",
    "i would not say that {thing} is {adjective}",
    "{thing} does not feel {adjective} for a minute",
    "it would be wrong to call {thing} {adjective}",
)
DECOY = (
    "nobody can deny that {thing} is {adjective}",
    "{thing} is nothing if not {adjective}",
    "there is no doubt that {thing} is {adjective}",
    "never before have i seen anything so {adjective} as {thing}",
    "it is not wrong to call {thing} {adjective}",
    "{thing} could not be more {adjective}",
    "{thing} never stops being {adjective}",
    "far from losing its way, {thing} is {adjective}",
)
CONTRAST = (
    "{other}, but {main}",
    "although {other}, {main}",
    "{main}, even though {other}",
    "while {other}, in the end {main}",
    "{other}; all the same, {main}",
    "granted, {other}, yet {main}",
)
REPORTED = (
    "critics called {thing} {opposite}; we found it {adjective}",
    "i expected {thing} to be {opposite}, and it is {adjective}",
    "my friends think {thing} is {opposite}, and they are wrong",
    "i expected {thing} to be {opposite}, and it is not",
    "i expected {thing} to be {adjective}, and it is",
    "my friends think {thing} is {adjective}, and they are right",
    "the poster promises something {opposite}; {thing} is {adjective}",
    "those who say that {thing} is {opposite} have not seen it",
)
ADVERBS = ("", "", "", "really ", "quite ", "deeply ", "utterly ", "rather ")
OPENINGS = (
    "on second viewing, ",
    "in the original version, ",
    "on a large screen, ",
    "after two hours, ",
    "in this new cut, ",
    "as in the novel, ",
    "judging by the first half, ",
    "with a cast of twelve, ",
)
OPENING_SHARE = 0.25  # of sentences begin with one of these, which have no sentiment


@dataclass(frozen=True, kw_only=True)
class ReviewsConfig(Section):
    """The number of sentences for training, the number held out for dev (and again for test), and the share of
    adjectives that occur only in those."""

    place: ClassVar[str] = "data.reviews"

    sentences: int = 1000
    held_out: int = 300
    unseen: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sentences", "held_out"):
            if not 2 <= getattr(self, name) <= MOST:
                raise ConfigError(f"{self.place}.{name} = {getattr(self, name)}: expected 2 to {MOST:,}")
        if not 0 <= self.unseen <= 0.75:
            raise ConfigError(f"{self.place}.unseen = {self.unseen}: expected 0 to 0.75")


MOST = 20_000


class _SentenceWriter:
    """Writes clauses and sentences with the given adjectives; `label` 1 is praise."""

    def __init__(self, draws: Draws, good: Sequence[str], bad: Sequence[str]) -> None:
        self.draws = draws
        self.adjectives = (bad, good)  # by label

    def clause(self, templates: Sequence[str], label: int, negates: bool = False, thing: str | None = None) -> str:
        """Returns one clause with the label; `negates`: the templates negate their adjective, which is of the other."""
        choice = self.draws.choice
        said = label
        if negates:
            said = 1 - label
        return choice(templates).format(
            thing=thing or choice(THINGS),
            adverb=choice(ADVERBS),
            adjective=choice(self.adjectives[said]),
            opposite=choice(self.adjectives[1 - label]),
        )

    def plain(self, label: int) -> str:
        return self.clause(PLAIN, label)

    def negated(self, label: int) -> str:
        return self.clause(NEGATED, label, negates=True)

    def decoy(self, label: int) -> str:
        return self.clause(DECOY, label)

    def reported(self, label: int) -> str:
        return self.clause(REPORTED, label)

    def contrast(self, label: int) -> str:
        return self._contrast(label, (False, False))

    def mixed(self, label: int) -> str:
        return self._contrast(label, self.draws.choice([(True, False), (False, True), (True, True)]))

    def _contrast(self, label: int, negated: tuple[bool, bool]) -> str:
        """Returns a main clause with the label and another with the opposite one, each with a negation if `negated`."""
        main_thing, other_thing = self.draws.sample(THINGS, 2)
        main = self._negated_or_plain(label, negated[0], main_thing)
        other = self._negated_or_plain(1 - label, negated[1], other_thing)
        return self.draws.choice(CONTRAST).format(main=main, other=other)

    def _negated_or_plain(self, label: int, negated: bool, thing: str) -> str:
        if negated:
            return self.clause(NEGATED, label, True, thing)
        return self.clause(PLAIN, label, False, thing)


# How many of 12 sentences are of each kind, and the function that writes one with a given label.
KINDS: dict[str, tuple[float, Callable[[_SentenceWriter, int], str]]] = {
    "plain": (4, _SentenceWriter.plain),
    "negated": (2, _SentenceWriter.negated),
    "decoy": (1, _SentenceWriter.decoy),
    "contrast": (2, _SentenceWriter.contrast),
    "mixed": (2, _SentenceWriter.mixed),
    "reported": (1, _SentenceWriter.reported),
}


def reviews(config: ReviewsConfig | None = None) -> SentenceSplit:
    """Returns the sentences that a config describes; the same seed gives the same ones on every machine."""
    config = config or ReviewsConfig()
    draws = Draws(config.seed, "reviews")
    known = [draws.sample(words, round(len(words) * (1 - config.unseen))) for words in (GOOD, BAD)]
    seen: set[str] = set()
    train = _write_sentences(_SentenceWriter(draws, *known), config.sentences, seen)
    with_all = _SentenceWriter(draws, GOOD, BAD)
    dev = _write_sentences(with_all, config.held_out, seen)
    test = _write_sentences(with_all, config.held_out, seen)
    return SentenceSplit(train, dev, test)


def _write_sentences(writer: _SentenceWriter, n: int, seen: set[str]) -> list[Sentence]:
    """Returns n sentences that are not in `seen`, as many of each kind as its share says, half of each positive."""
    draws = writer.draws
    sentences: list[Sentence] = []
    counts = apportion([weight for weight, _ in KINDS.values()], n)
    # Labels alternate over all kinds, so that each kind is half positive, give or take one.
    for (kind, (_, write)), count in zip(KINDS.items(), counts, strict=True):
        for _ in range(count):
            label = len(sentences) % 2
            text = ""
            while not text or text in seen:
                opening = draws.choice(OPENINGS) if draws.chance(OPENING_SHARE) else ""
                text = opening + write(writer, label)
            seen.add(text)
            sentences.append(Sentence(text, label, kind))
    draws.shuffle(sentences)
    return sentences
