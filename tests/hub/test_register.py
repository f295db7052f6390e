"""Mechanisms under names of transformers' own: what `hub.register` does equals `hub.use`, and nothing is silent."""

import pytest
import torch
import transformers as hf

import regard
from regard import hub
from regard.errors import HubError, OptionError, UnknownNameError
from regard.lens import record

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
V = 61
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(
        vocab_size=V,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,  # grouped
        max_position_embeddings=64,
        **ENDS,
    ),
    "mistral": lambda: hf.MistralConfig(
        vocab_size=V,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=5,
        **ENDS,
    ),
    "bert": lambda: hf.BertConfig(
        vocab_size=V,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=66,
        pad_token_id=0,
    ),
    "bart": lambda: hf.BartConfig(
        vocab_size=V,
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=20,
        decoder_ffn_dim=20,
        max_position_embeddings=64,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        **ENDS,
    ),
    "t5": lambda: hf.T5Config(
        vocab_size=V,
        d_model=24,
        d_kv=8,
        d_ff=20,
        num_layers=2,
        num_heads=3,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    ),
}
KINDS = {"llama": hf.AutoModelForCausalLM, "mistral": hf.AutoModelForCausalLM, "bert": hf.AutoModelForMaskedLM}
NAMES = hub.register()


def built(family, implementation=None):
    """The same small model every time, with attention that differs from token to token."""
    torch.manual_seed(0)
    kind = KINDS.get(family, hf.AutoModelForSeq2SeqLM)
    model = kind.from_config(CONFIGS[family](), attn_implementation=implementation).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def padded(side):
    torch.manual_seed(7)
    ids = torch.randint(3, V, (3, 11))
    mask = torch.ones_like(ids)
    if side == "left":
        mask[1, :4] = 0
    if side == "right":
        mask[1, -4:] = 0
    return ids.masked_fill(mask == 0, 0), mask


def logits(model, ids, mask, **more):
    """Those of tokens, not of padding."""
    if not model.config.is_encoder_decoder:
        return model(input_ids=ids, attention_mask=mask, **more).logits[mask.bool()]
    return model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids[:, :7].clamp(min=3), **more).logits


# A mechanism of each kind; T5's self-attention has a bias, which only mechanisms with scores can add.
EQUAL = [
    *(("llama", name) for name in ("softmax", "argmax", "elu", "performer", "gaussian", "retention")),
    *(("mistral", name) for name in ("softmax", "elu")),
    *(("bert", name) for name in ("softmax", "performer", "fourier")),
    *(("bart", name) for name in ("softmax", "quadratic")),
    ("t5", "softmax"),
]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize(("family", "name"), EQUAL)
def test_a_named_mechanism_gives_the_logits_and_gradients_of_use(family, name, side):
    ids, mask = padded(side)
    found = []
    for model in (built(family, f"regard_{name}"), hub.use(built(family), name)):
        given = logits(model, ids, mask)
        torch.manual_seed(3)
        (given * torch.randn_like(given)).sum().backward()
        found.append((given.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (ours, our_slopes), (want, slopes) = found
    torch.testing.assert_close(ours, want, rtol=1e-6, atol=1e-6)
    assert set(our_slopes) == set(slopes)
    for parameter, slope in slopes.items():
        torch.testing.assert_close(our_slopes[parameter], slope, rtol=1e-5, atol=1e-5 * float(slope.abs().max()))


@pytest.mark.parametrize("family", ["llama", "mistral", "bart", "t5"])
def test_softmax_by_name_is_the_model_itself(family):
    ids, mask = padded("left")
    with torch.no_grad():
        want = logits(built(family, "eager"), ids, mask)
        torch.testing.assert_close(
            logits(built(family, "regard_softmax"), ids, mask), want, rtol=0, atol=1e-5 * float(want.abs().max())
        )


HOW = {"greedy": {}, "beams": {"num_beams": 3}, "static": {"cache_implementation": "static"}}


@pytest.mark.parametrize("how", sorted(HOW))
@pytest.mark.parametrize(("family", "name"), [("llama", "elu"), ("mistral", "performer"), ("bart", "elu")])
def test_generation_caches_keys_and_values_and_writes_what_a_state_writes(family, name, how):
    ids, mask = padded("left")
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **HOW[how]}
    model = built(family, f"regard_{name}")
    ours = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **settings)
    want = hub.use(built(family), name).generate(ids, attention_mask=mask, **settings)
    assert torch.equal(ours.sequences, want)
    cache = ours.past_key_values
    cache = getattr(cache, "self_attention_cache", cache)
    heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    assert {type(layer).__module__ for layer in cache.layers} == {"transformers.cache_utils"}
    assert {layer.keys.shape[1] for layer in cache.layers} == {heads}


def test_packed_documents_are_kept_apart():
    torch.manual_seed(1)
    documents = torch.randint(3, V, (1, 6)), torch.randint(3, V, (1, 5))
    positions = torch.cat([torch.arange(x.shape[1]) for x in documents])[None]
    model = built("llama", "regard_elu")
    with torch.no_grad():
        packed = model(torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(x).logits for x in documents], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_weights_and_the_lens_show_the_mechanism_and_not_softmax():
    ids, _ = padded("none")
    named, used = built("llama", "regard_elu"), hub.use(built("llama"), "elu")
    with torch.no_grad():
        ours, want = (model(ids, output_attentions=True, use_cache=False).attentions for model in (named, used))
        softmax = built("llama", "eager")(ids, output_attentions=True).attentions
    torch.testing.assert_close(ours[0], want[0], rtol=1e-6, atol=1e-6)
    assert float((ours[0] - softmax[0]).abs().max()) > 0.01
    recorded = [record(model, ids[:1]).weights(0, 0) for model in (named, used)]
    torch.testing.assert_close(recorded[0], recorded[1], rtol=1e-6, atol=1e-6)


def test_use_in_some_layers_leaves_the_named_mechanism_in_the_others():
    ids, mask = padded("left")
    mixed = hub.use(built("llama", "regard_elu"), "softmax", layers=[0])
    want = hub.use(hub.use(built("llama"), "softmax", layers=[0]), "elu", layers=[1])
    with torch.no_grad():
        torch.testing.assert_close(logits(mixed, ids, mask), logits(want, ids, mask), rtol=1e-6, atol=1e-6)
        hub.restore(mixed)
        assert torch.equal(logits(mixed, ids, mask), logits(built("llama", "regard_elu"), ids, mask))


def test_the_model_holds_nothing_of_regards_and_loads_by_name(tmp_path):
    ids, mask = padded("none")
    model = built("llama", "regard_performer")
    with torch.no_grad():
        want = logits(model, ids, mask)
    assert set(model.state_dict()) == set(built("llama").state_dict())
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="regard_performer")
    with torch.no_grad():
        assert torch.equal(logits(again, ids, mask), want)
        again.set_attn_implementation("sdpa")
        assert not torch.allclose(logits(again, ids, mask), want, atol=1e-3)


def test_options_go_with_a_name():
    ids, mask = padded("none")
    try:
        assert hub.register("performer", features=8) == ["regard_performer"]
        with torch.no_grad():
            ours = logits(built("llama", "regard_performer"), ids, mask)
            want = logits(hub.use(built("llama"), "performer", features=8), ids, mask)
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)
    finally:
        hub.register()
    with pytest.raises(OptionError, match="options go with a name"):
        hub.register(features=8)
    with pytest.raises(OptionError, match="feature"):
        hub.register("performer", feature=8)
    with pytest.raises(UnknownNameError, match="performer"):
        hub.register("perfomer")


def test_what_has_learned_parameters_is_refused_by_name():
    assert "regard_elu" in NAMES
    assert not {"regard_synthesizer", "regard_synthesizer-random", "regard_gated"} & set(NAMES)
    for name, reason in {
        "synthesizer": r"regard\.hub\.use\(model, \"synthesizer\"\)",
        "synthesizer-random": r"regard\.hub\.use",
        "gated": "decays or write strengths",
        "delta": "decays or write strengths",
    }.items():
        with pytest.raises(OptionError, match=f"{name} cannot be registered: .*{reason}"):
            hub.register(name)
        with pytest.raises(HubError, match=f"regard_{name}.*{reason}"):
            built("llama", f"regard_{name}")(padded("none")[0])


class Learned(regard.mechanisms()["linear"]):
    """A linear mechanism with a parameter, as a plugin may have it."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(()))


def test_a_plugin_with_a_parameter_is_refused_for_it():
    from regard.mechanisms.base import MECHANISMS

    MECHANISMS["learned"] = Learned
    try:
        with pytest.raises(OptionError, match="it has learned parameters, which have to belong to the model"):
            hub.register("learned")
        assert "regard_learned" not in hub.register()
    finally:
        del MECHANISMS["learned"]


def test_what_a_layer_asks_for_and_a_mechanism_has_not_is_an_error_with_its_place():
    ids, mask = padded("none")
    with pytest.raises(HubError, match=r"T5Attention of layer 0: elu cannot honour 'position_bias'.*regard_softmax"):
        logits(built("t5", "regard_elu"), ids, mask)
    config = hf.BloomConfig(vocab_size=V, hidden_size=16, n_layer=1, n_head=2)
    bloom = hf.AutoModelForCausalLM.from_config(config, attn_implementation="regard_elu")
    with pytest.raises(HubError, match="models of type bloom make their attention themselves"):
        bloom(ids)


@pytest.mark.slow
def test_a_named_model_can_be_compiled():
    ids, mask = padded("left")
    model = built("llama", "regard_elu")
    with torch.no_grad():
        want = logits(model, ids, mask)
        compiled = torch.compile(built("llama", "regard_elu"), backend="eager")
        got = compiled(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_laws_of_whole_models_ask_the_named_mechanism():
    verdicts = regard.check(built("llama", "regard_elu"))
    assert not verdicts.broken, str(verdicts)
