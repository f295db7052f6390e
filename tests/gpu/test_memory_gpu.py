"""Where the memory of a GPU runs out, the error is regard's, and afterwards the device is as good as before."""

import subprocess
import sys

import pytest
import torch

import regard
from regard.errors import ResourceError

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _a_gpu():
    if not torch.cuda.is_available():
        pytest.fail("these tests need a CUDA device, and there is none")


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"mechanism": "argmax"}])
def test_attention_over_more_than_there_is(options):
    q = torch.zeros(1, 1, 1, 64, device="cuda").expand(16, 16, 1 << 19, 64)
    with pytest.raises(ResourceError, match=r"attending with q \[16, 16, 524288, 64\], .* asked for\. Lower") as raised:
        regard.attend(q, q, q, **options)
    print(options, raised.value)
    small = torch.ones(1, 1, 8, 64, device="cuda")
    torch.testing.assert_close(regard.attend(small, small, small), small)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ("model.width=65536 model.layers=1024 model.attention.heads=8", "Lower model.width"),
        ("model.width=1024 model.layers=12 train.batch=1048576 train.steps=2", "Lower train.batch"),
    ],
)
def test_a_training_that_is_too_large(tmp_path, sizes, told):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    words = [sys.executable, "-m", "regard", "train", "lm", "data.text=text.txt", *sizes.split(), "--device", "cuda"]
    done = subprocess.run([*words, "--out", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    print(done.stderr)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "out of memory" in done.stderr and told in done.stderr
