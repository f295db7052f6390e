"""The loss of tokens: chunk by chunk it is the loss of all logits, with its gradients, and never holds all of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard
from regard.data.batch import IGNORE
from regard.models import decoder, head_loss, losses, token_loss

N, D = 11, 7


def draw(tokens, dtype=torch.float64, seed=0):
    """Returns vectors [1,tokens,D], a head [N,D] and targets [1,tokens], the first of which is ignored."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens, D, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(N, D, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, N, (1, tokens), generator=source)
    targets[0, 0] = IGNORE
    return x, weight, targets


@given(
    tokens=st.integers(1, 30),
    chunk=st.integers(1, 40),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    mean=st.booleans(),
    ignore=st.sampled_from([IGNORE, 3]),
    seed=st.integers(0, 9),
)
def test_chunks_have_the_loss_and_the_gradients_of_all_logits(tokens, chunk, smoothing, mean, ignore, seed):
    x, weight, targets = draw(tokens, seed=seed)
    if ignore != IGNORE:
        targets = targets.clamp(min=0)
    want = token_loss(x @ weight.mT, targets, ignore, mean, smoothing)
    got = head_loss(x, weight, targets, ignore, mean, smoothing, chunk)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    # Some multiple of it, as training takes it.
    gradients = [torch.autograd.grad(-3 * loss, (x, weight)) for loss in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


def test_nothing_to_learn_is_zero_whatever_the_logits_are():
    x, weight, targets = draw(6)
    with torch.no_grad():
        x[0, 2] = torch.nan
    targets[:] = IGNORE
    loss = head_loss(x, weight, targets, chunk=4)
    assert loss == 0
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.zeros_like(x))


@pytest.mark.parametrize("frozen", ["x", "weight", "both"])
def test_what_is_frozen_has_no_gradient(frozen):
    x, weight, targets = draw(9)
    want = torch.autograd.grad(token_loss(x @ weight.mT, targets), (x, weight))
    if frozen != "weight":
        x.requires_grad_(False)
    if frozen != "x":
        weight.requires_grad_(False)
    loss = head_loss(x, weight, targets, chunk=4)
    assert loss.requires_grad == (frozen != "both")
    if loss.requires_grad:
        loss.backward()
    for tensor, gradient in zip((x, weight), want, strict=True):
        assert (tensor.grad is None) == (not tensor.requires_grad)
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad, gradient, rtol=1e-11, atol=1e-12)


def test_half_precision_is_as_exact_as_with_all_logits():
    x, weight, targets = draw(200, torch.float32)
    exact = torch.autograd.grad(token_loss((x.double() @ weight.double().mT), targets), (x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        plain = token_loss(functional.linear(x, weight), targets)
        chunked = head_loss(x, weight, targets, chunk=64)
    assert chunked.dtype == torch.float32
    errors = []
    for loss in (plain, chunked):
        found = torch.autograd.grad(loss, (x, weight))
        assert [g.dtype for g in found] == [torch.float32, torch.float32]
        errors.append([float((g - e).norm() / e.norm()) for g, e in zip(found, exact, strict=True)])
    assert all(got <= 1.1 * of_plain for got, of_plain in zip(errors[1], errors[0], strict=True)), errors


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.numbers = max([self.numbers, *made])
        return out


def test_the_logits_of_all_tokens_are_never_there():
    x, weight, targets = draw(64)
    with Largest() as plain:
        token_loss(x @ weight.mT, targets).backward()
    assert plain.numbers == 64 * N
    with Largest() as chunked:
        head_loss(x, weight, targets, chunk=8).backward()
    assert chunked.numbers == 64 * D  # the gradient of x; a chunk has 8·N logits


def test_a_target_outside_of_the_vocabulary_is_an_error_as_with_all_logits():
    x, weight, targets = draw(4)
    targets[0, 1] = -1
    for loss in (lambda: token_loss(x @ weight.mT, targets), lambda: head_loss(x, weight, targets, chunk=4)):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            loss()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile itself
def test_it_is_compiled_as_one_graph():
    x, weight, targets = draw(10)

    def loss(x, weight):
        return head_loss(x, weight, targets, smoothing=0.1, chunk=4)

    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, weight)
    want = token_loss(x @ weight.mT, targets, smoothing=0.1)
    gradients = [torch.autograd.grad(loss, (x, weight)) for loss in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_gpt_learns_the_same_by_chunks(tied, smoothing, monkeypatch):
    torch.manual_seed(0)
    model = regard.GPT(vocabulary=N, length=8, width=8, layers=1, attention={"heads": 2}, tied=tied).double()
    tokens = torch.randint(0, N, (3, 8))
    targets = tokens.roll(1, 1).masked_fill(tokens == 4, IGNORE)
    want = model.loss(tokens, targets, smoothing=smoothing)
    expected = torch.autograd.grad(want, list(model.parameters()))
    monkeypatch.setattr(losses, "CHUNK", 8 * N)
    monkeypatch.setattr(losses, "SMALLEST_CHUNK", 1)
    calls = []
    monkeypatch.setattr(decoder, "head_loss", lambda *given: calls.append(given) or head_loss(*given))
    got = model.loss(tokens, targets, smoothing=smoothing)
    assert len(calls) == 1
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(got, list(model.parameters())), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(want, token_loss(model(tokens), targets, smoothing=smoothing), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocabulary", [65, 50_304, 1 << 20, 1 << 30])
def test_a_chunk_has_about_as_many_logits_whatever_the_vocabulary(vocabulary):
    tokens = losses.chunk_tokens(vocabulary)
    assert tokens & (tokens - 1) == 0
    assert tokens == losses.SMALLEST_CHUNK or losses.CHUNK / 2 < tokens * vocabulary <= losses.CHUNK
