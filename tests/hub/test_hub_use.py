"""Mechanisms of regard in Hugging Face models: the same numbers where they must be, causal, cached, never silent."""

import copy
import gc
import itertools
import json

import pytest
import safetensors.torch
import torch
import transformers as hf
from typer.testing import CliRunner

import regard
from regard import hub
from regard.checking.hub_models import HUB_LAWS
from regard.cli.app import app
from regard.errors import HubError, LengthError, OptionError, UnknownNameError
from regard.hub.attention import PREFIX, RECORDING, replacement_in
from regard.hub.cache import StateLayer
from regard.hub.masks import LazyMask, recognise_structure
from regard.lens import record
from regard.mechanisms import Softmax

V = 89
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    **{"vocab_size": V, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64},
    **ENDS,
}
BERT = {
    **{"vocab_size": V, "hidden_size": 30, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"max_position_embeddings": 66, "pad_token_id": 0},
}
BART = {
    **{"vocab_size": V, "d_model": 30, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3},
    **{"decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 64},
    **{"decoder_start_token_id": 1, "forced_eos_token_id": None},
    **ENDS,
}
MAKERS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=V, n_embd=30, n_layer=2, n_head=3, n_positions=64, **ENDS)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**LLAMA, sliding_window=7)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA, head_dim=10)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**LLAMA, head_dim=8, sliding_window=7, attn_implementation="eager")
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**BERT)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            **{"vocab_size": V, "d_model": 30, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 3},
            **{"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
        )
    ),
}
WRITERS = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "bart", "t5"]
SLOW = pytest.mark.slow
LINEAR = ["elu", "performer", "quadratic", "fourier"]
STATED = [*LINEAR, "synthesizer", "synthesizer-random"]


def product(*lists, fast):
    """All combinations; those that are not `fast` only in the slow tests."""
    return [pytest.param(*x, marks=[] if fast(*x) else SLOW) for x in itertools.product(*lists)]


def made(name):
    torch.manual_seed(0)
    model = MAKERS[name]()
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return model.eval()


def given(side="none", B=3, T=13, cut=4):
    torch.manual_seed(7)
    ids, mask = torch.randint(3, V, (B, T)), torch.ones(B, T, dtype=torch.long)
    if side == "left":
        mask[1, :cut] = 0
    if side == "right":
        mask[1, -cut:] = 0
    return ids.masked_fill(mask == 0, 0), mask


def passed(model, ids, mask, **more):
    if model.config.is_encoder_decoder:
        torch.manual_seed(9)
        more["decoder_input_ids"] = torch.randint(3, V, (len(ids), 9))
    return model(input_ids=ids, attention_mask=mask, **more)


def kept(model, mask):
    """The logits that anyone looks at: not those of padding."""
    return torch.ones(len(mask), 9).bool() if model.config.is_encoder_decoder else mask.bool()


def written(model, ids, mask, **how):
    torch.manual_seed(5)
    settings = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False} | how
    return model.generate(ids, attention_mask=mask, **settings)


def apart(a, b):
    return float((a - b).detach().abs().max())


def close(got, want, limit):
    assert got.shape == want.shape
    assert apart(got, want) <= limit * max(1.0, float(want.detach().abs().max()))


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_softmax_gives_the_same_logits_and_gradients(name, side):
    model, (ids, mask) = made(name), given(side)
    shown, found = kept(model, mask), []
    for used in (False, True):
        if used:
            hub.use(model, "softmax")
        model.zero_grad()
        logits = passed(model, ids, mask).logits[shown]
        torch.manual_seed(3)
        (logits * torch.randn_like(logits)).sum().backward()
        found.append((logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (want, slopes), (got, ours) = found
    close(got, want, 1e-6)
    assert set(ours) == set(slopes)
    for n, g in slopes.items():
        close(ours[n], g, 1e-5)


HOW = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "static beams": {"num_beams": 2, "cache_implementation": "static"},
}


@pytest.mark.parametrize(
    ("name", "how"), product(WRITERS, sorted(HOW), fast=lambda name, how: how == "static beams" or name == "gpt2")
)
def test_softmax_writes_the_same_tokens(name, how):
    model, (ids, mask) = made(name), given("left")
    want = written(model, ids, mask, **HOW[how])
    assert torch.equal(written(hub.use(model, "softmax"), ids, mask, **HOW[how]), want)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_softmax_is_regards_own_code(name, monkeypatch):
    model, (ids, mask) = made(name), given("left")
    hub.use(model, regard.kernels.plain(Softmax()))
    asked = []
    weights = Softmax.weights
    monkeypatch.setattr(Softmax, "weights", lambda self, *a, **b: asked.append(self) or weights(self, *a, **b))
    passed(model, ids, mask)
    assert {id(m) for m in asked} == {id(replacement_in(p.module).mechanism) for p in hub.places(model)}


@pytest.mark.parametrize("mechanism", [*STATED, "argmax"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_causal_model_stays_causal(name, mechanism):
    model, (ids, mask) = hub.use(made(name).double(), mechanism), given()
    before = passed(model, ids, mask, use_cache=False).logits
    changed = ids.clone()
    changed[:, 8:] = (ids[:, 8:] + 5) % V
    after = passed(model, changed, mask, use_cache=False).logits
    close(after[:, :8], before[:, :8], 1e-9)
    assert apart(after[:, 8:], before[:, 8:]) > 1e-3


def positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize(
    ("name", "mechanism", "side"),
    product(["gpt2", "llama"], [*STATED, "argmax", "softmax"], ["none", "left"], fast=lambda n, m, s: s == "left"),
)
def test_token_by_token_is_the_whole_pass(name, mechanism, side):
    model, (ids, mask) = hub.use(made(name).double(), mechanism), given(side)
    want = model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
    with torch.no_grad():
        for sizes in ([13], [6, 7], [5] + [1] * 8):
            cache, start, found = hf.DynamicCache(config=model.config), 0, []
            for n in sizes:
                stop = start + n
                more = {"attention_mask": mask[:, :stop], "position_ids": positions(mask)[:, start:stop]}
                found.append(model(ids[:, start:stop], past_key_values=cache, **more).logits)
                start = stop
            close(torch.cat(found, 1)[mask.bool()], want[mask.bool()], 1e-8)
            assert isinstance(cache.layers[0], StateLayer) == (mechanism in STATED)


@pytest.mark.parametrize(
    ("name", "mechanism", "how"),
    product(
        ["gpt2", "llama"],
        [*STATED, "argmax"],
        [k for k in HOW if k != "greedy"],
        fast=lambda n, m, h: n == "llama" and m in ("elu", "synthesizer") and h in ("beams", "static"),
    ),
)
def test_generating_from_a_state_is_generating_without_one(name, mechanism, how):
    model, (ids, mask) = hub.use(made(name).double(), mechanism), given("left")
    plain = {n: x for n, x in HOW[how].items() if n != "cache_implementation"}
    want = written(model, ids, mask, use_cache=False, **plain)
    assert torch.equal(written(model, ids, mask, **HOW[how]), want)


@pytest.mark.parametrize("mechanism", LINEAR)
def test_a_linear_state_is_of_constant_size(mechanism):
    model, (ids, mask) = hub.use(made("llama"), mechanism), given()
    cache, sizes = hf.DynamicCache(config=model.config), []
    with torch.no_grad():
        for n in range(1, 13):
            model(ids[:, n - 1 : n], attention_mask=mask[:, :n], past_key_values=cache)
            sizes.append([layer.bytes for layer in cache.layers])
    assert cache.get_seq_length() == 12
    assert all(size == sizes[0] and min(size) > 0 for size in sizes)
    mechanism = replacement_in(hub.places(model)[0].module).mechanism
    declared = mechanism.cost(regard.Size(B=3, T=1, S=12, H=6, G=2, K=8, V=8), "recurrent").state
    peak = cache.layers[0].state.peak
    assert sum(sizes[0]) == 2 * (declared + peak.nbytes + 3 * 8)  # and the numbers of tokens


@pytest.mark.parametrize(
    ("mechanism", "how"),
    product([*LINEAR, "argmax", "softmax"], ["greedy", "beams"], fast=lambda m, h: h == "beams" and m == "performer"),
)
def test_an_encoder_decoder_writes_its_source_once(mechanism, how):
    model, (ids, mask) = hub.use(made("bart").double(), mechanism), given("right")
    want = written(model, ids, mask, use_cache=False, **HOW[how])
    assert torch.equal(written(model, ids, mask, **HOW[how]), want)
    cache = hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache())
    passed(model, ids, mask, past_key_values=cache)
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    assert {isinstance(layer, StateLayer) for layer in layers} == {mechanism in LINEAR}


@pytest.mark.parametrize("mechanism", [*STATED, "argmax"])
def test_padding_of_an_encoder_does_not_matter(mechanism):
    model, (ids, mask) = hub.use(made("bert").double(), mechanism), given("right")
    want = model(ids[1:2, :9]).logits
    close(model(ids, attention_mask=mask).logits[1:2, :9], want, 1e-9)


def test_several_mechanisms_in_one_model_and_all_of_them_out_again():
    model, (ids, mask) = made("llama"), given("left")
    before, config = passed(model, ids, mask), model.config.to_dict()
    state = {n: x.clone() for n, x in model.state_dict().items()}
    implementation, modules = model.config._attn_implementation, [type(m) for m in model.modules()]
    assert hub.use(model, "performer", layers=[0], features=16) is model
    one = passed(model, ids, mask)
    hub.use(model, "synthesizer", layers=[1])
    two = passed(model, ids, mask)
    names = [replacement_in(p.module).mechanism.name for p in hub.places(model)]
    assert names == ["performer", "synthesizer"] and replacement_in(hub.places(model)[0].module).mechanism.count == 16
    for a, b in ((before, one), (one, two), (before, two)):
        assert apart(a.logits, b.logits) > 1e-2
    assert hub.restore(model) is model and [type(m) for m in model.modules()] == modules
    after = passed(model, ids, mask)
    assert torch.equal(after.logits, before.logits)
    assert model.config._attn_implementation == implementation and model.config.to_dict() == config
    assert set(model.state_dict()) == set(state)
    assert all(not m._forward_pre_hooks and not m._forward_hooks for p in hub.places(model) for m in [p.module])
    assert hub.restore(model) is model


def test_layers_that_were_not_chosen_are_as_they_were():
    model, (ids, mask) = made("gemma2"), given("left")
    hub.use(model, "softmax", layers=[1])
    assert replacement_in(hub.places(model)[0].module) is None
    heard = []
    hub.places(model)[0].module.register_forward_hook(lambda m, a, out: heard.append(out[0]))
    passed(model, ids, mask)
    hub.restore(model)
    passed(model, ids, mask)
    assert torch.equal(heard[0][mask.bool()], heard[1][mask.bool()])


def test_what_a_mechanism_learns_belongs_to_the_model(tmp_path):
    model, (ids, mask) = made("gpt2"), given()
    torch.manual_seed(2)
    hub.use(model, "synthesizer", layers=[0])
    hub.use(model, "performer", layers=[1], features=8)
    model.double()
    extra = {n: x for n, x in model.state_dict().items() if f".{'regard'}." in n}
    assert {n.rpartition(".")[2] for n in extra} == {"keys", "offset", "w"}
    assert all(x.dtype == torch.float64 for x in extra.values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    passed(model, ids, mask, labels=ids).loss.backward()
    optimizer.step()
    after = model.state_dict()
    learned = "transformer.h.0.attn.regard.mechanism.keys"
    assert not torch.equal(after[learned], before[learned])
    model.save_pretrained(tmp_path)
    other = hf.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert not any("regard" in n for n in other.state_dict())
    torch.manual_seed(8)
    hub.use(other, "synthesizer", layers=[0])
    hub.use(other, "performer", layers=[1], features=8, seed=5)
    safetensors.torch.load_model(other, tmp_path / "model.safetensors")
    close(passed(other, ids, mask).logits, passed(model, ids, mask).logits, 1e-12)


def test_a_copy_of_a_model_in_use_is_one_too():
    model, (ids, mask) = hub.use(made("gpt2"), "elu"), given()
    other = copy.deepcopy(model)
    want = passed(model, ids, mask).logits
    hub.restore(model)
    assert torch.equal(passed(other, ids, mask).logits, want)
    assert not torch.equal(passed(hub.restore(other), ids, mask).logits, want)


def registered():
    """The names that `use` and recording have in transformers' tables of attention functions and of mask functions."""
    from transformers.masking_utils import AttentionMaskInterface

    tables = (hf.AttentionInterface, AttentionMaskInterface)
    ours = (PREFIX, RECORDING)
    return [sorted(name for name in table._global_mapping if name.startswith(ours)) for table in tables]


class Silent:
    """A recorder that keeps nothing."""

    def begin(self, call):
        """Nothing."""

    def rows(self, call, start, weights):
        """Nothing."""

    def end(self, call, out):
        return out


class TestRegistered:
    """Entries in transformers' tables are there as long as a model needs them, and no longer."""

    @pytest.fixture(autouse=True)
    def _nothing_used(self):
        """Models of other tests are gone, so that what is registered is what the test uses."""
        gc.collect()
        hub.restore(made("gpt2"))
        assert registered() == [[], []]

    def test_restore_leaves_nothing(self):
        model, (ids, mask) = made("gpt2"), given()
        before = passed(model, ids, mask).logits
        hub.use(model, "elu", layers=[0])
        hub.use(model, "softmax", layers=[1])
        kept = replacement_in(hub.places(model)[0].module)
        assert registered() == [[PREFIX + "sdpa"]] * 2
        hub.restore(model)
        assert registered() == [[], []] and kept is not None
        assert torch.equal(passed(model, ids, mask).logits, before)

    def test_what_another_model_needs_stays(self):
        (ids, mask), want = given(), {}
        models = {name: hub.use(made("gpt2"), "elu", layers=[1]) for name in ("first", "second")}
        eager = made("gpt2")
        eager.set_attn_implementation("eager")
        models["eager"] = hub.use(eager, "elu")
        models["copy"] = copy.deepcopy(models["second"])
        for name, model in models.items():
            want[name] = passed(model, ids, mask).logits
        left = {"first": ["eager", "sdpa"], "eager": ["sdpa"], "second": ["sdpa"], "copy": []}
        for name, bases in left.items():
            hub.restore(models.pop(name))
            assert registered() == [[PREFIX + base for base in bases]] * 2
            for other, model in models.items():
                assert torch.equal(passed(model, ids, mask).logits, want[other])

    def test_recording_leaves_nothing_even_if_the_model_is_restored_meanwhile(self):
        model, (ids, mask) = hub.use(made("gpt2"), "elu"), given()
        with hub.recording_attention(model, Silent()):
            assert registered() == [sorted([RECORDING, PREFIX + "sdpa"])] * 2
            hub.restore(model)
        assert registered() == [[], []] and model.config._attn_implementation == "sdpa"
        passed(model, ids, mask)


def test_training_goes_through_a_state_as_through_a_whole_pass():
    model, (ids, mask) = hub.use(made("llama").double(), "performer", features=16), given()
    slopes = []
    for cached in (True, False):
        model.zero_grad()
        passed(model, ids, mask, labels=ids, use_cache=cached).loss.backward()
        slopes.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*slopes, strict=True):
        close(a, b, 1e-10)


def test_attention_dropout_acts_in_training_only():
    model, (ids, mask) = made("llama"), given()
    for name in ("softmax", "elu"):
        hub.use(model, name)
        still = passed(model, ids, mask).logits
        for p in hub.places(model):
            p.module.attention_dropout = 0.5
        assert torch.equal(passed(model, ids, mask).logits, still)
        model.train()
        assert apart(passed(model, ids, mask).logits, still) > 1e-2
        model.eval()
        assert torch.equal(passed(model, ids, mask).logits, still)


@pytest.mark.parametrize("mechanism", ["softmax", *STATED, "argmax"])
def test_output_attentions_are_the_weights(mechanism):
    model, (ids, mask) = hub.use(made("gpt2").double(), mechanism, layers=[1]), given("left")
    shapes, values = [], []
    module = hub.places(model)[1].module
    module.c_proj.register_forward_pre_hook(lambda m, x: shapes.append(x[0]))
    module.c_attn.register_forward_hook(lambda m, x, out: values.append(out))
    out = passed(model, ids, mask, output_attentions=True, use_cache=False)
    assert len(out.attentions) == 2
    weights = out.attentions[1]
    v = values[0].split(30, 2)[2].view(3, 13, 3, 10).transpose(1, 2)
    mixed = (weights @ v).transpose(1, 2).reshape(3, 13, 30)
    close(mixed[mask.bool()], shapes[0][mask.bool()], 1e-9)
    rows = weights.sum(-1).transpose(1, 2)[mask.bool()]
    close(rows, torch.ones_like(rows), 1e-9)
    if mechanism in STATED:
        with pytest.raises(HubError, match=f"{mechanism} cannot honour 'output_attentions'"):
            passed(model, ids, mask, output_attentions=True, use_cache=True)


@pytest.mark.parametrize("mechanism", ["elu", "argmax", "synthesizer"])
def test_the_lens_sees_the_mechanism_in_use(mechanism):
    model = hub.use(made("gpt2"), mechanism, layers=[1])
    ids = given()[0][0].tolist()
    trace = record(model, ids)
    want = passed(model, *given(), output_attentions=True, use_cache=False).attentions
    for layer in range(2):
        for head in range(3):
            close(trace.weights(layer, head), want[layer][0, head].detach(), 1e-3)
    hub_name = model.config._attn_implementation
    steps = record(model, ids, generate={"max_new_tokens": 4})
    assert steps.recordings[0].sequences[0].ids[:13] == ids and model.config._attn_implementation == hub_name


class TestLaws:
    """`regard check` on a Hugging Face model: the same laws as for regard's own, and two of its attention."""

    @pytest.mark.parametrize("name", ["llama", pytest.param("bart", marks=SLOW), pytest.param("gemma2", marks=SLOW)])
    def test_a_writer_keeps_them_all(self, name):
        verdicts = regard.check(made(name), draws=1)
        assert [v.law for v in verdicts] == list(HUB_LAWS)
        # Not every family has packed documents or windows, and these models are too short for a chunk of 64.
        unasked = {v.law for v in verdicts if v.status == "does not apply"}
        assert unasked == {"llama": {"window", "long"}, "bart": {"window", "packed", "long"}, "gemma2": set()}[name]
        assert all(v.status == "holds" for v in verdicts if v.law not in unasked), repr(verdicts)

    def test_an_encoder_has_nothing_ahead(self):
        found = {v.law: v.status for v in regard.check(made("roberta"), draws=1)}
        apart = {"looks-ahead", "cache", "prompts", "packed", "window", "long"}
        assert found == {law: "does not apply" if law in apart else "holds" for law in HUB_LAWS}

    def test_of_a_mechanism_in_use(self):
        model = hub.use(made("gpt2"), "performer", features=16)
        assert regard.check(model, draws=1).ok and replacement_in(hub.places(model)[0].module) is not None

    def test_a_model_that_looks_ahead_is_found_out(self):
        model = made("llama")
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda m, a, out: (out[0] + 0.01 * out[0].mean(1, True), out[1]))
        broken = {v.law: v for v in regard.check(model, only=["looks-ahead", "cache", "batch"], draws=1).broken}
        assert set(broken) == {"looks-ahead", "cache"}
        assert "HubSubject(model, seed=0, dtype=torch.float32, B=1, T=2)" in broken["looks-ahead"].reproducer

    def test_attention_that_is_not_what_it_says_is_found_out(self, monkeypatch):
        from transformers.models.gpt2 import modeling_gpt2

        own = modeling_gpt2.eager_attention_forward

        def wrong(*given, **more):
            out, weights = own(*given, **more)
            return 1.001 * out, 0.999 * weights

        monkeypatch.setattr(modeling_gpt2, "eager_attention_forward", wrong)
        broken = regard.check(made("gpt2"), only=["reference", "rows"], draws=1).broken
        assert [v.law for v in broken] == ["reference", "rows"] and "transformer.h." in broken[0].detail

    def test_what_cannot_be_asked(self):
        model = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=V, hidden_size=16, n_layer=1, n_head=2)).eval()
        found = {v.law: v for v in regard.check(model, only=["reference", "looks-ahead"], draws=1)}
        assert found["looks-ahead"].status == "holds"
        assert (
            found["reference"].status == "does not apply" and "makes its attention itself" in found["reference"].detail
        )

    def test_on_the_command_line(self, tmp_path):
        made("gpt2").save_pretrained(tmp_path / "tiny")
        result = CliRunner().invoke(app, ["check", str(tmp_path / "tiny"), "--draws", "1", "--json"])
        assert result.exit_code == 0, result.output
        found = {row["law"]: row["status"] for row in json.loads(result.output)}
        assert [law for law, status in found.items() if status != "holds"] == ["window", "long"] and len(found) == 10
        twin = CliRunner().invoke(app, ["check", f"random:{tmp_path / 'tiny'}", "--draws", "1", "--only", "batch"])
        assert twin.exit_code == 0 and "GPT2LMHeadModel" in twin.output
        for name, said in (("nobody/nothing", HubError), ("gpt2", UnknownNameError), ("performr", UnknownNameError)):
            assert isinstance(CliRunner().invoke(app, ["check", name]).exception, said)


class TestRefused:
    """What a mechanism cannot honour is refused by name, never dropped."""

    def test_position_bias(self):
        model, (ids, mask) = hub.use(made("t5"), "elu"), given()
        with pytest.raises(HubError, match=r"SelfAttention: elu cannot honour 'position_bias'"):
            passed(model, ids, mask)
        hub.restore(model)
        passed(hub.use(model, "elu", parts=["cross"]), ids, mask)  # whose bias is zeros

    def test_softcap(self):
        model, (ids, mask) = hub.use(made("gemma2"), "performer"), given(T=5)
        with pytest.raises(HubError, match="performer cannot honour 'softcap'"):
            passed(model, ids, mask)

    def test_sinks(self):
        config = hf.GptOssConfig(
            **LLAMA, head_dim=8, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2
        )
        torch.manual_seed(0)
        model = hf.GptOssForCausalLM(config).eval()
        for layer, sink in zip(model.model.layers, (1.5, 0.0), strict=True):  # a sink of zero takes a share, too
            layer.self_attn.sinks.data.fill_(sink)
        want = passed(model, *given()).logits
        assert want.isfinite().all()
        torch.testing.assert_close(passed(hub.use(model, "softmax"), *given()).logits, want, rtol=0, atol=1e-5)
        with pytest.raises(HubError, match="elu cannot honour 's_aux'"):
            passed(hub.use(model, "elu"), *given())

    @pytest.mark.parametrize("mechanism", STATED)
    def test_a_mask_that_is_no_rule(self, mechanism):
        model, (ids, _) = hub.use(made("llama"), mechanism), given()
        odd = torch.ones(13, 13).tril().bool()
        odd[9, 3] = False
        for mask in (odd, torch.zeros(13, 13).masked_fill(~odd, torch.finfo(torch.float32).min)):
            for cached in (True, False):
                with pytest.raises(HubError, match=f"{mechanism} cannot honour .*mask"):
                    model(ids, attention_mask=mask.expand(3, 1, 13, 13), use_cache=cached)

    def test_two_directions_in_a_causal_state(self):
        model, (ids, _) = hub.use(made("llama"), "elu"), given()
        with pytest.raises(HubError, match="its state is causal"):
            model(ids, attention_mask=torch.ones(3, 1, 13, 13).bool())

    def test_cross_attention_of_synthesizers(self):
        model = made("bart")
        with pytest.raises(OptionError, match=r"encoder_attn: synthesizer has no cross-attention.*parts="):
            hub.use(model, "synthesizer")
        assert (
            all(replacement_in(p.module) is None for p in hub.places(model))
            and model.config._attn_implementation == "sdpa"
        )
        ids, mask = given("right")
        assert passed(hub.use(model, "synthesizer", parts=["encoder", "decoder"]), ids, mask).logits.isfinite().all()

    def test_keywords_nobody_knows(self):
        model, (ids, mask) = hub.use(made("llama"), "softmax"), given()
        with pytest.raises(HubError, match=r"layers\.0\.self_attn: softmax cannot honour 'cu_seq_lens_q'"):
            model(ids, attention_mask=mask, cu_seq_lens_q=torch.tensor([0, 13]))
        with pytest.raises(HubError, match=r"cannot honour 'tea_time'.*does not know"):
            model(ids, attention_mask=mask, tea_time=4)

    def test_cropping_a_state(self):
        model, (ids, mask) = hub.use(made("gpt2"), "elu"), given()
        cache = hf.DynamicCache(config=model.config)
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.crop(0)
        with pytest.raises(HubError, match="a state of elu cannot be cropped"):
            cache.crop(-3)

    def test_a_cache_of_another_time(self):
        model, (ids, mask) = hub.use(made("gpt2"), "elu"), given()
        cache = hf.DynamicCache(config=model.config)
        model(ids, attention_mask=mask, past_key_values=cache)
        more = {"attention_mask": torch.ones(3, 14), "past_key_values": cache}
        with pytest.raises(HubError, match="holds a state of elu, not of performer"):
            hub.use(model, "performer")(ids[:, :1], **more)
        with pytest.raises(HubError, match="without that mechanism cannot read"):
            hub.restore(model)(ids[:, :1], **more)

    def test_more_tokens_than_a_synthesizer_has_positions(self):
        model, (ids, mask) = hub.use(made("llama"), "synthesizer", length=9), given()
        with pytest.raises(LengthError, match="built for length = 9"):
            passed(model, ids, mask)


class TestAsking:
    """`use` itself: what cannot be is said before anything changes."""

    @pytest.mark.parametrize("name", ["bloom", "falcon", "gptj"])
    def test_models_that_never_ask_the_interface(self, name):
        config = {
            "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=V, hidden_size=16, n_layer=1, n_head=2)),
            "falcon": lambda: hf.FalconForCausalLM(
                hf.FalconConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
            ),
            "gptj": lambda: hf.GPTJForCausalLM(
                hf.GPTJConfig(vocab_size=V, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, n_positions=8)
            ),
        }
        with pytest.raises(HubError, match="makes its attention itself and not through transformers' interface"):
            hub.use(config[name](), "softmax")

    def test_a_layer_that_does_not_call(self, monkeypatch):
        model, (ids, mask) = hub.use(made("gpt2"), "softmax"), given()
        module = hub.places(model)[1].module
        monkeypatch.setattr(module, "forward", lambda x, *a, **b: (x, None))
        with pytest.raises(HubError, match=r"h\.1\.attn: GPT2Attention did not call .* softmax was never asked"):
            passed(model, ids, mask)

    def test_names_options_layers_and_parts(self):
        model = made("gpt2")
        with pytest.raises(UnknownNameError, match=r"no mechanism is called 'performr'\. Did you mean 'performer'"):
            hub.use(model, "performr")
        with pytest.raises(OptionError, match="Its options: features"):
            hub.use(model, "performer", feature=3)
        with pytest.raises(OptionError, match="has no layer 2; expected 0 to 1"):
            hub.use(model, "elu", layers=[0, 2])
        with pytest.raises(OptionError, match="no attention 'cross'; it has decoder"):
            hub.use(model, "elu", parts=["cross"])
        with pytest.raises(OptionError, match="scale: options go with a name"):
            hub.use(model, Softmax(), scale=1.0)
        with pytest.raises(OptionError, match="expected a model of transformers"):
            hub.use(torch.nn.Linear(2, 2), "elu")
        with pytest.raises(OptionError, match="its length is not in the model's config; give length="):
            hub.use(made("t5"), "synthesizer", parts=["encoder"])
        assert not model.config._attn_implementation.startswith(PREFIX)

    def test_parts_and_layers_of_every_kind(self):
        kinds = {
            name: sorted({(p.part, p.layer) for p in hub.places(made(name))}) for name in ("gpt2", "bert", "bart", "t5")
        }
        both = [(part, n) for part in ("cross", "decoder", "encoder") for n in (0, 1)]
        assert kinds == {
            "gpt2": [("decoder", 0), ("decoder", 1)],
            "bert": [("encoder", 0), ("encoder", 1)],
            "bart": both,
            "t5": both,
        }

    def test_a_scale_of_ones_own_goes_before_the_models(self):
        model, (ids, mask) = made("gpt2"), given()
        flat = passed(hub.use(model, Softmax(scale=0.0)), ids, mask, output_attentions=True).attentions[0]
        want = torch.ones(13, 13).tril() / torch.arange(1, 14)[:, None]
        close(flat, want.expand_as(flat), 1e-6)


class TestMasks:
    """The answer of our mask function is the rule, and the matrix as soon as someone computes with it."""

    def asked(self, **more):
        from transformers.masking_utils import causal_mask_function

        plain = {"batch_size": 2, "q_length": 5, "kv_length": 5, "q_offset": 0, "kv_offset": 0}
        return plain | {"mask_function": causal_mask_function, "attention_mask": None} | more

    @pytest.mark.parametrize("static", [False, True])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("padding", ["none", "left", "right"])
    def test_the_rule_is_the_matrix(self, padding, causal, static):
        from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

        from regard.hub.masks import lazy_mask

        shown = torch.ones(2, 9, dtype=torch.bool)
        if padding != "none":
            shown[1, slice(0, 2) if padding == "left" else slice(7, 9)] = False
        asked = self.asked(
            q_length=4, q_offset=5, kv_length=12 if static else 9, attention_mask=None if padding == "none" else shown
        )
        if not causal:
            asked["mask_function"] = bidirectional_mask_function
        seen = lazy_mask(**asked)
        want = sdpa_mask(**asked)
        assert isinstance(seen, LazyMask) and seen.shape == want.shape and seen.dtype == torch.bool
        rule = seen.structured
        T, S = want.shape[2:]
        allowed = rule.allowed(T, S, want.device)
        assert torch.equal(torch.ones_like(want) if allowed is None else allowed.expand_as(want), want)
        assert type(seen[:, :, 1:]) is torch.Tensor and torch.equal(seen[:, :, 1:], want[:, :, 1:])
        assert torch.equal(torch.where(seen, 1, 0), want.int())

    def test_no_matrix_is_made_for_a_rule(self):
        from regard.hub.masks import lazy_mask

        seen = lazy_mask(**self.asked(batch_size=1, q_length=1 << 20, kv_length=1 << 20))
        assert seen.shape == (1, 1, 1 << 20, 1 << 20) and not seen.computed and seen.structured.visible is None

    def test_no_rule_is_seen_where_there_is_none(self):
        odd = torch.ones(1, 1, 6, 6).tril().triu(-2).bool()
        odd[0, 0, 5, 4] = False
        assert recognise_structure(odd) is None
        assert recognise_structure(torch.ones(1, 2, 6, 6).bool()) is None  # one mask a head
        assert recognise_structure(torch.ones(1, 1, 6, 6).tril().bool()).causal
        assert recognise_structure(torch.full((1, 1, 6, 6), 0.5)) is None  # a bias
        assert not recognise_structure(torch.ones(1, 1, 3, 6).bool()).causal

    def test_padding_is_not_ignored(self):
        """A function without a mask function of the same name would be handed None."""
        model, (ids, mask) = hub.use(made("bert"), "elu"), given("right")
        full = model(ids).logits
        assert apart(model(ids, attention_mask=mask).logits[1, :9], full[1, :9]) > 1e-3

    @pytest.mark.parametrize("mechanism", ["softmax", "argmax", "elu"])
    def test_ready_made_masks_of_every_kind_say_the_same(self, mechanism):
        model, (ids, mask) = hub.use(made("llama").double(), mechanism), given("left")
        want = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        seen = torch.ones(13, 13).tril().bool() & mask.bool()[:, None, None, :]
        small = torch.zeros(3, 1, 13, 13).double().masked_fill(~seen, torch.finfo(torch.float64).min)
        for ready in (seen, small, small.masked_fill(~seen, float("-inf"))):
            close(model(ids, attention_mask=ready, use_cache=False).logits[mask.bool()], want, 1e-9)
