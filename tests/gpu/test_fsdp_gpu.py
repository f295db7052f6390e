"""FSDP2 in a single process over nccl: it learns what the plain model does."""

import pytest
import torch
from one_process import assert_close, process_group, trained_weights
from training import gpt

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _a_gpu():
    if not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device, and there is none")


def test_one_process_that_shards_learns_the_same(tmp_path):
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    with process_group("cpu:gloo,cuda:nccl"):
        sharded = trained_weights(tmp_path / "sharded", True, device)
    plain = trained_weights(tmp_path / "plain", False, device)
    start = gpt().state_dict()
    assert any(not torch.equal(x, start[name]) for name, x in plain.items())
    assert_close(sharded, plain, 1e-5)
