"""Training on a GPU: compiled and captured steps learn what plain ones do, go on in the same bits, and never wait."""

import pytest
import torch
from torch.nn import functional
from training import Crash, StopAt, Toy, bits, gpt, trainer

from regard.data.batch import IGNORE
from regard.kernels.crossentropy import losses_and_gradient
from regard.models import head_loss, token_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _a_gpu():
    if not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device, and there is none")
    torch._dynamo.reset()


class OnGPU(Toy):
    """The toy with its rows on the GPU."""

    def batch(self, step, size):
        return super().batch(step, size).to(DEVICE)


def fitted(folder, progress=None, **changes):
    model = gpt(0.1).to(DEVICE)
    kind = {"steps": 12, "precision": "bfloat16", "saving": {"every": 3}} | changes
    made = trainer(folder, OnGPU(), model, progress, **kind)
    made.resume()
    made.fit()


@pytest.mark.parametrize(
    "mode, optimizer",
    [("graph", "adamw"), ("inductor", "adamw"), ("both", "adamw"), ("off", "muon"), ("graph", "muon")],
)
def test_a_run_with_dropout_goes_on_in_the_same_bits(mode, optimizer, tmp_path):
    same = {"compile": mode, "deterministic": True, "optimizer": optimizer}
    fitted(tmp_path / "whole", **same)
    with pytest.raises(Crash):
        fitted(tmp_path / "stopped", StopAt(8), **same)
    torch._dynamo.reset()  # as in another process
    fitted(tmp_path / "stopped", **same)
    assert bits(tmp_path / "stopped") == bits(tmp_path / "whole")


def test_compiled_steps_learn_what_plain_ones_do(tmp_path):
    final = {}
    for mode in ("off", "both"):
        made = trainer(
            tmp_path / mode, OnGPU(), gpt().to(DEVICE), compile=mode, precision="float32", steps=12, deterministic=True
        )
        made.fit()
        final[mode] = made.model.state_dict()
    start = gpt().state_dict()
    for name, expected in final["off"].items():
        moved = (expected.cpu() - start[name]).norm()
        assert (final["both"][name] - expected).norm().cpu() <= 1e-3 * moved + 1e-7, name


@pytest.mark.parametrize("chunk", [256, 1024])
def test_a_head_by_chunks_is_as_exact_as_with_all_logits(chunk):
    torch.manual_seed(0)
    x = torch.randn(1000, 64, device=DEVICE, requires_grad=True)
    weight = torch.randn(5003, 64, device=DEVICE, requires_grad=True)
    targets = torch.randint(0, 5003, (1000,), device=DEVICE)
    targets[::7] = IGNORE
    exact = torch.autograd.grad(token_loss(x.double() @ weight.double().mT, targets), (x, weight))
    errors = {}
    compiled = torch.compile(head_loss, dynamic=False)
    losses = {
        "plain": lambda: token_loss(functional.linear(x, weight), targets),
        "chunks": lambda: head_loss(x, weight, targets, chunk=chunk),
        "compiled": lambda: compiled(x, weight, targets, chunk=chunk),
    }
    for name, loss in losses.items():
        with torch.autocast("cuda", torch.bfloat16):
            found = torch.autograd.grad(loss(), (x, weight))
        errors[name] = [float((g - e).norm() / e.norm()) for g, e in zip(found, exact, strict=True)]
    for name in ("chunks", "compiled"):
        assert all(got <= 1.1 * plain for got, plain in zip(errors[name], errors["plain"], strict=True)), errors


@pytest.mark.parametrize("N", [3, 5003, 50_304])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_losses_and_the_gradient(N, smoothing, dtype):
    torch.manual_seed(0)
    logits = (5 * torch.randn(67, N, device=DEVICE)).to(dtype)
    targets = torch.randint(0, N, (67,), device=DEVICE)
    targets[5] = IGNORE
    logits[5] = torch.nan
    exact = logits.double().requires_grad_()
    want = functional.cross_entropy(
        exact, targets, ignore_index=IGNORE, reduction="none", label_smoothing=smoothing
    ).nan_to_num()
    (expected,) = torch.autograd.grad(want.sum(), exact)
    losses, gradient = losses_and_gradient(logits, targets, IGNORE, smoothing, True)
    assert gradient.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(losses.double(), want, rtol=1e-5, atol=1e-5)
    rounding = 2**-8 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(gradient.double(), expected.nan_to_num(), rtol=rounding, atol=1e-6)


def test_captured_steps_of_muon_learn_what_plain_ones_do(tmp_path):
    """Its rate has to be read from the device in each step, and its polynomial is captured with it."""
    final = {}
    for mode in ("off", "graph"):
        made = trainer(
            tmp_path / mode, OnGPU(), gpt().to(DEVICE), compile=mode, optimizer="muon", steps=12, deterministic=True
        )
        made.fit()
        final[mode] = made.model.state_dict()
    start = gpt().state_dict()
    for name, expected in final["off"].items():
        moved = (expected.cpu() - start[name]).norm()
        assert (final["graph"][name] - expected).norm().cpu() <= 1e-2 * moved + 1e-7, name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_waits_for_nothing(optimizer, tmp_path):
    made = trainer(tmp_path / "run", OnGPU(), gpt().to(DEVICE), compile="off", optimizer=optimizer, steps=12)
    made.model.train()
    for _ in range(3):
        made._step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            made._step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
