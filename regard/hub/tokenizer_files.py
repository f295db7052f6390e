"""Writes regard's tokenizers as files that transformers' AutoTokenizer reads, with the same token ids."""

from __future__ import annotations

import json
from typing import Any

from regard.data.tokenizers import BPE, Bytes, Characters, Tokenizer
from regard.errors import HubError

# Transformers' names for the roles that tokens have in regard.
_ROLES = {"eos_token": "end", "bos_token": "start", "pad_token": "pad", "unk_token": "unknown", "mask_token": "mask"}


def tokenizer_files(tokenizer: Tokenizer, length: int) -> dict[str, str]:
    """Maps "tokenizer.json" and "tokenizer_config.json" to their texts; `length` is the model's context length."""
    if isinstance(tokenizer, BPE):
        document = {name: x for name, x in tokenizer.as_json().items() if name != "ends"}
    elif isinstance(tokenizer, Characters | Bytes):
        document = json.loads(_build_tokenizer(tokenizer).to_str())
    else:
        raise HubError(f"a {type(tokenizer).__name__} has no form in a tokenizer.json of the `tokenizers` library")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,  # decoding gives the text back as it was
    }
    by_id = {tokenizer.id(name): name for name in tokenizer.special}
    for theirs, role in _ROLES.items():
        token = by_id.get(tokenizer.role(role))
        if token is not None:
            config[theirs] = token
    if "[CLS]" in tokenizer.special and "[SEP]" in tokenizer.special:
        config |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    return {"tokenizer.json": _to_json(document), "tokenizer_config.json": _to_json(config)}


def token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns a config's bos_token_id, eos_token_id and pad_token_id; None where the tokenizer has no such token.

    A None is written too, as transformers would use its own default for a missing key.
    """
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if tokenizer is None:
        return ids
    ids["bos_token_id"] = tokenizer.role("start")
    ids["pad_token_id"] = tokenizer.role("pad")
    ends = sorted(tokenizer.ends)
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def _build_tokenizer(tokenizer: Characters | Bytes) -> Any:
    """Builds a tokenizer of the library `tokenizers` that splits a text into characters, or into its UTF-8 bytes."""
    import tokenizers as library
    from tokenizers import decoders, models, pre_tokenizers

    if isinstance(tokenizer, Characters):
        unknown = next((name for name in tokenizer.special if tokenizer.id(name) == tokenizer.role("unknown")), None)
        vocabulary = {token: i for i, token in enumerate(tokenizer.tokens)}
        # Without an UNK token, encoding an unknown character stays an error.
        built = library.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown or ""))
        built.pre_tokenizer = pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
        built.decoder = decoders.Fuse()
    else:
        letters = _byte_letters()
        vocabulary = {letter: byte for byte, letter in enumerate(letters)}
        vocabulary |= {name: 256 + n for n, name in enumerate(tokenizer.special)}
        built = library.Tokenizer(models.BPE(vocabulary, []))
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        built.decoder = decoders.ByteLevel()
    built.add_special_tokens([library.AddedToken(name, normalized=False, special=True) for name in tokenizer.special])
    return built


def _byte_letters() -> list[str]:
    """Returns the character for each byte in byte-level BPE, as GPT-2's `bytes_to_unicode` does.

    A byte that is a printable character stands for itself; the other bytes get the characters from 256 on, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _to_json(document: dict[str, Any]) -> str:
    """Returns a document as indented JSON."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
