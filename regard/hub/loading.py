"""Weights in: GPT-2-, Llama- and BERT-like models of Hugging Face as models of regard, number for number.

Only config.json, safetensors and tokenizer.json are read, and not by transformers, which need not be installed. The
sizes of a model are compared with the headers of its files before any memory is asked for.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.tokenizers import BPE, Tokenizer, TokenizerFileError
from regard.errors import HubError, RegardError
from regard.hub.families import FAMILIES, Family, Part
from regard.hub.keys import Keys
from regard.hub.safety import CONFIG, config_of, located
from regard.hub.weights import Weights
from regard.models import GPT, Encoder

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
# What a tokenizer is made of where it has no tokenizer.json.
_OTHER_TOKENIZERS = (
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
)


def load(
    name: str | Path,
    device: torch.device | str = "cpu",
    download: bool = False,
    *,
    dtype: torch.dtype | None = None,
    ignore: Collection[str] = (),
) -> GPT | Encoder:
    """A Hugging Face model, from a folder or by its name on the hub, as a model of regard with its tokenizer.

    `download` fetches it if it was not downloaded before. `dtype`: that of the weights in the file unless given.
    `ignore`: keys of its config that you know to change nothing; any other that regard cannot honour is refused.
    """
    folder = located(name, download)
    document = config_of(folder)
    family = _family(folder / CONFIG, document)
    with Weights(folder, family.prefix) as weights:
        keys = Keys(folder / CONFIG, document, family.default, ignore)
        try:
            config = family.read(keys, _head(family, keys, weights))
            keys.finish()
            with torch.device("meta"):  # no memory, and no random numbers, for what the files give
                model = family.model(config)
        except HubError:
            raise
        except RegardError as error:
            raise HubError(f"{folder / CONFIG}: {error}") from error
        tensors = _tensors(weights, family, config, document, model.state_dict(), dtype)
    model.load_state_dict(tensors, assign=True)
    model.tokenizer = _tokenizer(folder, document, config.vocabulary)
    assert isinstance(model, GPT | Encoder)
    return model.to(device).eval()


def _family(path: Path, document: Mapping[str, Any]) -> Family:
    named = document.get("model_type")
    if "format_version" in document:
        raise HubError(f"{path} is of a model saved by regard itself: regard.load reads it")
    if not isinstance(named, str) or named not in FAMILIES:
        raise HubError(
            f"{path}: model_type {named!r} is not among the families whose weights regard's models hold: "
            f"{', '.join(FAMILIES)}. Where the model is used as it is (regard view, check, heads), any of "
            "transformers' will do"
        )
    return FAMILIES[named]


def _head(family: Family, keys: Keys, weights: Weights) -> str:
    named = keys.document.get("architectures")
    if not named:
        return family.head(weights.names)
    if not isinstance(named, list) or len(named) != 1 or named[0] not in tuple(family.heads):
        raise keys.refuse("architectures", f"regard has the heads of {', '.join(family.heads)}")
    return family.heads[named[0]]


def _tensors(
    weights: Weights,
    family: Family,
    config: Any,
    document: Mapping[str, Any],
    ours: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Our tensors out of theirs; nothing is missing, nothing left over, and every shape is right."""
    parts = list(family.parts(config, document))
    used = {name for part in parts for name in part.theirs}
    copies = {name: other for name, other in family.copies(config).items() if name in weights.names}
    spare = {name for name in weights.names - used - set(copies) if _carries_nothing(name, family, config)}
    for name in sorted(weights.names - used - set(copies) - spare)[:1]:
        raise HubError(f"{weights.place(name)} has {name}, which is no part of a {family.architecture(_shown(config))}")
    for part in parts:
        _check_shapes(weights, part, list(ours[part.ours].shape))
    for name, other in copies.items() if config.tied else ():
        if not torch.equal(weights.get(name), weights.get(other)):
            raise HubError(
                f"{weights.place(name)}: {name} differs from {other}, although {CONFIG} says that they are one "
                "(tie_word_embeddings); say false there if it is to be used"
            )
    dtype = dtype or reduce(torch.promote_types, {weights.dtype(name) for name in used})
    return {part.ours: _assembled(weights, part).to(dtype) for part in parts}


def _shown(config: Any) -> str:
    return str(getattr(config, "head", "words"))


def _carries_nothing(name: str, family: Family, config: Any) -> bool:
    """Whether a tensor is left out rightly: a buffer, or a pooler, which only a head for classes would use."""
    pooler = name.startswith("pooler.") and getattr(config, "head", None) in ("none", "masked")
    return pooler or name.endswith(family.spare)


def _check_shapes(weights: Weights, part: Part, want: list[int]) -> None:
    first = [want[0] + part.skip] if not part.sizes else list(part.sizes)
    for name, size in zip(part.theirs, first, strict=True):
        if name not in weights.names:
            raise HubError(
                f"{weights.folder} lacks {name}, which {CONFIG} asks for: the file is incomplete, or of another model"
            )
        shape, weights_of = weights.shape(name), weights.place(name)
        expected = [size, *want[1:]][:: -1 if part.turned else 1]
        if shape != expected:
            raise HubError(f"{weights_of} does not fit {CONFIG}: {name} is {shape}, expected {expected}")
        weights.dtype(name)


def _assembled(weights: Weights, part: Part) -> Tensor:
    found = [weights.get(name) for name in part.theirs]
    if part.turned:
        found = [x.T for x in found]
    return torch.cat([x[part.skip :] for x in found])  # a copy, so that nothing hangs on the file


def _tokenizer(folder: Path, document: Mapping[str, Any], vocabulary: int) -> Tokenizer | None:
    path = folder / TOKENIZER
    if not path.exists():
        others = [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]
        if others:
            warnings.warn(
                f"{folder} has {others[0]} but no {TOKENIZER}, so the model gets no tokenizer; "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one",
                stacklevel=3,
            )
        return None
    try:
        tokenizer = BPE(path.read_text(encoding="utf-8"), _ends(folder, document))
    except (TokenizerFileError, OSError, UnicodeDecodeError) as error:
        raise HubError(f"{path} is damaged or no tokenizer: {error}") from error
    if tokenizer.size > vocabulary:
        warnings.warn(
            f"{path} has {tokenizer.size} tokens, the model only {vocabulary}: a text with one of the others fails",
            stacklevel=3,
        )
    return tokenizer


def _ends(folder: Path, document: Mapping[str, Any]) -> list[int] | None:
    """The ids that end a text, as transformers finds them: in generation_config.json, else in config.json."""
    found = document.get("eos_token_id")
    path = folder / GENERATION
    if path.exists():
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id", found)
        except (OSError, ValueError, AttributeError) as error:
            raise HubError(f"{path} is damaged or no JSON: {error}") from None
    ids = [found] if isinstance(found, int) else found
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise HubError(
            f"{path if path.exists() else folder / CONFIG}: eos_token_id = {found!r}: expected ids of tokens"
        )
    return ids
