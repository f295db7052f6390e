"""The page of the lens: what it shows is what torch computes, in a real browser, and no text in it can do anything."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import parse_qs

import pytest
import torch
from lens_window import drawn, gpt, holds, number

from regard import Seq2Seq
from regard.data.files import DataError
from regard.data.tokenizers import Bytes
from regard.lens import Trace, record
from regard.lens.pages.page import page, policy, write_page
from regard.lens.recording.overview import add_overview
from regard.lens.trace.format import encode
from regard.lens.trace.rules import MaskRules
from regard.report.palette import SHADES

STATIC = Path(__file__).parents[2] / "regard/lens/static"
WEB = Path(__file__).parents[2] / "web"
ALL = ("softmax", "elu", "quadratic", "performer", "fourier", "argmax", "synthesizer", "synthesizer-random")
VIEWS = ("heads", "head", "vectors", "compare", "masks", "positions", "layers")
TEXT, OTHER = "The dog ran to the red dog.", "The cat ran to the red cat!"


# Values


@pytest.mark.browser
def test_weights_of_every_mechanism_are_torchs(window):
    model = gpt(mechanism=ALL, layers=len(ALL), attention={"heads": 4, "groups": 4}, options={"features": 32})
    trace = record(model, TEXT)
    shown = window(trace)
    for layer, name in enumerate(ALL):
        assert trace.recordings[0].attention(layer).mechanism == name
        for head in (0, 3):
            values, rows, columns = shown.show(f"view=head&a={layer}&h={head}").cells()
            wanted = trace.weights(layer, head)
            hidden = torch.ones_like(wanted).triu(1).bool()
            assert values.isnan().equal(hidden), name
            assert (values.nan_to_num(0) - wanted).abs().max() < 2e-3, name
            assert len(rows) == len(columns) == len(TEXT)
    assert wanted.std() > 0.01  # not all alike


@pytest.mark.browser
def test_groups_windows_biases_and_cross_attention(window):
    torch.manual_seed(3)
    sizes = {"width": 24, "layers": 1, "length": 40, "attention": {"heads": 3}}
    both = Seq2Seq(vocabulary=256, encoder=sizes, decoder=sizes)
    both.tokenizer = Bytes()
    biases = {"slopes": torch.tensor([0.5, 0.1, 0.7]), "offsets": torch.randn(3, 2 * 17 - 1)}
    traces = [
        record(gpt(attention={"heads": 4, "groups": 2, "window": 5}), TEXT),
        Trace([drawn(17, 3, more=biases, softcap=1.5, causal=False, visible=[1] * 15 + [0] * 2)]),
        record(both, TEXT, target="Le chien"),
    ]
    shown = window(Trace.joined(*traces))
    for r, trace in enumerate(traces):
        recording = trace.recordings[0]
        for a, attended in enumerate(recording.attentions):
            values, _, _ = shown.show(f"view=head&r={r}&a={a}&h=2").cells()
            rows = torch.arange(len(recording.query_and_key_tokens(attended)[0]))
            assert (values.nan_to_num(0) - recording.head_weights(attended, [2], rows)[0]).abs().max() < 2e-3
            assert values.isnan().equal(~attended.rules.allowed(*recording.query_and_key_tokens(attended), rows))
            written = len(recording.sequences) > 1 and (attended.side, attended.kind) == ("decoder", "self")
            assert shown.page.locator(".reading h3").inner_text() == ("The decoder's text" if written else "The text")


@pytest.mark.browser
@pytest.mark.usefixtures("quantised")
@pytest.mark.parametrize("large", [0.1, 1e3])
def test_arrays_of_few_and_of_many_bits(window, large):
    """Scores that differ by little beside their size need many steps: their low bits are kept apart."""
    one = drawn(9, 1)
    attended = one.attentions[0]
    attended.q[..., 0], attended.k[..., 0] = large, 5.0  # the same for all keys, so it moves no weight
    attended.n = None
    add_overview(one, attended)
    arrays = encode(Trace([one])).header["recordings"][0]["attentions"][0]["arrays"]
    assert arrays["q"][0]["type"] == arrays["k"][0]["type"] == "step"
    values, _, _ = window(Trace([one]), "view=head").cells()
    assert (values.nan_to_num(0) - one.weights(0, 0)).abs().max() < 2e-3


@pytest.mark.browser
def test_words_sum_over_keys_and_average_over_queries_and_sinks_are_renormalised(window):
    words = ["[CLS]", "un", "box", "es", "the", "play", "."]
    starts, ends = [-1, 0, 2, 5, 8, 12, 16], [-1, 2, 5, 7, 11, 16, 17]
    one = drawn(
        words=words, text="unboxes the play.", starts=starts, ends=ends, special=[1, 0, 0, 0, 0, 0, 0], causal=False
    )
    trace = Trace([one])
    weights = trace.weights(0, 1)
    shown = window(trace, "view=head&h=1&words=true")
    values, rows, columns = shown.cells()
    assert rows == columns == ["[CLS]", "unboxes", "the", "play", "."]
    groups = [[0], [1, 2, 3], [4], [5], [6]]
    merged = torch.stack([weights[g].mean(0) for g in groups])
    merged = torch.stack([merged[:, g].sum(1) for g in groups], 1)
    assert torch.allclose(values, merged, atol=2e-3)
    values, _, _ = shown.show("view=head&h=1&sinks=true").cells()
    rest = weights[:, 1:] / weights[:, 1:].sum(1, keepdim=True)
    assert values[:, 0].isnan().all() and torch.allclose(values[:, 1:], rest, atol=4e-3)
    assert "these are not the model's weights" in shown.page.locator(".note").first.inner_text()


@pytest.mark.browser
def test_what_the_mouse_says_is_exact_also_where_dots_stand_for_many_cells(window):
    trace = Trace([drawn(1500, 1)])
    shown = window(trace, "view=head")
    assert "A dot shows the largest of" in shown.page.locator(".matrix .note").inner_text()
    box = shown.page.locator(".stage canvas").bounding_box()
    for x, y in ((0.1, 0.5), (0.33, 0.81), (0.72, 0.9)):
        shown.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        said = shown.page.locator(".readout").inner_text()
        i, j = (int(n) for n in re.findall(r"\((\d+)\)", said))
        assert holds(re.search(r"weight (\S+?),", said)[1], trace.weights(0, 0, [i])[0, j].item())
    # A zoomed part has single cells, and they are the same.
    values, rows, _ = shown.show("view=head&zoom=700-720,690-705").cells()
    assert rows[0] == "t700" and values.shape == (20, 15)
    assert torch.allclose(values.nan_to_num(0), trace.weights(0, 0, range(700, 720))[:, 690:705], atol=2e-3)


RED = """() => {
  const c = document.querySelector(".stage canvas");
  const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  return [c.width, c.height, data.filter((_, n) => n % 4 === 0).reduce((s, x) => s + String.fromCharCode(x), "")];
}"""


@pytest.mark.browser
def test_a_dot_is_the_largest_or_the_mean_of_its_cells(window):
    T = 900
    trace = Trace([drawn(T, 1, causal=False)])
    shown = window(trace)
    weights = trace.weights(0, 0)
    for pool in ("max", "mean"):
        C, R, text = shown.show(f"view=head&pool={pool}&scale=log").page.evaluate(RED)
        red = torch.tensor([float(ord(c)) for c in text])  # falls as weight grows
        row = torch.bucketize(torch.arange(T), torch.arange(R) * T // R, right=True) - 1
        place = (row[:, None] * C + torch.arange(T)[None] * C // T).flatten()
        how = "amax" if pool == "max" else "mean"
        dots = torch.zeros(R * C).scatter_reduce(0, place, weights.flatten(), how, include_self=False)
        share = (1 + dots.log10() / 4).clamp(0, 1)  # from 0.0001 to 1, whatever the head
        at = (share * 255).round() / 255 * 5  # six colours at even distances
        low = at.floor().clamp(max=4).long()
        stops = torch.tensor([0xFF, 0xD3, 0x86, 0x2F, 0x0C, 0x04]).float()
        wanted = stops[low] + (stops[low + 1] - stops[low]) * (at - low)
        assert ((red - wanted).abs() <= 3).float().mean() > 0.999, pool


@pytest.mark.browser
def test_vectors_say_how_a_weight_comes_about(window):
    trace = record(gpt(), TEXT, OTHER)
    recording = trace.recordings[0]
    attended = recording.attention(1)
    i, j, head = 20, 4, 3
    q, k, v = attended.q[head][i], attended.k[1][j], attended.v[1][j]
    weight = trace.weights(1, head, [i])[0, j]
    shown = window(trace, f"view=vectors&a=1&h={head}&i={i}&j={j}")
    assert number(shown.fact("q·k")) == pytest.approx((q @ k).item(), rel=2e-2, abs=2e-2)
    assert holds(shown.fact("weight = exp of the sum"), weight.item())
    assert number(shown.fact("‖v‖")) == pytest.approx(v.norm().item(), rel=1e-2)
    assert holds(shown.fact("‖weight·v‖"), (weight * v.norm()).item())
    output = trace.weights(1, head, [i])[0] @ attended.v[1]
    assert number(shown.fact("‖output of the head‖")) == pytest.approx(output.norm().item(), rel=2e-2)
    assert shown.fact("mask") == "lets it through"
    shown.show(f"view=vectors&a=1&h={head}&i=4&j=20")
    assert shown.fact("mask") == "hides it: the key comes later than the query"
    assert number(shown.fact("weight = exp of the sum")) == 0
    # The same token in the other text: q, k and v of both, and how alike they are.
    there = trace.recordings[1].attention(1)
    shown.show(f"view=vectors&a=1&h={head}&i=2&j=0&elsewhere=1:2")
    cosine = torch.nn.functional.cosine_similarity(attended.q[head][2], there.q[head][2], dim=0)
    said = shown.page.locator(".vector", has_text="cosine").first.inner_text()
    assert number(re.search(r"cosine (\S+),", said)[1]) == pytest.approx(cosine.item(), abs=2e-2)


@pytest.mark.browser
def test_gradients_of_the_loss_beside_the_weights(window):
    trace = record(gpt(), TEXT, gradient=True)
    shown = window(trace, "view=head&a=1&h=2&show=gradient")
    values, _, _ = shown.cells()
    wanted = trace.gradient(1, 2)
    assert (values.nan_to_num(0) - wanted).abs().max() < 3e-2 * wanted.abs().max()


@pytest.mark.browser
def test_comparing_subtracts_what_stands_for_the_same_characters(window):
    """ "The cat" and "The dog" share all but three letters; bytes against words share their spans."""
    trace = record(gpt(), TEXT, OTHER)
    shown = window(trace, "view=compare&a=1&h=1")
    values, rows, _ = shown.cells()
    a, b = trace.weights(1, 1), trace.weights(1, 1, recording=1)
    both = [n for n, (x, y) in enumerate(zip(TEXT, OTHER, strict=True)) if x == y]
    # Words that differ stand alone on either side: 3 + 3 letters twice, and the last sign.
    assert len(rows) == len(both) + 2 * (len(TEXT) - len(both))
    kept = [n for n in range(len(rows)) if not values[n].isnan().all()]
    assert len(kept) == len(both)
    wanted = (b - a)[both][:, both]
    assert (values[kept][:, kept].nan_to_num(0) - wanted).abs().max() < 4e-3
    told = shown.page.locator(".note", has_text="Jensen").inner_text()
    mean = number(re.search(r"Mean (\d\.\d+)", told)[1])
    assert mean == pytest.approx(_divergence(a, b, both), abs=5e-3)
    # What goes to letters that only one side has is counted apart.
    left, right = (100 * (1 - x[both][:, both].sum(1)).mean().item() for x in (a, b))
    told = shown.page.locator(".note", has_text="only one side").inner_text()
    assert [int(n) for n in re.findall(r"(\d+)%", told)] == pytest.approx([left, right], abs=0.8)
    # A cursor on the left is one on the right, at the same characters.
    left = shown.page.locator(".three-up .stage canvas").first
    box = left.bounding_box()
    n = len(TEXT)
    shown.page.mouse.move(box["x"] + 1.5 * box["width"] / n, box["y"] + 9.5 * box["height"] / n)
    said = [r.inner_text() for r in shown.page.locator(".readout").all()]
    assert all("(9)" in x and "(1)" in x for x in said[:2]) and "difference" in said[2]


def _divergence(a, b, both):
    """Mean Jensen–Shannon divergence in bits of aligned rows, over the keys that both have, each divided by its sum."""
    total = 0.0
    for i in both:
        p, q = (x[i][both].double() / x[i][both].double().sum() for x in (a, b))
        m = (p + q) / 2
        total += sum(0.5 * torch.where(x > 0, x * (x / m).log2(), 0).nan_to_num(0).sum().item() for x in (p, q))
    return total / len(both)


@pytest.mark.browser
def test_two_tokenizers_meet_where_their_boundaries_do(window):
    text, none = "unboxes the play", [-1]
    words, rest = ["un", "box", "es", "the", "play", "[SEP]"], ["[CLS]", "unbox", "es", "the play", "[SEP]"]
    fine = drawn(words=words, text=text, starts=[0, 2, 5, 8, 12, *none], ends=[2, 5, 7, 11, 16, *none], label="a")
    rough = drawn(words=rest, text=text, starts=[*none, 0, 5, 8, *none], ends=[*none, 5, 7, 16, *none], label="b")
    values, rows, _ = window(Trace([fine, rough]), "view=compare").cells()
    assert rows == ["[CLS]", "unbox", "es", "the play", "[SEP]"]
    assert values[0].isnan().all() and values[:, 0].isnan().all()
    a, b = fine.weights(0, 0), rough.weights(0, 0)
    here = torch.stack([a[:, [0, 1]].sum(1), a[:, 2], a[:, [3, 4]].sum(1), a[:, 5]], 1)
    here = torch.stack([here[:2].mean(0), here[2], here[3:5].mean(0), here[5]])
    assert (values[1:, 1:].nan_to_num(0) - (b[1:, 1:] - here)).abs().max() < 4e-3


@pytest.mark.browser
def test_masks_name_the_reason(window):
    one = drawn(8, 1, visible=[0, 1, 1, 1, 1, 1, 1, 1])
    attended = one.attentions[0]
    attended.rules, attended.n = MaskRules(True, window=3), None
    add_overview(one, attended)
    shown = window(Trace([one]), "view=masks")
    values, _, _ = shown.cells()
    wanted = attended.rules.reasons(*one.query_and_key_tokens(attended), torch.arange(8))
    assert values.int().equal(wanted.int())
    keys = shown.page.locator(".key").inner_text()
    assert "padding" in keys and "later" in keys and "outside the window" in keys
    shown.page.locator(".stage").focus()
    shown.page.keyboard.press("ArrowDown")
    assert "does not see “t0” (0): the key is padding" in shown.page.locator(".readout").inner_text()


@pytest.mark.browser
def test_positions_and_layers(window):
    trace = record(gpt(), TEXT)
    shown = window(trace, "view=positions&a=1&h=2")
    values, rows, columns = shown.cells()
    weights = trace.weights(1, 2)
    before = weights.diagonal(-1).mean().item()
    assert values[2, columns.index("−1")].item() == pytest.approx(before, abs=2e-3)
    assert rows == [f"head {n}" for n in range(4)] and columns[-1] == "0"
    shown.show("view=layers")
    assert shown.page.locator(".dot").count() == 5 * 8
    shown.page.locator(".dots").nth(2).locator(".dot").nth(6).dispatch_event("click")
    shown.settle()
    assert shown.page.locator("h2").first.inner_text() == "Layer 1, head 2"


# Using it


@pytest.fixture(scope="module")
def labelled():
    trace = record(gpt(), TEXT, OTHER)
    score = {"score": 0.8, "baseline": 0.1, "low": 0.6, "high": 0.75}
    low = {"score": 0.12, "baseline": 0.1, "low": -0.1, "high": 0.1}
    for recording in trace.recordings:
        recording.labels = [
            {
                "attention": n // 4, "head": n % 4, "label": "previous" if n == 5 else "mixed", "low": 0.6,
                "effect": 0.7 if n == 5 else 0.02, "high": 0.75, "scores": {"previous": score if n == 5 else low},
            }
            for n in range(8)
        ]  # fmt: skip
    return trace


@pytest.mark.browser
def test_heads_sort_filter_and_walk_by_keyboard(window, labelled):
    shown = window(labelled)
    page = shown.page
    assert page.locator(".thumb").count() == 8
    page.get_by_label("label", exact=True).select_option("previous")
    shown.settle()
    assert [x.get_attribute("data-k") for x in page.locator(".thumb").all()] == ["1.1"]
    page.get_by_label("label", exact=True).select_option("")
    page.get_by_label("sort by").select_option("entropy")
    entropy = [x for a in labelled.recordings[0].attentions for x in a.figures["entropy"]]
    order = sorted(range(8), key=lambda n: -entropy[n])
    assert [x.get_attribute("data-k") for x in page.locator(".thumb").all()] == [f"{n // 4}.{n % 4}" for n in order]
    page.get_by_label("sort by").select_option("place")
    page.locator('[data-k="0.0"]').focus()
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert "Layer 1, head 1" in page.locator(".info").inner_text() and "previous" in page.locator(".info").inner_text()
    page.keyboard.press("Enter")
    shown.settle()
    assert page.locator("h2").first.inner_text() == "Layer 1, head 1"
    page.locator(".stage").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    weight = labelled.weights(1, 1, [2])[0, 1].item()
    said = page.locator(".readout").inner_text()
    assert holds(re.search(r"weight (\S+?),", said)[1], weight)
    page.keyboard.press("]")
    shown.settle()
    assert page.locator("h2").first.inner_text() == "Layer 1, head 2"
    page.keyboard.press("?")
    assert page.locator("dialog[open]").get_attribute("aria-label") == "Keys"
    page.keyboard.press("Escape")
    for n, name in enumerate(("All heads", "One head", "Vectors", "Compare", "Masks", "Positions", "Layers"), 1):
        page.keyboard.press(str(n))
        shown.settle()
        assert page.locator("main > section").get_attribute("aria-label") == name


@pytest.mark.browser
def test_the_address_restores_the_state(window, labelled):
    shown = window(labelled)
    page = shown.page
    page.locator('[data-k="1.3"]').click()
    shown.settle()
    page.get_by_label("colours", exact=True).select_option("log")
    page.get_by_label("hide sinks").check()
    page.locator('.arcs [data-k="to 7"]').click()
    page.locator("input[type=range]").fill("0.2")
    shown.until("location.hash.includes('threshold=0.2')")
    address = page.evaluate("location.hash")
    asked = {key: value[0] for key, value in parse_qs(address.lstrip("#")).items()}
    assert asked == {
        "view": "head", "a": "1", "h": "3", "i": "7", "fixed": "true", "scale": "log", "sinks": "true",
        "threshold": "0.2",
    }  # fmt: skip
    before = page.locator("main").inner_text(), shown.save("SVG")[0]
    shown.show(address.lstrip("#"))
    assert (page.locator("main").inner_text(), shown.save("SVG")[0]) == before
    # An address that makes no sense shows the beginning, not an error.
    shown.show("view=nonsense&r=99&a=-3&h=zzz&zoom=9-1,x&theme=pink&i=9999999&__proto__=1")
    assert page.locator(".thumb").count() == 8


@pytest.mark.browser
def test_light_dark_and_narrow(window, labelled):
    ground = "getComputedStyle(document.querySelector('.lens')).backgroundColor"
    shown = window(labelled, "view=head", color_scheme="dark")
    assert shown.page.evaluate(ground) == "rgb(18, 21, 26)"
    shown.page.keyboard.press("t")
    assert shown.page.evaluate(ground) == "rgb(244, 245, 247)"
    shown.settle()
    first = "document.querySelector('.stage canvas').getContext('2d').getImageData(1, 0, 1, 1).data[3]"
    assert shown.page.evaluate(first) == 0  # hidden: nothing is painted, and the hatching behind shows
    shown.page.set_viewport_size({"width": 390, "height": 800})
    for view in VIEWS:
        shown.show(f"view={view}")
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= 390, view


NAMELESS = """() => {
  const all = document.querySelectorAll("button, select, input, textarea, [role=application], [role=img]");
  const name = (e) => e.getAttribute("aria-label") || e.textContent.trim() || e.closest("label")?.textContent.trim();
  return [...all].filter((e) => !e.hidden && !name(e)).map((e) => e.outerHTML);
}"""


@pytest.mark.browser
def test_everything_has_a_name_and_a_table(window, labelled):
    """Each control says what it is, each matrix can be read as a table."""
    shown = window(labelled)
    for view in VIEWS:
        shown.show(f"view={view}&a=1&h=1&i=5&j=2")
        nameless = shown.page.evaluate(NAMELESS)
        assert nameless == [], view
        assert shown.page.evaluate("document.querySelectorAll('[style*=\"url\"]').length") == 0
    shown.show("view=head&a=1&h=1")
    shown.page.locator("details summary").click()
    cell = shown.page.locator("details tbody tr").nth(3).locator("td").nth(1).inner_text()
    assert holds(cell, labelled.weights(1, 1, [3])[0, 1].item())


# Saving


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.mark.slow
@pytest.mark.browser
def test_saved_files_parse_and_hold_what_is_shown(window, labelled):
    shown = window(labelled)
    for view in VIEWS:
        shown.show(f"view={view}&a=1&h=1&i=5&j=2&fixed=true")
        svg, name = shown.save("SVG")
        assert name.endswith(".svg")
        tree = ElementTree.fromstring(svg)
        width = float(tree.get("width"))
        assert "foreignObject" not in svg.decode() and width > 300
        words = ["".join(x.itertext()) for x in tree.iter("{http://www.w3.org/2000/svg}text")]
        assert len(words) > 3, view
        if view == "head":
            cells = [r for r in tree.iter("{http://www.w3.org/2000/svg}rect") if r.get("fill", "").startswith("#")]
            n = len(TEXT)
            assert len(cells) >= n * (n + 1) / 2  # vectors, not dots
            assert "url(#ground)" in svg.decode()  # what is hidden is hatched
            assert any("Layer 1, head 1" in w for w in words) and any("weight" in w for w in words)
        png, _ = shown.save("PNG")
        assert png[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(png[16:20], "big") == round(2 * width)
        raw, _ = shown.save("CSV")
        table = list(csv.reader(io.StringIO(raw.decode("utf-8-sig"))))
        assert len({len(row) for row in table}) <= 2 and len(table) > 2


@pytest.mark.browser
def test_a_finding_is_a_page_with_picture_text_and_note(window, labelled, tmp_path, chromium):
    shown = window(labelled, "view=head&a=1&h=1&i=5&j=2&fixed=true")
    note = "It looks back </p><script>alert(1)</script>\nsecond line"
    raw, name = shown.save("Finding", note)
    assert name == "layer-1-head-1-of-gpt.html"
    found = _Tags()
    found.feed(raw.decode())
    assert "script" not in found.tags and "svg" in found.tags and note in found.text
    assert TEXT in found.text and "weight" in found.text
    place = tmp_path / "finding.html"
    place.write_bytes(raw)
    other = chromium.new_page()
    said = []
    other.on("console", lambda m: said.append(m.text))
    other.on("dialog", lambda d: said.append(d.message))
    other.goto(place.as_uri())
    assert (
        other.locator("blockquote").inner_text() == note and other.locator("svg").first.bounding_box()["height"] > 100
    )
    other.close()
    assert said == []


# Safety


HOSTILE = [
    "</script><img src=x onerror=alert(1)>", "<script>alert(1)</script>", "<!--<script>", "-->", "]]>", "<![CDATA[",
    '"><svg onload=alert(1)>', "' onmouseover='alert(1)", "javascript:alert(1)", "&lt;b&gt;", "&#x3c;b&#x3e;", "{{1}}",
    "${alert(1)}", "`${alert(1)}`", "\\u003cscript\\u003e", "\u2028alert(1)\u2029", "\x00\x01\x02", "\U0001f600",
    "\u202ereversed", "</style><style>*{display:none}</style>", "<iframe srcdoc='<script>alert(1)</script>'>", "=1+1",
    "<math><mi//xlink:href='data:x'>", "<a href=//evil.example>x</a>", "<base href=//evil.example/>", "@SUM(A1)",
    "<meta http-equiv=refresh content=0>", "</title><script>alert(1)</script>", "__proto__", "constructor", "\r\n\t ",
    "<template><script>alert(1)</script></template>", "<details open ontoggle=alert(1)>", "<plaintext>", "\ufeff<b>",
    "<input autofocus onfocus=alert(1)>", "<object data=x>", "<embed src=x>", "url(//evil.example)",
    "</noscript><img src=x onerror=alert(1)>",
]  # fmt: skip


def hostile():
    """Two hundred texts that would like to be more than text."""
    around = ("{}", "a{}b", "{}{}", " {}", "“{}”")
    return [shape.replace("{}", text) for shape in around for text in HOSTILE]


@pytest.mark.browser
def test_two_hundred_hostile_texts_stay_text(window):
    texts = hostile()
    assert len(texts) == 200
    for part in (texts[:100], texts[100:]):
        text = " ".join(part)
        starts = [sum(len(t) + 1 for t in part[:n]) for n in range(len(part))]
        ends = [s + len(t) for s, t in zip(starts, part, strict=True)]
        one = drawn(len(part), 1, words=part, text=text, starts=starts, ends=ends, label=part[0])
        two = drawn(len(part), 1, words=part[::-1], text="", label=part[1])
        one.name, two.name = part[0], part[2]
        scored = {"score": 0.6, "baseline": 0.1, "low": 0.4, "high": 0.6}
        one.labels = [{"attention": 0, "head": 0, "label": part[0], "effect": 0.5, "low": 0.4, "high": 0.6}]
        one.labels[0]["scores"] = {part[0]: scored}
        shown = window(Trace([one, two]))
        elements = shown.page.evaluate(
            "document.querySelectorAll('img, iframe, object, embed, base, math, template').length"
        )
        assert elements == 0
        for view in VIEWS:
            shown.show(f"view={view}&i=7&j=3&words=true&zoom=0-30,0-30")
            own = "[alt='The image as the model saw it'][hidden]:not([src])"  # the page's, empty without an image
            inside = shown.page.evaluate(
                f"document.querySelectorAll(`.lens img:not({own}), .lens script, .lens iframe, .lens b b`).length"
            )
            assert inside == 0, view
        shown.show("view=head")
        _, rows, columns = shown.cells()
        plain = [re.sub(r"[\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ufeff↵⇥␍␣�]", "", t) for t in part]
        same = [re.sub(r"[\s↵⇥␍␣�]", "", t) for t in rows]
        assert rows == columns
        assert all(b == a or (b.endswith("…") and a.startswith(b[:-1])) for a, b in zip(plain, same, strict=True))
        for kind in ("SVG", "Finding"):
            raw, _ = shown.save(kind, part[0])
            found = _Tags()
            found.feed(raw.decode())
            assert not {"script", "img", "iframe", "object"} & set(found.tags)


def test_the_policy_allows_one_script_and_one_style_and_nothing_else():
    """The bundle can also talk to the server that it came from; in a file this policy lets it reach nothing."""
    encoded = encode(Trace([drawn()]))
    text = "".join(page(encoded, "<b>&</b>"))
    said = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", text.replace(scripts[0], ""), re.DOTALL)
    assert len(scripts) == len(styles) == 1
    assert said == policy(scripts[0], styles[0])
    assert "unsafe" not in said and "http" not in said and "connect" not in said and "default-src 'none'" in said
    assert "<title>&lt;b&gt;&amp;&lt;/b&gt;</title>" in text
    assert not re.search(r"\son\w+=|\sstyle=|src=", re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL))


def test_the_bundle_is_small_and_makes_no_markup_of_text():
    script, style = ((STATIC / name).read_text("utf-8") for name in ("lens.js", "lens.css"))
    assert len(script.encode()) <= 152 * 1024
    assert "</script" not in script and "</style" not in style
    words = "innerHTML outerHTML= insertAdjacentHTML document.write eval( WebAssembly XMLHttpRequest WebSocket"
    for word in [*words.split(), "new Function", "sendBeacon", "localStorage", "import("]:
        assert word not in script, word
    assert set(re.findall(r"https?://[\w./]+", script + style)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in style and "url(" not in style


def test_the_colours_are_those_of_the_reports():
    style = (STATIC / "lens.css").read_text("utf-8")

    def short(colour):  # as the minifier writes it
        return re.sub(r"#(.)\1(.)\2(.)\3$", r"#\1\2\3", colour)

    for shade in SHADES:
        found = re.findall(rf"--{shade.name}: ?(#\w+)", style)
        assert [short(x) for x in found] == [short(shade.light), short(shade.dark), short(shade.dark)], shade.name


@pytest.mark.node
def test_the_bundle_is_what_the_sources_build(tmp_path):
    if not (WEB / "node_modules/esbuild").is_dir():
        pytest.skip("needs the bundler: npm ci in web/")
    before = {path.name: path.read_bytes() for path in STATIC.iterdir()}
    built = tmp_path / "regard/lens/static"
    shutil.copytree(WEB, tmp_path / "web", symlinks=True, ignore=shutil.ignore_patterns("node_modules"))
    (tmp_path / "web/node_modules").symlink_to(WEB / "node_modules")
    subprocess.run(["node", "build.mjs"], cwd=tmp_path / "web", check=True, capture_output=True)
    assert {path.name: path.read_bytes() for path in built.iterdir()} == before


# Writing


def test_a_page_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    trace = Trace([drawn()])
    place = tmp_path / "page.html"
    size = write_page(trace, place, "first")
    assert size == place.stat().st_size and "<title>first</title>" in place.read_text("utf-8")
    with pytest.raises(DataError, match="cannot be written"):
        write_page(trace, place / "inside.html")
    assert "<title>first</title>" in place.read_text("utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_the_overviews_come_before_the_lens_and_everything_else_after():
    text = "".join(page(encode(record(gpt(), TEXT)), "t"))
    order = [text.index(mark) for mark in ('id="trace"', 'id="block-0"', "<script>", 'id="block-1"', 'id="block-2"')]
    assert order == sorted(order)


@pytest.fixture
def command():
    """`regard view` alone."""
    from typer import Typer
    from typer.testing import CliRunner

    from regard.cli.view import view

    app = Typer()
    app.command()(view)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_view_on_the_command_line(tmp_path, command):
    gpt().save(tmp_path / "model")
    place = tmp_path / "page.html"
    run = command(tmp_path / "model", TEXT, OTHER, "-o", place, "--no-labels")
    assert run.exit_code == 0, run.output
    assert "16 heads over 2 recordings of 27, 27 tokens" in run.output and OTHER in place.read_text("utf-8")
    record(gpt(), TEXT).save(tmp_path / "a.trace")
    assert command(tmp_path / "a.trace", "-o", place).exit_code == 0
    assert OTHER not in place.read_text("utf-8")
    assert "needs a text" in str(command(tmp_path / "model").exception)
    assert "has its text already" in str(command(tmp_path / "a.trace", TEXT, "-o", place).exception)


@pytest.mark.slow
def test_one_page_compares_models_and_labels_heads(tmp_path, command):
    gpt(length=600).save(tmp_path / "model")
    twin = f"random:{tmp_path / 'model'}"
    run = command(tmp_path / "model", TEXT, "--with", twin, "-o", tmp_path / "p.html")
    assert run.exit_code == 0, run.output
    header = json.loads(re.search(r'id="trace">(.*?)</script>', (tmp_path / "p.html").read_text("utf-8"))[1])
    assert [card["trained"] for card in header["models"]] == [True, False]
    assert [len(r["labels"]) for r in header["recordings"]] == [8, 8]
