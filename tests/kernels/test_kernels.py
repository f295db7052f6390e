"""Kernels: which one runs, and what they must not do."""

import pytest
import torch

from regard.errors import KernelError, UnknownNameError
from regard.kernels import fast, plain
from regard.lab.bench.memory import peak
from regard.laws import LAWS, Case, subject
from regard.mechanisms import Softmax, mechanism
from regard.shapes import Mask, Size


def test_plain_and_fast_choose_for_every_mechanism_in_a_model():
    model = torch.nn.ModuleList([Softmax(), Softmax()])
    assert all(m.use == "plain" for m in plain(model))
    assert all(m.use == "sdpa" for m in fast(model, "sdpa"))
    assert all(m.use == "auto" for m in fast(model))


def test_kernels_are_named_for_each_mechanism_of_a_model():
    model = torch.nn.ModuleList([Softmax(), mechanism("gated"), mechanism("gated")])
    fast(model, {"gated": "triton"})
    assert [m.use for m in model] == ["auto", "triton", "triton"]
    fast(model, {"softmax": "plain"})
    assert [m.use for m in model] == ["plain", "auto", "auto"]
    for wrong, words in (
        ({"gated": "sdpa"}, "gated has no kernel called 'sdpa'"),
        ({"delta": "triton"}, "no layer has the mechanism 'delta'.*there are: gated, softmax"),
        ({"gatd": "triton"}, "Did you mean 'gated'"),
    ):
        with pytest.raises((KernelError, UnknownNameError), match=words):
            fast(model, wrong)
        assert [m.use for m in model] == ["plain", "auto", "auto"]


def test_a_kernel_that_cannot_run_here_says_why():
    softmax = fast(Softmax(), "triton")
    q = torch.randn(1, 2, 1, 4)
    with pytest.raises(KernelError, match="CUDA device"):
        softmax.extend(q, q, q, softmax.empty(Size(B=1, H=2, G=2, K=4, V=4)))


def test_a_subclass_inherits_no_kernel():
    class Other(Softmax):
        def weights(self, q, k, mask=Mask()):
            return super().weights(-q, k, mask)

    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    assert torch.allclose(Other()(q, k, v), Softmax()(-q, k, v), atol=1e-6)
    assert Other.kernels == {}


def test_float16_on_a_cpu_is_summed_in_float32():
    """Some CPUs sum float16 products in float16; over 131 queries the gradient of the one key was then too far off."""
    case = Case(B=1, T=131, S=1, H=1, G=1, K=1, V=2, causal=False, padding="right", dtype="float16", seed=27966)
    found = LAWS["kernel"](subject("synthesizer-random", rank=2), case)
    assert not found.broken, found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("synthesizer", {"width": 16}),
        ("synthesizer-random", {}),
        ("synthesizer-random", {"rank": 16}),
    ],
)
def test_a_step_of_a_synthesizer_copies_nothing_that_was_learned(name, options):
    m = mechanism(name, heads=4, length=1025, **options)
    x = torch.randn(2, 4, 1025, 16)
    before, now = (lambda t: None if t is None else t[:, :, :-1]), (lambda t: None if t is None else t[:, :, -1:])
    q = x if "q" in m.needs else None
    size = Size(B=2, S=1025, H=4, G=4, K=16, V=16)
    with torch.no_grad():
        _, state = m.extend(before(q), None, before(x), m.empty(size))
        want = plain(m)(q, None, x, Mask(causal=True))[:, :, -1:]
        fast(m, "in-place")
        got, _ = m.extend(now(q), None, now(x), state)
        taken = peak(lambda: m.extend(now(q), None, now(x), state), torch.device("cpu"))
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
    assert taken < 4 * 2 * 4 * 1025 * 4  # scores and weights of each head, no keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "options"),
    [("synthesizer", {"width": 16}), ("synthesizer-random", {}), ("synthesizer-random", {"rank": 3})],
)
def test_a_step_of_a_synthesizer_takes_rows_of_unequal_length(name, options, dtype):
    torch.manual_seed(0)
    m = mechanism(name, heads=4, length=24, **options).to(dtype)
    q, v = torch.randn(3, 4, 21, 16).to(dtype), torch.randn(3, 2, 21, 16).to(dtype)
    seen = torch.rand(3, 20) > 0.4
    size = Size(B=3, S=24, H=4, G=2, K=16, V=16, dtype=dtype)
    outs = []
    with torch.no_grad():
        for choose in (plain, lambda m: fast(m, "in-place")):
            _, state = plain(m).extend(q[:, :, :20], None, v[:, :, :20], m.empty(size), seen)
            outs.append(choose(m).extend(q[:, :, 20:], None, v[:, :, 20:], state)[0])
    assert not state.even
    assert (outs[1] - outs[0]).abs().max() <= (1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)
