"""What `hub.use` takes in place of a mechanism's name."""

import pytest
import torch
import transformers

import regard
from regard.errors import OptionError


def gpt2():
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def test_a_similarity_is_used_and_a_whole_attention_is_refused():
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        named = regard.hub.use(gpt2(), "similarity", sim=lambda q, k: (q @ k).exp())(tokens).logits
        assert torch.isfinite(regard.hub.use(gpt2(), lambda q, k: (q @ k).exp())(tokens).logits).all()
    assert torch.isfinite(named).all()
    with pytest.raises(OptionError, match=r"A whole attention f\(q, k, v\) is not called by regard"):
        regard.hub.use(gpt2(), lambda q, k, v: v)
    with pytest.raises(OptionError, match="it is the mechanism 'softmax'"):
        regard.hub.use(gpt2(), torch.nn.functional.scaled_dot_product_attention)
