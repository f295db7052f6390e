"""The page of gated and delta layers: weights, gates and memory are what torch computes, and signs have one colour."""

from __future__ import annotations

import re

import pytest
import torch
from lens_window import number
from memory_models import mamba, memory_gpt, qwen

from regard.data.tokenizers import Bytes
from regard.lens import Trace, record
from regard.models import Encoder

LARGE = 0.1  # of the largest weight: from here on the sign has to be seen
TEXT = list(b"The dog ran to the red dog.")
PIXELS = """() => {
  const c = document.querySelector(".stage canvas");
  return [c.width, c.height, [...c.getContext("2d").getImageData(0, 0, c.width, c.height).data]];
}"""

NUMBERS = """() => [...document.querySelectorAll(".numbers text")].map(x => [x.textContent, x.getBBox().width])"""


@pytest.fixture(scope="module")
def trace():
    models = (memory_gpt("gated-delta", {"channels": True}), mamba(), qwen(), memory_gpt("retention"))
    return Trace.joined(
        *(record(model, TEXT if model.__module__[:6] == "regard" else range(2, 29)) for model in models)
    )


def relative(got, want):
    return float((got.nan_to_num(0) - want).norm() / want.norm())


@pytest.mark.browser
def test_weights_are_torchs_and_hidden_cells_are_not_zero(window, trace):
    shown = window(trace)
    for r, a in ((0, 1), (1, 0), (2, 1), (3, 0)):
        attended = trace.recordings[r].attentions[a]
        head = attended.heads - 1
        values, _, _ = shown.show(f"view=head&r={r}&a={a}&h={head}").cells()
        wanted = trace.weights(a, head, recording=r)
        assert values.isnan().equal(torch.ones_like(wanted).triu(1).bool())
        assert relative(values, wanted) < 1e-5 and attended.missed["output"][head] < 1e-6
        said = shown.page.locator(".one-head > .note").first.inner_text()
        assert re.search(r"Weights @ v is what this head gave, to \de−0?[78] of its length", said)
        assert ("usual picture" in said) == attended.formula.erases


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_above_zero_is_blue_below_orange_and_zero_is_neither(window, trace, theme):
    a, h = next((a, h) for a in (0, 1) for h in range(4) if _has_both_signs(trace.weights(a, h)))
    shown = window(trace, f"view=head&a={a}&h={h}&theme={theme}")
    values, _, _ = shown.cells()
    width, height, data = shown.page.evaluate(PIXELS)
    assert (height, width) == values.shape
    red, _, blue, opaque = torch.tensor(data).view(height, width, 4).unbind(-1)
    assert (opaque > 0).equal(~values.isnan())
    large = values.abs() > LARGE * values.nan_to_num(0).abs().max()
    assert (blue > red)[large & (values > 0)].all() and (red > blue)[large & (values < 0)].all()


def _has_both_signs(weights):
    return min(weights.max(), -weights.min()) > 2 * LARGE * weights.abs().max()


@pytest.mark.browser
def test_the_memory_view_shows_what_is_held_and_until_when(window, trace):
    shown = window(trace)
    for r, a, h in ((0, 1, 2), (1, 0, 5), (2, 0, 3)):
        memory = trace.memory(a, h, recording=r)
        values, rows, _ = shown.show(f"view=memory&r={r}&a={a}&h={h}").cells()
        T = memory.k.shape[1]
        later = torch.ones(T, T).triu(1).bool()
        assert values.isnan().equal(later) and len(rows) == T
        assert relative(values, memory.answers()[0]) < 1e-5
        shown.page.get_by_label("shown").select_option("left")
        shown.settle()
        values, _, _ = shown.cells()
        assert values.isnan().equal(later) and relative(values, memory.left()[0]) < 1e-5
        ends = memory.ends()
        gone = ends.token[0] >= 0
        by_decay = int((ends.by_decay[0][gone] >= 0.5).sum())
        said = shown.page.locator(".memory > .note").first.inner_text()
        assert f"So it went with {int(gone.sum())} of {T} tokens" in said
        assert (
            f"({by_decay} mostly by decay, {int(gone.sum()) - by_decay} mostly overwritten)" in said or not gone.any()
        )
        assert shown.page.locator(".over .end").count() == int(gone.sum())


@pytest.mark.browser
def test_gates_stand_above_their_columns(window, trace):
    shown = window(trace, "view=memory&a=1&h=2")
    attended = trace.recordings[0].attentions[1]
    titles = shown.page.locator(".gates rect title").all_text_contents()
    said = torch.tensor([number(title.rsplit(" ", 1)[1]) for title in titles]).view(2, len(TEXT))
    assert torch.allclose(
        said[0], attended.a[2].exp().mean(-1), rtol=6e-3, atol=1e-6
    )  # one decay a channel: their mean
    assert torch.allclose(said[1], attended.b[2], rtol=6e-3)
    bars = shown.page.locator(".gates rect").evaluate_all("all => all.map(x => x.getBoundingClientRect().x)")
    canvas = shown.page.locator(".stage canvas").bounding_box()
    wanted = canvas["x"] + torch.arange(len(TEXT)) * canvas["width"] / len(TEXT)
    assert (torch.tensor(bars[: len(TEXT)]) - wanted).abs().max() < 3
    # A cell in words.
    shown.show("view=memory&a=1&h=2&i=20&j=7")
    answer, left = (float(x[0, 20, 7]) for x in (trace.memory(1, 2).answers(), trace.memory(1, 2).left()))
    said = shown.page.locator(".readout").inner_text()
    for value in (answer, left):
        assert f"{value:.2f}".replace("-", "−") in said or abs(value) < 0.005
    shown.show("view=memory&a=1&h=2&i=3&j=7")
    assert "has not met" in shown.page.locator(".readout").inner_text()
    shown.page.set_viewport_size({"width": 390, "height": 844})
    shown.until("document.documentElement.scrollWidth <= 390")


@pytest.mark.browser
def test_how_a_weight_comes_about_is_the_usual_picture_and_what_was_erased(window, trace):
    shown = window(trace, "view=vectors&a=0&h=1&i=20&j=15")
    memory = trace.memory(0, 1)
    row = torch.tensor([20])
    usual, exact = (float(m.weights(row)[0, 0, 15]) for m in (memory.without_erasing(), memory))
    assert number(shown.fact("+ what the delta rule erased in between")) == pytest.approx(exact - usual, rel=1e-3)
    strips = shown.page.locator("dl > div", has_text="× what decays since left").first.locator("dd").inner_text()
    assert number(strips) == pytest.approx(usual, rel=1e-3)


@pytest.mark.browser
def test_only_recordings_with_a_memory_have_the_view(window):
    softmax = record(memory_gpt("softmax"), TEXT)
    shown = window(softmax)
    assert shown.page.locator("nav .tab").all_text_contents()[-2:] == ["Layers", "Next token"]
    shown.page.goto(f"{shown.uri}#view=memory")
    shown.page.locator(".memory .how", has_text="it keeps keys and values and no memory that fades").wait_for()
    both = window(Trace.joined(softmax, record(memory_gpt(("gated", "softmax")), TEXT)), "view=memory&r=1&a=0")
    assert both.page.locator("nav .tab").all_text_contents()[-1] == "Memory"


@pytest.mark.browser
def test_an_encoder_has_no_tab_for_the_next_token(window):
    torch.manual_seed(0)
    encoder = Encoder.preset("nano", vocabulary=256, layers=1)
    encoder.tokenizer = Bytes()
    shown = window(record(encoder, TEXT))
    assert shown.page.locator("nav .tab").all_text_contents()[-2:] == ["Positions", "Layers"]
    shown.page.goto(f"{shown.uri}#view=next")
    shown.page.locator("main .quiet", has_text="it does not say what comes next").wait_for()


@pytest.mark.browser
def test_small_weights_by_distance_have_digits_that_hold_and_fit_their_cells(window, trace):
    """Means of weights that decay are as small as 1e-30: none of their digits would say anything, nor have room."""
    shown = window(trace, "view=positions&r=0&a=1")
    for r, a in ((0, 1), (2, 1)):
        values, _, columns = shown.show(f"view=positions&r={r}&a={a}&h=1").cells()
        written = shown.page.evaluate(NUMBERS)
        cell = shown.page.locator(".stage canvas").bounding_box()["width"] / len(columns)
        assert len(written) == values.numel() and max(width for _, width in written) < cell
        decimals = {len(text.partition(".")[2]) for text, _ in written}
        assert len(decimals) == 1 and not any("e" in text for text, _ in written)
        half = 0.5 * 10.0 ** -decimals.pop()
        said = torch.tensor([number(text) for text, _ in written]).view(values.shape)
        assert (said - values).abs().max() <= 1.001 * half and half <= 0.05 * values.abs().max()


@pytest.mark.browser
def test_a_weighted_value_has_as_many_digits_as_it_is_small(window):
    """‖weight · v‖ of a memory is stored without loss, so it is said beside a short value, too."""
    small = record(memory_gpt("gated-delta"), TEXT)
    attended = small.recordings[0].attentions[0]
    attended.v = 1e-3 * attended.v
    i, j = divmod(int(small.weights(0, 1).abs().argmax()), len(TEXT))
    shown = window(small, f"view=vectors&a=0&h=1&i={i}&j={j}")
    wanted = float(small.weights(0, 1)[i, j].abs() * attended.v[1, j].norm())
    assert number(shown.fact("‖weight·v‖")) == pytest.approx(wanted, rel=0.01)


@pytest.mark.browser
def test_the_text_beside_signed_weights_speaks_of_strong_colours(window, trace):
    shown = window(trace, "view=head&a=1&h=2")
    assert "the largest in the strongest colours" in shown.page.locator(".about").inner_text()
