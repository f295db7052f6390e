"""Regard's tokenizers as files that transformers' AutoTokenizer reads, with the same ids."""

from __future__ import annotations

import json
from typing import Any

from regard.data.tokenizers import BPE, Bytes, Characters, Tokenizer
from regard.errors import ExtraMissingError, HubError

# What transformers calls the tokens that have a role.
_ROLES = {"eos_token": "end", "bos_token": "start", "pad_token": "pad", "unk_token": "unknown", "mask_token": "mask"}


def tokenizer_files(tokenizer: Tokenizer, length: int) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json. `length`: the most tokens that the model takes."""
    if isinstance(tokenizer, BPE):
        document = {name: x for name, x in tokenizer.as_json().items() if name != "ends"}
    elif isinstance(tokenizer, Characters | Bytes):
        document = json.loads(_built(tokenizer).to_str())
    else:
        raise HubError(f"a {type(tokenizer).__name__} has no form in a tokenizer.json of the `tokenizers` library")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,  # a text is given back as it was
    }
    by_id = {tokenizer.id(name): name for name in tokenizer.special}
    for theirs, role in _ROLES.items():
        found = by_id.get(tokenizer.role(role))
        if found is not None:
            config[theirs] = found
    if "[CLS]" in tokenizer.special and "[SEP]" in tokenizer.special:
        config |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    return {"tokenizer.json": _shown(document), "tokenizer_config.json": _shown(config)}


def token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The keys of a config that name tokens by id; null where there is none, as the library has defaults of its own."""
    ends = sorted(tokenizer.ends) if tokenizer is not None else []
    start, pad = (None if tokenizer is None else tokenizer.role(role) for role in ("start", "pad"))
    return {
        "bos_token_id": start,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": pad,
    }


def _built(tokenizer: Characters | Bytes) -> Any:
    """A tokenizer of the library that cuts a text into single characters, or into the bytes of its UTF-8."""
    try:
        import tokenizers as library
        from tokenizers import decoders, models, pre_tokenizers
    except ImportError:
        raise ExtraMissingError('writing a tokenizer needs `tokenizers`: pip install "regard[text]"') from None
    if isinstance(tokenizer, Characters):
        unknown = next((name for name in tokenizer.special if tokenizer.id(name) == tokenizer.role("unknown")), None)
        vocabulary = {token: i for i, token in enumerate(tokenizer.tokens)}
        # Without a token for the unknown, a character that is none of these stays an error.
        made = library.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown or ""))
        made.pre_tokenizer = pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
    else:
        letters = _letters()
        vocabulary = {letter: byte for byte, letter in enumerate(letters)}
        vocabulary |= {name: 256 + n for n, name in enumerate(tokenizer.special)}
        made = library.Tokenizer(models.BPE(vocabulary, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
    made.add_special_tokens([library.AddedToken(name, normalized=False, special=True) for name in tokenizer.special])
    return made


def _letters() -> list[str]:
    """The letter by which the library writes each byte: itself where it is printed, else one of those from 256 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def _shown(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
