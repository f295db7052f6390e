"""A small grammar of English that knows its own parses and antecedents, for finding heads without annotated files.

A `_Sentence` is built word by word: a word is added with the word that it depends on (Universal Dependencies), and a
noun or a pronoun with the number of its referent. Optional adjectives, adverbs and phrases keep words that belong
together from always standing at the same distance. A pronoun means either of two people equally often, so that always
taking the nearer one is right only half the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from regard.data.draws import Draws
from regard.lens.heads.annotations import Mentions, Parsed, Span


class _Being(NamedTuple):
    """A referent: its noun or name, and the pronouns that mean it: those of m, f, n or p (several) in CASES.

    The kind "either" has none: such a noun ("doctor") is named again instead.
    """

    word: str
    kind: str
    is_name: bool = False


def _beings(words: str, kind: str, is_name: bool = False) -> list[_Being]:
    return [_Being(word, kind, is_name) for word in words.split()]


WOMEN = _beings("Anna Maria Laura Emma Julia Sarah Alice Helen Ruth Jane", "f", True) + _beings(
    "queen girl woman mother aunt sister daughter actress widow grandmother", "f"
)
MEN = _beings("Peter John Paul David Tom Daniel Martin James Henry Robert", "m", True) + _beings(
    "king boy man father uncle brother son prince monk grandfather", "m"
)
GROUPS = _beings("children soldiers farmers students neighbours guests sailors nurses", "p")
PEOPLE = _beings("doctor teacher baker lawyer painter pilot singer judge driver cook", "either")
THINGS = _beings("letter basket lamp mirror book chair bottle carpet clock violin blanket coin", "n")
MANY = _beings("letters baskets lamps mirrors books chairs bottles carpets", "p")
PLACES = ["market", "station", "garden", "river", "church", "kitchen", "museum", "harbour"]
ADJECTIVES = ["old", "young", "tall", "quiet", "clever", "tired", "famous", "little", "friendly", "strange"]
QUALITIES = ["old", "heavy", "small", "red", "broken", "empty", "cheap", "dusty", "beautiful"]
OF_PLACES = ["old", "small", "empty", "beautiful"]
ADVERBS = ["quickly", "often", "never", "carefully", "finally", "gladly", "secretly"]
DID = ["carried", "opened", "found", "sold", "cleaned", "painted", "washed", "bought", "repaired", "lost"]
MET = ["met", "thanked", "praised", "followed", "called", "visited", "helped", "greeted"]
LEFT = ["slept", "laughed", "waited", "smiled", "danced", "left", "sang", "shouted"]
BARE = ["carry", "open", "find", "sell", "clean", "paint", "wash", "buy", "repair", "lose"]
STATES = ("rusty", "cheap", "new", "heavy", "clean", "broken")
CASES = {
    "m": ("he", "him", "his", "himself"),
    "f": ("she", "her", "her", "herself"),
    "n": ("it", "it", "its", "itself"),
    "p": ("they", "them", "their", "themselves"),
}
SUBJECT, OBJECT, POSSESSIVE, REFLEXIVE = range(4)
NOBODY = -1


def _adjectives(being: _Being) -> list[str]:
    """Returns the adjectives that suit somebody, a thing or a place."""
    if being.word in PLACES:
        return OF_PLACES
    if being in THINGS or being in MANY:
        return QUALITIES
    return ADJECTIVES


class _Sentence:
    """A sentence to which words are added, with their governors and relations, and with its mentions."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.forms: list[str] = []
        self.governors: list[int] = []
        self.relations: list[str] = []
        self.mentions: list[tuple[int, int, int]] = []  # first word, last word, number of the referent
        self.strangers = count(1000)  # numbers of referents that are mentioned once

    def word(self, form: str, relation: str = "root", governor: int = NOBODY) -> int:
        """Adds a word and returns its number."""
        self.forms.append(form)
        self.relations.append(relation)
        self.governors.append(governor)
        return len(self.forms) - 1

    def link(self, governor: int, *dependents: int) -> int:
        """Makes words depend on one that was added after them, and returns that one."""
        for dependent in dependents:
            self.governors[dependent] = governor
        return governor

    def noun(self, being: _Being, relation: str, case: str = "", who: int | None = None, plain: bool = False) -> int:
        """Adds a noun with its article, and perhaps an adjective; returns the number of its word.

        `case` is a preposition to put before it, `who` the number of its referent, None for one that is not mentioned
        again; `plain` leaves out the adjective.
        """
        before = []
        if case:
            before.append(self.word(case, "case"))
        first = len(self.forms)
        if not being.is_name:
            before.append(self.word("the", "det"))
            if not plain and self.draws.chance(0.4):
                before.append(self.word(self.draws.choice(_adjectives(being)), "amod"))
        head = self.link(self.word(being.word, relation), *before)
        self.mentions.append((first, head, next(self.strangers) if who is None else who))
        return head

    def pronoun(self, being: _Being, who: int, case: int, relation: str) -> int:
        """Adds the pronoun of a referent that was mentioned before, and returns the number of its word."""
        here = self.word(CASES[being.kind][case], relation)
        self.mentions.append((here, here, who))
        return here

    def place(self, verb: int, share: float = 0.5) -> None:
        """Adds a phrase that says where it happened, with probability `share`."""
        if self.draws.chance(share):
            here = _Being(self.draws.choice(PLACES), "n")
            self.link(verb, self.noun(here, "obl", self.draws.choice(("in", "near", "behind"))))

    def somebody(self, relation: str, case: str = "", plain: bool = False) -> int:
        """Adds a noun for any person or people, and returns the number of its word."""
        return self.noun(self.draws.choice((*WOMEN, *MEN, *GROUPS, *PEOPLE)), relation, case, plain=plain)

    def something(self, relation: str, case: str = "") -> int:
        """Adds a noun for any thing or things, and returns the number of its word."""
        return self.noun(self.draws.choice((*THINGS, *MANY)), relation, case)

    def verb(self, forms: Sequence[str], relation: str, *subjects: int, perfect: float = 0.0) -> int:
        """Adds a verb that governs its subjects, perhaps with an adverb before it, and returns its number.

        `perfect` is the probability that "had" stands before it.
        """
        before = list(subjects)
        if self.draws.chance(perfect):
            before.append(self.word("had", "aux"))
        if self.draws.chance(0.3):
            before.append(self.word(self.draws.choice(ADVERBS), "advmod"))
        return self.link(self.word(self.draws.choice(forms), relation), *before)

    def clause(self, relation: str, *before: int) -> int:
        """Adds a clause about a person and a thing, and returns its verb, which also governs the words `before`."""
        subject = self.somebody("nsubj")
        if not self.is_name(subject) and self.draws.chance(0.4):
            # A phrase between a subject and its verb makes the verb harder to find.
            self.link(subject, self.something("nmod", "with"))
        if self.draws.chance(0.25):
            verb = self.verb(LEFT, relation, subject, *before)
        else:
            verb = self.verb(DID, relation, subject, *before, perfect=0.3)
            self.link(verb, self.something("obj"))
        self.place(verb, 0.3)
        return verb

    def is_name(self, word: int) -> bool:
        """Returns whether a noun is a name: it has no article."""
        return word == 0 or word not in self.governors

    def parsed(self) -> Parsed:
        """Returns the sentence with its tree."""
        text, spans = self.write()
        return Parsed(text, tuple(spans), tuple(self.governors), tuple(self.relations))

    def with_mentions(self) -> Mentions:
        """Returns the sentence with its mentions in the order of the text; referents are numbered from 0."""
        text, spans = self.write()
        rows = sorted((spans[first][0], spans[last][1], who) for first, last, who in self.mentions)
        numbers = {who: n for n, who in enumerate(dict.fromkeys(who for _, _, who in rows))}
        return Mentions(text, tuple((a, b) for a, b, _ in rows), tuple(numbers[who] for _, _, who in rows))

    def write(self) -> tuple[str, list[Span]]:
        """Returns the text, and the characters of each word; sentences begin with a capital."""
        text = ""
        spans = []
        begins = True
        for form in self.forms:
            if text and form not in (",", ".", "'s"):
                text += " "
            if begins:
                form = form[:1].upper() + form[1:]
            spans.append((len(text), len(text) + len(form)))
            text += form
            begins = form == "."
        return text, spans


def _plain(s: _Sentence, d: Draws) -> int:
    return s.clause("root")


def _fronted(s: _Sentence, d: Draws) -> int:
    mark = s.word(d.choice(("after", "because", "although", "while")), "mark")
    side = s.clause("advcl", mark)
    s.word(",", "punct", side)
    return s.link(s.clause("root"), side)


def _behind(s: _Sentence, d: Draws) -> int:
    verb = s.clause("root")
    mark = s.word(d.choice(("because", "before", "until", "while")), "mark")
    s.link(verb, s.clause("advcl", mark))
    return verb


def _reported(s: _Sentence, d: Draws) -> int:
    verb = s.verb(("said", "believed", "knew", "dreamed"), "root", s.somebody("nsubj"))
    mark = s.word("that", "mark")
    s.link(verb, s.clause("ccomp", mark))
    return verb


def _who_did(s: _Sentence, d: Draws) -> int:
    subject = s.noun(d.choice((*PEOPLE, *GROUPS)), "nsubj")
    inner = s.verb(DID, "acl", s.word("who", "nsubj"), perfect=0.3)
    s.link(inner, s.something("obj"))
    s.link(subject, inner)
    verb = s.verb(LEFT, "root", subject)
    s.place(verb)
    return verb


def _that_was_done(s: _Sentence, d: Draws) -> int:
    subject = s.something("nsubj")
    inner = s.verb(DID, "acl", s.word("that", "obj"), s.somebody("nsubj"))
    s.governors[inner] = subject
    verb = s.word(d.choice(("pleased", "surprised", "bored", "annoyed")), "root")
    return s.link(verb, subject, s.somebody("obj"))


def _given(s: _Sentence, d: Draws) -> int:
    verb = s.verb(("gave", "sent", "lent", "showed"), "root", s.somebody("nsubj"))
    return s.link(verb, s.somebody("iobj", plain=True), s.something("obj"))


def _passive(s: _Sentence, d: Draws) -> int:
    thing = d.choice((*THINGS, *MANY))
    subject = s.noun(thing, "nsubj")
    auxiliary = s.word("were" if thing.kind == "p" else "was", "aux")
    verb = s.verb(("repaired", "found", "sold", "cleaned"), "root", subject, auxiliary)
    return s.link(verb, s.somebody("obl", "by"))


def _coordinated(s: _Sentence, d: Draws) -> int:
    verb = s.verb(DID, "root", s.somebody("nsubj"))
    s.link(verb, s.something("obj"))
    also = s.verb(DID, "conj", s.word("and", "cc"))
    s.link(also, s.something("obj"))
    return s.link(verb, also)


def _agreeing(s: _Sentence, d: Draws) -> int:
    """Adds a subject and a noun of the other number behind it, so that the verb agrees with the farther noun alone."""
    first, second = d.choice(((THINGS, MANY), (MANY, THINGS)))
    subject = s.noun(d.choice(first), "nsubj")
    s.link(subject, s.noun(d.choice(second), "nmod", d.choice(("beside", "behind", "near"))))
    copula = s.word("are" if first is MANY else "is", "cop")
    before = [subject, copula]
    if d.chance(0.4):
        before.append(s.word(d.choice(("still", "very", "rather")), "advmod"))
    return s.link(s.word(d.choice(STATES), "root"), *before)


def _wished(s: _Sentence, d: Draws) -> int:
    verb = s.verb(("wanted", "hoped", "promised", "refused"), "root", s.somebody("nsubj"))
    mark = s.word("to", "mark")
    wish = s.link(s.word(d.choice(BARE), "xcomp"), mark)
    s.link(wish, s.something("obj"))
    return s.link(verb, wish)


def _owned(s: _Sentence, d: Draws) -> int:
    owner = s.noun(d.choice((*WOMEN, *MEN, *PEOPLE)), "nmod")
    s.word("'s", "case", owner)
    own = s.link(s.word(d.choice(("dog", "horse", "cat", "parrot")), "nsubj"), owner)
    verb = s.verb(("followed", "watched", "bit", "loved"), "root", own)
    return s.link(verb, s.somebody("obj"))


def _because(s: _Sentence, d: Draws) -> None:
    pair, chosen = _meet(s, d)
    s.word(d.choice(("because", "after", "when")), "mark")
    s.verb(DID, "advcl", s.pronoun(pair[chosen], chosen, SUBJECT, "nsubj"))
    s.something("obj")


def _afterwards(s: _Sentence, d: Draws) -> None:
    pair, chosen = _meet(s, d)
    s.word(".", "punct")
    s.verb(LEFT, "root", s.pronoun(pair[chosen], chosen, SUBJECT, "nsubj"))
    s.place(len(s.forms) - 1)


def _possessed(s: _Sentence, d: Draws) -> None:
    pair = _pair(d)
    chosen = d.randrange(2)
    s.verb(("gave", "lent", "showed", "returned"), "root", s.noun(pair[0], "nsubj", who=0))
    s.noun(pair[1], "iobj", who=1)
    s.pronoun(pair[chosen], chosen, POSSESSIVE, "nmod")
    s.word(d.choice(THINGS).word, "obj")


def _about_oneself(s: _Sentence, d: Draws) -> None:
    pair = _pair(d)
    chosen = d.randrange(2)
    s.verb(("told", "asked", "warned", "reminded"), "root", s.noun(pair[0], "nsubj", who=0))
    s.noun(pair[1], "obj", who=1)
    s.word("about", "case")
    s.pronoun(pair[chosen], chosen, REFLEXIVE, "obl")


def _handled(s: _Sentence, d: Draws) -> None:
    being = d.choice((*WOMEN, *MEN))
    thing = d.choice(THINGS)
    s.verb(DID, "root", s.noun(being, "nsubj", who=0))
    s.noun(thing, "obj", who=1)
    s.word(d.choice(("before", "while", "and")), "mark")
    third = s.noun(d.choice(PEOPLE), "nsubj")
    if d.chance(0.5):
        s.verb(MET, "advcl", third)
        s.pronoun(being, 0, OBJECT, "obj")
    else:
        s.verb(DID, "advcl", third)
        s.pronoun(thing, 1, OBJECT, "obj")


def _named_again(s: _Sentence, d: Draws) -> None:
    pair = d.sample(PEOPLE, 2)
    chosen = d.randrange(2)
    s.verb(MET, "root", s.noun(pair[0], "nsubj", who=0))
    s.place(s.noun(pair[1], "obj", who=1))
    s.word(".", "punct")
    s.verb(LEFT, "root", s.noun(pair[chosen], "nsubj", who=chosen, plain=True))


def _pair(d: Draws) -> list[_Being]:
    """Returns two referents of different kinds (woman, man, group), so that a pronoun can mean only one of them."""
    return [d.choice(beings) for beings in d.sample((WOMEN, MEN, GROUPS), 2)]


def _meet(s: _Sentence, d: Draws) -> tuple[list[_Being], int]:
    """Adds a clause in which one of a pair met the other; returns the pair, and the index of the one to name next."""
    pair = _pair(d)
    verb = s.verb(MET, "root", s.noun(pair[0], "nsubj", who=0))
    s.noun(pair[1], "obj", who=1)
    s.place(verb)
    return pair, d.randrange(2)


# Each adds a sentence without its full stop, and returns the number of its root.
PARSED_PATTERNS: tuple[Callable[[_Sentence, Draws], int], ...] = (
    _plain,
    _fronted,
    _behind,
    _reported,
    _who_did,
    _that_was_done,
    _given,
    _passive,
    _coordinated,
    _agreeing,
    _wished,
    _owned,
)
# Each adds a text without its last full stop, in which somebody is mentioned twice.
COREFERENT_PATTERNS: tuple[Callable[[_Sentence, Draws], None], ...] = (
    _because,
    _afterwards,
    _possessed,
    _about_oneself,
    _handled,
    _named_again,
)


def parsed_sentences(n: int, seed: int = 0) -> list[Parsed]:
    """Returns n sentences with their dependency trees; the patterns take turns."""
    draws = Draws(seed, "syntax")
    sentences = []
    for place in range(n):
        sentence = _Sentence(draws)
        root = PARSED_PATTERNS[place % len(PARSED_PATTERNS)](sentence, draws)
        sentence.word(".", "punct", root)
        sentences.append(sentence.parsed())
    return sentences


def coreferent_texts(n: int, seed: int = 0) -> list[Mentions]:
    """Returns n texts with their mentions and the referent of each; the patterns take turns."""
    draws = Draws(seed, "coreference")
    texts = []
    for place in range(n):
        sentence = _Sentence(draws)
        COREFERENT_PATTERNS[place % len(COREFERENT_PATTERNS)](sentence, draws)
        sentence.word(".", "punct")
        texts.append(sentence.with_mentions())
    return texts
