"""How far the usual picture of a gated delta layer is from what it computes: docs/gated.md has the numbers."""

import json
import statistics
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from regard import Mask
from regard.mechanisms import mechanism, mix


@pytest.mark.parametrize(("bent", "missed", "elsewhere"), [(False, 0.18, 0.08), (True, 0.24, 0.11)])
def test_a_picture_without_what_is_erased_misses_the_output(bent, missed, elsewhere):
    torch.manual_seed(0)
    q = functional.normalize(torch.randn(2, 8, 256, 64), dim=-1)
    k = torch.randn(2, 8, 256, 64)
    if bent:
        k = functional.silu(k)
    k = functional.normalize(k, dim=-1)
    v = torch.randn(2, 8, 256, 64)
    gates = {"a": functional.logsigmoid(torch.randn(2, 8, 256) + 3), "b": torch.randn(2, 8, 256).sigmoid()}
    mask = Mask(causal=True)
    exact = mechanism("gated-delta")
    out = exact(q, k, v, mask, **gates)
    weights = exact.weights(q, k, mask, **gates)
    picture = mechanism("gated").weights(q, k, mask, **gates)
    assert float((mix(weights, v) - out).norm() / out.norm()) < 1e-6
    assert float((mix(picture, v) - out).norm() / out.norm()) == pytest.approx(missed, abs=0.01)
    other = picture.abs().argmax(-1) != weights.abs().argmax(-1)
    assert float(other.float().mean()) == pytest.approx(elsewhere, abs=0.01)


def test_the_page_says_what_was_measured_of_a_trained_model():
    root = Path(__file__).parents[2]
    latest = max((root / "benchmarks" / "results").glob("gated-pictures-cpu-*.json"))
    found = json.loads(latest.read_text())
    usual, moved = found["usual"], found["moved"]
    page = " ".join((root / "docs" / "gated.md").read_text().split())
    assert found["text"] in page and max(found["output"]) < 2e-7
    for said in (
        f"Of its {len(usual)} heads the matrix without the erase term misses the output by "
        f"{statistics.mean(usual):.0%} on average",
        f"half of them by more than {statistics.median(usual):.0%}; the least by {min(usual):.0%}, the worst by "
        f"{max(usual):.0%}",
        f"for {statistics.mean(moved):.0%} of the queries its largest weight is on another token, in the worst head "
        f"for {max(moved):.0%}",
    ):
        assert said in page
