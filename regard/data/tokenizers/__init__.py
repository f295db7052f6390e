"""Text to numbers and back: by character, by byte, by byte-pair encoding, or by a tokenizer of one's own.

A tokenizer of one's own is a class with a decorator: recipes (`data.tokenizer=words`), `regard data tokens` and saved
folders then know it by its name.

    @tokenizer("words")
    class Words(Tokenizer):
        ...
"""

from regard.data.tokenizers.base import (
    TOKENIZERS,
    Pieces,
    TextError,
    Tokenizer,
    TokenizerFileError,
    load_tokenizer,
    tokenizer,
)
from regard.data.tokenizers.bpe import BPE, byte_letters
from regard.data.tokenizers.fixed import Bytes, Characters

__all__ = [
    "BPE",
    "TOKENIZERS",
    "Bytes",
    "Characters",
    "Pieces",
    "TextError",
    "Tokenizer",
    "TokenizerFileError",
    "byte_letters",
    "load_tokenizer",
    "tokenizer",
]
