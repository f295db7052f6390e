"""Mamba-2: gated attention whose step Δ says both how much is forgotten and how strongly a token is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from regard.hub.families.base import Family, RowSpans, TensorMap
from regard.hub.keys import Keys
from regard.models import GPT, GPTConfig
from regard.reading import fits

_NO_LIMIT = (float("inf"), {"__float__": "Infinity"})  # how transformers writes that Δ has no upper limit
# Keys that transformers does not read, or that change only how weights are drawn or computed.
_WITHOUT_EFFECT = (
    *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_scale"),
    *("time_step_init_scheme", "rescale_prenorm_residual", "chunk_size", "residual_in_fp32", "norm_before_gate"),
    *("rms_norm", "intermediate_size"),
)


class Mamba2(Family):
    """Mamba-2: blocks without MLPs; x, B and C of theirs are values, keys and queries of ours.

    Value heads share B and C by groups. Their D adds a head's values to its output (`skip`); a SiLU gate and one norm
    over all heads follow.
    """

    model_type = "mamba2"
    model = GPT
    prefix = "backbone."
    output_heads: ClassVar[Mapping[str, str]] = {"Mamba2ForCausalLM": "lm", "Mamba2Model": "lm"}
    default: ClassVar[Mapping[str, Any]] = {
        "num_heads": 128,
        "head_dim": 64,
        "vocab_size": 32768,
        "hidden_size": 4096,
        "state_size": 128,
        "num_hidden_layers": 64,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "time_step_limit": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1024,  # it has no positions, but regard's models have a length
    }

    def read(self, keys: Keys, head: str) -> GPTConfig:
        width = keys.size("hidden_size", "width")
        heads = keys.size("num_heads", "heads")
        value_width = keys.size("head_dim", "value_width")
        inner = heads * value_width
        if keys.size("expand", "width") * width != inner:
            raise keys.refusal("expand", f"expected hidden_size · expand to be num_heads · head_dim = {inner}")
        keys.name("hidden_act", {"silu": "silu", "swish": "silu"})  # only checked: the gate is always silu
        keys.require("use_bias", False)
        for key in _WITHOUT_EFFECT:
            keys.take(key, None)
        return GPTConfig(
            vocabulary=keys.size("vocab_size", "vocabulary"),
            tied=keys.flag("tie_word_embeddings"),
            width=width,
            layers=keys.size("num_hidden_layers", "layers"),
            length=keys.size("max_position_embeddings", "length"),
            mechanism="gated",
            options={"scale": 1.0},
            position="none",
        ).but(
            attention={
                "heads": heads,
                "groups": heads,
                "key_heads": keys.size("n_groups", "key_heads"),
                "key_width": keys.size("state_size", "key_width"),
                "value_width": value_width,
                "bias": False,
                "out_bias": False,
                "convolution": {
                    "width": keys.size("conv_kernel", "window"),
                    "activation": "silu",
                    "bias": keys.flag("use_conv_bias"),
                },
                "decay": "step",
                "decay_options": self._read_limits(keys),
                "output": {"norm": True, "gate": "silu", "joint": True, "skip": True},
            },
            block={
                "norm": "rms",
                "before": True,  # pre-norm
                "final_norm": True,
                "eps": keys.number("layer_norm_epsilon"),
                "mlp": "none",
                "bias": False,
            },
        )

    def _read_limits(self, keys: Keys) -> dict[str, Any]:
        """Returns the limits of Δ as options of the decay: `least` unless it is 0, and `most` unless it is infinite."""
        limits = keys.take("time_step_limit")
        if limits is None:
            return {}
        if not isinstance(limits, list) or len(limits) != 2 or not fits(limits[0], float) or limits[0] < 0:
            raise keys.refusal("time_step_limit", "expected two numbers")
        least, most = limits
        if most in _NO_LIMIT:
            return {"least": float(least)} if least else {}
        if not fits(most, float) or not least < most:
            raise keys.refusal("time_step_limit", "expected two numbers, the larger one last")
        return {"least": float(least), "most": float(most)}

    def write(self, config: GPTConfig) -> dict[str, Any]:
        a = config.attention
        options = a.decay_options
        written: dict[str, Any] = {
            "vocab_size": config.vocabulary,
            "hidden_size": config.width,
            "num_hidden_layers": config.layers,
            "num_heads": a.heads,
            "head_dim": a.value_width,
            "n_groups": a.key_heads or a.heads,
            "state_size": a.key_width,
            "expand": a.heads * (a.value_width or 0) // config.width,
            "conv_kernel": a.convolution.width,
            "use_conv_bias": a.convolution.bias,
            "use_bias": False,
            "hidden_act": "silu",
            "layer_norm_epsilon": config.block.eps,
            "max_position_embeddings": config.length,
            "tie_word_embeddings": config.tied,
        }
        if options:
            most = options.get("most")
            written["time_step_limit"] = [options.get("least", 0.0), _NO_LIMIT[1] if most is None else most]
        return written

    def tensor_maps(self, config: GPTConfig, hf_config: Mapping[str, Any]) -> Iterator[TensorMap]:
        a = config.attention
        assert a.key_width is not None and a.value_width is not None
        inner = a.heads * a.value_width
        shared = (a.key_heads or a.heads) * a.key_width
        # Their rows are the gate, x, B, C and Δ; ours are queries, keys and values, which is C, B and x.
        total = 2 * inner + 2 * shared + a.heads
        x, b, c = ((0, inner), (inner, inner + shared), (inner + shared, inner + 2 * shared))
        channels = RowSpans(inner + 2 * shared, (c, b, x))
        project = RowSpans(total, tuple((inner + start, inner + stop) for start, stop in channels.spans))
        yield TensorMap("embedding.weight", ("embeddings.weight",))
        for n in range(config.layers):
            ours = f"stack.blocks.{n}.attention"
            theirs = f"layers.{n}.mixer"
            joined = (f"{theirs}.in_proj.weight",)
            yield TensorMap(f"stack.blocks.{n}.attention_norm.weight", (f"layers.{n}.norm.weight",))
            yield TensorMap(f"{ours}.project.weight", joined, (), (project,))
            yield TensorMap(f"{ours}.gate.weight", joined, (), (RowSpans(total, ((0, inner),)),))
            yield TensorMap(f"{ours}.gates.project.weight", joined, (), (RowSpans(total, ((total - a.heads, total),)),))
            yield TensorMap(f"{ours}.convolution.weight", (f"{theirs}.conv1d.weight",), (), (channels,), filters=True)
            if a.convolution.bias:
                yield TensorMap(f"{ours}.convolution.bias", (f"{theirs}.conv1d.bias",), (), (channels,))
            yield TensorMap(f"{ours}.gates.decay.rate", (f"{theirs}.A_log",))
            yield TensorMap(f"{ours}.gates.decay.bias", (f"{theirs}.dt_bias",))
            yield TensorMap(f"{ours}.skip", (f"{theirs}.D",))
            yield TensorMap(f"{ours}.head_norm.weight", (f"{theirs}.norm.weight",))
            yield TensorMap(f"{ours}.out.weight", (f"{theirs}.out_proj.weight",))
        yield TensorMap("stack.final_norm.weight", ("norm_f.weight",))
        if not config.tied:
            yield TensorMap("head.weight", ("lm_head.weight",))

    def copies(self, config: GPTConfig) -> dict[str, str]:
        return {"lm_head.weight": "embeddings.weight"} if config.tied else {}
