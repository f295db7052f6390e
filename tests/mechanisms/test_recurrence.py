"""Gated and delta attention against the recurrence written out, others' code, and at the edges of its inputs."""

import math

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import Mask, Size, cost
from regard.cost import crossing
from regard.errors import GateError, MaskError, OptionError, ShapeError, UnknownNameError
from regard.kernels import fast, plain
from regard.laws.case import difference
from regard.mechanisms import Memory, fork, mechanism, mix

KINDS = [
    ("retention", {}),
    ("gated", {}),
    ("gated", {"channels": True}),
    ("delta", {}),
    ("delta", {"range": 2}),
    ("gated-delta", {}),
    ("gated-delta", {"channels": True, "range": 2}),
]
BY_HEAD = [(name, options) for name, options in KINDS if not options.get("channels")]
B, H, G, T, K, V = 2, 6, 3, 131, 5, 4


def draw(m, T=T, H=H, J=G, G=G, K=K, dtype=torch.float64, grad=False):
    """Returns q [B,H,T,K], k [B,J,T,K] of length 1, v [B,G,T,V], and the decays and write strengths that m needs."""
    torch.manual_seed(0)
    q = torch.randn(B, H, T, K, dtype=dtype)
    k = functional.normalize(torch.randn(B, J, T, K, dtype=dtype), dim=-1)
    v = torch.randn(B, G, T, V, dtype=dtype)
    gates = {}
    if "a" in m.needs:
        shape = (B, G, T, K) if m.channels else (B, G, T)
        gates["a"] = -functional.softplus(3 * torch.randn(shape, dtype=dtype))
    if "b" in m.needs:
        gates["b"] = m.range * torch.rand(B, G, T, dtype=dtype)
    for x in (q, k, v, *gates.values()):
        x.requires_grad_(grad)
    return q, k, v, gates


def recurrence(m, q, k, v, a=None, b=None, visible=None, memory=None):
    """The three lines, token by token and head by head."""
    B, G, T, V = v.shape
    H, K = max(q.shape[1], G), q.shape[3]
    S = torch.zeros(B, G, K, V, dtype=v.dtype) if memory is None else memory.clone()
    if a is None:
        a = torch.zeros(B, G, T, dtype=v.dtype)
        if m.name == "retention":
            a = a + torch.tensor([math.log(1 - 2 ** (-5 - g)) for g in range(G)], dtype=v.dtype)[None, :, None]
    out = torch.zeros(B, H, T, V, dtype=v.dtype)
    for n in range(B):
        for t in range(T):
            shown = visible is None or bool(visible[n, t])
            for h in range(H):
                g = h // (H // G)
                key = k[n, g * k.shape[1] // G, t]
                if shown and h % (H // G) == 0:
                    S[n, g] = a[n, g, t].exp().reshape(-1, 1) * S[n, g]
                    value = v[n, g, t] - (key @ S[n, g] if m.erases else 0)
                    S[n, g] += (1 if b is None else b[n, g, t]) * torch.outer(key, value)
                out[n, h, t] = q[n, h * q.shape[1] // H, t] @ S[n, g] / math.sqrt(K)
    return out, S


def label(kind):
    return kind[0] + "".join(f"-{name}" for name in kind[1])


kinds = pytest.mark.parametrize("kind", KINDS, ids=label)


@kinds
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("how", [plain, fast])
def test_all_faces_are_the_recurrence_written_out(kind, padded, how):
    m = how(mechanism(kind[0], **kind[1]))
    q, k, v, gates = draw(m)
    visible = None
    if padded:
        visible = torch.rand(B, T) > 0.3
    mask = Mask(causal=True, visible=visible)
    want, memory = recurrence(m, q, k, v, visible=visible, **gates)
    assert difference(m(q, k, v, mask, **gates), want) < 1e-13
    assert difference(mix(m.weights(q, k, mask, **gates), mask.zero_hidden(v)), want) < 1e-13
    state = m.empty(Size.of(q, k, v))
    parts = []
    for piece in torch.arange(T).split([1, 1, 66, 1, 62]):
        some = slice(int(piece[0]), int(piece[-1]) + 1)
        new = {name: x[:, :, some] for name, x in gates.items()}
        seen = None if visible is None else visible[:, some]
        part, state = m.extend(q[:, :, some], k[:, :, some], v[:, :, some], fork(state), seen, **new)
        parts.append(part)
    assert difference(torch.cat(parts, 2), want) < 1e-13 and difference(state.memory, memory) < 1e-13
    assert state.tokens.tolist() == ([T] * B if visible is None else visible.sum(1).tolist())


@kinds
@pytest.mark.parametrize(("H", "J", "G"), [(2, 2, 6), (6, 1, 3), (3, 1, 3), (1, 2, 4)])
def test_keys_and_queries_may_have_fewer_heads_than_values_or_queries_more(kind, H, J, G):
    m = mechanism(kind[0], **kind[1])
    q, k, v, gates = draw(m, 9, H, J, G)
    want, _ = recurrence(m, q, k, v, **gates)
    assert want.shape == (B, max(H, G), 9, V)
    options = {name: x for name, x in kind[1].items() if name != "channels"}  # which the shape of a says
    assert difference(regard.attend(q, k, v, kind[0], causal=True, **gates, **options), want) < 1e-13
    out, _ = m.extend(q, k, v, m.empty(Size(B=B, H=H, G=G, K=K, V=V, dtype=torch.float64)), **gates)
    assert difference(out, want) < 1e-13
    if gates:  # they say how many value heads there are
        assert difference(mix(m.weights(q, k, Mask(causal=True), **gates), v), want) < 1e-13


@kinds
@pytest.mark.parametrize("how", [plain, fast])
def test_no_tokens_give_an_empty_output_and_leave_the_state(kind, how):
    m = how(mechanism(kind[0], **kind[1]))
    q, k, v, gates = draw(m, 0)
    assert m(q, k, v, Mask(causal=True), **gates).shape == (B, H, 0, V)
    assert m.weights(q, k, Mask(causal=True), **gates).shape == (B, H, 0, 0)
    out, state = m.extend(q, k, v, m.empty(Size.of(q, k, v)), **gates)
    assert out.shape == (B, H, 0, V) and state.memory.shape == (B, G, K, V) and not state.tokens.any()


@kinds
def test_values_of_one_hot_rows_give_back_the_weights(kind):
    m = mechanism(kind[0], **kind[1])
    q, k, _, gates = draw(m, 67)
    read = regard.weights_of(lambda q, k, v: m(q, k, v, Mask(causal=True), **gates), q, k)
    weights = m.weights(q, k, Mask(causal=True), **gates)
    assert difference(read, weights) < 1e-13
    assert bool((weights < 0).any()) and not weights.triu(1).any()


@kinds
@pytest.mark.parametrize("how", [plain, fast])
def test_a_hidden_token_leaves_the_state_bit_for_bit(kind, how):
    m = how(mechanism(kind[0], **kind[1]))
    for dtype in (torch.float32, torch.float64):
        q, k, v, gates = draw(m, 70, dtype=dtype)
        _, state = m.extend(q, k, v, m.empty(Size.of(q, k, v)), **gates)
        for n in (1, 70):
            spoilt = [x[:, :, :n] * math.nan for x in (q, k, v)]
            new = {name: x[:, :, :n] * math.nan for name, x in gates.items()}
            _, after = m.extend(*spoilt, fork(state), torch.zeros(B, n, dtype=torch.bool), **new)
            assert torch.equal(after.memory, state.memory) and torch.equal(after.tokens, state.tokens)


@kinds
@pytest.mark.parametrize("how", [plain, fast])
def test_what_is_hidden_reaches_no_gradient(kind, how):
    m = how(mechanism(kind[0], **kind[1]))
    visible = torch.arange(9) % 3 > 0
    found = []
    for filling in (1.0, math.nan):
        q, k, v, gates = draw(m, 9)
        for x in (k, v, *gates.values()):
            x[:, :, ~visible] *= filling
        leaves = [x.requires_grad_() for x in (k, v, *gates.values())]
        out = m(q, k, v, Mask(causal=True, visible=visible.expand(B, 9)), **gates)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for want, got in zip(*found, strict=True):
        assert torch.equal(got, want)
    assert not any(x[:, :, ~visible].any() for x in found[0][1:])


@pytest.mark.parametrize("name", ["delta", "gated-delta"])
def test_a_key_reads_what_was_written_under_it_last(name):
    m = mechanism(name, scale=1.0)
    _, k, v, gates = draw(m, 9, 3)
    gates["b"][:, :, 4] = 1
    out = m(k, k, v, Mask(causal=True), **gates)
    torch.testing.assert_close(out[:, :, 4], v[:, :, 4])


@pytest.mark.parametrize("name", ["delta", "gated-delta"])
def test_a_memory_does_not_grow_by_erasing(name):
    """Nothing is written (v = 0), so that a memory can only lose, in whatever order keys come and at b = 2 as well."""
    m = mechanism(name, range=2)
    q, k, v, gates = draw(m, 300)
    gates["b"][:, :, ::2] = 2
    if "a" in gates:
        gates["a"] = gates["a"] * 0
    start = torch.randn(B, G, K, V, dtype=torch.float64)
    _, state = m.extend(q, k, v * 0, Memory(start, torch.zeros(B, dtype=torch.long)), **gates)
    largest = torch.linalg.matrix_norm(start, 2)
    assert bool((torch.linalg.matrix_norm(state.memory, 2) <= largest * (1 + 1e-12)).all())


@kinds
@pytest.mark.parametrize("how", [plain, fast])
def test_packed_documents_are_those_alone(kind, how):
    m = how(mechanism(kind[0], **kind[1]))
    q, k, v, gates = draw(m)
    sizes = [5, 60, 1, 65]
    documents = torch.repeat_interleave(torch.tensor(sizes)).expand(B, T)
    mask = Mask(causal=True, documents=documents)
    parts = [x.split(sizes, 2) for x in (q, k, v)]
    split = {name: x.split(sizes, 2) for name, x in gates.items()}
    alone = [
        m(*(x[i] for x in parts), Mask(causal=True), **{name: x[i] for name, x in split.items()}) for i in range(4)
    ]
    assert difference(m(q, k, v, mask, **gates), torch.cat(alone, 2)) < 1e-13
    assert difference(mix(m.weights(q, k, mask, **gates), v), torch.cat(alone, 2)) < 1e-13


@pytest.mark.parametrize("kind", BY_HEAD, ids=label)
def test_gradients_of_gradients_are_those_of_the_reference(kind):
    m = mechanism(kind[0], **kind[1])
    q, k, v, gates = draw(m, 70, grad=True)
    memory = torch.randn(B, G, K, V, dtype=torch.float64).requires_grad_()
    leaves = [q, k, memory, *gates.values()]
    results = []
    for use in ("plain", "chunks"):
        m.use = use
        state = Memory(memory, torch.zeros(B, dtype=torch.long))
        # Values are made of keys, whose gradient has both parts.
        out, state = m.extend(q, k, v.detach() * k[..., :1], state, **gates)
        first = torch.autograd.grad(out.sin().sum() + state.memory.square().sum(), leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)])
    for want, got in zip(*results, strict=True):
        assert difference(got, want) < 1e-11 * (1 + float(want.detach().abs().max()))


@pytest.mark.parametrize("kind", BY_HEAD, ids=label)
def test_packed_documents_go_by_the_chunks_of_a_cpu_too(kind, monkeypatch):
    """With hidden tokens where documents begin, and the gradients of the reference."""
    m = mechanism(kind[0], **kind[1])
    q, k, v, gates = draw(m, dtype=torch.float32, grad=True)
    documents = torch.repeat_interleave(torch.tensor([5, 1, 1, 59, 65])).expand(B, T)
    visible = torch.ones(B, T, dtype=torch.bool)
    visible[0, 5] = visible[1, 66] = visible[1, 64] = False
    mask = Mask(causal=True, visible=visible, documents=documents)
    results = []
    for use in ("plain", "chunks"):
        m.use = use
        out = m(q, k, v, mask, **gates)
        results.append([out, *torch.autograd.grad((out * out.detach().cos()).sum(), [q, k, v, *gates.values()])])
    assert all(difference(got, want) < 1e-5 for want, got in zip(*results, strict=True))
    monkeypatch.setattr(type(m), "_scan", None)  # the reference is not asked
    m.use = "auto"
    assert torch.equal(m(q, k, v, mask, **gates), results[1][0])
    broken = v.detach().clone()
    broken[0, 0, 7] = math.nan  # it stays in its document
    lost = m(q, k, broken, mask, **gates).isnan().any(-1)[0]
    assert lost[:2, 7:66].all() and lost.sum() == 2 * 59


@kinds
def test_strong_decays_lose_no_digits(kind):
    """A decay of −700 or −∞ clears a memory; what comes after it counts as if nothing had been before."""
    m = mechanism(kind[0], **kind[1])
    if "a" not in m.needs:
        return
    q, k, v, gates = draw(m, 40, dtype=torch.float32)
    for how in (plain, fast):
        for strong in (-700.0, -math.inf):
            gates["a"][:, :, 7] = strong
            out = how(m)(q, k, v, Mask(causal=True), **gates)
            later = [x[:, :, 7:] for x in (q, k, v)]
            alone = m(*later, Mask(causal=True), **{name: x[:, :, 7:] for name, x in gates.items()})
            assert difference(out[:, :, 7:], alone) < 1e-6


@pytest.mark.parametrize("kind", BY_HEAD, ids=label)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(("H", "T"), [(6, 131), (3, 64), (6, 7)])
def test_the_chunks_of_a_cpu_have_the_gradients_of_the_reference(kind, written, H, T):
    """Those of decays, write strengths and the memory before, too, which no law asks about."""
    m = mechanism(kind[0], **kind[1])
    q, k, v, gates = draw(m, T, H, grad=True)
    if written and "b" not in gates and m.name != "retention":
        gates["b"] = torch.rand(B, G, T, dtype=torch.float64).requires_grad_()
    memory = torch.randn(B, G, K, V, dtype=torch.float64).requires_grad_()
    visible = torch.rand(B, T) > 0.2
    leaves = [q, k, v, memory, *gates.values()]
    results = []
    for use in ("plain", "chunks"):
        m.use = use
        out = m(q, k, v, Mask(causal=True, visible=visible), **gates)
        more, state = m.extend(q, k, v, Memory(memory, torch.zeros(B, dtype=torch.long)), visible, **gates)
        total = (out * out.detach().cos()).sum() + (more * more.detach().sin()).sum() + state.memory.square().sum()
        results.append([out, more, state.memory, *torch.autograd.grad(total, leaves)])
    for want, got in zip(*results, strict=True):
        assert difference(got, want) < 1e-12


@kinds
@pytest.mark.parametrize(("T", "S"), [(1, 1), (16, 16), (65, 65), (5, 70)])
def test_costs_are_what_is_counted(kind, T, S):
    m = plain(mechanism(kind[0], **kind[1]))
    q, k, v, gates = draw(m, S, grad=True)
    q = q[:, :, S - T :]
    size = Size.of(q, k, v)
    causal = Mask(causal=True)
    with FlopCounterMode(display=False) as forward:
        out = m(q, k, v, causal, **gates)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    with FlopCounterMode(display=False) as explicit:
        m.weights(q, k, causal, **gates)
    assert forward.get_total_flops() == m.cost(size).matmul
    assert backward.get_total_flops() == m.gradient_cost(size).matmul
    assert explicit.get_total_flops() == m.cost(size, "weights").matmul
    state = m.empty(size)
    assert state.memory.nbytes == m.cost(size).state
    if T == S:
        with FlopCounterMode(display=False) as counter:
            m.extend(q, k, v, state, **gates)
        assert counter.get_total_flops() == m.cost(size, "recurrent").matmul


@kinds
@pytest.mark.parametrize(
    ("face", "training"), [("parallel", False), ("parallel", True), ("recurrent", False), ("weights", False)]
)
def test_what_is_timed_is_the_face_that_was_asked_for(kind, face, training):
    size = Size(1, 1 if face == "recurrent" else 9, 9, 2, 2, 4, 4)
    run = crossing.face_runner(plain(mechanism(kind[0], **kind[1])), size, face, training)
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() == cost.of(kind[0], size, face, training=training, **kind[1]).matmul


class TestOthersCode:
    """transformers' plain PyTorch, which its models run without a GPU."""

    @pytest.mark.parametrize("length", [7, 64, 131])
    @pytest.mark.parametrize("how", [plain, fast])
    def test_qwen3_next(self, length, how):
        from transformers.models.qwen3_next import modeling_qwen3_next as theirs

        m = how(mechanism("gated-delta"))
        q, k, v, gates = draw(m, length, G, G, dtype=torch.float32)
        before = torch.randn(B, G, K, V)
        ours, state = m.extend(q, k, v, Memory(before, torch.zeros(B, dtype=torch.long)), **gates)
        given = [x.transpose(1, 2) for x in (q, k, v, gates["a"], gates["b"])]
        for f in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
            f = getattr(f, "__wrapped__", f)
            out, after = f(*given, initial_state=before, output_final_state=True)
            assert difference(ours, out.transpose(1, 2)) < 2e-6 and difference(state.memory, after) < 2e-6

    @pytest.mark.parametrize("how", [plain, fast])
    def test_mamba_2(self, how):
        """B and C have one group of heads, the step size Δ is b, and a is Δ·A; the rest is the layer's."""
        from transformers.models.mamba2 import modeling_mamba2 as theirs

        m = how(mechanism("gated", scale=1.0))
        q, k, v, _ = draw(m, 70, 1, 1, G, dtype=torch.float32)
        step = functional.softplus(torch.randn(B, 70, G))
        rate = -torch.rand(G)
        ours = regard.attend(q, k, v, m, causal=True, a=(step * rate).transpose(1, 2), b=step.transpose(1, 2))
        scan = getattr(theirs.mamba2_chunk_scan, "__wrapped__", theirs.mamba2_chunk_scan)
        found = scan(v.transpose(1, 2), step, rate, k.transpose(1, 2), q.transpose(1, 2), 32)
        if isinstance(found, tuple):
            found = found[0]
        assert difference(ours, found.reshape(B, 70, G, V).transpose(1, 2)) < 2e-6


class TestParity:
    """Whether a head can count ones modulo two, bit by bit; docs/gated.md has the proof."""

    def test_reflections_solve_it_at_any_length(self):
        """One key (1), b = 2 for a one and 0 for a zero: S changes its sign at each one. The first token writes 1."""
        n = 10_000
        bits = torch.randint(0, 2, (3, n), generator=torch.Generator().manual_seed(0))
        start = torch.ones(3, 1, 1, 1)
        ones = torch.ones(3, 1, n + 1, 1)
        b = torch.cat([torch.ones(3, 1, 1), 2.0 * bits[:, None]], 2)
        v = torch.cat([start, torch.zeros(3, 1, n, 1)], 2)
        out = regard.attend(ones, ones, v, "delta", causal=True, b=b, range=2, scale=1.0)
        assert torch.equal(out[:, 0, 1:, 0], (-1.0) ** bits.cumsum(1))

    @pytest.mark.parametrize("kind", KINDS, ids=label)
    def test_what_one_token_does_to_a_memory_has_no_negative_eigenvalue_up_to_one(self, kind):
        """S ← (I − b k kᵀ) diag(eᵃ) S + …: with b‖k‖² ≤ 1 the eigenvalues are in [0, 1], with 2 one can be −1."""
        m = mechanism(kind[0], **{name: x for name, x in kind[1].items() if name != "range"})
        q, k, _, gates = draw(m, 1, K=K)
        smallest = []
        for strength in (None, 0.0, 0.5, 1.0):
            if "b" in gates and strength is not None:
                gates["b"] = torch.full((B, G, 1), strength, dtype=torch.float64)
            columns = torch.eye(K, dtype=torch.float64).expand(B, G, K, K)
            state = Memory(columns.clone(), torch.zeros(B, dtype=torch.long))
            _, after = m.extend(q, k, torch.zeros(B, G, 1, K, dtype=torch.float64), state, **gates)
            eigenvalues = torch.linalg.eigvals(after.memory)
            assert float(eigenvalues.imag.abs().max()) < 1e-7
            smallest.append(float(eigenvalues.real.min()))
            assert smallest[-1] > -1e-7 and float(eigenvalues.real.max()) < 1 + 1e-7
        if m.erases:
            reflecting = mechanism(kind[0], range=2, **{n: x for n, x in kind[1].items() if n == "channels"})
            gates = {n: torch.zeros_like(x) for n, x in gates.items()} | {"b": torch.full((B, G, 1), 2.0)}
            _, after = reflecting.extend(q, k, torch.zeros(B, G, 1, K, dtype=torch.float64), state, **gates)
            assert float(torch.linalg.eigvals(after.memory).real.min()) == pytest.approx(-1)


class TestRefused:
    def test_masks_by_name(self):
        m = mechanism("gated-delta")
        q, k, v, gates = draw(m, 9)
        bias = torch.zeros(9, 9)
        for mask, word in (
            (Mask(), "is causal"),
            (Mask(causal=True, window=3), "'window'"),
            (Mask(causal=True, bias=bias), "'bias'"),
            (Mask(causal=True, slopes=torch.ones(H)), "'slopes'"),
            (Mask(causal=True, softcap=2.0), "'softcap'"),
        ):
            with pytest.raises(MaskError, match=f"gated-delta.*{word}|{word}"):
                m(q, k, v, mask, **gates)
            with pytest.raises(MaskError):
                m.weights(q, k, mask, **gates)
        with pytest.raises(MaskError, match="window"):
            m.empty(Size.of(q, k, v), Mask(window=3))
        for call in (lambda: m.write(None, k, v), lambda: m.read(q, None)):
            with pytest.raises(MaskError, match="no cross-attention"):
                call()
        m(q, k, v, Mask(causal=True, window=10), **gates)  # nothing is farther away

    @pytest.mark.parametrize("how", [plain, fast])
    @pytest.mark.parametrize("T", [1, 9])
    @pytest.mark.parametrize(
        ("name", "bad", "words"),
        [
            ("gated-delta", {"a": 0.3}, r"a = 0.3 \(batch 1, head 2, token 0\), expected at most 0"),
            ("gated", {"a": math.nan}, "a = nan"),
            ("delta", {"b": 1.2}, "b = 1.2 .* expected 0 to 1"),
            ("delta", {"b": -0.1}, "b = -0.1 .* expected 0 to 1"),
            ("delta", {"b": math.nan}, "b = nan"),
            ("delta", {"k": 3.0}, "expected at most 2"),
        ],
    )
    def test_what_would_grow(self, name, bad, words, how, T):
        m = how(mechanism(name))
        q, k, v, gates = draw(m, T)
        if "b" in gates:
            gates["b"].fill_(0.5)
        for letter, x in bad.items():
            if letter == "k":
                k[1, 2, 0] *= x
            else:
                gates[letter][1, 2, 0] = x
        with pytest.raises(GateError, match=words):
            m.extend(q, k, v, m.empty(Size.of(q, k, v)), **gates)
        with pytest.raises(GateError, match=words):
            m(q, k, v, Mask(causal=True), **gates)
        visible = torch.ones(B, T, dtype=torch.bool)
        visible[1, 0] = False  # what nobody sees may be anything
        assert m(q, k, v, Mask(causal=True, visible=visible), **gates).isfinite().all()

    @pytest.mark.parametrize("T", [1, 9])
    @pytest.mark.parametrize(
        ("name", "bad"),
        [
            ("gated", {"a": 0.3}),
            ("gated-delta", {"a": 0.3}),
            ("delta", {"b": 1.2}),
            ("delta", {"b": -0.1}),
            ("delta", {"k": 3.0}),
        ],
    )
    def test_what_would_grow_shows_where_no_number_can_be_read(self, name, bad, T):
        """Compiled, captured, transformed or counted, nothing can be raised: NaN from that token on, at the latest."""
        m = mechanism(name)
        q, k, v, gates = draw(m, T)
        want = m(q, k, v, Mask(causal=True), **gates)
        for letter, x in bad.items():
            if letter == "k":
                gates["b"][1, 2, T // 2] = 0.5
                k[1, 2, T // 2] *= x
            else:
                gates[letter][1, 2, T // 2] = x
        with FlopCounterMode(display=False):
            out = m(q, k, v, Mask(causal=True), **gates)
            extended, _ = m.extend(q, k, v, m.empty(Size.of(q, k, v)), **gates)
        for found in (out, extended):
            assert found[1, 4:, T // 2 :].isnan().all()  # both query heads of the memory
            assert difference(found[:, :4], want[:, :4]) < 1e-13 and difference(found[:1], want[:1]) < 1e-13

    @pytest.mark.parametrize("name", ["delta", "gated-delta"])
    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    @pytest.mark.parametrize("T", [1, 3])
    def test_a_key_that_is_not_a_number_is_seen_and_not_too_long(self, name, broken, T):
        m = mechanism(name)
        q, k, v, gates = draw(m, T)
        k[1, 2, T - 1, 0] = broken
        out, state = m.extend(q, k, v, m.empty(Size.of(q, k, v)), **gates)
        for found in (out, m(q, k, v, Mask(causal=True), **gates), m.weights(q, k, Mask(causal=True), **gates)):
            lost = found.isnan().any(-1)
            assert lost[1, 4:, T - 1].all() and lost.sum() == 2
        assert state.memory.isnan().any((2, 3)).sum() == 1

    def test_a_key_of_length_one_in_single_precision_has_it_in_double_precision_too(self):
        m = mechanism("delta", range=2)
        q, k, v, gates = draw(m, 40, dtype=torch.float32)
        gates["b"].fill_(2)
        assert (torch.linalg.vector_norm(k.double(), dim=-1) > 1).any()
        inputs = [x.double() for x in (q, k, v)]
        want, _ = recurrence(m, *inputs, b=gates["b"].double())
        assert difference(m(*inputs, Mask(causal=True), b=gates["b"].double()), want) < 1e-12
        inputs[1] = inputs[1] * (1 + 1e-5)
        with pytest.raises(GateError, match=r"b‖k‖² = 2\.0000[34]\d* .*expected at most 2"):
            m(*inputs, Mask(causal=True), b=gates["b"].double())

    def test_decays_of_a_mechanism_of_ones_own_are_looked_at(self):
        class Growing(type(mechanism("retention"))):
            def log_decay(self, v):
                return -super().log_decay(v)

        q, k, v, _ = draw(Growing(), 9)
        with pytest.raises(GateError, match="expected at most 0"):
            Growing()(q, k, v, Mask(causal=True))

    def test_inputs_that_are_missing_or_have_another_shape(self):
        m = mechanism("gated-delta")
        q, k, v, gates = draw(m, 9)
        with pytest.raises(OptionError, match=r"needs b \[B,G,S\]"):
            m(q, k, v, Mask(causal=True), a=gates["a"])
        with pytest.raises(OptionError, match="takes no a"):
            regard.attend(q, k, v, "delta", causal=True, **gates)
        with pytest.raises(OptionError, match=r"only gated and delta mechanisms take.*softmax does not"):
            regard.attend(q, k, v, "softmax", causal=True, **gates)
        with pytest.raises(UnknownNameError, match="Did you mean 'gated-delta'"):
            regard.attend(q, k, v, "gated_delta", causal=True, **gates)
        with pytest.raises(ShapeError, match="a is a float, expected a tensor"):
            regard.attend(q, k, v, "gated", causal=True, a=-0.1)
        with pytest.raises(ShapeError, match=r"a has shape .*channels=True"):
            m(q, k, v, Mask(causal=True), a=k, b=gates["b"])
        with pytest.raises(ShapeError, match="b has shape"):
            m(q, k, v, Mask(causal=True), a=gates["a"], b=gates["b"][:, :1])
        with pytest.raises(ShapeError, match="k has 2 heads, which do not divide the G = 3"):
            regard.attend(q, k[:, :2], v, m, causal=True, **gates)
        with pytest.raises(OptionError, match="range = 3"):
            mechanism("delta", range=3)
        turned = gates["a"].transpose(1, 2)
        with pytest.raises(ShapeError, match=r"a has shape .*Heads come before tokens: a\.transpose\(1, 2\)"):
            m(q, k, v, Mask(causal=True), a=turned, b=gates["b"])
        with pytest.raises(ShapeError, match=r"b is torch\.complex64, expected real numbers"):
            m(q, k, v, Mask(causal=True), a=gates["a"], b=gates["b"].to(torch.complex64))
        with pytest.raises(OptionError, match=r"Here 'beta' is b=, \[B,G,S\]"):
            regard.attend(q, k, v, "gated-delta", causal=True, a=gates["a"], beta=gates["b"])


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_keep_sums_in_float32(kind, dtype):
    m = mechanism(kind[0], **kind[1])
    q, k, v, gates = draw(m, 67)
    want, _ = recurrence(m, *(x.to(dtype).double() for x in (q, k, v)), **gates)
    half = [x.to(dtype) for x in (q, k, v)]
    single = {name: x.float() for name, x in gates.items()}
    state = m.empty(Size.of(*half))
    assert state.memory.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        for out in (m(*half, Mask(causal=True), **single), m.extend(*half, state, **single)[0]):
            assert out.dtype == dtype
            assert difference(out, want) < 2 * torch.finfo(dtype).eps
        assert m.weights(*half[:2], Mask(causal=True), **single).dtype == torch.float32


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_token_decays_with_the_digits_of_the_memory_whatever_the_dtype_of_a(kind, dtype):
    m = mechanism(kind[0], **kind[1])
    q, k, v, gates = draw(m, 20)
    rounded = {name: x.to(dtype) for name, x in gates.items()}
    want, memory = recurrence(m, q, k, v, **{name: x.double() for name, x in rounded.items()})
    state = m.empty(Size.of(q, k, v))
    for t in range(20):
        now = {name: x[:, :, t : t + 1] for name, x in rounded.items()}
        out, state = m.extend(*(x[:, :, t : t + 1] for x in (q, k, v)), state, **now)
        assert difference(out, want[:, :, t : t + 1]) < 1e-13
    assert difference(state.memory, memory) < 1e-13


@pytest.mark.slow
@kinds
def test_each_compiles_whole(kind):
    m = mechanism(kind[0], **kind[1])
    q, k, v, gates = draw(m, 70, dtype=torch.float32)
    mask = Mask(causal=True, visible=torch.arange(70).expand(B, 70) > 1)
    compiled = torch.compile(lambda q, k, v, gates: m(q, k, v, mask, **gates), fullgraph=True, backend="aot_eager")
    assert difference(compiled(q, k, v, gates), m(q, k, v, mask, **gates)) < 1e-5
    step = torch.compile(lambda q, k, v, s, gates: m.extend(q, k, v, s, **gates), fullgraph=True, backend="aot_eager")
    one = [x[:, :, :1] for x in (q, k, v)]
    first = {name: x[:, :, :1] for name, x in gates.items()}
    state = m.empty(Size.of(q, k, v))
    assert difference(step(*one, state, first)[0], m.extend(*one, state, **first)[0]) < 1e-5
