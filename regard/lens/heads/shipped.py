"""Annotated sentences that come with regard: 40 written by hand, and more by a grammar that knows its own parses."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path

from regard.data.files import DataError
from regard.lens.heads.annotations import Mentions, Parsed, read_conllu, read_mentions
from regard.lens.heads.grammar import coreferent_texts, parsed_sentences
from regard.lens.heads.linguistics import MIN_PAIRS, is_resolvable

OWN = "regard:sentences"  # names regard's own sentences where an option expects a file
GENERATED = 120  # sentences of each kind that the grammar writes


def default_parsed() -> list[Parsed]:
    """Returns regard's own sentences with their dependency trees."""
    return read_conllu(_folder() / "syntax.conllu") + parsed_sentences(GENERATED)


def default_mentions() -> list[Mentions]:
    """Returns regard's own texts with their mentions."""
    return read_mentions(_folder() / "coreference.jsonl") + coreferent_texts(GENERATED)


def _folder() -> Path:
    return Path(str(resources.files("regard.lens.heads") / "sentences"))


def read_parsed(path: str | Path) -> list[Parsed]:
    """Returns the sentences of a CoNLL-U file, or regard's own for OWN; raises DataError if no relation is frequent."""
    if str(path) == OWN:
        return default_parsed()
    sentences = read_conllu(path)
    pairs = [(g, r) for s in sentences for g, r in zip(s.governors, s.relations, strict=True)]
    counts = Counter(relation for governor, relation in pairs if governor >= 0)
    name, most = max(counts.items(), key=lambda item: item[1], default=("none", 0))
    if most < MIN_PAIRS:
        raise DataError(
            f"{path}: a relation needs {MIN_PAIRS} pairs of words, the most frequent ({name}) has {most}; add "
            "sentences, or give --syntax without a file: regard has some of its own"
        )
    return sentences


def read_coreference(path: str | Path) -> list[Mentions]:
    """Returns the texts of a JSONL file, or regard's own for OWN; raises DataError if too few mentions can be used."""
    if str(path) == OWN:
        return default_mentions()
    texts = read_mentions(path)
    found = sum(is_resolvable(text, mention) for text in texts for mention in range(len(text.spans)))
    if found < MIN_PAIRS:
        raise DataError(
            f"{path}: coreference needs {MIN_PAIRS} mentions with both an earlier mention of the same and one of "
            f"something else, has {found}; add texts, or give --coreference without a file: regard has some of its own"
        )
    return texts
