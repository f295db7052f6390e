"""Llama, Mistral, Qwen 2 and Qwen 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from regard.hub.families.base import (
    Family,
    TensorMap,
    attention_section,
    layer_maps,
    projection_widths,
    weight_and_bias,
)
from regard.hub.keys import Keys
from regard.models import GPT, GPTConfig

# Transformers' names for the options of our rotary positions (RoPE) of the type 'llama3', and our names.
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "original_max_position_embeddings": "original",
}
# The defaults of our rotary positions.
_ROTARY: dict[str, Any] = {"base": 10000.0, "factor": 1.0, "original": None, "low": 1.0, "high": 4.0, "share": 1.0}


class Llama(Family):
    """Llama: RoPE, pre-norm (RMSNorm), SwiGLU, grouped-query attention."""

    model_type = "llama"
    model = GPT
    prefix = "model."
    output_heads: ClassVar[Mapping[str, str]] = {"LlamaForCausalLM": "lm", "LlamaModel": "lm"}
    default: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
    }
    ignored_suffixes = (".rotary_emb.inv_freq",)
    qk_norm: ClassVar[bool] = False

    def read(self, keys: Keys, head: str) -> GPTConfig:
        width = keys.size("hidden_size", "width")
        heads = keys.size("num_attention_heads", "heads")
        groups = keys.size("num_key_value_heads", "groups", heads)
        layers = keys.size("num_hidden_layers", "layers")
        key_width = keys.size("head_dim", "key_width", width // heads or 1)
        keys.name("hidden_act", {"silu": "silu", "swish": "silu"})  # only checked: SwiGLU always uses silu
        bias, out_bias, mlp_bias = self._biases(keys, width, heads)
        return GPTConfig(
            vocabulary=keys.size("vocab_size", "vocabulary"),
            tied=keys.flag("tie_word_embeddings"),
            width=width,
            layers=layers,
            length=keys.size("max_position_embeddings", "length"),
            position="rotary",
            position_options=read_rotary(keys),
        ).but(
            attention={
                **attention_section(heads, groups, key_width, bias, out_bias),
                "dropout": keys.number("attention_dropout"),
                "window": self._window(keys, layers),
                "qk_norm": self.qk_norm,
            },
            block={
                "norm": "rms",
                "before": True,  # pre-norm
                "final_norm": True,
                "eps": keys.number("rms_norm_eps"),
                "mlp": "swiglu",
                "hidden": keys.size("intermediate_size", "hidden"),
                "bias": mlp_bias,
            },
        )

    def _biases(self, keys: Keys, width: int, heads: int) -> tuple[bool, bool, bool]:
        """Returns three booleans: whether the q, k and v projections, the output projection and the MLP have biases.

        For a Llama, it also refuses a `width` that is not a multiple of `heads`, as transformers does. The families
        below override this method and do not check that.
        """
        if width % heads:
            raise keys.refusal("num_attention_heads", f"a Llama's hidden_size = {width} must divide into its heads")
        attention = keys.flag("attention_bias", False)
        return attention, attention, keys.flag("mlp_bias", False)

    def _window(self, keys: Keys, layers: int) -> int | None:
        """Returns the size of the sliding window of all layers, or None for full attention."""
        return None

    def write(self, config: GPTConfig) -> dict[str, Any]:
        a = config.attention
        theta, scaling = write_rotary(config.position_options)
        return {
            "vocab_size": config.vocabulary,
            "hidden_size": config.width,
            "intermediate_size": config.block.hidden,
            "num_hidden_layers": config.layers,
            "num_attention_heads": a.heads,
            "num_key_value_heads": a.groups,
            "head_dim": a.key_width,
            "hidden_act": "silu",
            "max_position_embeddings": config.length,
            "rms_norm_eps": config.block.eps,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "attention_dropout": a.dropout,
            "tie_word_embeddings": config.tied,
            **self._own_keys(config),
        }

    def _own_keys(self, config: GPTConfig) -> dict[str, Any]:
        """Returns the keys of config.json that this family writes besides those common to all families in this file."""
        return {"attention_bias": config.attention.bias, "mlp_bias": config.block.bias}

    def tensor_maps(self, config: GPTConfig, hf_config: Mapping[str, Any]) -> Iterator[TensorMap]:
        a = config.attention
        hidden = config.block.hidden or 0
        yield TensorMap("embedding.weight", ("embed_tokens.weight",))
        for n in range(config.layers):
            ours = f"stack.blocks.{n}"
            theirs = f"layers.{n}"
            yield TensorMap(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",))
            yield TensorMap(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
            for kind in weight_and_bias(a.bias):
                names = tuple(f"{theirs}.self_attn.{x}_proj.{kind}" for x in "qkv")
                yield TensorMap(f"{ours}.attention.project.{kind}", names, projection_widths(config))
            yield from layer_maps(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", *weight_and_bias(a.out_bias))
            for kind in weight_and_bias(config.block.bias):
                names = tuple(f"{theirs}.mlp.{x}_proj.{kind}" for x in ("gate", "up"))
                yield TensorMap(f"{ours}.mlp.into.{kind}", names, (hidden, hidden))
            yield from layer_maps(f"{ours}.mlp.out", f"{theirs}.mlp.down_proj", *weight_and_bias(config.block.bias))
            if a.qk_norm:
                yield TensorMap(f"{ours}.attention.query_norm.weight", (f"{theirs}.self_attn.q_norm.weight",))
                yield TensorMap(f"{ours}.attention.key_norm.weight", (f"{theirs}.self_attn.k_norm.weight",))
        yield TensorMap("stack.final_norm.weight", ("norm.weight",))
        if not config.tied:
            yield TensorMap("head.weight", ("lm_head.weight",))

    def copies(self, config: GPTConfig) -> dict[str, str]:
        return {"lm_head.weight": "embed_tokens.weight"} if config.tied else {}


class Mistral(Llama):
    """Mistral: a Llama without biases, with an optional sliding window."""

    model_type = "mistral"
    output_heads: ClassVar[Mapping[str, str]] = {"MistralForCausalLM": "lm", "MistralModel": "lm"}
    default: ClassVar[Mapping[str, Any]] = {**Llama.default, "max_position_embeddings": 131072, "sliding_window": 4096}

    def _biases(self, keys: Keys, width: int, heads: int) -> tuple[bool, bool, bool]:
        return False, False, False

    def _window(self, keys: Keys, layers: int) -> int | None:
        if keys.take("sliding_window") is None:
            return None
        return keys.size("sliding_window", "window")

    def _own_keys(self, config: GPTConfig) -> dict[str, Any]:
        return {"sliding_window": config.attention.window}


class Qwen2(Llama):
    """Qwen 2: a Llama with biases on q, k and v. Supported only if all layers have a sliding window, or none has."""

    model_type = "qwen2"
    output_heads: ClassVar[Mapping[str, str]] = {"Qwen2ForCausalLM": "lm", "Qwen2Model": "lm"}
    default: ClassVar[Mapping[str, Any]] = {
        **Llama.default,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    }

    def _biases(self, keys: Keys, width: int, heads: int) -> tuple[bool, bool, bool]:
        return True, False, False

    def _window(self, keys: Keys, layers: int) -> int | None:
        enabled = keys.flag("use_sliding_window")
        first = keys.take("max_window_layers")  # the first layer that has a window
        types = keys.take("layer_types")
        window = keys.take("sliding_window")
        key = "layer_types"
        if types is None:  # a config of an older version of transformers
            key = "max_window_layers"
            if not isinstance(first, int):
                raise keys.refusal(key, "expected a whole number")
            full = max(0, min(first, layers)) if enabled else layers
            types = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
        if not isinstance(types, list) or len(types) != layers:
            raise keys.refusal(key, f"expected {layers} names")
        if types == ["full_attention"] * layers:
            return None
        if types != ["sliding_attention"] * layers or not enabled or window is None:
            raise keys.refusal(key, "regard's models have one window for all layers, or none")
        return keys.size("sliding_window", "window")

    def _own_keys(self, config: GPTConfig) -> dict[str, Any]:
        window = config.attention.window
        return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}


class Qwen3(Qwen2):
    """Qwen 3: a Qwen 2 with an RMSNorm on the queries and keys of each head, and biases only if its config says so."""

    model_type = "qwen3"
    output_heads: ClassVar[Mapping[str, str]] = {"Qwen3ForCausalLM": "lm", "Qwen3Model": "lm"}
    default: ClassVar[Mapping[str, Any]] = {**Qwen2.default, "head_dim": 128}
    qk_norm = True

    def _biases(self, keys: Keys, width: int, heads: int) -> tuple[bool, bool, bool]:
        bias = keys.flag("attention_bias", False)
        return bias, bias, False

    def _own_keys(self, config: GPTConfig) -> dict[str, Any]:
        return {**super()._own_keys(config), "attention_bias": config.attention.bias}


def read_rotary(keys: Keys, shares: bool = False) -> dict[str, Any]:
    """Returns those options of our rotary positions whose values are not our defaults.

    Newer configs hold the options in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`. `shares` says
    whether the family's config may restrict them to a share of each head's width (`partial_rotary_factor`).
    """
    theta = keys.take("rope_theta")
    sections = {key: keys.take(key, None) for key in ("rope_parameters", "rope_scaling")}
    key = "rope_scaling" if sections["rope_parameters"] is None else "rope_parameters"
    section = sections[key] or {}
    if not isinstance(section, Mapping):
        raise keys.refusal(key, "expected a section of keys and values")
    rope = {"rope_theta": theta, **section}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    types = {"default": {}, "linear": {"factor": "factor"}, "llama3": _LLAMA3}
    if not isinstance(kind, str) or kind not in types:
        raise keys.refusal(key, f"regard's rotary positions know the types {', '.join(types)}, not '{kind}'")
    names = {"rope_theta": "base", **types[kind]}
    if shares:
        rope.setdefault("partial_rotary_factor", keys.take("partial_rotary_factor"))
        names["partial_rotary_factor"] = "share"
    else:
        keys.require("partial_rotary_factor", None, 1.0)
        if rope.get("partial_rotary_factor") in (None, 1.0):
            rope.pop("partial_rotary_factor", None)
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", keys.take("max_position_embeddings"))
    wrong = sorted(set(rope) ^ set(names))
    if wrong:
        problem = "no" if wrong[0] in names else "unknown"
        raise keys.refusal(key, f"{problem} '{wrong[0]}' for the type '{kind}'")
    for name, value in rope.items():
        if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise keys.refusal(key, f"{name} = {value!r}: expected a number above zero")
    return {names[name]: value for name, value in rope.items() if value != _ROTARY[names[name]]}


def write_rotary(options: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Returns the values of rope_theta and rope_scaling, two keys that every version of transformers reads."""
    full = {**_ROTARY, **options}
    scaling: dict[str, Any] | None = None
    if full["original"] is not None:
        scaling = {"rope_type": "llama3", **{theirs: full[ours] for theirs, ours in _LLAMA3.items()}}
    elif full["factor"] != 1:
        scaling = {"rope_type": "linear", "factor": full["factor"]}
    return full["base"], scaling
