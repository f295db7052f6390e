"""Ways through the page of the lens, click by click: what each step shows is what torch computes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from lens_window import drawn, gpt, holds, number

from regard.lens import Trace, record
from regard.lens.pages.widget import _RENDER
from regard.lens.recording.images import as_picture

TEXT = "The dog ran to the red dog."

pytestmark = pytest.mark.browser

PATCHES = """() => {
  const c = document.querySelector(".patches canvas");
  const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  return [c.height, c.width, Array.from(data.filter((_, n) => n % 4 === 0))];
}"""


def pointed(shown, row, column, of):
    """Points at a cell of the first matrix; what the page says about it."""
    box = shown.page.locator(".stage canvas").first.bounding_box()
    rows, columns = of
    shown.page.mouse.move(
        box["x"] + (column + 0.5) / columns * box["width"], box["y"] + (row + 0.5) / rows * box["height"]
    )
    return shown.page.locator(".readout").first.inner_text()


def weight_of(said):
    return re.search(r"weight (\S+?)(,|$)", said)[1]


def tab(shown, name):
    shown.page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
    shown.settle()


def test_a_walk_through_all_views_with_the_mouse_alone(window):
    trace = record(gpt(), TEXT)
    T, (i, j) = len(TEXT), (20, 11)
    attended = trace.recordings[0].attention(1)
    weights = trace.weights(1, 2)
    shown = window(trace)
    page = shown.page
    page.locator('[data-k="1.2"]').click()  # of the grid
    shown.settle()
    assert holds(weight_of(pointed(shown, i, j, (T, T))), weights[i, j].item())
    page.mouse.down()
    page.mouse.up()
    tab(shown, "Vectors")  # of the pair that was clicked
    assert holds(shown.fact("weight = exp of the sum"), weights[i, j].item())
    assert number(shown.fact("‖v‖")) == pytest.approx(attended.v[1][j].norm().item(), rel=2e-2)
    page.locator('[data-k="key 3"]').click()
    shown.until("document.querySelector('[data-k=\"key 3\"]').getAttribute('aria-pressed') === 'true'")
    assert holds(shown.fact("weight = exp of the sum"), weights[i, 3].item())
    tab(shown, "Compare")  # with the next head, since there is one text only
    values, _, _ = shown.cells()
    assert (values.nan_to_num(0) - (trace.weights(1, 3) - weights)).abs().max() < 4e-3
    tab(shown, "Masks")
    values, _, _ = shown.cells()
    assert values.int().equal(
        attended.rules.reasons(*trace.recordings[0].query_and_key_tokens(attended), torch.arange(T)).int()
    )
    tab(shown, "Positions")
    values, _, columns = shown.cells()
    assert values[2, columns.index("−3")].item() == pytest.approx(weights.diagonal(-3).mean().item(), abs=2e-3)
    tab(shown, "Layers")
    values, _, _ = shown.cells()
    figures = trace.recordings[0].attentions[0].figures
    near = (values - figures["entropy"][0]).abs().min()
    assert near < 1e-3
    tab(shown, "All heads")
    assert page.locator(".thumb").count() == 8


def test_another_trace_is_opened_and_compared(window, tmp_path):
    here, there = record(gpt(), TEXT), record(gpt(mechanism="elu"), TEXT)
    there.save(tmp_path / "there.trace")
    shown = window(here, "view=head&a=1&h=1")
    shown.page.set_input_files("input[type=file]", tmp_path / "there.trace")
    shown.page.wait_for_selector("section[aria-label=Compare]")
    shown.settle()
    values, _, _ = shown.cells()
    assert (values.nan_to_num(0) - (there.weights(1, 1) - here.weights(1, 1))).abs().max() < 4e-3
    # What is no trace is told, and what was there stays.
    (tmp_path / "no.trace").write_bytes(b"PK\x03\x04 something else")
    shown.page.set_input_files("input[type=file]", tmp_path / "no.trace")
    shown.page.get_by_role("alert").wait_for()
    assert "not a trace file" in shown.page.get_by_role("alert").inner_text()
    assert shown.page.get_by_label("right", exact=True).locator("option").count() == 2
    assert [x for x in shown.said if "not a trace file" not in x] == []
    shown.said.clear()


def test_checkpoints_follow_a_slider(window):
    steps = []
    for n in range(4):
        model = gpt()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.4 + 0.2 * n)
        steps += record(model, TEXT).recordings
        steps[-1].name = f"step {n}"
    shown = window(Trace(steps), "view=compare&a=1&h=2")
    slider = shown.page.get_by_label("Recording on the right")
    for n in (3, 2):
        slider.fill(str(n))
        shown.page.locator("h3").nth(1).filter(has_text=f"step {n}").wait_for()  # what is drawn last is not yet new
        shown.settle()
        values, _, _ = shown.cells()
        assert (values.nan_to_num(0) - (steps[n].weights(1, 2) - steps[0].weights(1, 2))).abs().max() < 4e-3
    slider.focus()  # it is still there, and keys move it
    shown.page.keyboard.press("ArrowLeft")
    shown.until("document.activeElement.getAttribute('aria-label') === 'Recording on the right'")
    assert slider.input_value() == "1"


def test_what_differs_is_named_and_rounding_is_no_difference(window):
    """In the first layer of a causal model a later word changes no earlier row, but for the last bits of sums."""
    first, second = "The small dog ran home to the wall", "The small dog ran home to the door"
    trace = Trace.joined(record(gpt(), first, second), record(gpt(), first))
    trace.recordings[2].model = replace(trace.recordings[2].model, name="other")
    trace.recordings[1].attentions[0].q += 1e-6
    shown = window(trace, "view=compare&a=0&h=1&r2=1")
    names = shown.page.get_by_label("left", exact=True).locator("option").all_inner_texts()
    assert names == ["GPT: …wall", "GPT: …door", "other: …wall"]
    bars = shown.page.locator(".bars rect.plus").evaluate_all("all => all.map(x => x.height.baseVal.value)")
    assert len(bars) == len(first) + 4 and max(bars[:30]) < 1  # of the last words letters have no partner
    assert shown.page.locator(".bars .tick").first.text_content() == "0.01"
    shown.show("view=head")  # and every token has room beside its curves
    assert shown.page.locator(".arcs-box").evaluate("x => x.scrollHeight - x.clientHeight") <= 0


@pytest.mark.parametrize("space", [0, 1])
def test_tokens_without_a_partner_are_hatched_and_said_to_be(window, space):
    """ "The old dog" and "The dog": one word stands on one side only, and the sentence goes on behind it. A space that
    belongs to a token, as those of GPT-2 have it, makes no word the partner of another."""
    words, fewer = ["The", "old", "dog", "ran"], ["The", "dog", "ran"]
    starts, ends = [0, 4 - space, 8 - space, 12 - space], [3, 7, 11, 15]
    left = drawn(words=words, text="The old dog ran", starts=starts, ends=ends, causal=False)
    right = drawn(words=fewer, text="The dog ran", starts=starts[:3], ends=ends[:3], causal=False)
    right.name = "text b"
    shown = window(Trace([left, right]), "view=compare")
    values, rows, _ = shown.cells()
    assert rows == words and values[1].isnan().all() and values[:, 1].isnan().all()
    kept = [0, 2, 3]
    wanted = right.weights(0, 0) - left.weights(0, 0)[kept][:, kept]
    assert (values[kept][:, kept] - wanted).abs().max() < 4e-3
    third = shown.page.locator(".matrix").nth(2)
    assert third.locator('.over rect[fill="url(#crossed)"]').count() == 2  # a row and a column
    assert shown.page.get_by_text("; 1 has no partner and is hatched.").count() == 1
    box = third.locator(".stage canvas").bounding_box()
    shown.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.4)
    assert "only on the left, so there is nothing to compare" in third.locator(".readout").inner_text()


def test_generated_text_is_one_matrix_with_a_line_where_the_prompt_ends(window):
    model = gpt()
    trace = record(model, "The dog", generate=12)
    read = trace.recordings[0].sequences[0]
    assert len(read) == 19 and read.prompt == 7
    whole = record(model, read.ids)  # the same tokens at once
    shown = window(trace, "view=head&a=1&h=3")
    values, _, _ = shown.cells()
    assert (values.nan_to_num(0) - whole.weights(1, 3)).abs().max() < 2e-3
    frame = shown.page.locator(".over .frame")
    top, height = (float(frame.get_attribute(name)) for name in ("y", "height"))
    line = shown.page.locator(".over .prompt").first
    assert float(line.get_attribute("y1")) == pytest.approx(top + 0.5 + (height - 1) * 7 / 19, abs=1)
    # A cross in the middle of what was written is between tokens that no single step saw together.
    said = pointed(shown, 15, 9, (19, 19))
    assert holds(weight_of(said), whole.weights(1, 3)[15, 9].item())


def test_an_image_shows_the_weights_of_a_query_at_its_patches(window):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=8)).eval()
    for p in model.parameters():
        p.data = 0.4 * torch.randn_like(p)
    trace = record(model, {"pixel_values": torch.randn(1, 3, 32, 48)[..., :32]})
    trace.recordings[0].sequences[0].picture = as_picture(torch.rand(3, 32, 32))
    weights = trace.weights(1, 2)
    shown = window(trace, "view=head&a=1&h=2")
    values, rows, _ = shown.cells()
    assert rows[:3] == ["[CLS]", "0,0", "0,1"] and (values - weights).abs().max() < 2e-3
    pointed(shown, 6, 3, (17, 17))
    shown.page.locator(".patches canvas").wait_for()
    rows, columns, red = shown.page.evaluate(PATCHES)
    assert (rows, columns) == (4, 4)
    at = weights[6, 1:]
    # The darker, the more: the order of clearly different patches is that of their weights.
    red = torch.tensor(red, dtype=torch.float)
    apart = (at[:, None] - at[None]) > 0.1 * at.max()
    assert apart.any() and bool((red[:, None] <= red[None])[apart].all())
    # The image lies below, as large as the map, and alone beside it.
    image, map_ = shown.page.locator(".patches img"), shown.page.locator(".patches canvas")
    assert image.evaluate("x => x.complete && x.naturalWidth") == 32 and image.bounding_box() == map_.bounding_box()
    assert 0.5 < float(map_.evaluate("x => getComputedStyle(x).opacity")) < 0.9
    alone, box = shown.page.locator(".imaged > img").bounding_box(), map_.bounding_box()
    assert alone["width"] == pytest.approx(box["width"], abs=1) and alone["x"] + alone["width"] < box["x"]
    said = shown.page.locator(".note", has_text="patches of the image").inner_text()
    assert number(re.search(r"up to (\S+)\.", said)[1]) == pytest.approx(at.max().item(), abs=2e-3)
    # A patch that is clicked is the one that looks, in every view: the third of the second row is token 7.
    shown.show("view=heads&a=1&h=2")
    box = map_.bounding_box()
    shown.page.mouse.click(box["x"] + 0.6 * box["width"], box["y"] + 0.4 * box["height"])
    shown.page.locator(".note", has_text="What “1,2” looks at").wait_for()
    shown.until("location.hash.includes('i=7')")
    assert "text" not in shown.page.locator(".intro").inner_text()


def test_a_lens_that_is_taken_away_leaves_nothing_behind(window):
    """A notebook renders its widget again and again: what was shown before must not go on listening."""
    assert "return () => app.unmount()" in _RENDER
    shown = window(record(gpt(), TEXT), "view=head")
    page = shown.page
    page.evaluate("""() => {
      const box = document.createElement("div");
      document.body.append(box);
      window.second = regardLens.mount(box, regardLens.embedded(document));
      window.changes = 0;
      second.store.listen(() => changes++);
    }""")
    press = """() => [document.body, document.body.lastElementChild].forEach((on) =>
      on.dispatchEvent(new KeyboardEvent("keydown", { key: "t", bubbles: true })))"""  # cannot be kept from the other
    page.evaluate(press)
    assert page.evaluate("changes") == 2
    page.evaluate("second.unmount()")
    page.evaluate(press)
    page.set_viewport_size({"width": 900, "height": 900})
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(100)
    assert page.evaluate("[changes, document.body.lastElementChild.childElementCount]") == [2, 0]
    assert page.evaluate("document.querySelector('#lens').dataset.theme") == "dark"  # auto, light, dark: the first lens
