"""The page beyond weights: lengths handed on, several heads in one matrix, and the next token."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from lens_window import drawn, gpt, holds, number

from regard.lens import record
from regard.lens.recording.overview import add_overview
from regard.lens.trace.trace import Trace

TEXT = "The dog ran, the dog sat"
COLOURS = (Path(__file__).parents[2] / "web/src/colour.ts").read_text("utf-8")
HUES = re.findall(r"#\w{6}", re.search(r"HUES = {\s*light: (.*?)\]", COLOURS)[1])
PIXELS = """() => {
  const c = document.querySelector(".stage canvas");
  return [...c.getContext("2d").getImageData(0, 0, c.width, c.height).data];
}"""


@pytest.mark.browser
def test_a_cell_shows_how_much_is_handed_on(window):
    trace = record(gpt(), TEXT)
    attended = trace.recordings[0].attention(1)
    attended.vo[:, 1::2] *= 1e-5  # what every second key hands on is next to nothing
    shown = window(trace, "view=head&a=1&h=2&show=length&i=9&j=4&fixed=true")
    expected = float(trace.weights(1, 2)[9, 4].abs() * attended.vo[2, 4])
    said = shown.page.locator(".readout").inner_text()
    assert number(re.search(r"length handed on ([\d.e−]+)", said)[1]) == pytest.approx(expected, rel=0.02, abs=1e-5)
    assert "‖weight · v · Wₒ‖" in shown.page.locator(".legend").text_content()
    assert "lengths handed on" in shown.page.locator(".about").inner_text()
    # Numbers stay within their cells, however small: 2.13e−5 beside 1.82 would not.
    shown.show("view=head&a=1&h=2&show=length&zoom=0-9,0-9")
    written = shown.page.locator(".numbers text").all_text_contents()
    assert written and not any("e" in text for text in written)
    wide = shown.page.locator(".numbers").evaluate("g => Math.max(...[...g.children].map(x => x.getBBox().width))")
    assert wide < shown.page.locator(".stage canvas").bounding_box()["width"] / 9


@pytest.mark.browser
def test_gradients_stand_in_all_cells_with_as_many_decimals_or_in_none(window):
    """Numbers above zero are shorter than those below: written where they fit they would be half of the picture."""
    shown = window(record(gpt(), TEXT, gradient=True))
    counts = []
    for end in (4, 14):
        values, _, _ = shown.show(f"view=head&a=1&h=2&show=gradient&zoom=0-{end},0-{end}").cells()
        written = shown.page.locator(".numbers text").all_text_contents()
        counts.append(len(written))
        assert len(written) in (0, int((~values.isnan()).sum()))
        assert not any("e" in text for text in written)
        assert len({len(text.partition(".")[2]) for text in written}) <= 1
    assert counts[0] > 0
    words = shown.page.locator(".legend .tick")
    boxes = [box for box in (x.bounding_box() for x in words.all()) if box and box["width"]][:5]
    ends = sorted((box["x"], box["x"] + box["width"]) for box in boxes if box["y"] == boxes[0]["y"])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))  # and the legend's words keep apart


@pytest.mark.browser
def test_nearly_even_weights_have_the_digits_that_tell_them_apart(window):
    recording = drawn(12, 1, causal=False)
    attended = recording.attentions[0]
    attended.q, attended.n = 0.02 * attended.q, None
    add_overview(recording, attended)
    shown = window(Trace([recording]), "view=head")
    shown.page.locator(".numbers").wait_for()
    written = [float(x) for x in shown.page.locator(".numbers text").all_text_contents()]
    assert written == pytest.approx(recording.weights(0, 0).flatten().tolist(), abs=6e-4) and len(set(written)) > 3


@pytest.mark.browser
def test_several_heads_have_a_stripe_each(window):
    recording = drawn(6, 3, causal=True)
    weights = [recording.weights(0, n) for n in range(3)]
    clear = int(torch.stack(weights)[:, 5].amin(0).argmax())  # a key to which all three give some weight
    shown = window(Trace([recording]), f"view=head&h=0&over=0.1 0.2&i=5&j={clear}&fixed=true")
    shown.until("document.querySelector('.stage canvas').width === 18")
    hues = [[int(c[n : n + 2], 16) for n in (1, 3, 5)] for c in HUES]
    legends = [x.locator("text").all_text_contents() for x in shown.page.locator(".legends > .legend > svg").all()]
    assert [words[0] for words in legends] == [f"Layer 0, head {n}: weight" for n in range(3)]
    ends = [words[3].removeprefix("≥ ") for words in legends]
    assert len(set(ends)) == 1  # one scale for all
    most = float(ends[0])
    pixels = torch.tensor(shown.page.evaluate(PIXELS)).view(6, 18, 4)
    for i, j in ((5, 3), (4, 1), (2, 2)):
        for n in range(3):
            got = pixels[i, 3 * j + n].tolist()
            share = min(1.0, float(weights[n][i, j]) / most)
            wanted = [255 + (c - 255) * share for c in hues[n]]  # from white to the hue, as from nothing to the end
            assert got[:3] == pytest.approx(wanted, abs=3), (i, j, n)
    assert int(pixels[0, 15, 3]) == 0  # what the mask hides stays hatched
    said = shown.page.locator(".readout").inner_text()
    for n in range(3):
        assert holds(re.search(rf"head {n} ([\d.]+)", said)[1], float(weights[n][5, clear]))
    shown.page.get_by_role("button", name="Without layer 0, head 1").click()
    shown.until("document.querySelector('.stage canvas').width === 12")


@pytest.mark.browser
def test_the_next_token_and_what_adds_up_to_it(window):
    trace = record(gpt(), TEXT)
    found = trace.recordings[0].predictions
    shown = window(trace)
    page = shown.page
    page.keyboard.press("8")
    page.wait_for_selector(".lens-grid")
    page.get_by_label("The text").locator(".tok").nth(7).click()
    page.wait_for_selector(".said h3:has-text('(7)')")
    order = found.logits[7].argsort(descending=True)
    rows = page.locator(".said .best li")
    logits = [number(x.locator(".n").inner_text().split("·")[1].strip()) for x in rows.all()]
    assert logits == pytest.approx(found.logits[7][order].tolist(), abs=6e-3)
    second = int(order[1])
    rows.nth(1).locator("button").click()
    page.wait_for_selector(".said .best li:nth-child(2).on")
    line = page.locator(".grow > .note").inner_text()
    heads, mlps, total = (number(re.search(rf"{x} (−?[\d.]+)", line)[1]) for x in ("heads", "MLPs", "logit"))
    assert heads == pytest.approx(float(sum(x[7, second].sum() for x in found.heads)), abs=6e-3)
    assert mlps == pytest.approx(float(found.rest[7, second, 1:-1].sum()), abs=6e-3)
    assert total == pytest.approx(float(found.logits[7, second]), abs=6e-3)
    assert page.locator(".parts .open").count() == 8
    tip = page.locator(".parts .open title").nth(5).text_content()
    assert number(tip.split(": ")[1]) == pytest.approx(float(found.heads[1][7, second, 1]), rel=6e-3, abs=1e-4)
    page.locator(".parts .open").nth(5).click()
    page.wait_for_selector("section[aria-label='One head']")
    assert page.locator("main h2").inner_text() == "Layer 1, head 1"
    page.go_back()
    page.wait_for_selector(".lens-grid")


@pytest.mark.browser
def test_a_trace_without_predictions_says_how_to_get_them(window):
    shown = window(record(gpt(), TEXT, contributions=False))
    shown.page.keyboard.press("8")
    shown.page.wait_for_selector("text=--contributions")
    assert shown.page.locator(".lens-grid").count() == 0
    shown.page.keyboard.press("2")
    shown.page.wait_for_selector("section[aria-label='One head']")
    assert shown.page.get_by_label("show", exact=True).count() == 0
