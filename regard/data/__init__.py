"""Data for training and evaluation: tokenizers, lines and tokens in files, questions, span corruption, an invented
world."""

from regard.data.batch import IGNORE, Batch
from regard.data.corruption import corrupt
from regard.data.files import DataError, read_lines, write_lines
from regard.data.people import Person
from regard.data.questions import (
    MARK,
    PAD,
    UNKNOWN,
    Question,
    pack_documents,
    prompt,
    question_batch,
    read_documents,
    read_predictions,
    read_questions,
    unseen,
    vocabulary,
    write_predictions,
    write_questions,
)
from regard.data.scores import calibration, coverage, exact_match, most_frequent, wilson
from regard.data.tokenizers import (
    BPE,
    TOKENIZERS,
    Bytes,
    Characters,
    TextError,
    Tokenizer,
    TokenizerFileError,
    load_tokenizer,
    tokenizer,
)
from regard.data.tokens import TokenFile, all_windows, random_windows, windows, write_tokens
from regard.data.world import World, WorldConfig, make_world, read_world

__all__ = [
    "BPE",
    "IGNORE",
    "MARK",
    "PAD",
    "TOKENIZERS",
    "UNKNOWN",
    "Batch",
    "Bytes",
    "Characters",
    "DataError",
    "Person",
    "Question",
    "TextError",
    "TokenFile",
    "Tokenizer",
    "TokenizerFileError",
    "World",
    "WorldConfig",
    "all_windows",
    "calibration",
    "corrupt",
    "coverage",
    "exact_match",
    "load_tokenizer",
    "make_world",
    "most_frequent",
    "pack_documents",
    "prompt",
    "question_batch",
    "random_windows",
    "read_documents",
    "read_lines",
    "read_predictions",
    "read_questions",
    "read_world",
    "tokenizer",
    "unseen",
    "vocabulary",
    "wilson",
    "windows",
    "write_lines",
    "write_predictions",
    "write_questions",
    "write_tokens",
]
