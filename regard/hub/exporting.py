"""Exports a model of regard as a folder that transformers' AutoModel and AutoTokenizer load, with the same outputs.

The family of a model is found by writing its config as a family's config.json, and reading that back. The settings that
then differ are those that the family cannot represent, and the error names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.config import Section
from regard.errors import HubError, RegardError
from regard.hub.families import FAMILIES, Family, TensorMap, output_head_of
from regard.hub.keys import Keys
from regard.hub.safety import CONFIG, HASHES, WEIGHTS
from regard.hub.tokenizer_files import token_ids, tokenizer_files
from regard.mechanisms import lookup
from regard.models import GPT, AttentionConfig, Encoder, Model, StackConfig
from regard.nn import MERGES, POSITIONS
from regard.registry import parameters_of
from regard.storage import check_new_folder, new_folder, write_manifest, write_tensors

# For each output head: the class of transformers that loads a model with it.
_AUTO_CLASSES = {
    "lm": "AutoModelForCausalLM",
    "none": "AutoModel",
    "masked": "AutoModelForMaskedLM",
    "classes": "AutoModelForSequenceClassification",
}
_BIASES = {"model.block.bias", "model.attention.bias", "model.attention.out_bias"}


class NoEquivalentError(HubError):
    """Raised for a model that transformers has no equivalent of."""


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    `architecture` is the transformers class of the model, and `loads_with` the Auto class that loads it. `files` maps
    the name of each file to its size in bytes. `notes` lists what was not exported, such as settings for training.
    """

    folder: Path
    architecture: str
    loads_with: str
    files: dict[str, int]
    notes: tuple[str, ...] = ()


def export(model: Model[Any], folder: str | Path) -> Exported:
    """Writes a model into a new folder that `AutoModel.from_pretrained` and `AutoTokenizer.from_pretrained` load.

    Raises NoEquivalentError if transformers has no equivalent, naming the settings that it cannot represent. Never
    overwrites a file.
    """
    target = check_new_folder(folder, HubError)
    if not isinstance(model, GPT | Encoder):
        raise NoEquivalentError(
            f"a {type(model).__name__} has no equivalent in transformers that regard writes; "
            "expected a GPT or an Encoder"
        )
    config = _canonical_config(model)
    family, hf_config = _find_family(config, model)
    head = output_head_of(config)
    hf_config = {
        "architectures": [family.architecture(head)],
        "model_type": family.model_type,
        **hf_config,
        **{name: i for name, i in token_ids(model.tokenizer).items() if name not in hf_config},
        "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
    }
    texts = {CONFIG: json.dumps(hf_config, indent=2) + "\n"}
    differences = _training_only_differences(family, config, hf_config)
    notes = [f"{setting}: it matters only in training" for setting in differences]
    if model.tokenizer is None:
        notes.append("a tokenizer: the model has none")
    else:
        texts |= tokenizer_files(model.tokenizer, config.length)
    if head == "none":
        notes.append("a pooler: read last_hidden_state, as transformers makes a random one")
    tensors = dict(_convert_tensors(model, family, config, hf_config))
    # Untied: without these tensors transformers reports missing keys, although it does not use them.
    if not config.tied:
        tensors |= {name: tensors[other].clone() for name, other in family.copies(config).items()}
    _write(target, texts, tensors)
    files = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    return Exported(Path(folder), family.architecture(head), _AUTO_CLASSES[head], files, tuple(notes))


def _canonical_config(model: GPT | Encoder) -> Any:
    """Returns a model's config in canonical form: defaults filled in, settings that do not affect the outputs reset.

    So a comparison with the config that a family reads back shows only differences that matter.
    """
    config = _canonical_attention(model.config)
    parameters = parameters_of(POSITIONS.find(config.position))
    options = {n: x for n, x in config.position_options.items() if n not in parameters or x != parameters[n].default}
    config = config.but(
        checkpoint=False,
        position_options=options,
        block={
            "final_norm": _value_or_default(config.block.final_norm, config.block.before),
            "hidden": _hidden_width(model),
        },
    )
    if isinstance(model, GPT):
        return config
    # A model without token types is exported with one type, whose embedding is zero.
    changes: dict[str, Any] = {"token_types": model.config.token_types or 1}
    if model.config.head != "classes":
        changes["classes"] = 2
    if model.config.head != "masked":
        changes["tied"] = True
    return config.but(**changes)


def _canonical_attention(config: Any) -> Any:
    """Returns a config with a canonical section `attention`, or with one for each mechanism if there are several."""
    names = list(dict.fromkeys(config.per_layer))
    sections = {name: _canonical_section(config, name) for name in names}
    if len(names) == 1:
        return replace(config, mechanism=names[0], attention=sections[names[0]])
    by_mechanism = {}
    for name, section in sections.items():
        keys = section.as_dict()
        del keys["by_mechanism"]
        by_mechanism[name] = keys
    return replace(config, mechanism=config.per_layer, attention=AttentionConfig(by_mechanism=by_mechanism))


def _canonical_section(config: Any, name: str) -> AttentionConfig:
    """Returns the section of the layers with a mechanism: defaults filled in, and what has no effect there reset."""
    section = config.attention.for_mechanism(name)
    mechanism = lookup(name)
    key_width = section.key_width or config.width // section.heads
    groups = section.groups or section.heads
    qk_norm = section.qk_norm in (True, config.block.norm) or section.qk_norm
    if not qk_norm and getattr(mechanism, "erases", False):
        qk_norm = "l2"
    changes: dict[str, Any] = {
        "groups": groups,
        "key_heads": None if section.key_heads == groups else section.key_heads,
        "key_width": key_width,
        "value_width": section.value_width or key_width,
        "bias": _value_or_default(section.bias, config.block.bias),
        "out_bias": _value_or_default(section.out_bias, config.block.bias),
        "qk_norm": qk_norm,
        "output": {"norm": section.output.norm in (True, config.block.norm) or section.output.norm},
    }
    if section.merge == "shift" and not section.output.joint:
        changes["merge"] = "concatenate"  # `_unshift_heads` changes the output projection instead
    if "a" not in mechanism.needs:
        changes |= {"decay": "softplus", "decay_options": {}}
    if config.position not in ("rotary", "alibi"):
        changes["positions"] = True
    full: AttentionConfig = section.but(**changes)
    return full


def _hidden_width(model: GPT | Encoder) -> int | None:
    """Returns the width inside the MLPs of a model, or None where it has none."""
    mlp: Any = model.stack.layers[0].mlp
    return None if mlp is None else mlp.out.in_features


def _value_or_default(value: bool | None, default: bool) -> bool:
    """Returns the value, or the default if the value is None."""
    return default if value is None else value


def _find_family(config: StackConfig, model: GPT | Encoder) -> tuple[Family, dict[str, Any]]:
    """Returns the first family that can represent a config, and the config.json that it writes.

    If there is no such family, the error names the nearest family and the settings that it has no place for.
    """
    nearest: tuple[Family, list[str]] | None = None
    smallest = (True, 0)
    # The nearest family is the one with the fewest unsupported settings; among equals, the first. One that cannot read
    # what it wrote cannot be compared, and comes last.
    for family in FAMILIES.values():
        if family.model is not type(model):
            continue
        hf_config = family.write(config)
        readable, unsupported = _unsupported_settings(family, config, hf_config)
        if not unsupported:
            return family, hf_config
        distance = (not readable, len(unsupported))
        if nearest is None or distance < smallest:
            nearest = (family, unsupported)
            smallest = distance
    assert nearest is not None
    family, unsupported = nearest
    raise NoEquivalentError(
        f"this {type(model).__name__} has no equivalent in transformers. The nearest, "
        f"{family.architecture(output_head_of(config))}, has no place for: {'; '.join(unsupported)}"
    )


def _training_only_differences(family: Family, config: Any, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the settings, used only in training, that the family's config does not keep."""
    back = family.read(Keys(Path(CONFIG), hf_config, family.default), output_head_of(config))
    for name, value, _ in _differences(config, _canonical_attention(back)):
        if _only_in_training(name):
            yield f"{name} = {value!r}"


def _only_in_training(name: str) -> bool:
    """Tells whether a setting, by its full name, matters only in training."""
    return name.endswith(".dropout")


def _unsupported_settings(family: Family, config: Any, hf_config: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Tells whether a family can read the config that it writes, and describes the settings that it cannot keep."""
    keys = Keys(Path(CONFIG), hf_config, family.default)
    try:
        back = family.read(keys, output_head_of(config))
        keys.finish()
    except RegardError as error:
        return False, [str(error)]
    found = []
    for name, value, value_back in _differences(config, _canonical_attention(back)):
        written_as_zeros = family.zero_bias and name in _BIASES and not value
        if not written_as_zeros and not _only_in_training(name):
            found.append(f"{name} = {value!r} (it has {value_back!r})")
    return True, found


def _differences(config: Section, back: Section) -> Iterator[tuple[str, Any, Any]]:
    """Yields each setting in which a config and the one read back differ: its full name, and both values."""
    for name, value in config.as_dict().items():
        before = getattr(config, name)
        after = getattr(back, name)
        if isinstance(before, Section):
            yield from _differences(before, after)
        elif name == "by_mechanism" and set(before) == set(after) and before:
            for mechanism, section in before.items():
                own, other = (AttentionConfig().but(**keys) for keys in (section, after[mechanism]))
                for place, mine, theirs in _differences(own, other):
                    inside = place.removeprefix(f"{own.place}.")
                    yield f"{config.place}.by_mechanism.{mechanism}.{inside}", mine, theirs
        elif before != after:
            yield f"{config.place}.{name}", value, after


def _convert_tensors(
    model: Any, family: Family, config: Any, hf_config: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the full name and the value of each tensor of theirs, made from our tensors."""
    ours = model.state_dict()
    like = model.embedding.weight
    shared: dict[str, Tensor] = {}  # tensors of theirs whose rows several of ours hold
    with torch.no_grad():
        for tensor_map in family.tensor_maps(config, hf_config):
            if tensor_map.ours in ours:
                x = _unshift_heads(tensor_map, ours[tensor_map.ours], model)
            else:
                x = torch.zeros(_missing_shape(tensor_map, ours, config), dtype=like.dtype, device=like.device)
            pieces = x.split(tensor_map.sizes) if tensor_map.sizes else (x,)
            for (name, _, rows), piece in zip(tensor_map.pieces(x.shape[0]), pieces, strict=True):
                if tensor_map.filters:
                    piece = piece[:, None]
                if rows is not None:
                    if name not in shared:
                        shared[name] = piece.new_full((rows.total, *piece.shape[1:]), float("nan"))
                    rows.put(piece, shared[name])
                    continue
                if tensor_map.skip:  # RoBERTa's rows before the first position: no token but padding reads them
                    piece = torch.cat([piece.new_zeros(tensor_map.skip, *piece.shape[1:]), piece])
                if tensor_map.transposed:
                    piece = piece.T
                # A copy: the pieces of one tensor share its memory, which safetensors refuses.
                yield _full_name(family, name), piece.clone().contiguous()
    for name, x in shared.items():
        yield _full_name(family, name), x


def _full_name(family: Family, name: str) -> str:
    """Returns the name of a tensor of theirs in a file of a model with an output head."""
    if name.startswith(("lm_head", "cls.", "classifier")):
        return name
    return family.prefix + name


def _unshift_heads(tensor_map: TensorMap, x: Tensor, model: Any) -> Tensor:
    """Undoes, in the weight of an output projection, the head shift of a model with merge = 'shift'.

    That merge puts head h in the place of head h + 1. Here the columns of the weight are rolled back by one head, so
    that plain concatenation gives the same output. Any other tensor is returned unchanged.
    """
    if not tensor_map.ours.endswith("attention.out.weight"):
        return x
    layer = model.get_submodule(tensor_map.ours.removesuffix(".out.weight"))
    if type(layer.merge) is not MERGES["shift"]:
        return x
    return x.view(x.shape[0], layer.size.H, -1).roll(-1, 1).reshape(x.shape)


def _missing_shape(tensor_map: TensorMap, ours: Mapping[str, Tensor], config: Any) -> tuple[int, ...]:
    """Returns the shape of an exported tensor that our model does not have: token types, or a bias."""
    if tensor_map.ours == "types.weight":
        return (1, config.width)
    assert tensor_map.zeros, tensor_map.ours
    return (ours[tensor_map.ours.removesuffix("bias") + "weight"].shape[0],)


def _write(target: Path, texts: Mapping[str, str], tensors: dict[str, Tensor]) -> None:
    """Writes all files into a new folder beside the target, and then moves it to the target's place in one step."""
    with new_folder(target, HubError) as stage:
        write_tensors(stage / WEIGHTS, tensors, metadata={"format": "pt"})
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        write_manifest(stage, HASHES)
