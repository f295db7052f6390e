"""Qwen3-Next: three layers of gated delta attention to one of gated softmax attention, all with dense MLPs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from regard.hub.families.base import Family, RowSpans, TensorMap, attention_section, layer_maps, weight_and_bias
from regard.hub.families.llama import read_rotary, write_rotary
from regard.hub.keys import Keys
from regard.models import GPT, AttentionConfig, GPTConfig

MEMORY = "gated-delta"
SOFTMAX = "softmax"
# Transformers' names of kinds of layers, and the mechanisms that they are.
_KINDS = {"linear_attention": MEMORY, "full_attention": SOFTMAX}


class Qwen3Next(Family):
    """Qwen3-Next without mixtures of experts: RMSNorm with 1 + weight, SwiGLU, and two kinds of layers.

    One is gated delta attention over a short convolution, whose value heads share queries and keys, with a norm and a
    SiLU gate on each head's output. The other is softmax attention with norms of queries and keys, rotary positions on
    a share of each head, and a sigmoid gate.
    """

    model_type = "qwen3_next"
    model = GPT
    prefix = "model."
    output_heads: ClassVar[Mapping[str, str]] = {"Qwen3NextForCausalLM": "lm", "Qwen3NextModel": "lm"}
    default: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "layer_types": None,
        "full_attention_interval": 4,
        "mlp_only_layers": None,
        "decoder_sparse_step": 1,
        "num_experts": 512,
    }
    ignored_suffixes = (".rotary_emb.inv_freq",)

    def read(self, keys: Keys, head: str) -> GPTConfig:
        layers = keys.size("num_hidden_layers", "layers")
        mechanism = self._mechanisms(keys, layers)
        self._check_dense(keys, layers)
        keys.name("hidden_act", {"silu": "silu", "swish": "silu"})  # only checked: it is always silu
        sections = {SOFTMAX: self._read_softmax(keys), MEMORY: self._read_memory(keys)}
        rotary = read_rotary(keys, shares=True)
        present = [name for name in (SOFTMAX, MEMORY) if name in mechanism]
        attention = dict(sections[present[0]])
        if len(present) == 2:
            attention["by_mechanism"] = {MEMORY: sections[MEMORY]}
        turned = SOFTMAX in present
        return GPTConfig(
            vocabulary=keys.size("vocab_size", "vocabulary"),
            tied=keys.flag("tie_word_embeddings"),
            width=keys.size("hidden_size", "width"),
            layers=layers,
            length=keys.size("max_position_embeddings", "length"),
            mechanism=mechanism,
            position="rotary" if turned else "none",
            position_options=rotary if turned else {},
        ).but(
            attention=attention,
            block={
                "norm": "rms_zero_centred",
                "before": True,  # pre-norm
                "final_norm": True,
                "eps": keys.number("rms_norm_eps"),
                "mlp": "swiglu",
                "hidden": keys.size("intermediate_size", "hidden"),
                "bias": False,
            },
        )

    def _mechanisms(self, keys: Keys, layers: int) -> tuple[str, ...]:
        """Returns the mechanism of each layer: from layer_types, or else softmax in every n-th, n from the config."""
        kinds = keys.take("layer_types")
        interval = keys.take("full_attention_interval")
        if kinds is None:
            if not isinstance(interval, int) or interval < 1:
                raise keys.refusal("full_attention_interval", "expected a whole number above 0")
            return tuple(MEMORY if (n + 1) % interval else SOFTMAX for n in range(layers))
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise keys.refusal("layer_types", f"expected {layers} names")
        for kind in kinds:
            if not isinstance(kind, str) or kind not in _KINDS:
                raise keys.refusal("layer_types", f"a Qwen3-Next has layers of the kinds {', '.join(_KINDS)}")
        return tuple(_KINDS[kind] for kind in kinds)

    def _check_dense(self, keys: Keys, layers: int) -> None:
        """Refuses a model with mixtures of experts; the error lists the layers that have them."""
        experts = keys.take("num_experts")
        step = keys.take("decoder_sparse_step")
        dense = keys.take("mlp_only_layers") or []
        for name in ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok"):
            keys.take(name, None)
        for name in ("norm_topk_prob", "output_router_logits", "router_aux_loss_coef"):
            keys.take(name, None)
        if not isinstance(experts, int) or not isinstance(step, int) or step < 1:
            raise keys.refusal(
                "decoder_sparse_step", f"expected a whole number above 0, and one for num_experts, which is {experts!r}"
            )
        if not isinstance(dense, list):
            raise keys.refusal("mlp_only_layers", "expected numbers of layers")
        sparse = [n for n in range(layers) if n not in dense and experts > 0 and (n + 1) % step == 0]
        if sparse:
            raise keys.refusal(
                "mlp_only_layers",
                f"layers {', '.join(map(str, sparse[:8]))}{', …' * (len(sparse) > 8)} are mixtures of experts (MoE), "
                "which regard's models do not have. `regard view` and `regard check` take the model as it is",
            )

    def _read_softmax(self, keys: Keys) -> dict[str, Any]:
        """Returns the section `attention` of the layers with gated softmax attention."""
        heads = keys.size("num_attention_heads", "heads")
        groups = keys.size("num_key_value_heads", "groups", heads)
        bias = keys.flag("attention_bias")
        return {
            **attention_section(heads, groups, keys.size("head_dim", "key_width"), bias, bias),
            "qk_norm": True,
            "output": {"gate": "sigmoid"},
            "dropout": keys.number("attention_dropout"),
        }

    def _read_memory(self, keys: Keys) -> dict[str, Any]:
        """Returns the section `attention` of the layers with gated delta attention."""
        heads = keys.size("linear_num_value_heads", "heads")
        return {
            **attention_section(heads, heads, keys.size("linear_key_head_dim", "key_width"), False, False),
            "key_heads": keys.size("linear_num_key_heads", "key_heads"),
            "value_width": keys.size("linear_value_head_dim", "value_width"),
            "qk_norm": "l2",
            "positions": False,
            "convolution": {"width": keys.size("linear_conv_kernel_dim", "window"), "activation": "silu"},
            "output": {"norm": "rms", "gate": "silu"},
            "dropout": 0.0,
        }

    def write(self, config: GPTConfig) -> dict[str, Any]:
        theta, scaling = write_rotary(config.position_options)
        theirs = {ours: name for name, ours in _KINDS.items()}
        written: dict[str, Any] = {
            "vocab_size": config.vocabulary,
            "hidden_size": config.width,
            "intermediate_size": config.block.hidden,
            "num_hidden_layers": config.layers,
            "layer_types": [theirs.get(name, name) for name in config.per_layer],
            "mlp_only_layers": list(range(config.layers)),
            "hidden_act": "silu",
            "max_position_embeddings": config.length,
            "rms_norm_eps": config.block.eps,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "partial_rotary_factor": config.position_options.get("share", 1.0),
            "tie_word_embeddings": config.tied,
        }
        if SOFTMAX in config.per_layer:
            a = config.attention.for_mechanism(SOFTMAX)
            written |= {
                "num_attention_heads": a.heads,
                "num_key_value_heads": a.groups,
                "head_dim": a.key_width,
                "attention_bias": a.bias,
                "attention_dropout": a.dropout,
            }
        if MEMORY in config.per_layer:
            a = config.attention.for_mechanism(MEMORY)
            written |= {
                "linear_num_value_heads": a.heads,
                "linear_num_key_heads": a.key_heads or a.heads,
                "linear_key_head_dim": a.key_width,
                "linear_value_head_dim": a.value_width,
                "linear_conv_kernel_dim": a.convolution.width or None,
            }
        return written

    def tensor_maps(self, config: GPTConfig, hf_config: Mapping[str, Any]) -> Iterator[TensorMap]:
        hidden = config.block.hidden or 0
        yield TensorMap("embedding.weight", ("embed_tokens.weight",))
        for n, mechanism in enumerate(config.per_layer):
            ours = f"stack.blocks.{n}"
            theirs = f"layers.{n}"
            yield TensorMap(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",))
            yield TensorMap(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
            a = config.attention.for_mechanism(mechanism)
            if mechanism == MEMORY:
                yield from _memory_maps(f"{ours}.attention", f"{theirs}.linear_attn", a)
            else:
                yield from _softmax_maps(f"{ours}.attention", f"{theirs}.self_attn", a)
            names = tuple(f"{theirs}.mlp.{x}_proj.weight" for x in ("gate", "up"))
            yield TensorMap(f"{ours}.mlp.into.weight", names, (hidden, hidden))
            yield TensorMap(f"{ours}.mlp.out.weight", (f"{theirs}.mlp.down_proj.weight",))
        yield TensorMap("stack.final_norm.weight", ("norm.weight",))
        if not config.tied:
            yield TensorMap("head.weight", ("lm_head.weight",))

    def copies(self, config: GPTConfig) -> dict[str, str]:
        return {"lm_head.weight": "embed_tokens.weight"} if config.tied else {}


def _softmax_maps(ours: str, theirs: str, a: AttentionConfig) -> Iterator[TensorMap]:
    """Yields the tensor maps of a layer with gated softmax attention.

    The rows of their q_proj are one head after another: its query, then its gate, which is as wide as its values.
    """
    assert a.groups is not None and a.key_width is not None and a.value_width is not None
    queries, gates = _interleave(a.heads, (a.key_width, a.value_width))
    sizes = (a.heads * a.key_width, a.groups * a.key_width, a.groups * a.value_width)
    for kind in weight_and_bias(a.bias):
        names = tuple(f"{theirs}.{x}_proj.{kind}" for x in "qkv")
        yield TensorMap(f"{ours}.project.{kind}", names, sizes, (queries, None, None))
        yield TensorMap(f"{ours}.gate.{kind}", names[:1], (), (gates,))
    yield from layer_maps(f"{ours}.out", f"{theirs}.o_proj", *weight_and_bias(a.out_bias))
    yield TensorMap(f"{ours}.query_norm.weight", (f"{theirs}.q_norm.weight",))
    yield TensorMap(f"{ours}.key_norm.weight", (f"{theirs}.k_norm.weight",))


def _memory_maps(ours: str, theirs: str, a: AttentionConfig) -> Iterator[TensorMap]:
    """Yields the tensor maps of a layer with gated delta attention.

    The rows of their in_proj_qkvz are one key head after another: its query, its key, and the values and gates of the
    value heads that share them. Those of in_proj_ba give, for these value heads, the b and the inputs of the decays.
    """
    assert a.key_width is not None and a.value_width is not None
    key_heads = a.key_heads or a.heads
    share = a.heads // key_heads
    values = share * a.value_width
    q, k, v, z = _interleave(key_heads, (a.key_width, a.key_width, values, values))
    mixed = RowSpans(q.total, q.spans + k.spans + v.spans)
    yield TensorMap(f"{ours}.project.weight", (f"{theirs}.in_proj_qkvz.weight",), (), (mixed,))
    yield TensorMap(f"{ours}.gate.weight", (f"{theirs}.in_proj_qkvz.weight",), (), (z,))
    writes, decays = _interleave(key_heads, (share, share))
    made = RowSpans(writes.total, decays.spans + writes.spans)
    yield TensorMap(f"{ours}.gates.project.weight", (f"{theirs}.in_proj_ba.weight",), (), (made,))
    yield TensorMap(f"{ours}.gates.decay.rate", (f"{theirs}.A_log",))
    yield TensorMap(f"{ours}.gates.decay.bias", (f"{theirs}.dt_bias",))
    yield TensorMap(f"{ours}.convolution.weight", (f"{theirs}.conv1d.weight",), filters=True)
    yield TensorMap(f"{ours}.head_norm.weight", (f"{theirs}.norm.weight",))
    yield TensorMap(f"{ours}.out.weight", (f"{theirs}.out_proj.weight",))


def _interleave(heads: int, widths: tuple[int, ...]) -> tuple[RowSpans, ...]:
    """Returns the rows of each part of a weight whose rows are, head after head, parts of these widths."""
    step = sum(widths)
    found = []
    for n, width in enumerate(widths):
        first = sum(widths[:n])
        spans = tuple((head * step + first, head * step + first + width) for head in range(heads))
        found.append(RowSpans(heads * step, spans))
    return tuple(found)
