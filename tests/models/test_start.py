"""How long it takes until a model is there: nothing is imported that opening one does not need."""

import subprocess
import sys

import torch

from regard.devices import without_values
from regard.models import GPT, GPTConfig, save

OPEN = """
import sys
from regard.models import load
load(sys.argv[1])
print("torch._dynamo" in sys.modules)
"""


def _config():
    return GPTConfig(vocabulary=11, layers=1, width=24)


def test_opening_a_model_leaves_pytorchs_compiler_alone(tmp_path):
    """It takes as long to import as torch itself."""
    save(GPT(_config()), tmp_path / "model")
    found = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path / "model")], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"


def test_tensors_without_values_have_shapes_and_draw_nothing():
    state = torch.random.get_rng_state()
    with without_values():
        model = GPT(_config())
        drawn = torch.nn.init.normal_(tensor=torch.empty(3, 4), std=0.5)
        assert torch.empty(2).normal_(0, 1).shape == (2,)
    assert drawn.is_meta and drawn.shape == (3, 4)
    assert all(x.is_meta for x in model.state_dict().values())
    assert torch.equal(torch.random.get_rng_state(), state)
    usual = GPT(_config()).state_dict()
    assert {name: x.shape for name, x in model.state_dict().items()} == {name: x.shape for name, x in usual.items()}
    assert (torch.nn.init.normal_(torch.zeros(9)) != 0).all()  # behind it, tensors are filled again
