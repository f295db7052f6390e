"""Where memory runs out, the error is regard's: it says what was asked for, and what to lower."""

import pytest
import torch
from training import gpt

import regard
from regard.devices import explain_memory
from regard.errors import ResourceError
from regard.mechanisms import Softmax
from regard.train import recipe as recipes
from regard.train.stage import train

HUGE = 1 << 58  # bytes, which no machine has


def test_out_of_memory_says_what_was_asked_for_and_what_to_lower():
    with (
        pytest.raises(ResourceError, match=r"out of memory while trying: .* asked for. Lower it"),
        explain_memory("trying", "Lower it"),
    ):
        torch.zeros(HUGE, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"another"), explain_memory("trying", "Lower it"):
        raise RuntimeError("another")


def test_attention_over_more_than_there_is():
    q = torch.zeros(1, 1, 1, 8).expand(1, 1, 10**7, 8)
    with pytest.raises(ResourceError, match=r"attending with q \[1, 1, 10000000, 8\], .* 400000000000000 bytes"):
        regard.attend(q, q, q, softcap=3.0)


def test_attention_that_fails_for_another_reason_says_so():
    class Broken(Softmax):
        def forward(self, q, k, v, mask):
            raise RuntimeError("another")

    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(RuntimeError, match=r"another") as raised:
        regard.attend(q, q, q, Broken())
    assert not isinstance(raised.value, ResourceError)


def fill_memory(*given, **named):
    torch.zeros(HUGE, dtype=torch.uint8)


def test_generating_with_too_little_memory(monkeypatch):
    model = gpt()
    monkeypatch.setattr("regard.generate.decode._make_sampler", fill_memory)
    with pytest.raises(ResourceError, match=r"while generating: .* asked for. Lower max_tokens"):
        regard.generate(model, [1, 2], max_tokens=2)


def test_recording_with_too_little_memory(monkeypatch):
    model = gpt()
    monkeypatch.setattr(model, "forward", fill_memory)
    with pytest.raises(ResourceError, match=r"while recording: .* asked for. Give a shorter text"):
        regard.lens.record(model, [1, 2])


def training_text(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 50)
    return f"data.text={tmp_path / 'text.txt'}"


def test_a_model_that_cannot_fit_is_refused_before_it_is_built(tmp_path):
    sizes = ["model.width=65536", "model.layers=64", "model.attention.heads=8"]
    recipe = recipes.load("lm", [training_text(tmp_path), *sizes])
    with pytest.raises(ResourceError, match=r"[\d,.]+ GB are needed, and cpu has [\d,.]+ GB free. Lower model.width"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_that_cannot_be_had_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.train.stage._build_seeded", fill_memory)
    recipe = recipes.load("lm", [training_text(tmp_path), "model.layers=1"])
    with pytest.raises(ResourceError, match=r"while training: .* asked for. Lower train.batch"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
