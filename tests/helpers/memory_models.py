"""Small random models whose layers keep a memory that fades: regard's, Qwen3-Next and Mamba-2."""

import pytest
from small_models import GROUPED, stirred

from regard.data.tokenizers import Bytes
from regard.models import GPT

LAYER = {"heads": 4, "convolution": {"width": 3}, "output": {"norm": True}}


def memory_gpt(name, options=None, **changes):
    sizes = {"vocabulary": 256, "width": 24, "layers": 2, "length": 64, "position": "none", "attention": LAYER}
    model = stirred(GPT.preset("nano", **{**sizes, "mechanism": name, "options": options or {}, **changes}))
    model.tokenizer = Bytes()
    return model


def qwen():
    transformers = pytest.importorskip("transformers")
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "head_dim": 8}
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    config = transformers.Qwen3NextConfig(
        **{**GROUPED, **sizes, "linear_value_head_dim": 6, "num_hidden_layers": 3, "layer_types": kinds},
        mlp_only_layers=[0, 1, 2],
    )
    return stirred(transformers.Qwen3NextForCausalLM(config).eval())


def mamba():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 6, "n_groups": 2}
    config = transformers.Mamba2Config(**sizes, state_size=5, chunk_size=8, bos_token_id=1, eos_token_id=None)
    return stirred(transformers.Mamba2ForCausalLM(config).eval())
