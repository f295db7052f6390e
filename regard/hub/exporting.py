"""Exporting a model of regard as a folder that transformers' AutoModel and AutoTokenizer load, with the same numbers.

The family of a model is found by writing its config as one of theirs and reading that back. What then differs is what
the family has no equivalent of, and the error names it.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from regard.config import Section
from regard.data.files import sync
from regard.errors import HubError, RegardError
from regard.hub.families import FAMILIES, Family, Part, head_of
from regard.hub.keys import Keys
from regard.hub.safety import CONFIG, WEIGHTS
from regard.hub.tokenizer_files import token_ids, tokenizer_files
from regard.models import GPT, Encoder, Model, StackConfig
from regard.nn import POSITIONS
from regard.registry import parameters_of

# The class of transformers that loads a model with each head.
_AUTO_CLASSES = {
    "words": "AutoModelForCausalLM",
    "none": "AutoModel",
    "masked": "AutoModelForMaskedLM",
    "classes": "AutoModelForSequenceClassification",
}
_ONLY_IN_TRAINING = {"model.dropout", "model.attention.dropout"}
_BIASES = {"model.block.bias", "model.attention.bias", "model.attention.out_bias"}


class NoEquivalentError(HubError):
    """A model that transformers has no equivalent of."""


@dataclass(frozen=True)
class Exported:
    """What was written: the class of transformers that the model is, and the one that loads it.

    `files` gives the bytes of each file, and `notes` says what of the model is in none of them.
    """

    folder: Path
    architecture: str
    loads_with: str
    files: dict[str, int]
    notes: tuple[str, ...] = ()


def export(model: Model[Any], folder: str | Path) -> Exported:
    """Writes a model into a new folder that `AutoModel.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    A model without an equivalent is refused, and what has none is named. Nothing is written over.
    """
    place = Path(folder).absolute()  # `_write` needs the folder above it
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise HubError(f"{folder} is there already and not empty; nothing was written. Choose another folder")
    if not isinstance(model, GPT | Encoder):
        raise NoEquivalentError(
            f"a {type(model).__name__} has no equivalent in transformers that regard writes; "
            "expected a GPT or an Encoder"
        )
    config = _resolve_config(model)
    family, document = _find_family(config, model)
    head = head_of(config)
    document = {
        "architectures": [family.architecture(head)],
        "model_type": family.model_type,
        **document,
        **{name: i for name, i in token_ids(model.tokenizer).items() if name not in document},
        "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
    }
    texts = {CONFIG: json.dumps(document, indent=2) + "\n"}
    notes = [f"{setting}: it matters only in training" for setting in _lost_settings(family, config, document)]
    if model.tokenizer is None:
        notes.append("a tokenizer: the model has none")
    else:
        texts |= tokenizer_files(model.tokenizer, config.length)
    if head == "none":
        notes.append("a pooler: read last_hidden_state, as transformers makes a random one")
    tensors = dict(_convert_tensors(model, family, config, document))
    if not config.tied:  # transformers misses them, though it does not use them
        tensors |= {name: tensors[other].clone() for name, other in family.copies(config).items()}
    _write(place, texts, tensors)
    files = {path.name: path.stat().st_size for path in sorted(place.iterdir())}
    return Exported(Path(folder), family.architecture(head), _AUTO_CLASSES[head], files, tuple(notes))


def _resolve_config(model: GPT | Encoder) -> Any:
    """Returns the config of a model with its defaults filled in, and without what does not change its numbers.

    So it equals the config that a family reads back if, and only if, the two compute the same.
    """
    config = model.config
    size = model.stack.layers[0].attention.size
    mechanism = config.mechanism
    if len(set(config.per_layer)) == 1:
        mechanism = config.per_layer[0]
    parameters = parameters_of(POSITIONS.find(config.position))
    options = {n: x for n, x in config.position_options.items() if n not in parameters or x != parameters[n].default}
    merge = config.attention.merge
    if merge == "shift":  # `_unshift_heads` changes the output projection instead
        merge = "concatenate"
    config = config.but(
        checkpoint=False,
        mechanism=mechanism,
        position_options=options,
        attention={
            "groups": size.G,
            "key_width": size.K,
            "value_width": size.V,
            "bias": _first_set(config.attention.bias, config.block.bias),
            "out_bias": _first_set(config.attention.out_bias, config.block.bias),
            "merge": merge,
        },
        block={
            "final_norm": _first_set(config.block.final_norm, config.block.before),
            "hidden": model.get_parameter("stack.blocks.0.mlp.out.weight").shape[1],
        },
    )
    if isinstance(model, GPT):
        return config
    changes: dict[str, Any] = {"token_types": model.config.token_types or 1}  # a single type adds zeros
    if model.config.head != "classes":
        changes["classes"] = 2
    if model.config.head != "masked":
        changes["tied"] = True
    return config.but(**changes)


def _first_set(value: bool | None, default: bool) -> bool:
    """Returns the value, or the default where it is None."""
    return default if value is None else value


def _find_family(config: StackConfig, model: GPT | Encoder) -> tuple[Family, dict[str, Any]]:
    """Returns the first family that can hold a config, with the config as that family writes it.

    The error where there is none names the nearest family, and what it has no place for.
    """
    nearest: tuple[Family, list[str]] | None = None
    # The nearest is the family that lacks the fewest settings; among equals, the first.
    for family in FAMILIES.values():
        if family.model is not type(model):
            continue
        document = family.write(config)
        lacking = list(_lacking_settings(family, config, document))
        if not lacking:
            return family, document
        if nearest is None or len(lacking) < len(nearest[1]):
            nearest = (family, lacking)
    assert nearest is not None
    family, lacking = nearest
    raise NoEquivalentError(
        f"this {type(model).__name__} has no equivalent in transformers. The nearest, "
        f"{family.architecture(head_of(config))}, has no place for: {'; '.join(lacking)}"
    )


def _lost_settings(family: Family, config: Any, document: Mapping[str, Any]) -> Iterator[str]:
    """Yields the settings that a family leaves out and that matter only in training."""
    back = family.read(Keys(Path(CONFIG), document, family.default), head_of(config))
    for name, value, _ in _differences(config, back):
        if name in _ONLY_IN_TRAINING:
            yield f"{name} = {value!r}"


def _lacking_settings(family: Family, config: Any, document: Mapping[str, Any]) -> Iterator[str]:
    """Yields, in words, the settings of a config that a family has no place for."""
    keys = Keys(Path(CONFIG), document, family.default)
    try:
        back = family.read(keys, head_of(config))
        keys.finish()
    except RegardError as error:
        yield str(error)
        return
    for name, value, theirs in _differences(config, back):
        written_as_zeros = family.zero_bias and name in _BIASES and not value
        if not written_as_zeros and name not in _ONLY_IN_TRAINING:
            yield f"{name} = {value!r} (it has {theirs!r})"


def _differences(ours: Section, theirs: Section) -> Iterator[tuple[str, Any, Any]]:
    """Yields the settings in which two configs differ: the full name, our value and theirs."""
    for name, value in ours.as_dict().items():
        mine = getattr(ours, name)
        other = getattr(theirs, name)
        if isinstance(mine, Section):
            yield from _differences(mine, other)
        elif mine != other:
            yield f"{ours.place}.{name}", value, other


def _convert_tensors(
    model: Any, family: Family, config: Any, document: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yields their tensors, made of ours, each with its full name."""
    ours = model.state_dict()
    like = model.embedding.weight
    with torch.no_grad():
        for part in family.parts(config, document):
            if part.ours in ours:
                x = _unshift_heads(part, ours[part.ours], model)
            else:
                x = torch.zeros(_missing_shape(part, ours, config), dtype=like.dtype, device=like.device)
            pieces = x.split(part.sizes) if part.sizes else (x,)
            for name, piece in zip(part.theirs, pieces, strict=True):
                if part.skip:  # rows for padding, which are never read
                    piece = torch.cat([piece.new_zeros(part.skip, *piece.shape[1:]), piece])
                if part.transposed:
                    piece = piece.T
                if not name.startswith(("lm_head", "cls.", "classifier")):
                    name = family.prefix + name
                # A copy: the pieces of one tensor share its memory, which safetensors refuses.
                yield name, piece.clone().contiguous()


def _unshift_heads(part: Part, x: Tensor, model: Any) -> Tensor:
    """Returns a tensor of a model with the merge 'shift' such that concatenating the heads gives the same.

    That merge puts head h where head h + 1 would be, so the columns of the output projection are put back by one head.
    """
    if model.config.attention.merge != "shift" or not part.ours.endswith("attention.out.weight"):
        return x
    H = model.config.attention.heads
    return x.view(x.shape[0], H, -1).roll(-1, 1).reshape(x.shape)


def _missing_shape(part: Part, ours: Mapping[str, Tensor], config: Any) -> tuple[int, ...]:
    """Returns the shape of a tensor that our model does without: token types, or a bias."""
    if part.ours == "types.weight":
        return (1, config.width)
    assert part.zeros, part.ours
    return (ours[part.ours.removesuffix("bias") + "weight"].shape[0],)


def _write(place: Path, texts: Mapping[str, str], tensors: dict[str, Tensor]) -> None:
    """Writes all files into a folder beside the place, forces them to disk, and renames it: all of them or none."""
    stage = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        stage.mkdir(parents=True)
        save_file(tensors, stage / WEIGHTS, metadata={"format": "pt"})
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        # safetensors makes its file private; it gets the permissions of the others.
        shutil.copymode(stage / CONFIG, stage / WEIGHTS)
        for path in (*stage.iterdir(), stage):
            sync(path)
        stage.rename(place)
        sync(place.parent)
    except OSError as error:
        raise HubError(f"{place} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
