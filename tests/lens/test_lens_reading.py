"""The page of the lens for somebody who reads a text with it: first screen, text, colours, links, pairs, paper."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lens_window import drawn, gpt, holds, number

from regard.lens import Trace, record
from regard.lens.recording.overview import add_overview

WEB = Path(__file__).parents[2] / "web/src"
TEXT, OTHER = "The dog ran to the red dog.", "The cat ran to the red cat!"

# Colours


def variables():
    """The colours of the page by name, for a light and for a dark one."""
    style = (WEB / "lens.css").read_text("utf-8")
    light, dark = re.findall(r"--ink:.*?color-scheme", style, re.DOTALL)[:2]
    return [dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in (light, dark)]


def stops(name):
    """A list of colours of web/src/colour.ts, for a light and for a dark page."""
    source = (WEB / "colour.ts").read_text("utf-8")
    block = re.search(rf"{name} = {{(.*?)}}", source, re.DOTALL)[1]
    return [re.findall(r"#\w{6}", line) for line in re.findall(r"\[.*?\]", block)]


def linear(colour):
    rgb = torch.tensor([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)], dtype=torch.float64)
    return torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def luminance(colour):
    return float(linear(colour) @ torch.tensor([0.2126, 0.7152, 0.0722], dtype=torch.float64))


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def ramp(colours):
    """256 colours between stops, as the page makes them."""
    rgb = torch.tensor([[int(c[n : n + 2], 16) for n in (1, 3, 5)] for c in colours], dtype=torch.float64)
    at = torch.linspace(0, len(colours) - 1, 256, dtype=torch.float64)
    low = at.long().clamp(max=len(colours) - 2)
    mixed = rgb[low] + (rgb[low + 1] - rgb[low]) * (at - low)[:, None]
    return ["#" + "".join(f"{round(float(x)):02x}" for x in row) for row in mixed]


@pytest.mark.parametrize("theme", [0, 1])
def test_text_and_marks_stand_out_from_their_ground(theme):
    v = variables()[theme]
    grounds = [v["card"], v["page"], v["wash"]]
    text = [v["ink"], v["muted"], *(v[f"series-{n}"] for n in range(6))]
    assert min(contrast(a, b) for a in text for b in grounds) >= 4.5
    assert contrast(v["card"], v["series-0"]) >= 4.5 and contrast(v["card"], v["ink"]) >= 4.5  # pressed buttons, hints
    zero = stops("ONE")[theme][0]
    for mark in (v["edge"], v["hatch"], v["series-1"]):
        assert contrast(mark, v["card"]) >= 3 and contrast(mark, zero) >= 3
    assert zero != v["hidden"]
    # Letters on any colour of a ramp: black or white, whichever `legible` takes.
    assert float(re.search(r"luminance\(ground\) > ([\d.]+)", (WEB / "colour.ts").read_text("utf-8"))[1]) == 0.179
    for name in ("ONE", "TWO"):
        for ground in ramp(stops(name)[theme]):
            letters = "#000000" if luminance(ground) > 0.179 else "#ffffff"
            assert contrast(letters, ground) >= 4.5, (name, ground)


# What the colours are to eyes without red or green cones (Machado, Oliveira and Fernandes 2009, severity 1).
BLIND = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def lab(rgb):
    """CIE L*a*b* of linear sRGB."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = torch.tensor(to_xyz, dtype=torch.float64) @ rgb.clamp(0, 1)
    t = xyz / torch.tensor([0.9505, 1.0, 1.089], dtype=torch.float64)
    f = torch.where(t > 0.008856, t.clamp(min=1e-9) ** (1 / 3), 7.787 * t + 16 / 116)
    return torch.stack([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("eyes", BLIND)
def test_colours_keep_apart_for_colour_blind_eyes(theme, eyes):
    seen = {c: lab(torch.tensor(BLIND[eyes], dtype=torch.float64) @ linear(c)) for c in stops("REASON_COLOURS")[theme]}
    for a, b in itertools.combinations(seen, 2):
        assert (seen[a] - seen[b]).norm() > 10, (a, b)  # reasons of a mask; about 2 can just be told apart
    one = torch.stack([lab(torch.tensor(BLIND[eyes], dtype=torch.float64) @ linear(c))[0] for c in stops("ONE")[theme]])
    steps = one.diff() * (1 if theme else -1)
    assert (steps > 0).all()  # more is darker on a light page, brighter on a dark one
    low, *_, high = stops("TWO")[theme]
    apart = [lab(torch.tensor(BLIND[eyes], dtype=torch.float64) @ linear(c)) for c in (low, high)]
    assert (apart[0] - apart[1]).norm() > 20 and apart[0][2] > apart[1][2]  # orange below zero, blue above


@pytest.mark.parametrize("theme", [0, 1])
def test_hues_of_heads_keep_apart(theme):
    """Marks of contrast 3 on the ground of a cell, and apart for eyes without red or green cones."""
    hues = stops("HUES")[theme]
    zero = stops("ONE")[theme][0]
    assert zero == variables()[theme]["card"]
    for hue in hues:
        assert contrast(hue, zero) >= 3, hue
    for eyes in BLIND.values():
        seen = [lab(torch.tensor(eyes, dtype=torch.float64) @ linear(c)) for c in hues]
        for a, b in itertools.combinations(range(len(hues)), 2):
            assert (seen[a] - seen[b]).norm() > 10, (hues[a], hues[b])


PIXEL = """([x, y]) => {
  const c = document.querySelector(".stage canvas");
  return [...c.getContext("2d").getImageData(x, y, 1, 1).data];
}"""


@pytest.mark.browser
def test_zooming_changes_no_colour_and_compare_shares_one_scale(window):
    left, right = drawn(12, 1, causal=False, label="a"), drawn(12, 1, causal=False, label="b")
    right.attentions[0].q *= 0.2  # nearly even: on a scale of its own it would be as dark
    right.attentions[0].n = None
    add_overview(right, right.attentions[0])
    shown = window(Trace([left, right]), "view=head")
    for scale in ("head", "row", "log"):
        whole = shown.show(f"view=head&scale={scale}").page.evaluate(PIXEL, [5, 6])
        ends = shown.page.locator(".legend").inner_html()
        assert shown.show(f"view=head&scale={scale}&zoom=5-9,4-8").page.evaluate(PIXEL, [1, 1]) == whole, scale
        assert shown.page.locator(".legend").inner_html() == ends
    shown.show("view=compare")
    words = [[t.text_content() for t in x.locator("text").all()] for x in shown.page.locator(".legend").all()]
    assert words[0] == words[1]
    assert words[2][-1] == words[0][-1]  # of the difference, too: −end … end
    # Blue is above zero in the difference, as in bars, and orange below.
    values, _, _ = shown.cells()
    read = "(c) => [...c.getContext('2d').getImageData(0, 0, 12, 12).data]"
    dots = torch.tensor(shown.page.locator(".stage canvas").nth(2).evaluate(read)).view(144, 4)
    bluer = dots[:, 2] - dots[:, 0]
    assert bluer[values.argmax()] > 10 and bluer[values.argmin()] < -10


# The first screen and the text


@pytest.mark.browser
def test_the_first_screen_says_what_is_shown_and_where_to_begin(window):
    trace = record(gpt(), TEXT)
    shown = window(trace)
    page = shown.page
    assert "Each row is a token that looks; darker means more weight on that column's token." in page.inner_text("main")
    assert page.locator(".run").inner_text() == TEXT
    assert page.locator(".suggestion").count() == 3
    # The example stands in words and in the text beside, and the legend above the pictures.
    example = page.locator(".worked").inner_text()
    row, column = re.findall("“(.)”", example)
    shown.until("document.querySelector('.about').innerText.includes('looks at')")
    assert page.locator(".about").inner_text().startswith(f"“{row}”") and " dark in the column" in example
    assert page.locator(".best .name").first.inner_text().startswith(column)
    assert page.locator(".legend").first.bounding_box()["y"] < page.locator(".thumb").first.bounding_box()["y"]
    # Without labels a reason is a figure of this text: it is the one that torch computed.
    peaks = [x for a in trace.recordings[0].attentions for x in a.figures["peak"]]
    first = [x for a in trace.recordings[0].attentions for x in a.figures["first"]]
    best = max((n for n in range(8) if first[n] < 0.5), key=lambda n: peaks[n])
    said = page.locator(".suggestion").first.inner_text()
    assert f"Layer {best // 4}, head {best % 4}" in said and "this text" in said
    assert number(re.search(r"average|is (\d\.\d+)", said)[1]) == pytest.approx(peaks[best], abs=6e-3)
    for name in ("evenness (entropy)", "mean largest weight"):
        page.locator(".info .term", has_text=name).hover()
        assert "of this text" in page.locator(".tip").inner_text()
    page.locator(".suggestion").first.click()
    shown.settle()
    assert page.locator("h2").first.inner_text() == f"Layer {best // 4}, head {best % 4}"
    # On a dark page more is brighter, and the sentences say so.
    page.keyboard.press("t")
    page.keyboard.press("t")
    shown.until("document.querySelector('main').innerText.includes('brighter means more weight')")
    page.keyboard.press("1")
    shown.until("document.querySelector('.worked').innerText.includes(' bright in the column')")
    page.get_by_role("link", name="Layers").click()
    shown.until("document.querySelector('.about').innerText.includes('the most on the brightest')")


@pytest.mark.browser
def test_the_text_names_the_ten_largest_weights_in_both_directions(window):
    trace = record(gpt(), TEXT)
    weights = trace.weights(1, 2)
    shown = window(trace, "view=head&a=1&h=2")
    page = shown.page

    def listed():
        rows = [x.inner_text().split("\n") for x in page.locator(".best li").all()]
        return [(int(name.split()[-1]), value) for name, value in rows]

    page.locator(".tok").nth(20).click()
    shown.until("document.querySelector('.about').innerText.includes('(20) looks at')")
    order = weights[20].argsort(descending=True)[:10]
    assert [j for j, _ in listed()] == order.tolist()
    assert all(holds(value, weights[20, j].item()) for j, value in listed())
    page.keyboard.press("x")  # who looks at it
    shown.until("document.querySelector('.about').innerText.includes('Who looks at')")
    column = weights[20:, 20]
    assert {i for i, _ in listed()} == set((column.argsort(descending=True)[:10] + 20).tolist())
    assert all(holds(value, weights[i, 20].item()) for i, value in listed())
    # Curves and matrix are about the same token.
    assert page.locator(".arcs [data-side=from][aria-pressed=true]").get_attribute("data-u") == "20"
    shown.until("location.hash.includes('way=from')")
    # Looking for a token: Enter goes from one to the next.
    page.keyboard.press("/")
    page.keyboard.type("d")
    places = [n for n, c in enumerate(TEXT) if c == "d"]
    found = []
    for _ in places:
        page.keyboard.press("Enter")
        found.append(int(re.search(r"\((\d+)\)", page.locator(".about").inner_text())[1]))
    assert sorted(found) == places
    for view in ("vectors", "compare", "masks", "positions", "layers", "heads"):
        shown.show(f"view={view}&a=1&h=2&i=20&j=3&fixed=true")
        assert "(20) looks at" in page.locator(".about").inner_text(), view


@pytest.mark.browser
def test_a_long_text_keeps_its_words_where_it_is_zoomed(window):
    shown = window(Trace([drawn(600, 1)]), "view=head")
    names = shown.page.locator(".over .tick").all_text_contents()
    assert any(re.fullmatch(r"t\d+ \d+", name) for name in names)
    curves = shown.show("view=head&threshold=0.001").page.locator(".arc").count()
    assert 0 < curves <= 4 * 96 and "strongest of" in shown.page.locator(".arcs-box .note").inner_text()
    shown.show("view=head&zoom=300-320,290-320")
    assert {"t300", "t319"} <= set(shown.page.locator(".over .tick").all_text_contents())
    assert shown.page.locator(".arcs [data-side=to]").count() == 20
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("t450")
    shown.page.keyboard.press("Enter")
    shown.until("document.querySelector('.matrix .tick') && location.hash.includes('i=450')")
    assert "t450" in shown.page.locator(".over .tick").all_text_contents()  # the part that is shown has moved there
    shown.show("view=head&i=450&fixed=true")
    shown.until("document.querySelector('.arcs-box').scrollTop > 0")  # the chosen token is in sight


# Where it stands


@pytest.mark.browser
def test_back_leads_to_the_view_before_and_each_view_is_a_link(window):
    shown = window(record(gpt(), TEXT))
    page = shown.page
    heading = page.locator("main > section")
    page.locator('[data-k="1.2"]').click()
    shown.settle()
    page.locator(".tok").nth(3).click()  # is no place of its own
    page.get_by_role("link", name="Masks").click()
    shown.settle()
    page.go_back()
    shown.until("document.querySelector('main > section').getAttribute('aria-label') === 'One head'")
    assert page.locator("h2").first.inner_text() == "Layer 1, head 2"
    shown.until("document.querySelector('.about').innerText.includes('(3) looks at')")
    page.go_back()
    shown.until("document.querySelector('main > section').getAttribute('aria-label') === 'All heads'")
    page.go_forward()
    shown.until("document.querySelector('main > section').getAttribute('aria-label') === 'One head'")
    there = page.get_by_role("link", name="Vectors").get_attribute("href")
    shown.show(there.lstrip("#"))
    assert heading.get_attribute("aria-label") == "Vectors"
    assert page.locator("h2").first.inner_text().startswith("Layer 1, head 2")


@pytest.mark.browser
def test_a_phone_shows_the_matrix_first(window):
    shown = window(record(gpt(), TEXT))
    shown.page.set_viewport_size({"width": 390, "height": 844})
    shown.show("view=head&a=1&h=2")
    box = shown.page.locator(".stage canvas").bounding_box()
    assert box["y"] + box["height"] < 844 and box["width"] > 200
    assert shown.page.locator(".reading").bounding_box()["y"] > box["y"]


@pytest.mark.browser
def test_a_long_name_leaves_the_buttons_beside_the_views(window):
    trace = record(gpt(), TEXT)
    card = replace(trace.recordings[0].model, name="SmolLM2-135M-Instruct.Q4_1", cls="LlamaForCausalLM", layers=30)
    trace.recordings[0].model = card
    shown = window(trace)
    shown.page.set_viewport_size({"width": 1280, "height": 800})
    shown.show("view=layers")
    tabs, buttons = (shown.page.locator(f".bar {part}").bounding_box() for part in ("nav", ".right"))
    assert buttons["y"] < tabs["y"] + tabs["height"] and tabs["y"] < buttons["y"] + buttons["height"]


@pytest.mark.browser
def test_a_finger_is_told_to_tap(window):
    trace = record(gpt(), TEXT)
    page = window(trace, "view=head&a=1&h=2", has_touch=True, is_mobile=True).page
    before = "getComputedStyle(document.querySelector('.readout'), '::before').content"
    assert page.evaluate(before) == '"Tap a cell to read its exact number."'
    assert "Tap a token" in page.locator(".about").inner_text()
    assert not re.search("[Cc]lick|[Pp]oint at", page.inner_text("body"))
    page.goto(page.url.split("#")[0] + "#view=heads")
    page.wait_for_selector(".heads[data-state=done]")
    assert not re.search("[Cc]lick|[Pp]oint at", page.inner_text("body"))


@pytest.mark.browser
def test_the_next_token_has_room_on_a_phone(window):
    """Letters need narrow columns, so that a good part of the text is in sight, and the buttons stand on one line."""
    shown = window(record(gpt(), TEXT))
    shown.page.set_viewport_size({"width": 390, "height": 844})
    shown.page.goto(f"{shown.uri}#view=next")
    shown.page.wait_for_selector(".lens-grid .chosen")
    assert shown.page.locator(".lens-grid .cell-of-lens").count() >= 3 * 6
    tops = shown.page.locator("main .picker button").evaluate_all("all => all.map(x => x.getBoundingClientRect().y)")
    assert len(tops) == 2 and tops[0] == tops[1]
    shown.until("document.documentElement.scrollWidth <= 390")


@pytest.mark.browser
def test_distances_rise_from_left_to_right_each_with_its_sign(window):
    """ "−5–6" could be read as minus five to six."""
    recording = drawn(40, 1, causal=False)
    shown = window(Trace([recording]), "view=positions")
    _, _, columns = shown.cells()
    ends = [[number(end.lstrip("+")) for end in name.split("…")] for name in columns]
    flat = [end for pair in ends for end in pair]
    assert flat == sorted(flat) and flat[0] == -39 and flat[-1] == 39 and columns.count("0") == 1
    assert all(end.startswith(("−", "+")) for name in columns if name != "0" for end in name.split("…"))
    assert [pair[0] for pair in ends][1:] == [pair[-1] + 1 for pair in ends][:-1]  # and none is left out


@pytest.mark.browser
def test_pairs_show_what_one_text_gives_to_the_other(window):
    one = drawn(9, 1, words=["[CLS]", "a", "b", "c", "[SEP]", "d", "e", "f", "[SEP]"], causal=False)
    trace = Trace([one])
    shown = window(trace, "view=head")
    assert shown.page.get_by_role("group", name="Texts of the pair").count() == 0
    segment = [-1, 0, 0, 0, -1, 1, 1, 1, -1]
    shown.page.add_init_script(f"""
      const read = JSON.parse;
      JSON.parse = (text) => {{
        const found = read(text);
        if (found.recordings) found.recordings[0].sequences[0].segment = {segment};
        return found;
      }};""")
    shown.show("view=head")
    weights = trace.weights(0, 0)
    for name, rows, columns in (("A → B", slice(1, 4), slice(5, 8)), ("B → A", slice(5, 8), slice(1, 4))):
        shown.page.get_by_role("button", name=name).click()
        shown.settle()
        values, said, _ = shown.cells()
        assert torch.allclose(values, weights[rows, columns], atol=2e-3) and len(said) == 3


@pytest.mark.browser
def test_heads_are_ranked_by_how_much_they_changed(window):
    before, after = record(gpt(), TEXT), record(gpt(), TEXT)
    changed = after.recordings[0].attentions[1]
    changed.q[2] *= -1  # of one head alone
    changed.n = None
    add_overview(after.recordings[0], changed)
    shown = window(Trace.joined(before, after), "view=compare")
    shown.page.wait_for_selector(".ranking[data-state=done]")
    rows = shown.page.locator(".ranking li").all_inner_texts()
    assert rows[0].startswith("Layer 1, head 2") and float(rows[0].split("\n")[1]) > 0.01
    assert all(row.split("\n")[1] in ("<0.0005", "0.000") for row in rows[1:])
    shown.page.locator(".ranking li button").first.click()
    shown.settle()
    assert "Layer 1, head 2" in shown.page.locator("h3").nth(1).inner_text()


@pytest.mark.browser
def test_a_printed_page_is_the_picture_with_its_legend_on_one_sheet(window):
    shown = window(record(gpt(), TEXT), "view=head&a=1&h=2&i=20&j=3&fixed=true")
    pdf = shown.page.pdf(landscape=True, print_background=True)
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1
    shown.page.emulate_media(media="print")
    shown.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    paper = shown.page.locator(".paper svg").first
    words = paper.locator("text").all_text_contents()
    assert "Layer 1, head 2 of GPT" in words and {"weight", "0"} <= set(words)
    assert not shown.page.locator(".bar").is_visible() and paper.is_visible()
