"""Weights out: a model of regard as a folder that transformers' AutoModel and AutoTokenizer load, number for number.

Which family a model belongs to is found by writing its config as one of theirs and reading that back: what then differs
is what the family has no equivalent of, and is named.
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
from regard.hub.families import FAMILIES, Family, Part
from regard.hub.keys import Keys
from regard.hub.safety import CONFIG, WEIGHTS
from regard.hub.tokenizer_files import token_ids, tokenizer_files
from regard.models import GPT, Encoder, Model, StackConfig
from regard.nn import POSITIONS
from regard.registry import parameters_of

_AUTO = {"words": "AutoModelForCausalLM", "none": "AutoModel", "masked": "AutoModelForMaskedLM"}
_AUTO["classes"] = "AutoModelForSequenceClassification"
_ONLY_IN_TRAINING = {"model.dropout", "model.attention.dropout"}


class NoEquivalentError(HubError):
    """A model that transformers has no equivalent of."""


@dataclass(frozen=True)
class Exported:
    """What was written: the class of transformers that it is, the one that loads it, the files with their bytes, and
    what is not in them."""

    folder: Path
    architecture: str
    loads_with: str
    files: dict[str, int]
    notes: tuple[str, ...] = ()


def export(model: Model[Any], folder: str | Path) -> Exported:
    """Writes a model into a new folder that `AutoModel.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    A model without an equivalent is refused, and what has none is named. Nothing is written over.
    """
    place = Path(folder).absolute()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise HubError(f"{folder} is there already and not empty; nothing was written. Choose another folder")
    if not isinstance(model, GPT | Encoder):
        raise NoEquivalentError(
            f"a {type(model).__name__} has no equivalent in transformers that regard writes; "
            "expected a GPT or an Encoder"
        )
    config = resolved(model)
    family, document = matching(config, model)
    head = getattr(config, "head", "words")
    like = model.embedding.weight
    document = {
        "architectures": [family.architecture(head)],
        "model_type": family.model_type,
        **document,
        **{name: i for name, i in token_ids(model.tokenizer).items() if name not in document},
        "dtype": str(like.dtype).removeprefix("torch."),
    }
    texts = {CONFIG: json.dumps(document, indent=2) + "\n"}
    notes = [f"{gone}: it matters only in training" for gone in _unsaid(family, config, document)]
    if model.tokenizer is None:
        notes.append("a tokenizer: the model has none")
    else:
        texts |= tokenizer_files(model.tokenizer, config.length)
    if head == "none":
        notes.append("a pooler: read last_hidden_state, as transformers makes a random one")
    tensors = dict(_theirs(model, family, config, document))
    if not config.tied:  # transformers misses them, though it does not use them
        tensors |= {name: tensors[other].clone() for name, other in family.copies(config).items()}
    _write(place, texts, tensors)
    files = {path.name: path.stat().st_size for path in sorted(place.iterdir())}
    return Exported(Path(folder), family.architecture(head), _AUTO[head], files, tuple(notes))


def resolved(model: GPT | Encoder) -> Any:
    """The config of a model with everything said that it leaves open, and nothing that does not change its numbers."""
    config, block = model.config, model.stack.layers[0]
    size = block.attention.size
    a = config.attention
    position = parameters_of(POSITIONS.find(config.position))
    options = {n: x for n, x in config.position_options.items() if n not in position or x != position[n].default}
    final = config.block.before if config.block.final_norm is None else config.block.final_norm
    config = config.but(
        checkpoint=False,
        mechanism=config.per_layer[0] if len(set(config.per_layer)) == 1 else config.mechanism,
        position_options=options,
        attention={
            "groups": size.G,
            "key_width": size.K,
            "value_width": size.V,
            "bias": config.block.bias if a.bias is None else a.bias,
            "out_bias": config.block.bias if a.out_bias is None else a.out_bias,
            "merge": "concatenate" if a.merge == "shift" else a.merge,  # `_out` turns the output projection instead
        },
        block={"final_norm": final, "hidden": model.get_parameter("stack.blocks.0.mlp.out.weight").shape[1]},
    )
    if isinstance(model, GPT):
        return config
    unused: dict[str, Any] = {} if model.config.head == "classes" else {"classes": 2}
    unused |= {} if model.config.head == "masked" else {"tied": True}
    return config.but(token_types=model.config.token_types or 1, **unused)  # a type that adds zeros


def matching(config: StackConfig, model: GPT | Encoder) -> tuple[Family, dict[str, Any]]:
    """The first family that has all of a config, with its config in theirs; an error that says what none has."""
    best: tuple[Family, list[str]] | None = None
    for family in FAMILIES.values():
        if family.model is not type(model):
            continue
        document = family.write(config)
        lacking = list(_lacking(family, config, document))
        if not lacking:
            return family, document
        if best is None or len(lacking) < len(best[1]):
            best = family, lacking
    assert best is not None
    nearest = best[0].architecture(_head(config))
    raise NoEquivalentError(
        f"this {type(model).__name__} has no equivalent in transformers. The nearest, {nearest}, has no place for: "
        f"{'; '.join(best[1])}"
    )


def _unsaid(family: Family, config: Any, document: Mapping[str, Any]) -> Iterator[str]:
    """What a family leaves out that does not change what the model computes outside training."""
    back = family.read(Keys(Path(CONFIG), document, family.default), _head(config))
    for place, mine, _ in _differences(config, back):
        if place in _ONLY_IN_TRAINING:
            yield f"{place} = {mine!r}"


def _lacking(family: Family, config: Any, document: Mapping[str, Any]) -> Iterator[str]:
    """What of a config a family has no place for, in words."""
    keys = Keys(Path(CONFIG), document, family.default)
    try:
        back = family.read(keys, _head(config))
        keys.finish()
    except RegardError as error:
        yield str(error)
        return
    for place, mine, theirs in _differences(config, back):
        if family.zero_bias and place in _BIASES and not mine:
            continue  # written as zeros
        if place in _ONLY_IN_TRAINING:
            continue
        yield f"{place} = {mine!r} (it has {theirs!r})"


_BIASES = {"model.block.bias", "model.attention.bias", "model.attention.out_bias"}


def _head(config: Any) -> str:
    return str(getattr(config, "head", "words"))


def _differences(mine: Section, theirs: Section) -> Iterator[tuple[str, Any, Any]]:
    for name, x in mine.as_dict().items():
        a, b = getattr(mine, name), getattr(theirs, name)
        if isinstance(a, Section):
            yield from _differences(a, b)
        elif a != b:
            yield f"{mine.place}.{name}", x, b


def _theirs(model: Any, family: Family, config: Any, document: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Their tensors out of ours, by their full names."""
    ours = model.state_dict()
    like = model.embedding.weight
    with torch.no_grad():
        for part in family.parts(config, document):
            if part.ours in ours:
                x = _out(part, ours[part.ours], model)
            else:
                x = torch.zeros(_missing_shape(part, ours, config), dtype=like.dtype, device=like.device)
            for name, piece in zip(part.theirs, x.split(part.sizes) if part.sizes else (x,), strict=True):
                piece = torch.cat([piece.new_zeros(part.skip, *piece.shape[1:]), piece]) if part.skip else piece
                headed = name.startswith(("lm_head", "cls.", "classifier"))
                # A copy: the pieces of one tensor share its memory, which a file cannot.
                yield name if headed else family.prefix + name, (piece.T if part.turned else piece).clone().contiguous()


def _out(part: Part, x: Tensor, model: Any) -> Tensor:
    """The merge 'shift' puts head h where head h + 1 was: the same as concatenating, with the columns put back."""
    if model.config.attention.merge != "shift" or not part.ours.endswith("attention.out.weight"):
        return x
    H = model.config.attention.heads
    return x.view(x.shape[0], H, -1).roll(-1, 1).reshape(x.shape)


def _missing_shape(part: Part, ours: Mapping[str, Tensor], config: Any) -> tuple[int, ...]:
    """Of a bias that ours does without, or of its token types."""
    if part.ours == "types.weight":
        return (1, config.width)
    assert part.zeros, part.ours
    return (ours[part.ours.removesuffix("bias") + "weight"].shape[0],)


def _write(place: Path, texts: Mapping[str, str], tensors: dict[str, Tensor]) -> None:
    """All files into a folder beside the place, forced to disk, and then renamed."""
    stage = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        stage.mkdir(parents=True)
        save_file(tensors, stage / WEIGHTS, metadata={"format": "pt"})
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        shutil.copymode(stage / CONFIG, stage / WEIGHTS)  # safetensors makes its file private
        for path in (*stage.iterdir(), stage):
            sync(path)
        stage.rename(place)
        sync(place.parent)
    except OSError as error:
        raise HubError(f"{place} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
