"""GPT-2: its config and its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from regard.hub.families.base import (
    ACTIVATION_FROM_HF,
    ACTIVATION_TO_HF,
    Family,
    TensorMap,
    attention_section,
    layer_maps,
)
from regard.hub.keys import Keys
from regard.models import GPT, GPTConfig


class GPT2(Family):
    """GPT-2: learned positions, pre-norm (LayerNorm), biases everywhere; linear weights stored [in, out] (Conv1D)."""

    model_type = "gpt2"
    model = GPT
    prefix = "transformer."
    output_heads: ClassVar[Mapping[str, str]] = {"GPT2LMHeadModel": "lm", "GPT2Model": "lm"}
    default: ClassVar[Mapping[str, Any]] = {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    }
    ignored_suffixes = (".attn.bias", ".attn.masked_bias")
    zero_bias = True

    def read(self, keys: Keys, head: str) -> GPTConfig:
        width = keys.size("n_embd", "width")
        heads = keys.size("n_head", "heads")
        if width % heads:
            raise keys.refusal("n_head", f"n_embd = {width} does not divide into so many heads")
        dropout = keys.number("resid_pdrop")
        keys.require("embd_pdrop", dropout)
        keys.require("scale_attn_weights", True)
        keys.require("scale_attn_by_inverse_layer_idx", False)
        keys.require("reorder_and_upcast_attn", False)
        for key in [key for key in keys.left if key.startswith("summary_")]:  # read by GPT2DoubleHeadsModel alone
            keys.take(key)
        return GPTConfig(
            vocabulary=keys.size("vocab_size", "vocabulary"),
            tied=keys.flag("tie_word_embeddings"),
            width=width,
            layers=keys.size("n_layer", "layers"),
            length=keys.size("n_positions", "length"),
            dropout=dropout,
        ).but(
            attention={
                **attention_section(heads, heads, width // heads, bias=True, out_bias=True),
                "dropout": keys.number("attn_pdrop"),
            },
            block={
                "norm": "layer",
                "before": True,  # pre-norm
                "final_norm": True,
                "eps": keys.number("layer_norm_epsilon"),
                "mlp": keys.name("activation_function", ACTIVATION_FROM_HF),
                "hidden": keys.size("n_inner", "hidden", 4 * width),
                "bias": True,
            },
        )

    def write(self, config: GPTConfig) -> dict[str, Any]:
        return {
            "vocab_size": config.vocabulary,
            "n_positions": config.length,
            "n_embd": config.width,
            "n_layer": config.layers,
            "n_head": config.attention.heads,
            "n_inner": config.block.hidden,
            "activation_function": ACTIVATION_TO_HF.get(config.block.mlp, "gelu_new"),
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.attention.dropout,
            "layer_norm_epsilon": config.block.eps,
            "tie_word_embeddings": config.tied,
        }

    def tensor_maps(self, config: GPTConfig, hf_config: Mapping[str, Any]) -> Iterator[TensorMap]:
        yield TensorMap("embedding.weight", ("wte.weight",))
        yield TensorMap("stack.positions.table.weight", ("wpe.weight",))
        for n in range(config.layers):
            for ours, theirs in {
                "attention_norm": "ln_1",
                "attention.project": "attn.c_attn",
                "attention.out": "attn.c_proj",
                "mlp_norm": "ln_2",
                "mlp.into": "mlp.c_fc",
                "mlp.out": "mlp.c_proj",
            }.items():
                names = (f"stack.blocks.{n}.{ours}", f"h.{n}.{theirs}")
                yield from layer_maps(*names, "weight", transposed="norm" not in ours)
                yield from layer_maps(*names, "bias")
        yield from layer_maps("stack.final_norm", "ln_f", "weight", "bias")
        if not config.tied:
            yield TensorMap("head.weight", ("lm_head.weight",))

    def copies(self, config: GPTConfig) -> dict[str, str]:
        return {"lm_head.weight": "wte.weight"} if config.tied else {}
