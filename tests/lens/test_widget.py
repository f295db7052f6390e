"""A trace in a notebook: a frame that saved notebooks keep, and a widget that Python hears of."""

from __future__ import annotations

import html
import inspect
import re

import pytest
import torch
from small_models import stirred

from regard.data.tokenizers import Bytes
from regard.errors import ExtraMissingError, OptionError
from regard.lens import decode, record
from regard.lens.pages import widget
from regard.lens.pages.widget import show
from regard.models import GPT


def made():
    import torch

    import regard
    from regard.data.tokenizers import Bytes
    from regard.lens import record

    torch.manual_seed(0)
    model = regard.GPT.preset("nano", vocabulary=256)
    model.tokenizer = Bytes()
    return record(model, "</script><b>A dog</b>")


@pytest.fixture(scope="module")
def trace():
    return made()


def opened(chromium, path):
    """A page that may reach nothing but its own file; what it said, and what it asked for elsewhere."""
    page = chromium.new_context(viewport={"width": 1200, "height": 900}).new_page()
    said = []
    page.on("console", lambda m: said.append(m.text))
    page.on("pageerror", lambda e: said.append(str(e)))
    page.route(re.compile("^https?:"), lambda route: route.abort())
    page.goto(path.as_uri())
    return page, said


def weight_shown(frame, page):
    """Opens layer 1, head 2 in a frame and reads one weight off it."""
    frame.locator(".heads[data-state=done]").wait_for()
    frame.get_by_role("link", name="Head", exact=True).click()
    frame.get_by_label("attention", exact=True).select_option("1")
    frame.get_by_label("head", exact=True).select_option("2")
    frame.locator(".stage canvas[data-state=done]").first.wait_for()
    frame.locator(".stage").first.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    said = frame.locator(".readout", has_text="weight").first.inner_text()
    i, j, value = re.search(r"\((\d+)\) → .*\((\d+)\).*: weight ([\d.]+)", said).groups()
    return int(i), int(j), float(value)


def test_a_frame_is_one_element_that_cannot_reach_the_notebook(trace):
    text = show(trace, height=300)._repr_html_()
    assert re.fullmatch(r'<iframe [^<>]*sandbox="allow-scripts allow-downloads"[^<>]*></iframe>', text)
    assert "allow-same-origin" not in text and 'height="300"' in text
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', text)[1])
    assert page.startswith("<!doctype html>") and "Content-Security-Policy" in page


def test_a_model_and_a_text_are_shown_with_the_head_that_is_asked_for():
    model = stirred(GPT.preset("nano", vocabulary=256, length=64, layers=2))
    model.tokenizer = Bytes()
    shown = show(model, "the dog", layer=1, head=2)
    assert torch.equal(shown.trace.weights(1, 2), record(model, "the dog").weights(1, 2))
    assert 'app.store.set({"view": "head", "a": 1, "h": 2});' in html.unescape(shown._repr_html_())
    assert "app.store.set({" not in html.unescape(show(model, "the dog")._repr_html_()).rpartition("mount(document")[2]
    for wrong, match in (
        (lambda: show(model), "needs a text"),
        (lambda: show(shown.trace, "the dog"), "has its text already"),
        (lambda: show(model, "the dog", head=1), "of which layer"),
        (lambda: show(model, "the dog", layer=1, head=3), "layer 1 has 3, 0 to 2"),
        (lambda: show(model, "the dog", layer=2), "no self-attention of layer 2"),
    ):
        with pytest.raises(OptionError, match=match):
            wrong()


@pytest.mark.browser
def test_the_head_that_is_asked_for_is_shown_first(trace, chromium, tmp_path):
    path = tmp_path / "frame.html"
    shown = show(trace, layer=1, head=2)._repr_html_()
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{shown}", "utf-8")
    page, said = opened(chromium, path)
    frame = page.frame_locator("iframe")
    frame.locator(".stage canvas[data-state=done]").first.wait_for()
    assert frame.get_by_label("attention", exact=True).input_value() == "1"
    assert frame.get_by_label("head", exact=True).input_value() == "2" and said == []


@pytest.mark.browser
def test_a_frame_shows_what_torch_computes(trace, chromium, tmp_path):
    path = tmp_path / "frame.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{show(trace)._repr_html_()}", "utf-8")
    page, said = opened(chromium, path)
    i, j, value = weight_shown(page.frame_locator("iframe"), page)
    assert abs(value - float(trace.weights(1, 2)[i, j])) < 2e-3
    inner = page.frames[1]
    page.wait_for_timeout(200)  # longer than the lens waits before it would keep its state in an address
    assert inner.evaluate("(() => { try { return parent.document.title } catch { return 'apart' } })()") == "apart"
    assert said == []


def test_a_page_too_large_for_a_notebook_is_told(trace, monkeypatch):
    monkeypatch.setattr(widget, "MAX_PAGE_BYTES", 1000)
    with pytest.raises(OptionError, match="write it to a file"):
        show(trace)._repr_html_()


def test_a_missing_extra_is_told(trace, monkeypatch):
    monkeypatch.setattr(widget, "find_spec", lambda name: None)
    with pytest.raises(ExtraMissingError, match=r"regard\[notebook\]"):
        show(trace, linked=True)


def test_a_linked_widget_holds_the_trace_and_its_frame(trace):
    pytest.importorskip("anywidget")
    found = show(trace, linked=True, height=500)
    assert torch.equal(decode(found.trace).weights(0, 0), decode(show(trace, linked=True).trace).weights(0, 0))
    assert decode(found.trace).tokens == trace.tokens
    bundle = found._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["text/html"] == show(trace, height=500)._repr_html_()


@pytest.mark.browser
def test_a_linked_widget_tells_what_is_looked_at(trace, chromium, tmp_path):
    pytest.importorskip("anywidget")
    made = show(trace, linked=True, height=500)
    path = tmp_path / "empty.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><style>{made._css}</style><body><div id=el></div>", "utf-8")
    page, said = opened(chromium, path)
    page.evaluate(
        """async ([code, bytes]) => {
          const module = await import(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
          const state = { trace: new DataView(Uint8Array.from(bytes).buffer), height: 500 };
          window.kept = state;
          const model = { get: (n) => state[n], set: (n, x) => (state[n] = x), save_changes() {} };
          module.default.render({ model, el: document.getElementById("el") });
        }""",
        [made._esm if isinstance(made._esm, str) else str(made._esm), list(made.trace)],
    )
    page.locator(".heads[data-state=done]").wait_for()
    assert page.evaluate("kept.selected")["head"] == 0
    page.get_by_role("link", name="Head", exact=True).click()
    page.get_by_label("attention", exact=True).select_option("1")
    page.get_by_label("head", exact=True).select_option("2")
    found = page.evaluate("kept.selected")
    assert (found["recording"], found["layer"], found["head"], found["side"]) == (0, 1, 2, "decoder")
    assert found["query"] == found["key"] == -1
    box = page.locator("#el > div").bounding_box()
    assert box["height"] == 500
    assert said == []


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_a_saved_and_exported_notebook_still_shows_it(trace, chromium, tmp_path):
    nbformat, nbclient, nbconvert = (pytest.importorskip(n) for n in ("nbformat", "nbclient", "nbconvert"))
    cells = inspect.getsource(made), "from regard.lens.pages.widget import show\nshow(made())"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(x) for x in cells])
    nbclient.NotebookClient(book, timeout=200, kernel_name="python3").execute()
    assert book.cells[1].outputs[0]["output_type"] == "execute_result"
    saved = tmp_path / "saved.ipynb"
    nbformat.write(book, saved)
    exported, _ = nbconvert.HTMLExporter().from_filename(str(saved))
    path = tmp_path / "saved.html"
    path.write_text(exported, "utf-8")
    page, _ = opened(chromium, path)
    i, j, value = weight_shown(page.frame_locator("iframe"), page)
    assert abs(value - float(trace.weights(1, 2)[i, j])) < 2e-3
