"""A state with a window is a ring: it keeps as many tokens as the window, whatever it has read."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from regard.errors import LengthError, MaskError
from regard.generate.graph import _fix_shapes
from regard.laws.case import difference
from regard.mechanisms import Mechanism, State, fitted, fork, mechanisms
from regard.models import GPT, AttentionConfig, GPTConfig
from regard.shapes import Mask, Size

B, H, G, K, V = 3, 4, 2, 5, 3
OPTIONS = {"synthesizer-random": {"rank": 2}, "performer": {"features": 8}, "fourier": {"features": 8}}
NAMES = [name for name, cls in mechanisms().items() if not cls.causal_only]  # the others have no window
PAIRWISE = [name for name in NAMES if name in ("softmax", "argmax", "synthesizer", "synthesizer-random")]


def build(name: str, length: int) -> Mechanism:
    torch.manual_seed(0)
    size = Size(T=length, S=length, H=H, G=G, K=K, V=V)
    return fitted(name, size, **OPTIONS.get(name, {})).double()


def draw(N: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    q = torch.randn(B, H, N, K, dtype=torch.float64)
    k = torch.randn(B, G, N, K, dtype=torch.float64)
    v = torch.randn(B, G, N, V, dtype=torch.float64)
    return q, k, v


def empty(mechanism: Mechanism, rules: Mask, capacity: int = 2) -> State:
    size = Size(B=B, S=capacity, H=H, G=G, K=K, V=V, dtype=torch.float64)
    return mechanism.empty(size, rules)


def padding(N: int) -> Tensor:
    """A third of the tokens is invisible, in the middle of a row all of ten in turn."""
    visible = torch.rand(B, N, generator=torch.Generator().manual_seed(2)) > 1 / 3
    visible[1, 40:50] = False
    return visible


def extend_by(
    mechanism: Mechanism, inputs: Iterable[Tensor], state: State, sizes: list[int], visible: Tensor | None
) -> tuple[Tensor, State]:
    """Extends a state chunk by chunk; its rows change places and back after each, as beams do."""
    outs = []
    start = 0
    for T in sizes:
        part = slice(start, start + T)
        q, k, v = (x[:, :, part] for x in inputs)
        out, state = mechanism.extend(q, k, v, state, None if visible is None else visible[:, part])
        outs.append(out)
        state = fork(fork(state, torch.tensor([2, 0, 1])), torch.tensor([1, 2, 0]))
        start += T
    return torch.cat(outs, 2), state


@pytest.mark.parametrize("use", ["plain", "auto"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_ring_is_the_windowed_sequence(name: str, padded: bool, use: str) -> None:
    """Single tokens, chunks, and chunks longer than the window; windows of one token and of all."""
    N = 90
    mechanism = build(name, N)
    mechanism.use = use
    inputs = draw(N)
    visible = padding(N) if padded else None
    for window in (1, 7, N + 1):
        want = mechanism(*inputs, Mask(causal=True, window=window, visible=visible))
        for sizes in ([1] * N, [1, 2, 27, 3, 4, 8, 45]):
            with torch.no_grad():
                out, state = extend_by(mechanism, inputs, empty(mechanism, Mask(window=window)), sizes, visible)
            assert difference(out, want) < 1e-10, (window, sizes)
            assert state.v.shape[2] <= window


@pytest.mark.parametrize("name", PAIRWISE)
def test_distances_in_a_ring(name: str) -> None:
    """Slopes, softcap and relative positions go by positions, not by slots."""
    N = 60
    mechanism = build(name, N)
    inputs = draw(N)
    table = torch.randn(N, H, dtype=torch.float64)
    rules = Mask(
        window=9,
        slopes=torch.rand(H, dtype=torch.float64),
        softcap=2.0,
        relative=lambda distance: table[distance.clamp(0, N - 1)].movedim(-1, 1),
    )
    for visible in (None, padding(N)):
        want = mechanism(*inputs, rules.but(causal=True, visible=visible))
        for sizes in ([1] * N, [13, 1, 1, 25, 20]):
            out, _ = extend_by(mechanism, inputs, empty(mechanism, rules), sizes, visible)
            assert difference(out, want) < 1e-10, sizes


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_state_stays_as_large_as_its_window(name: str, padded: bool) -> None:
    """Thousands of tokens later a state has as many slots, and a step as many products, as when the ring was full."""
    N = 3000
    window = 16
    mechanism = build(name, N + 1)
    inputs = draw(N)
    visible = padding(N) if padded else None
    sizes = [1] * 60 + [97] * 28 + [1] * 24 + [200]
    later = [x[:, :, 60:] for x in inputs]
    visible_later = None if visible is None else visible[:, 60:]
    with torch.no_grad():
        _, state = extend_by(mechanism, inputs, empty(mechanism, Mask(window=window)), sizes[:60], visible)
        early = count_step(mechanism, state)
        _, state = extend_by(mechanism, later, state, sizes[60:], visible_later)
        assert state.v.shape[2] == window
        assert count_step(mechanism, state) == early
    assert int(state.tokens.max()) > 1900


def count_step(mechanism: Mechanism, state: State) -> int:
    """Returns the FLOPs of the matrix products of one more token on the plain reference."""
    mechanism.use = "plain"
    with FlopCounterMode(display=False) as counter:
        mechanism.extend(*draw(1), fork(state))
    mechanism.use = "auto"
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", PAIRWISE)
def test_invisible_tokens_take_no_slot(name: str) -> None:
    mechanism = build(name, 40)
    state = empty(mechanism, Mask(), capacity=8)
    with torch.no_grad():
        _, state = mechanism.extend(*draw(5), state)
        hidden = torch.zeros(B, 1, dtype=torch.bool)
        for _ in range(200):
            _, state = mechanism.extend(*draw(1), state, hidden)
    assert state.v.shape[2] == 8
    assert state.tokens.tolist() == [5] * B


def test_ties_go_to_the_first_token_of_a_ring() -> None:
    mechanism = build("argmax", 20)
    q = torch.ones(1, 1, 20, 1)
    v = torch.arange(20.0).view(1, 1, 20, 1)
    state = mechanism.empty(Size(S=20, K=1, V=1), Mask(window=6))
    for t in range(20):
        part = slice(t, t + 1)
        out, state = mechanism.extend(q[:, :, part], q[:, :, part], v[:, :, part], state)
        assert float(out) == max(0, t - 5)


def test_gradients_pass_through_a_ring() -> None:
    """From the last outputs to the keys and values within the window, and to no others."""
    for name in ("softmax", "elu"):
        mechanism = build(name, 40)
        q, k, v = draw(40)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        whole = mechanism(q, k, v, Mask(causal=True, window=6))
        out, _ = extend_by(mechanism, (q, k, v), empty(mechanism, Mask(window=6)), [1] * 10 + [11, 4, 1, 14], None)
        direction = whole.detach().cos()
        want = torch.autograd.grad((whole * direction).sum(), leaves)
        got = torch.autograd.grad((out * direction).sum(), leaves)
        for g, w in zip(got, want, strict=True):
            assert difference(g, w) < 1e-10


@pytest.mark.parametrize("name", ["synthesizer", "synthesizer-random"])
def test_ring_ends_where_a_synthesizer_does(name: str) -> None:
    """Positions are counted from the first token, not from the first one kept; padding has none."""
    mechanism = build(name, 12)
    state = empty(mechanism, Mask(window=4))
    with torch.no_grad():
        for _ in range(12):
            _, state = mechanism.extend(*draw(1), state)
        _, same = mechanism.extend(*draw(1), fork(state), torch.zeros(B, 1, dtype=torch.bool))
        assert same.tokens.tolist() == [12] * B
        with pytest.raises(LengthError, match="13 visible tokens"):
            mechanism.extend(*draw(1), state)


def test_written_states_keep_all() -> None:
    """Cross-attention reads at any position, so that nothing written may be forgotten."""
    mechanism = build("softmax", 30)
    q, k, v = draw(30)
    state = empty(mechanism, Mask(window=4))
    for part in (slice(0, 7), slice(7, 30)):
        state = mechanism.write(state, k[:, :, part], v[:, :, part])
    positions = torch.arange(30).expand(B, 30)
    out = mechanism.read(q, state, positions)
    assert difference(out, mechanism(q, k, v, Mask(window=4))) < 1e-10

    state = empty(mechanism, Mask(window=4))
    _, state = mechanism.extend(q[:, :, :11], k[:, :, :11], v[:, :, :11], state)
    # A query at the position of the last token sees it and the three before it; the ring is not in their order.
    out = mechanism.read(q[:, :, 10:11], state, torch.full((B, 1), 10))
    assert difference(out, mechanism(q, k, v, Mask(causal=True, window=4))[:, :, 10:11]) < 1e-10
    with pytest.raises(MaskError, match="forgotten its first tokens"):
        mechanism.write(state, k, v)


@pytest.mark.parametrize("mechanism", ["softmax", "argmax", "elu", "performer", "synthesizer"])
@pytest.mark.parametrize("position", ["rotary", "alibi", "learned"])
def test_models_decode_with_a_window(mechanism: str, position: str) -> None:
    """A whole model, token by token beyond its window: eagerly, and with the fixed shapes of a CUDA graph."""
    if position == "alibi" and mechanism in ("elu", "performer"):
        pytest.skip("linear mechanisms have no scores for ALiBi")
    torch.manual_seed(0)
    options = {"features": 8} if mechanism == "performer" else {}
    attention = AttentionConfig(heads=2, window=5)
    config = GPTConfig(
        vocabulary=11, layers=2, width=16, length=64, position=position, mechanism=mechanism, options=options,
        attention=attention,
    )  # fmt: skip
    model = GPT(config).double().eval()
    tokens = torch.randint(11, (2, 40))
    visible = torch.ones(2, 40, dtype=torch.bool)
    visible[1, :3] = False
    with torch.no_grad():
        want = model(tokens, visible)[:, 8:]
        _, state = model.prefill(tokens[:, :8], visible[:, :8], 32)
        fixed = _fix_shapes(model.fork(state), 64)
        for t in range(8, 40):
            logits, state = model.extend(tokens[:, t : t + 1], state)
            assert difference(logits[:, 0], want[:, t - 8]) < 1e-10
            logits, after = model.extend(tokens[:, t : t + 1], fixed)
            assert difference(logits[:, 0], want[:, t - 8]) < 1e-10
            # A replayed graph has the shapes and bounds of its first step; only what is on the device goes on.
            fixed = _fix_shapes(after, 64)
    for layer in state.layers:
        assert layer.own.v.shape[2] == 5
