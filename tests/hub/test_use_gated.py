"""Mechanisms with a memory in Hugging Face models: where a and b come from, caches, training; and GPT-OSS's sinks."""

import pytest
import safetensors.torch
import torch
import transformers as hf

from regard import hub
from regard.checking.hub_models import HUB_LAWS, HubSubject
from regard.errors import HubError, MaskError, OptionError
from regard.functional import attend
from regard.hub.attention import replacement_in
from regard.hub.cache import StateLayer
from regard.laws import DoesNotApply

V = 89
SIZE = {
    **{"vocab_size": V, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
    "pad_token_id": 0,
}
MEMORIES = {
    "retention": {},
    "gated": {"channels": True},
    "delta": {"range": 2},
    "gated-delta": {},
}


def made(cls=hf.LlamaForCausalLM, **more):
    torch.manual_seed(0)
    model = cls(cls.config_class(**SIZE | more))
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return model.eval()


def text():
    """Three texts, two of them padded on the left: ids, mask, positions."""
    ids = torch.randint(3, V, (3, 13), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, :1] = 0
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def apart(a, b):
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_a_cache_gives_what_a_whole_pass_gives(name):
    model = hub.use(made(), name, layers=[1], **MEMORIES[name])
    ids, mask, positions = text()
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache = hf.DynamicCache(config=model.config)
    parts, sizes, seen = [], [], 0
    for n in (5, 4, 1, 1, 2):
        now = slice(seen, seen + n)
        seen += n
        given = {"attention_mask": mask[:, :seen], "position_ids": positions[:, now]}
        parts.append(model(ids[:, now], past_key_values=cache, use_cache=True, **given).logits)
        sizes.append(cache.layers[1].bytes)
    torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=1e-5)
    assert isinstance(cache.layers[1], StateLayer) and len(set(sizes)) == 1
    for b in range(3):
        alone = model(ids[b : b + 1, mask[b].bool()], use_cache=False).logits[0]
        torch.testing.assert_close(alone, whole[b, mask[b].bool()], atol=1e-5, rtol=1e-5)
    settings = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    for beams in (1, 3):
        got = model.generate(ids, num_beams=beams, **settings)
        assert torch.equal(got, model.generate(ids, num_beams=beams, use_cache=False, **settings))


@torch.no_grad()
def test_a_and_b_are_made_of_what_queries_are_made_of():
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=V, n_embd=30, n_head=3, n_layer=2, n_positions=64)
    model = hub.use(hf.GPT2LMHeadModel(config).eval(), "gated-delta", layers=[1])
    module = model.transformer.h[1].attn
    heard = {}
    module.register_forward_pre_hook(lambda _, args, kwargs: heard.update(x=args[0]), with_kwargs=True)
    module.c_proj.register_forward_pre_hook(lambda _, args: heard.update(out=args[0]))
    model(text()[0], use_cache=False)
    x = heard["x"]
    q, k, v = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in module.c_attn(x).split(30, -1))
    own = dict(replacement_in(module).gates.named_parameters())
    a, b = (x @ own["project.weight"].mT).split(3, -1)
    a = -torch.nn.functional.softplus(a + own["decay.bias"]) * own["decay.rate"].exp()
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    out = attend(q, k, v, "gated-delta", causal=True, a=a.mT, b=b.sigmoid().mT)
    torch.testing.assert_close(heard["out"], out.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-5)
    assert replacement_in(module).made == {}


def test_the_gates_are_learned_and_saved_with_the_model(tmp_path):
    model = hub.use(made(), "gated-delta", decay="logsigmoid").train()
    ids, mask, _ = text()
    own = {n: x for n, x in model.named_parameters() if ".regard.gates." in n}
    assert {n.rpartition("gates.")[2] for n in own} == {"project.weight", "decay.bias"}
    assert sum(x.numel() for x in own.values()) == 2 * (48 * 4 + 2)
    before = {n: x.detach().clone() for n, x in own.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for _ in range(12):
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert not any(torch.equal(x, before[n]) for n, x in own.items())
    model.eval().save_pretrained(tmp_path)
    other = hf.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    hub.use(other, "gated-delta", decay="logsigmoid")
    safetensors.torch.load_model(other, tmp_path / "model.safetensors")
    assert apart(other(ids).logits, model(ids).logits) == 0
    hub.restore(other)
    assert not any("regard" in n for n in other.state_dict())


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_weights_are_those_of_the_output(name):
    model = hub.use(made(), name, **MEMORIES[name])
    ids, mask, positions = text()
    heard = {}
    module = model.model.layers[0].self_attn
    module.o_proj.register_forward_pre_hook(lambda _, args: heard.update(out=args[0]))
    module.v_proj.register_forward_hook(lambda _, args, out: heard.update(v=out))
    weights = model(
        ids, attention_mask=mask, position_ids=positions, output_attentions=True, use_cache=False
    ).attentions
    v = heard["v"].unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(3, 1)
    out = (weights[0] @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out[mask.bool()], heard["out"][mask.bool()], atol=1e-5, rtol=1e-5)


def test_a_model_with_memories_keeps_the_laws():
    trial = HubSubject(hub.use(made(), "gated-delta", layers=[0]))
    asked = []
    for name, law in HUB_LAWS.items():
        try:
            found = law(trial)
        except DoesNotApply:
            continue
        asked.append(name)
        assert found.error <= found.limit, f"{name}: {found.what} {found.error}"
    assert {"padding", "batch", "cache", "looks-ahead", "reference", "rows"} <= set(asked)


class TestRefused:
    """What a memory cannot do is refused by name."""

    def test_encoders_and_cross_attention(self):
        bert = hf.BertModel(hf.BertConfig(hidden_size=12, num_attention_heads=2, num_hidden_layers=1, vocab_size=V))
        with pytest.raises(OptionError, match=r"attention\.self: gated is causal, and an encoder looks both ways"):
            hub.use(bert, "gated")
        t5 = hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=V, d_model=12, d_kv=4, d_ff=8, num_layers=1, num_heads=3)
        )
        with pytest.raises(OptionError, match="delta has no cross-attention"):
            hub.use(t5, "delta", parts=["cross"])

    def test_windows_and_sinks(self):
        ids, mask, _ = text()
        model = hub.use(made(hf.MistralForCausalLM, sliding_window=7), "gated-delta")
        for cached in (False, True):
            with pytest.raises(MaskError, match="gated-delta cannot honour 'window'"):
                model(ids, attention_mask=mask, use_cache=cached)
        with pytest.raises(HubError, match="gated-delta cannot honour 's_aux'"):
            hub.use(made_oss(), "gated-delta")(ids)

    def test_a_cache_of_another_time(self):
        ids, _, _ = text()
        model = made()
        cache = hf.DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        hub.use(model, "gated-delta")
        with pytest.raises(HubError, match=r"14 keys for 1 new tokens.*begin with a new cache"):
            model(ids[:, :1], past_key_values=cache)

    def test_models_without_softmax(self):
        mamba = hf.Mamba2ForCausalLM(
            hf.Mamba2Config(vocab_size=V, hidden_size=8, num_heads=4, head_dim=4, n_groups=1, num_hidden_layers=1)
        )
        assert hub.places(mamba) == []
        with pytest.raises(HubError, match="makes its attention itself"):
            hub.use(mamba, "gated")


@torch.no_grad()
def test_of_a_hybrid_the_softmax_layers_are_replaced():
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "head_dim": 8}
    model = made(
        hf.Qwen3NextForCausalLM, **sizes, linear_value_head_dim=5, num_hidden_layers=4, mlp_only_layers=[0, 1, 2, 3]
    )
    assert [place.layer for place in hub.places(model)] == [3]
    ids, mask, positions = text()
    before = model(ids, attention_mask=mask, position_ids=positions).logits
    hub.use(model, "gated-delta")
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert apart(whole[mask.bool()], before[mask.bool()]) > 1e-2
    settings = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    got = model.generate(ids, **settings)
    assert torch.equal(got, model.generate(ids, use_cache=False, **settings))


def made_oss(kinds=("full_attention", "sliding_attention")):
    model = made(
        hf.GptOssForCausalLM,
        **{"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        **{"layer_types": list(kinds), "sliding_window": 5},
    )
    for layer in model.model.layers:
        layer.self_attn.sinks.data = torch.tensor([1.5, 0.0, -1.0, 3.0, 0.5, -4.0])
    return model


@torch.no_grad()
def test_sinks_are_honoured_with_padding_windows_and_caches():
    ids, mask, positions = text()
    model = made_oss()
    given = {"attention_mask": mask, "position_ids": positions}
    want = model(ids, **given).logits
    settings = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    written = model.generate(ids, **settings)
    hub.use(model, "softmax")
    torch.testing.assert_close(model(ids, **given).logits[mask.bool()], want[mask.bool()], atol=1e-5, rtol=1e-5)
    assert torch.equal(model.generate(ids, **settings), written)
    for layer in model.model.layers:
        layer.self_attn.sinks.data += 2.0  # they matter
    assert apart(model(ids, **given).logits[mask.bool()], want[mask.bool()]) > 1e-2
