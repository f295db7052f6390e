"""The trace: what is written is what docs/trace-format.md says, and what is read is what was recorded."""

import json
import math
import struct
import tracemalloc
import zlib
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from regard.data.tokenizers import Bytes
from regard.errors import OptionError
from regard.lens import Trace, TraceError, decode, encode, load, record
from regard.lens.recording.overview import OVERVIEW_SIZE, add_overview
from regard.lens.trace.arrays import pack, pack_steps, unpack
from regard.lens.trace.format import VERSION, to_bytes
from regard.lens.trace.formulas import Dense, SoftmaxFormula
from regard.lens.trace.rules import MaskRules, infer_rules
from regard.lens.trace.tokens import Tokens, word_indices
from regard.lens.trace.trace import Card, RecordedAttention, Recording
from regard.mechanisms import mechanisms
from regard.models import GPT, Encoder

CARD = Card("made up", "GPT", "regard", 0, 1, 1, 1, 8, 8, 8, ("softmax",))


def stirred(model, size=0.4, seed=0):
    torch.manual_seed(seed)
    for p in model.parameters():
        p.data = torch.randn_like(p) * size
    return model.eval()


def nano(mechanism="softmax", **options):
    return stirred(GPT.preset("nano", vocabulary=50, length=64, mechanism=mechanism, options=options, layers=2))


def tokens(n, name="text"):
    return Tokens(name, "", [str(i) for i in range(n)])


def made_up(q, k, v, causal=True, scale=None):
    """A recording of one softmax attention with these vectors."""
    sequence = tokens(q.shape[1])
    formula = SoftmaxFormula(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    a = RecordedAttention(
        0, "decoder", "self", "a", "softmax", 0, 0, len(q), len(k), formula, MaskRules(causal), q=q, k=k, v=v
    )
    made = Recording("text", CARD, [sequence], [a])
    add_overview(made, a)
    return made


class Reader:
    """A reader written from the page alone, number by number."""

    def __init__(self, raw):
        assert raw[:8] == b"REGARD\x01\n"
        (n,) = struct.unpack("<Q", raw[8:16])
        self.header = json.loads(raw[16 : 16 + n].decode("utf-8"))
        self.blocks, at = [], 16 + n
        for length in self.header["blocks"]:
            self.blocks.append(raw[at : at + length])
            at += length
        assert at == len(raw)

    def array(self, x):
        assert x["at"] % 13 == 0
        data = zlib.decompress(self.blocks[x["block"]][x["at"] : x["at"] + x["bytes"]])
        n, columns = math.prod(x["shape"]), x["shape"][-1]
        if x["type"] == "step":
            whole = self.steps(data, n, columns)
        else:
            whole = self.planes(data, n, {"f32": "f", "f16": "e", "i32": "i"}[x["type"]])
        for length in reversed(x["shape"][1:]):
            whole = [whole[i : i + length] for i in range(0, len(whole), length)]
        return whole

    def planes(self, data, n, form):
        size = struct.calcsize("<" + form)
        return [struct.unpack("<" + form, bytes(data[b * n + i] for b in range(size)))[0] for i in range(n)]

    def steps(self, data, n, columns):
        low, rest = data[0], data[1:]
        step = [2 ** (c / 64) for c in self.planes(rest, columns, "h")]
        upper = self.planes(rest[2 * columns :], n, "h")
        noise = int.from_bytes(rest[2 * columns + 2 * n :], "little")
        bits = [(noise >> (low * i)) & ((1 << low) - 1) for i in range(n)]
        return [step[i % columns] * ((upper[i] - 128) * 2**low + bits[i]) for i in range(n)]

    def weight(self, a, h, i, j):
        """One weight of a causal attention by the formulas of the page."""
        arrays, how = a["arrays"], a["weights"]
        if a["mask"]["causal"] and j > i:
            return 0.0
        if how["kind"] == "onehot":
            return float(self.array(arrays["choice"])[h][i] == j)
        if how["kind"] == "dense":
            return self.array(arrays["tiles"][h][i // how["tile"]])[i % how["tile"]][j]

        def pick(name):
            return self.array(arrays[name][h * len(arrays[name]) // a["heads"]])

        q, k, n = pick("q")[i], pick("k")[j], self.array(arrays["n"])[h][i]
        dot = sum(x * y for x, y in zip(q, k, strict=True))
        if how["kind"] == "softmax":
            return math.exp(how["scale"] * dot - n)
        root = len(q) ** -0.25
        x, y = [c * root for c in q], [c * root for c in k]
        half = sum(c * c for c in x) / 2, sum(c * c for c in y) / 2
        w = self.array(arrays["w"]) if "w" in arrays else []
        wx, wy = ([sum(a * b for a, b in zip(f, z, strict=True)) for f in w] for z in (x, y))
        sign = self.array(arrays["sign"])[h][i] if "sign" in arrays else 1.0
        if how["map"] == "elu":
            phi = [[c + 1 if c > 0 else math.exp(c) for c in z] for z in (q, k)]
            return sum(a * b for a, b in zip(*phi, strict=True)) * math.exp(-n)
        if how["map"] == "quadratic":
            return (dot + 1) ** 2 * math.exp(-n)
        if how["map"] == "performer":
            terms = (math.exp(a + b - half[0] - half[1] - n) for a, b in zip(wx, wy, strict=True))
            return sum(terms) / len(w)
        if how["map"] == "fourier":
            near = sum(math.cos(a - b) for a, b in zip(wx, wy, strict=True)) / len(w)
            return sign * math.exp(half[0] + half[1] - n) * near
        return dot * math.exp(-n)


@pytest.mark.usefixtures("quantised")
@pytest.mark.parametrize("name", sorted(name for name, cls in mechanisms().items() if not cls.causal_only))
def test_a_reader_written_from_the_page_computes_the_weights(name, tmp_path):
    options = {"features": 16} if name in ("performer", "fourier") else {}
    trace = record(nano(name, **options), list(range(3, 14)))
    trace.save(tmp_path / "x.trace")
    reader = Reader((tmp_path / "x.trace").read_bytes())
    for a in reader.header["recordings"][0]["attentions"]:
        for h, i, j in ((0, 0, 0), (1, 7, 3), (2, 10, 9), (2, 4, 6)):
            want = float(trace.weights(a["layer"], h)[i, j])
            assert reader.weight(a, h, i, j) == pytest.approx(want, abs=1.2e-3 * max(1, abs(want)))


@pytest.mark.parametrize("short", [0, 512])
@pytest.mark.parametrize("name", sorted(name for name, cls in mechanisms().items() if not cls.causal_only))
def test_what_is_read_is_what_was_recorded(name, short, tmp_path, monkeypatch):
    """Without loss where texts are short; else no weight moves by more than a thousandth."""
    monkeypatch.setattr("regard.lens.trace.precision.SHORT", short)
    trace = record(nano(name), list(range(3, 40)), list(range(5, 20)))
    encoded = encode(trace)
    encoded.write(tmp_path / "x.trace")
    assert (tmp_path / "x.trace").read_bytes() == to_bytes(encoded) and len(to_bytes(encoded)) == encoded.size
    again = load(tmp_path / "x.trace")
    assert [r.name for r in again.recordings] == ["text", "text b"]
    for r, s in zip(trace.recordings, again.recordings, strict=True):
        assert s.sequences == r.sequences and s.model == r.model
        for a, b in zip(r.attentions, s.attentions, strict=True):
            for head in range(a.heads):
                exact, got = r.weights(a.layer, head), s.weights(b.layer, head)
                assert float((exact - got).abs().max()) <= max(1.1 * b.error[head], 1e-6) * max(
                    1, float(exact.abs().max())
                )
            lossless = short and a.q is not None
            dense = isinstance(a.formula, Dense)  # weights in float16, computed by the mechanism
            assert max(b.error) <= (0 if lossless and not dense else 1e-3)
            if lossless:
                assert all(torch.equal(getattr(a, x), getattr(b, x)) for x in "qkv")
            assert b.figures == a.figures
            assert torch.allclose(a.overview, b.overview, atol=1e-6, rtol=0.0045)


def test_grouped_heads_store_keys_and_values_once():
    model = stirred(
        GPT.preset("nano", vocabulary=50, length=64, layers=1, width=48, attention={"heads": 6, "groups": 2})
    )
    header = encode(record(model, list(range(20)))).header
    arrays = header["recordings"][0]["attentions"][0]["arrays"]
    assert [len(arrays[n]) for n in "qkv"] == [6, 2, 2]


@given(st.integers(0, 40), st.integers(1, 9), st.sampled_from(["f32", "f16", "i32", "i16", "u8", "bit", "step"]))
def test_arrays_are_read_back(T, K, kind):
    draw = torch.Generator().manual_seed(T * 100 + K)
    x = torch.randn(T, K, generator=draw)
    if kind == "bit":
        x = x > 0
    elif kind[0] in "iu":
        x = torch.randint(0, 200, (T, K), generator=draw)
    got = unpack(pack(x, kind), kind, (T, K))
    if kind == "step":
        size = x.square().mean(0).sqrt() if T else torch.ones(K)
        assert bool(((got - x).abs() <= size / 64 * 1.001 + 1e-6).all())
    else:
        assert torch.equal(got.to(x.dtype), x.half().to(x.dtype) if kind == "f16" else x)


def test_steps_are_kept_exactly():
    for most in (3, 100, 3000, 1 << 22):  # without low bits, and with many
        x = torch.randint(-most, most, (50, 4)).float()
        x[3, 1] = 5 * most  # one that is far from all others
        step = torch.tensor([0.5, 0.25, 2.0, 1.0])
        assert torch.equal(
            unpack(pack_steps(x.clamp(max=1 << 22) * step, step), "step", (50, 4)), x.clamp(max=1 << 22) * step
        )


@pytest.mark.usefixtures("quantised")
def test_sharp_heads_are_stored_more_finely_and_none_moves_by_more_than_a_thousandth():
    torch.manual_seed(0)
    for size in (0.3, 1.0, 3.0, 8.0):
        q, k, v = (torch.randn(3, 150, 16) * s for s in (size, size, 1.0))
        trace = Trace([made_up(q, k, v)])
        encoded = encode(trace)
        error = encoded.header["recordings"][0]["attentions"][0]["error"]
        again = decode(to_bytes(encoded))
        worst = max(float((trace.weights(0, h) - again.weights(0, h)).abs().max()) for h in range(3))
        assert worst <= 1e-3 + 5e-6 and abs(worst - max(error)) < 5e-6
        moved = float((again.recordings[0].attentions[0].q - q).abs().max() / q.square().mean().sqrt())
        assert moved <= 1 / 16


def test_damaged_files_are_refused_and_nothing_else_happens(tmp_path):
    raw = to_bytes(encode(record(nano(), list(range(9)))))
    for cut in (0, 5, 12, 17, 200, len(raw) // 2, len(raw) - 1):
        with pytest.raises(TraceError):
            decode(raw[:cut])
    draw = torch.Generator().manual_seed(0)
    good = decode(raw).weights(0, 0)
    for place in torch.randint(16, len(raw), (150,), generator=draw).tolist():
        bent = raw[:place] + bytes([raw[place] ^ 0x15]) + raw[place + 1 :]
        try:
            got = decode(bent)
        except TraceError:
            continue
        assert torch.equal(got.weights(0, 0), good)  # a byte between arrays
    with pytest.raises(TraceError, match="cannot be read"):
        load(tmp_path / "nothing.trace")
    with pytest.raises(TraceError, match="no trace"):
        decode(b"PK\x03\x04 something else")


def test_a_newer_version_and_a_bomb_are_refused():
    encoded = encode(record(nano(), list(range(9))))
    newer = replace(encoded, header={**encoded.header, "version": VERSION + 1})
    with pytest.raises(TraceError, match=f"version {VERSION + 1}"):
        decode(to_bytes(newer))
    with pytest.raises(TraceError, match="expected 16"):
        unpack(zlib.compress(bytes(1 << 24)), "f32", (4,))


def test_a_small_block_of_steps_cannot_fill_the_memory():
    n = 1 << 18

    def block(low):
        return zlib.compress(bytes([low]) + bytes(2 + 2 * n - (-n * low // 8)))

    with pytest.raises(TraceError, match="255 raw bits"):
        unpack(block(255), "step", (n, 1))
    tracemalloc.start()
    try:
        assert not bool(unpack(block(24), "step", (n, 1)).sub(-128 * 2.0**24).any())
        assert tracemalloc.get_traced_memory()[1] <= 40 * n
    finally:
        tracemalloc.stop()


def read_letters(text):
    """Bytes that are written in letters, read as the page on the format says."""
    letters = [chr(c) for c in range(32, 127) if chr(c) not in '"&<\\']
    number = 0
    for n in range(0, len(text), 2):
        number |= (letters.index(text[n]) + 91 * letters.index(text[n + 1])) << (13 * (n // 2))
    return number.to_bytes(len(text) * 13 // 16, "little")


class _Scripts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.tags = {}, []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.here = dict(attrs).get("id")

    def handle_data(self, data):
        self.found[self.here] = self.found.get(self.here, "") + data


def test_elements_of_a_page_hold_the_trace_and_no_text_ends_them():
    model = stirred(GPT.preset("nano", vocabulary=256, length=64, layers=1))
    model.tokenizer = Bytes()
    evil = "</script><img onerror=alert(1)>&\u2028 <!--<script>"
    encoded = encode(record(model, evil))
    page = _Scripts()
    page.feed("".join(encoded.elements()))
    assert set(page.tags) == {"script"}
    assert not set(page.found["trace"]) & set("<>&\u2028\u2029")
    header = json.loads(page.found["trace"])
    assert header == json.loads(encoded.header_bytes) and header["recordings"][0]["sequences"][0]["text"] == evil
    for n, block in enumerate(encoded.blocks):
        assert read_letters(page.found[f"block-{n}"].rstrip("\n"))[: len(block)] == block
    array = header["recordings"][0]["attentions"][0]["arrays"]["q"][1]
    coded = page.found[f"block-{array['block']}"]
    cut = coded[array["at"] // 13 * 16 : math.ceil((array["at"] + array["bytes"]) / 13) * 16]
    assert (
        read_letters(cut)[: array["bytes"]]
        == encoded.blocks[array["block"]][array["at"] : array["at"] + array["bytes"]]
    )
    assert encoded.page_size == sum(len(x.encode()) for x in encoded.elements())


def test_overview_of_a_short_text_is_its_weights_and_of_a_long_one_their_mass():
    torch.manual_seed(1)
    for T in (11, 70):
        made = made_up(*(torch.randn(2, T, 8) for _ in range(3)))
        a = made.attentions[0]
        w = torch.stack([made.weights(0, h) for h in range(2)])
        r = min(T, OVERVIEW_SIZE)
        want = torch.zeros(2, r, r)
        for i in range(T):
            for j in range(T):
                want[:, i * r // T, j * r // T] += w[:, i, j]
        want /= torch.bincount(torch.arange(T) * r // T)[None, :, None]
        assert torch.allclose(a.overview, want, atol=1e-5)
        assert torch.allclose(a.overview.sum(-1), torch.ones(2, r), atol=1e-4)


def test_figures_are_means_over_queries():
    torch.manual_seed(2)
    made = made_up(*(torch.randn(2, 9, 8) * 2 for _ in range(3)))
    w = torch.stack([made.weights(0, h) for h in range(2)])
    i = torch.arange(9)
    figures = made.attentions[0].figures
    assert figures["first"] == pytest.approx(w[:, :, 0].mean(1).tolist(), abs=1e-5)
    assert figures["self"] == pytest.approx(w[:, i, i].mean(1).tolist(), abs=1e-5)
    assert figures["peak"] == pytest.approx(w.amax(-1).mean(1).tolist(), abs=1e-5)
    far = (i[:, None] - i[None]).abs()
    assert figures["distance"] == pytest.approx((w * far).sum(-1).mean(1).tolist(), abs=1e-5)
    entropy = -(w * w.clamp(min=1e-30).log()).sum(-1) / (i + 1).clamp(min=2).log()
    assert figures["entropy"] == pytest.approx(entropy.mean(1).tolist(), abs=1e-5)


@given(
    st.integers(2, 24),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 8)),
    st.lists(st.booleans(), min_size=24, max_size=24),
)
def test_rules_are_recognised_from_what_may_be_seen(T, causal, window, visible):
    seen = [int(x) for x in visible[:T]]
    seen[0] = 1
    sequence = Tokens("text", "", ["x"] * T, visible=seen)
    rules = MaskRules(causal, window)
    allowed = rules.allowed(sequence, sequence, torch.arange(T))
    found = infer_rules(allowed, sequence, sequence, cross=False)
    rows = sequence.not_padding.nonzero()[:, 0]
    assert torch.equal(found.allowed(sequence, sequence, rows), allowed[rows])
    assert found.hidden is None


def test_chunks_are_recognised_and_odd_masks_are_kept_bit_by_bit():
    sequence = tokens(12)
    rows = torch.arange(12)
    chunked = MaskRules(causal=True, chunk=5)
    assert infer_rules(chunked.allowed(sequence, sequence, rows), sequence, sequence, False) == chunked
    odd = torch.rand(12, 12, generator=torch.Generator().manual_seed(0)) > 0.5
    found = infer_rules(odd, sequence, sequence, False)
    assert torch.equal(found.allowed(sequence, sequence, rows), odd)


def test_every_hidden_cell_has_a_reason():
    sequence = Tokens("text", "", list("abcdef"), visible=[1, 1, 0, 1, 1, 1])
    recording = made_up(*(torch.randn(1, 6, 4) for _ in range(3)))
    recording.sequences = [sequence]
    recording.attentions[0].rules = MaskRules(causal=True, window=2)
    reasons = [[recording.reason(0, i, j) for j in range(6)] for i in (1, 5)]
    assert reasons[0] == [None, None, "padding", "later", "later", "later"]
    assert reasons[1] == ["window", "window", "padding", "window", None, None]


def test_words_are_made_of_tokens():
    text = "Don't un-do it, naïve 🐶!"
    starts = [0, 3, 4, 6, 8, 9, 12, 14, 16, 18, 22, 23]
    ends = [3, 4, 5, 8, 9, 11, 14, 15, 18, 21, 23, 24]
    assert word_indices(text, starts, ends) == [0, 0, 0, 1, 2, 3, 4, 5, 6, 6, 7, 8]
    assert word_indices("", [-1], [-1]) == [-1]


def test_asking_for_what_is_not_there_is_an_error():
    trace = record(nano(), list(range(9)))
    for ask in (lambda: trace.weights(7, 0), lambda: trace.weights(0, 5), lambda: trace.weights(0, 0, rows=[9])):
        with pytest.raises(OptionError, match=r"there (is|are)"):
            ask()
    with pytest.raises(OptionError, match="gradient=True"):
        trace.gradient(0, 0)
    with pytest.raises(TraceError, match="without recordings"):
        Trace([])


def test_traces_of_two_models_become_one():
    a, b = record(nano(), list(range(9))), record(nano("elu"), list(range(9)))
    joined = decode(to_bytes(encode(Trace.joined(a, b))))
    assert [r.model.mechanisms for r in joined.recordings] == [("softmax",), ("elu",)]
    assert joined.weights(0, 0, recording=1).shape == (9, 9)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("mechanism", ["softmax", "elu"])  # others form it themselves
def test_no_matrix_over_all_tokens_is_ever_held(mechanism):
    T, H = 800, 8
    model = stirred(
        GPT.preset("nano", vocabulary=50, length=T, layers=1, width=32, attention={"heads": H}, mechanism=mechanism),
        0.1,
    )
    with _Largest() as mode:
        record(model, torch.randint(0, 50, (T,)))
    assert mode.largest < T * T * H


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "T", "times", "limit"), [(12, 2048, 12, 140e6), (1, 16384, 1, 10e6)])
def test_traces_are_small_enough(heads, T, times, limit):
    torch.manual_seed(0)
    q, k, v = (torch.randn(heads, T, 64) * 1.3 for _ in range(3))
    assert times * encode(Trace([made_up(q, k, v)])).page_size <= limit


def test_heads_from_even_to_sharp_take_little_room():
    """Twelve layers of them have to be a twentieth of the 106.7 MB that bertviz's model view takes."""
    torch.manual_seed(0)
    spread = torch.linspace(math.log(0.5), math.log(6), 12).exp().sqrt()[:, None, None]
    q, k, v = (torch.randn(12, 128, 64) * s for s in (spread, spread, 1.0))
    made = made_up(q, k, v, causal=False)
    made.attentions *= 12
    encoded = encode(Trace([made]))
    assert encoded.page_size <= 106.7e6 / 20 - 150e3  # less the script and the style
    assert max(encoded.header["recordings"][0]["attentions"][0]["error"]) <= 1e-3


@pytest.mark.usefixtures("quantised")
def test_a_share_that_a_sink_takes_stays_taken():
    """Rows that sum to less than one, as those of models with sinks, do so still when they are stored."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, 16) * s for s in (2.0, 2.0, 1.0))
    made = made_up(q, k, v)
    made.attentions[0].n = torch.logaddexp(made.attentions[0].n, torch.tensor([3.0, 8.0])[:, None])
    made.attentions[0].n[0, 7] = -torch.inf  # a row that sees nothing
    again = decode(to_bytes(encode(Trace([made])))).recordings[0]
    for head in range(2):
        exact, got = made.weights(0, head), again.weights(0, head)
        assert float((exact - got).abs().max()) <= 1e-3 + 1e-6
        assert torch.allclose(exact.sum(1), got.sum(1), atol=1e-5) and float(exact.sum(1).mean()) < 0.97
    assert not again.weights(0, 0, [7]).any()


def test_values_that_are_not_numbers_are_kept():
    """A key that is hidden from all may hold anything."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 8) for _ in range(3))
    v[0, 8] = torch.nan
    again = decode(to_bytes(encode(Trace([made_up(q, k, v)])))).recordings[0].attentions[0]
    assert again.v[0, 8].isnan().all() and torch.equal(again.v[0, :8], v[0, :8])


def test_an_encoder_may_look_both_ways():
    model = stirred(Encoder.preset("nano", vocabulary=50))
    trace = record(model, list(range(12)))
    assert (
        trace.recordings[0].attentions[0].rules == MaskRules() and trace.recordings[0].attentions[0].side == "encoder"
    )
    assert float(trace.weights(0, 0)[0, 5]) > 0


def test_half_a_surrogate_pair_in_a_token_is_written_as_a_question_mark():
    made = made_up(*(torch.randn(1, 2, 8) for _ in range(3)))
    made.sequences[0].tokens[1] = "a\ud83d"
    again = decode(to_bytes(encode(Trace([made]))))
    assert again.recordings[0].sequences[0].tokens[1] == "a?"


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_an_entry_is_allowed_where_no_reason_hides_it(causal, chunk, window):
    visible = [0, 0, 1, 1, 1, 0, 1, 1, 1]
    tokens = Tokens("text", "", [f"t{n}" for n in range(9)], visible=visible)
    hidden = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.2
    for more in (None, hidden):
        rules = MaskRules(causal, window, chunk, more)
        for rows in (torch.arange(9), torch.tensor([7, 2])):
            wanted = rules.reasons(tokens, tokens, rows) == 0
            assert torch.equal(rules.allowed(tokens, tokens, rows), wanted)


def test_chunks_are_the_reached_chunks_and_zeros(monkeypatch):
    monkeypatch.setattr("regard.lens.trace.trace.MAX_ENTRIES", 2 * 2 * 9)  # two rows a chunk
    draw = torch.Generator().manual_seed(0)
    made = made_up(*(torch.randn(2, 9, 4, generator=draw) for _ in range(3)))
    attended = made.attentions[0]
    S = len(made.sequences[attended.keys])
    short = list(made.reached_chunks(attended))
    assert [part.shape[2] for _, part in short] == [2, 4, 6, 8, 9]
    for (rows, whole), (same, part) in zip(made.chunks(attended), short, strict=True):
        assert torch.equal(rows, same) and whole.shape[2] == S
        assert torch.equal(whole[..., : part.shape[2]], part) and not whole[..., part.shape[2] :].any()
