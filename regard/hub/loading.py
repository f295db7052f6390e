"""Loads the weights of Hugging Face's GPT-2-, Llama- and BERT-like models, of Qwen3-Next and of Mamba-2 into models of
regard.

Only JSON files and safetensors are read. Transformers is not used, and need not be installed. The shapes of a model
are compared with the headers of its files before any memory is allocated.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.tokenizers import BPE, Tokenizer, TokenizerFileError
from regard.devices import without_values
from regard.errors import HubError, RegardError, quote
from regard.hub.families import FAMILIES, Family, TensorMap, output_head_of
from regard.hub.keys import Keys
from regard.hub.safety import CONFIG, check_hashes, find_folder, read_config
from regard.hub.weights import Weights
from regard.models import GPT, Encoder
from regard.reading import read_json_object, read_text

TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
# Tokenizer files in other formats, which regard does not read.
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
    """Returns a Hugging Face model, from a folder or by its id on the hub, as a model of regard with its tokenizer.

    `download` permits downloading the model. `dtype` is the dtype of the loaded weights, by default the one in the
    file. `ignore` names keys of config.json that you know not to affect the outputs; any other key that regard does not
    support raises a HubError.
    """
    if str(name).startswith("random:") and not Path(name).exists():
        built = str(name).removeprefix("random:")
        raise HubError(
            f"{quote(str(name))} has no weights to load; expected a folder or an id of the hub. "
            f"regard.hub.untrained({built!r}) builds transformers' model with random weights"
        )
    folder = find_folder(name, download)
    hf_config = read_config(folder)
    check_hashes(folder)
    family = _find_family(folder / CONFIG, hf_config)
    with Weights(folder, family.prefix) as weights:
        keys = Keys(folder / CONFIG, hf_config, family.default, ignore)
        try:
            config = family.read(keys, _find_output_head(family, keys, weights))
            keys.finish()
            with without_values():  # the weights come from the files: no memory, and no random draws
                model = family.model(config)
        except HubError:  # such an error names the file already
            raise
        except RegardError as error:
            raise HubError(f"{folder / CONFIG}: {error}") from error
        tensors = _convert_tensors(weights, family, config, hf_config, model.state_dict(), dtype)
    model.load_state_dict(tensors, assign=True)
    model.tokenizer = _load_tokenizer(folder, hf_config, config.vocabulary)
    assert isinstance(model, GPT | Encoder)
    return model.to(device).eval()


def _find_family(path: Path, hf_config: Mapping[str, Any]) -> Family:
    """Returns the family of a config's model_type; the error for an unsupported one lists the supported ones."""
    model_type = hf_config.get("model_type")
    if "format_version" in hf_config:
        raise HubError(f"{path} is of a model saved by regard itself: regard.load reads it")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise HubError(
            f"{path}: model_type {quote(model_type)} is not among the families whose weights regard's models hold: "
            f"{', '.join(FAMILIES)}. `regard view`, `regard check` and `regard heads` take any model of transformers"
        )
    return FAMILIES[model_type]


def _find_output_head(family: Family, keys: Keys, weights: Weights) -> str:
    """Returns the output head of the class in the config's `architectures`; else guesses it from the tensor names."""
    classes = keys.hf_config.get("architectures")
    if not classes:
        return family.guess_output_head(weights.names)
    if not isinstance(classes, list) or len(classes) != 1 or classes[0] not in tuple(family.output_heads):
        raise keys.refusal("architectures", f"regard has the heads of {', '.join(family.output_heads)}")
    return family.output_heads[classes[0]]


def _convert_tensors(
    weights: Weights,
    family: Family,
    config: Any,
    hf_config: Mapping[str, Any],
    ours: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Returns the tensors of our state dict, built from theirs.

    Raises an error if a tensor of theirs is missing, unexpected, or of another shape.
    """
    tensor_maps = list(family.tensor_maps(config, hf_config))
    used = {name for tensor_map in tensor_maps for name in tensor_map.theirs}
    copies = {name: other for name, other in family.copies(config).items() if name in weights.names}
    for name in sorted(weights.names - used - set(copies)):
        if not _can_be_ignored(name, family, config):
            architecture = family.architecture(output_head_of(config))
            raise HubError(f"{weights.path_of(name)} has {name}, which is no part of a {architecture}")
    for tensor_map in tensor_maps:
        _check_shapes(weights, tensor_map, list(ours[tensor_map.ours].shape))
    if config.tied:
        _check_copies(weights, copies)
    # Files may mix dtypes, such as norms in float32: the model gets one that holds all of them.
    dtype = dtype or reduce(torch.promote_types, {weights.dtype(name) for name in used})
    return {tensor_map.ours: _assemble(weights, tensor_map).to(dtype) for tensor_map in tensor_maps}


def _check_copies(weights: Weights, copies: Mapping[str, str]) -> None:
    """Raises an error if a tied tensor that is stored twice differs from its copy."""
    for name, other in copies.items():
        if not torch.equal(weights.get(name), weights.get(other)):
            raise HubError(
                f"{weights.path_of(name)}: {name} differs from {other}, although {CONFIG} says that they are one "
                f"(tie_word_embeddings); set tie_word_embeddings to false if {name} is to be used"
            )


def _can_be_ignored(name: str, family: Family, config: Any) -> bool:
    """Tells whether a tensor can be ignored.

    It can if it is a buffer, part of BERT's next-sentence head, or part of a pooler in a model without a classification
    head.
    """
    pooler = name.startswith("pooler.") and getattr(config, "head", None) in ("none", "masked")
    return pooler or name.endswith(family.ignored_suffixes)


def _check_shapes(weights: Weights, tensor_map: TensorMap, want: list[int]) -> None:
    """Raises an error if a tensor of theirs is missing, or has a shape or a dtype that our tensor cannot take."""
    for name, size, rows in tensor_map.pieces(want[0]):
        if name not in weights.names:
            raise HubError(
                f"{weights.folder} lacks {name}, which {CONFIG} asks for: the file is incomplete, or of another model"
            )
        shape = weights.shape(name)
        expected = [size + tensor_map.skip, *want[1:]]
        if rows is not None:
            assert rows.count == size, tensor_map.ours
            expected[0] = rows.total
        if tensor_map.filters:
            expected.insert(1, 1)
        if tensor_map.transposed:
            expected.reverse()
        if shape != expected:
            raise HubError(f"{weights.path_of(name)} does not fit {CONFIG}: {name} is {shape}, expected {expected}")
        weights.dtype(name)  # raises an error for a dtype that regard does not read, such as a quantised one


def _assemble(weights: Weights, tensor_map: TensorMap) -> Tensor:
    """Returns a tensor of ours, concatenated from theirs."""
    tensors = []
    for name, _, rows in tensor_map.pieces(0):
        x = weights.get(name)
        if tensor_map.transposed:
            x = x.T
        if tensor_map.filters:
            x = x.squeeze(1)
        tensors.append(x[tensor_map.skip :] if rows is None else rows.take(x))
    return torch.cat(tensors)  # a copy, as the file will be closed


def _load_tokenizer(folder: Path, hf_config: Mapping[str, Any], vocabulary: int) -> Tokenizer | None:
    """Returns the tokenizer of a folder; None if the folder has no tokenizer.json.

    In that case it warns if the folder has a tokenizer in another format.
    """
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
        read_json_object(path, HubError)
        tokenizer = BPE(read_text(path, HubError), _eos_token_ids(folder, hf_config))
    except TokenizerFileError as error:
        raise HubError(f"{path} is damaged or no tokenizer: {error}") from error
    if tokenizer.size > vocabulary:
        warnings.warn(
            f"{path} has {tokenizer.size} tokens, the model only {vocabulary}: texts with a token id from "
            f"{vocabulary} on will fail",
            stacklevel=3,
        )
    return tokenizer


def _eos_token_ids(folder: Path, hf_config: Mapping[str, Any]) -> list[int] | None:
    """Returns the EOS token ids, from generation_config.json or else from config.json, as transformers does."""
    path = folder / CONFIG
    value = hf_config.get("eos_token_id")
    if (folder / GENERATION).exists():
        path = folder / GENERATION
        value = read_json_object(path, HubError).get("eos_token_id", value)
    if value is None:
        return None
    ids = value
    if isinstance(value, int):
        ids = [value]
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise HubError(f"{path}: eos_token_id = {quote(value)}: expected ids of tokens")
    return ids
