"""Data on its way to a model: tokenizers."""

from regard.data.tokenizers import BPE, Bytes, Characters, TextError, Tokenizer, TokenizerFileError, load_tokenizer

__all__ = ["BPE", "Bytes", "Characters", "TextError", "Tokenizer", "TokenizerFileError", "load_tokenizer"]
