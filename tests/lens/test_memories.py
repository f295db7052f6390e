"""Gated and delta layers, of regard and of transformers: their weights and memories are what they compute."""

import inspect
import re
import warnings
from functools import wraps
from importlib import import_module

import pytest
import torch
from memory_models import LAYER, mamba, memory_gpt, qwen
from typer.testing import CliRunner

from regard.cli.app import app
from regard.errors import OptionError
from regard.generate import Settings
from regard.hub import recording_attention
from regard.hub.opening import open_model
from regard.lens import Trace, attention_maps, encode, load, record
from regard.lens.heads.ablation import without_heads
from regard.lens.heads.examine import examine
from regard.lens.heads.scores import TextSums, measure
from regard.lens.models import RecordableModel
from regard.lens.pages.live import generate_steps
from regard.lens.recording.memories import EXACT
from regard.lens.recording.regard_models import regard_card
from regard.lens.trace.arrays import TraceError
from regard.lens.trace.format import decode, to_bytes
from regard.lens.trace.formulas import RecurrenceFormula
from regard.lens.trace.memory import RecordedMemory
from regard.mechanisms import mechanism
from regard.shapes import Mask, Size

MECHANISMS = {
    "retention": {},
    "gated": {},
    "delta": {},
    "gated-delta": {},
    "gated by channel": {"channels": True},
    "gated-delta by channel": {"channels": True},
    "gated-delta to two": {"range": 2.0},
}


def worst(attended):
    return max(attended.missed["output"])


@pytest.mark.parametrize("key_heads", [None, 2])
@pytest.mark.parametrize("name", MECHANISMS)
def test_weights_of_every_mechanism_are_exact(name, key_heads):
    attention = {**LAYER, "key_heads": key_heads}
    model = memory_gpt(name.partition(" ")[0], MECHANISMS[name], attention=attention)
    ids = torch.randint(0, 256, (29,)).tolist()
    trace = record(model, ids)
    reference = attention_maps(model.double(), torch.tensor([ids]))
    for layer, maps in enumerate(reference):
        attended = trace.recordings[0].attentions[layer]
        assert attended.signed and attended.formula.kind == "recurrence" and worst(attended) < EXACT / 10
        for head in range(4):
            weights = trace.weights(layer, head).double()
            assert (weights - maps[0, head]).norm() < 2e-6 * maps[0, head].norm()
            assert trace.weights(layer, head, rows=[28, 3]).equal(trace.weights(layer, head)[[28, 3]])
    assert float(weights.min()) < 0


def test_layers_of_a_pattern_and_steps_of_generating_make_one_matrix():
    model = memory_gpt(("gated-delta", "softmax"), layers=4, attention=LAYER | {"groups": 2})
    trace = record(model, list(b"The dog ran."), generate=6)
    recording = trace.recordings[0]
    assert [a.mechanism for a in recording.attentions] == ["gated-delta", "softmax"] * 2
    assert recording.model.signed and not recording.attentions[1].signed
    whole = record(model, recording.sequences[0].ids)
    for layer in (0, 2):
        assert worst(recording.attentions[layer]) < EXACT and recording.attentions[layer].groups == 2
        assert torch.allclose(trace.weights(layer, 3), whole.weights(layer, 3), atol=1e-6)


# Models of transformers

MADE = {"qwen3_next": qwen, "mamba2": mamba}
SCANS = {"qwen3_next": ("torch_chunk_gated_delta_rule", "value"), "mamba2": ("mamba2_chunk_scan", "hidden_states")}


def scanned(model, family, ids, monkeypatch):
    """The weights [T,H,T] of each layer as transformers' own code has them: what it makes of one-hot values."""
    file = import_module(f"transformers.models.{family}.modeling_{family}")
    name, values = SCANS[family]
    function, found = getattr(file, name), []

    def asked(*args, **given):
        named = inspect.signature(function).bind(*args, **given).arguments
        named |= named.pop("kwargs", {})
        T, H = named[values].shape[1:3]
        out = function(**{**named, values: torch.eye(T)[None, :, None].expand(1, T, H, T)})
        found.append((out[0] if isinstance(out, tuple) else out)[0])
        return function(*args, **given)

    monkeypatch.setattr(file, name, asked)
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("family", MADE)
def test_weights_of_transformers_layers_are_what_its_own_code_makes_of_one_hot_values(family, monkeypatch):
    model, ids = MADE[family](), list(range(2, 31))
    expected = scanned(model, family, ids, monkeypatch)
    trace = record(model, ids)
    layers = [a for a in trace.recordings[0].attentions if isinstance(a.formula, RecurrenceFormula)]
    assert len(layers) == len(expected) == 2
    for layer, weights in zip(layers, expected, strict=True):
        assert worst(layer) < EXACT / 10
        for head in range(layer.heads):
            got = trace.weights(layer.layer, head)
            assert (got - weights[:, head]).norm() < 3e-6 * weights[:, head].norm()
    assert float(got.min()) < 0


@pytest.mark.parametrize("family", ["kimi_linear", "granitemoehybrid", "bamba"])
def test_kin_of_these_families_are_exact_too(family):
    """Kimi Linear has a decay a channel; the scan of Granite 4 and Bamba is Mamba-2's."""
    pytest.importorskip("transformers")
    model = open_model(f"random:{family}@tiny").model
    trace = record(model, list(range(2, 31)))
    layers = [a for a in trace.recordings[0].attentions if isinstance(a.formula, RecurrenceFormula)]
    kinds = list(model.config.layer_types)
    assert len(layers) == kinds.count("linear_attention") == len(kinds) - 1
    assert all(worst(layer) < EXACT / 10 for layer in layers)
    channels = layers[0].k.shape[-1] if layers[0].formula.erases else 1
    assert all(layer.a.shape[-1] == channels for layer in layers)
    steps = record(model, list(range(2, 14)), generate={"max_new_tokens": 4, "min_new_tokens": 4})
    whole = record(model, steps.recordings[0].sequences[0].ids)
    assert torch.allclose(steps.weights(0, 1), whole.weights(0, 1), atol=2e-5)


@pytest.mark.parametrize("family", MADE)
def test_steps_of_generating_with_transformers_make_one_matrix(family):
    model = MADE[family]()
    trace = record(model, list(range(2, 14)), generate={"max_new_tokens": 5, "min_new_tokens": 5})
    whole = record(model, trace.recordings[0].sequences[0].ids)
    assert len(trace.tokens) == 17 and len(whole.recordings[0].attentions) == len(trace.recordings[0].attentions)
    for layer, attended in enumerate(trace.recordings[0].attentions):
        assert not attended.missed or worst(attended) < EXACT
        assert torch.allclose(trace.weights(layer, 1), whole.weights(layer, 1), atol=2e-5)


def test_a_gate_inside_the_function_of_a_step_is_no_part_of_the_weights():
    pytest.importorskip("transformers")
    model = open_model("random:falcon_h1@tiny").model
    trace = record(model, list(range(2, 14)), generate={"max_new_tokens": 4, "min_new_tokens": 4})
    ids = trace.recordings[0].sequences[0].ids
    layers = [a for a in trace.recordings[0].attentions if a.missed]
    assert layers and all(worst(a) < EXACT for a in layers) and len(ids) == 16
    with torch.no_grad():
        assert model(torch.tensor([ids[:-1]])).logits[0, -4:].argmax(-1).tolist() == ids[-4:]


@pytest.mark.parametrize("family", MADE)
def test_padding_on_the_left_changes_no_weight(family):
    model, ids = MADE[family](), torch.tensor([list(range(2, 14))])
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = torch.tensor([[0] * 3 + [1] * 12])
    plain, shifted = record(model, {"input_ids": ids}), record(model, {"input_ids": padded, "attention_mask": mask})
    for attended, other in zip(plain.recordings[0].attentions, shifted.recordings[0].attentions, strict=True):
        if attended.missed:
            assert worst(other) < EXACT
            one, two = (x.weights(attended.layer, 2) for x in (plain, shifted))
            assert torch.allclose(one, two[3:, 3:], atol=1e-5) and not two[:, :3].any()


@pytest.mark.parametrize("family", MADE)
def test_gradients_are_those_of_the_heads_outputs(family):
    model, ids = MADE[family](), list(range(2, 14))
    trace = record(model, ids, gradient=lambda out: out.logits.double().square().sum())

    class Nudge:
        def __init__(self, name, step):
            self.name, self.step = name, step

        def memory(self, call, out):
            out = out.clone()
            if call.name == self.name:
                out[0, 5, 1, 2] += self.step
            return out

        def begin(self, call): ...
        def rows(self, call, start, weights): ...
        def end(self, call, out):
            return out

    for attended in trace.recordings[0].attentions[:2]:
        losses = []
        for step in (-1e-3, 1e-3):
            with torch.no_grad(), recording_attention(model, Nudge(attended.name, step)):
                losses.append(model(torch.tensor([ids])).logits.double().square().sum())
        slope = float(losses[1] - losses[0]) / 2e-3
        assert float(attended.g[1, 5, 2]) == pytest.approx(slope, rel=0.02, abs=1e-3)


def test_a_layer_that_gives_something_else_is_not_passed_for_exact(monkeypatch):
    from transformers.models.mamba2 import modeling_mamba2 as file

    plain = file.mamba2_chunk_scan

    @wraps(plain)
    def louder(*args, **given):
        out, state = plain(*args, **given)
        return out * 1.5, state

    monkeypatch.setattr(file, "mamba2_chunk_scan", louder)
    with pytest.warns(UserWarning, match="misses what the layer gave by 3.3e-01"):
        trace = record(mamba(), list(range(2, 14)))
    assert trace.recordings[0].attentions[0].missed["output"][0] == pytest.approx(1 / 3)


def test_calls_of_other_models_are_not_recorded_and_functions_come_back():
    from transformers.models.mamba2 import modeling_mamba2 as file

    before, other, seen = file.mamba2_chunk_scan, mamba(), []

    class Seer:
        def memory(self, call, out):
            seen.append(call.name)
            return out

    model = mamba()
    with recording_attention(model, Seer()), torch.no_grad():
        other(torch.tensor([[1, 2, 3]]))
        assert not seen
        model(torch.tensor([[1, 2, 3]]))
    assert seen == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"] and file.mamba2_chunk_scan is before


def test_a_head_of_transformers_layers_can_be_removed():
    model, ids = mamba(), torch.tensor([list(range(2, 14))])
    with torch.no_grad():
        whole = model(ids).logits
        with without_heads(model, {"backbone.layers.0.mixer": [3]}):
            less = model(ids).logits
        assert not torch.equal(whole, less) and torch.equal(model(ids).logits, whole)


@pytest.mark.parametrize("model", ["hybrid", "shared keys"])
def test_steps_of_a_live_generation_have_the_rows_of_the_whole(model):
    if model == "hybrid":
        model = memory_gpt(("gated-delta", "softmax"))
    else:
        model = memory_gpt("retention", attention={**LAYER, "key_heads": 2})
    ids = list(b"The dog ran")
    recordable = RecordableModel(model, model.tokenizer, regard_card(model))
    steps = list(generate_steps(recordable, ids, Settings(max_tokens=3)))
    whole = record(model, ids + [step.token for step in steps])
    for n, step in enumerate(steps):
        last = len(ids) - 1 + n
        for layer, rows in enumerate(step.weights):
            for head in range(4):
                assert torch.allclose(rows[head], whole.weights(layer, head)[last, : last + 1], atol=1e-5)


# What a memory holds


def memory_of_keys(keys, values=None, *, a=0.0, b=1.0, erases=True):
    k = torch.tensor(keys, dtype=torch.double)[None]
    T = k.shape[1]
    v = torch.randn(1, T, 5, dtype=torch.double) if values is None else torch.tensor(values, dtype=torch.double)[None]
    decays, writes = torch.full((1, T, 1), a, dtype=torch.double), torch.full((1, T), b, dtype=torch.double)
    return RecordedMemory(k, k, v, decays, writes, torch.zeros(1, dtype=torch.double), 1.0, erases)


def test_a_key_is_answered_until_another_value_is_written_to_it():
    one, two = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    held = memory_of_keys([one, two, one], [[1.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    assert torch.allclose(held.answers()[0], torch.tensor([[1.0, 0, 0], [1, 1, 0], [0, 1, 1]]).double())
    assert torch.allclose(held.left()[0], torch.tensor([[1.0, 0, 0], [1, 1, 0], [0, 1, 1]]).double())
    ends = held.ends()
    assert ends.token.tolist() == [[2, -1, -1]] and ends.by_decay.tolist() == [[0, 0, 0]]
    # Without erasing the second value is added to the first.
    kept = memory_of_keys([one, two, one], [[1.0, 0.0], [0.0, 1.0], [1.0, 3.0]], erases=False)
    assert kept.answers()[0, 2, 0] == 2 and kept.left()[0, 2, 0] == 1 and kept.ends().token.tolist() == [[-1] * 3]


def test_what_fades_is_gone_by_decay_and_what_is_half_overwritten_by_both():
    one, two = [1.0, 0.0], [0.0, 1.0]
    ends = memory_of_keys([one, two, two, two], a=-0.3).ends()
    assert ends.token[0].tolist() == [3, 2, 3, -1]
    assert float(ends.by_decay[0, 0]) == pytest.approx(1)  # e^{−0.9} is less than a half
    lost = 1 - torch.tensor(-0.3).exp().item()
    assert float(memory_of_keys([one, one], a=-0.3).ends().by_decay[0, 0]) == pytest.approx(lost)


def test_answers_are_those_of_the_memory_of_the_mechanism():
    model = memory_gpt("gated-delta")
    trace = record(model, list(b"The dog ran to the red dog."))
    memory = trace.memory(1, 2)
    attended = trace.recordings[0].attentions[1]
    rule = model.stack.layers[1].attention.mechanism
    k, v, a, b = (x[None, 2:3].double() for x in (attended.k, attended.v, attended.a[..., 0], attended.b))
    for t in (0, 9, 26):
        keys, values, decays, writes = (x[:, :, : t + 1] for x in (k, v, a, b))
        size = Size(B=1, S=t + 1, H=1, G=1, K=k.shape[3], V=v.shape[3], dtype=k.dtype)
        _, state = rule.extend(keys, keys, values, rule.empty(size), a=decays, b=writes)
        read = ((keys @ state.memory) * values).sum(-1)
        wanted = read / (values.square().sum(-1) * keys.square().sum(-1))
        assert torch.allclose(memory.answers()[:, t, : t + 1], wanted[0], atol=1e-6)
    with pytest.raises(OptionError, match="layer 0 is softmax, which has no memory"):
        record(memory_gpt("softmax"), [1, 2, 3]).memory(0, 0)


# Files, labels


def test_the_command_says_how_exact_it_is_and_what_the_usual_picture_misses(tmp_path):
    trace = record(memory_gpt(("gated-delta", "gated")), list(b"The dog ran to the red dog."))
    usual, moved = (sum(trace.recordings[0].attentions[0].missed[name]) / 4 for name in ("usual", "moved"))
    trace.save(tmp_path / "a.trace")
    result = CliRunner().invoke(app, ["view", str(tmp_path / "a.trace"), "--out", str(tmp_path / "a.html")])
    assert re.search(
        r"gated: weights @ v misses the outputs of 4 heads by at most \de-0[78] of their length\n", result.output
    )
    assert f"without the erase term, by {usual:.0%} on average" in result.output and usual > 0.05
    assert f"another token for {moved:.0%} of the queries" in result.output


def test_the_usual_picture_is_that_of_a_memory_without_erasing():
    model = memory_gpt("gated-delta", layers=1)
    ids = list(b"The dog ran to the red dog.")
    attended = record(model, ids).recordings[0].attentions[0]
    q, k, v, a, b = (x[None].double() for x in (attended.q, attended.k, attended.v, attended.a[..., 0], attended.b))
    mask = Mask(causal=True)
    exact, usual = (mechanism(name).weights(q, k, mask, a=a, b=b) for name in ("gated-delta", "gated"))
    out = exact @ v
    missed = (usual @ v - out).norm(dim=(2, 3)) / out.norm(dim=(2, 3))
    assert torch.allclose(torch.tensor([attended.missed["usual"]]).double(), missed, atol=1e-6)
    moved = (usual.abs().argmax(-1) != exact.abs().argmax(-1)).double().mean(-1)
    assert torch.allclose(torch.tensor([attended.missed["moved"]]).double(), moved, atol=1e-6)


def test_a_trace_of_memories_comes_back_as_it_was(tmp_path):
    traces = [
        record(model, list(range(2, 20))) for model in (memory_gpt("gated-delta", {"channels": True}), mamba(), qwen())
    ]
    trace = Trace.joined(*traces)
    trace.save(tmp_path / "a.trace")
    again = load(tmp_path / "a.trace")
    assert encode(trace).header["version"] == 2 and encode(record(memory_gpt("softmax"), [1, 2])).header["version"] == 1
    for r, recording in enumerate(trace.recordings):
        for layer, attended in enumerate(recording.attentions):
            other = again.recordings[r].attentions[layer]
            assert (other.missed, other.formula.kind) == (attended.missed, attended.formula.kind)
            if attended.missed:
                for head in range(attended.heads):
                    assert again.weights(layer, head, recording=r).equal(trace.weights(layer, head, recording=r))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": torch.full((4, 9, 1), 0.5)}, "lets the memory grow"),
        ({"a": torch.zeros(4, 9, 3)}, "do not fit the keys"),
        ({"a": None}, "decays of a memory are missing"),
        ({"b": torch.zeros(4, 8)}, "b is"),
    ],
)
def test_a_memory_that_does_not_fit_is_refused(change, words):
    trace = record(memory_gpt("gated-delta"), list(range(9)))
    for name, x in change.items():
        setattr(trace.recordings[0].attentions[0], name, x)
    with pytest.raises(TraceError, match=words):
        decode(to_bytes(encode(trace)))


def test_labels_are_by_the_size_of_weights():
    """Keys of one direction and another sign: the weight on the token before is −5, the one on the token itself 1."""
    model = memory_gpt("gated", layers=1)
    recording = record(model, list(b"abcdefgh")).recordings[0]
    attended = recording.attentions[0]
    T = 8
    attended.q, attended.k = torch.zeros(4, T, 2 * T), torch.zeros(4, T, 2 * T)
    for t in range(T):
        attended.k[:, t, t] = 1
        attended.q[:, t, t] = 1
        if t:
            attended.q[:, t, t - 1] = -5
    attended.a, attended.b = torch.zeros(4, T, 1), torch.ones(4, T)
    sums = {"previous": TextSums(), "self": TextSums()}
    measure(recording, attended, {}, sums)
    assert float(sums["previous"].score[0][0]) == pytest.approx(7 * 5 / 6)


def test_labels_of_a_model_with_memories_are_measured():
    model = memory_gpt("gated-delta", layers=1)
    recordable = RecordableModel(model, model.tokenizer, regard_card(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = examine(recordable, ["The dog ran to the red dog.", "A cat sat on the mat, and then it slept."])[0]
    assert len(found["heads"]) == 4 and all(-1 <= head["effect"] <= 1 for head in found["heads"])
