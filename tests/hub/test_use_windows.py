"""Mechanisms in Hugging Face models with a sliding window: what a cache gives is what the windowed reference gives."""

import pytest
import torch
import transformers as hf

import regard
from regard import Mask, hub
from regard.errors import HubError
from regard.hub.cache import StateLayer
from regard.hub.masks import recognise_structure

WINDOW = 7
SIZE = {
    **{"vocab_size": 89, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sliding_window": WINDOW},
}
MAKERS = {
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZE)),
    # One layer with a window and one without; capped scores are another matter.
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZE, head_dim=8, attn_logit_softcapping=None)),
}
SLOW = pytest.mark.slow
EACH = [
    pytest.param(model, mechanism, marks=[] if (model, mechanism) in FAST else [SLOW])
    for FAST in [{("mistral", "elu"), ("gemma2", "performer"), ("mistral", "synthesizer")}]
    for model in MAKERS
    for mechanism in ("elu", "performer", "quadratic", "fourier", "synthesizer", "synthesizer-random", "softmax")
]


def used(name, mechanism):
    torch.manual_seed(0)
    return hub.use(MAKERS[name]().eval(), mechanism)


@pytest.fixture
def text():
    """Three texts, two of them padded on the left: ids, mask, positions."""
    ids = torch.randint(3, 89, (3, 13), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, :1] = 0
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize(("name", "mechanism"), EACH)
@torch.no_grad()
def test_a_cache_gives_what_the_window_shows(name, mechanism, text):
    ids, mask, positions = text
    model = used(name, mechanism)
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for cache in (hf.DynamicCache(config=model.config), hf.DynamicCache()):
        parts = []
        seen = 0
        for n in (5, 4, 1, 1, 2):  # across the window in a piece and by single tokens
            now = slice(seen, seen + n)
            seen += n
            given = {"attention_mask": mask[:, :seen], "position_ids": positions[:, now]}
            parts.append(model(ids[:, now], past_key_values=cache, use_cache=True, **given).logits)
        torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()], atol=2e-6, rtol=1e-5)
        if mechanism != "softmax":
            layer = cache.layers[0]
            assert isinstance(layer, StateLayer)
            assert max(x.shape[2] for x in layer.state if torch.is_tensor(x) and x.dim() == 4) == WINDOW
    for b in range(3):  # padding does not count as tokens of the window
        alone = model(ids[b : b + 1, mask[b].bool()], use_cache=False).logits[0]
        torch.testing.assert_close(alone, whole[b, mask[b].bool()], atol=2e-6, rtol=1e-5)


@torch.no_grad()
def test_a_layer_computes_the_windowed_reference():
    """The first layer of a replaced Mistral against its own projections and a mechanism with the window as a rule."""
    model = used("mistral", "elu")
    ids = torch.randint(3, 89, (2, 13), generator=torch.Generator().manual_seed(1))
    attention = model.model.layers[0].self_attn
    given = {}
    replacement = next(m for m in attention.modules() if type(m).__name__ == "AttentionReplacement")
    replacement.register_forward_pre_hook(lambda m, args: given.update(call=args[0]))
    made = {}
    replacement.register_forward_hook(lambda m, args, out: made.update(out=out[0]))
    model(ids, use_cache=False)
    call = given["call"]
    rule = Mask(causal=True, window=WINDOW)
    want = replacement.mechanism(call.q * call.scaling * call.q.shape[-1] ** 0.5, call.k, call.v, rule)
    torch.testing.assert_close(made["out"], want.transpose(1, 2), atol=1e-6, rtol=1e-5)
    everything = replacement.mechanism(call.q, call.k, call.v, Mask(causal=True)).transpose(1, 2)
    assert (made["out"] - everything).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "mechanism"), EACH)
@torch.no_grad()
def test_generation_beyond_the_window(name, mechanism, text):
    ids, mask, _ = text
    model = used(name, mechanism)
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), want)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), want)


def test_windows_are_recognised():
    causal = torch.ones(6, 6).tril().bool()
    window = causal & ~causal.tril(-3)
    found = recognise_structure(window[None, None])
    assert found.causal and found.window == 3 and found.visible is None
    last = recognise_structure(window[None, None, 3:])  # three queries after three keys
    assert last is not None and last.window == 3
    padded = (window & torch.tensor([False, True, True, True, True, True]))[None, None]
    found = recognise_structure(padded)
    assert found.window == 3 and found.visible.tolist() == [[False] + [True] * 5]
    odd = window.clone()
    odd[5, 3] = False
    assert recognise_structure(odd[None, None]) is None


def test_a_used_model_keeps_the_laws_around_its_window():
    """Its lengths come from the config: a text cut short, in pieces or padded gives the same, window ± 1 included."""
    verdicts = {v.law: v for v in regard.check(used("mistral", "elu"), draws=1)}
    for law in ("looks-ahead", "cache", "padding", "prompts", "packed", "window", "long"):
        assert verdicts[law].status == "holds", verdicts[law]


@torch.no_grad()
def test_padding_between_tokens_is_refused_beyond_the_window(text):
    ids, mask, _ = text
    mask[:, 2] = 0  # transformers' window counts it, and a position here does not
    for use_cache in (True, False):
        with pytest.raises(HubError, match=r"elu cannot honour .*mask"):
            used("mistral", "elu")(ids, attention_mask=mask, use_cache=use_cache)
