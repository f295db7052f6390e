"""The lens draws weights alone, such as those of anybody's function."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import lens
from regard.errors import OptionError, ShapeError


def test_weights_of_a_function_as_a_page(tmp_path):
    q, k = torch.randn(2, 1, 3, 70, 8)
    weights = regard.weights_of(scaled_dot_product_attention, q, k, is_causal=True)
    words = [f"w{i}" for i in range(70)]
    trace = lens.trace_of_weights(weights, words, name="sdpa")
    path = tmp_path / "weights.lens"
    trace.save(path)
    opened = lens.load(path)
    for head in range(3):  # tiles of 64 rows, in float16
        torch.testing.assert_close(opened.weights(0, head), weights[0, head], atol=5e-4, rtol=0)
    assert opened.recordings[0].sequences[0].tokens == words
    lens.write_page(trace, tmp_path / "page.html")
    assert "sdpa" in (tmp_path / "page.html").read_text("utf-8")
    assert "<iframe" in lens.show(trace)._repr_html_()


def test_other_keys_than_queries():
    trace = lens.trace_of_weights(torch.full((2, 3, 5), 0.2), keys=list("abcde"))
    assert trace.recordings[0].weights(0, 1, kind="cross").shape == (3, 5)


def test_what_cannot_be_drawn():
    with pytest.raises(ShapeError, match="expected"):
        lens.trace_of_weights(torch.ones(3, 3))
    with pytest.raises(OptionError, match="2 names for 3"):
        lens.trace_of_weights(torch.ones(1, 3, 3), ["a", "b"])
    with pytest.raises(OptionError, match="NaN"):
        lens.trace_of_weights(torch.full((1, 2, 2), float("nan")))
