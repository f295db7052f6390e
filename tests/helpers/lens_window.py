"""A page of the lens in a real browser, and traces to show in it."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import torch

from regard import GPT
from regard.data.tokenizers import Bytes
from regard.lens import Card, RecordedAttention, Recording
from regard.lens.recording.overview import add_overview
from regard.lens.trace.formulas import SoftmaxFormula
from regard.lens.trace.rules import MaskRules
from regard.lens.trace.tokens import Tokens


def gpt(**changes):
    torch.manual_seed(5)
    sizes = {"vocabulary": 256, "width": 24, "layers": 2, "length": 64, "attention": {"heads": 4, "groups": 2}}
    model = GPT.preset("nano", **{**sizes, **changes})
    model.tokenizer = Bytes()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)  # weights far from even
    return model


def drawn(T=6, H=2, *, words=None, text="", label="none", K=8, causal=True, softcap=None, more=None, **sequence):
    """A recording of random vectors over given tokens; `more`: other tensors of the attention."""
    draw = torch.Generator().manual_seed(T)
    tokens = Tokens("text", text, words or [f"t{n}" for n in range(T)], **sequence)
    card = Card(label, "Drawn", "regard", 0, 1, H, H, K * H, K, K, ("softmax",))
    made = Recording("text", card, [tokens], [])
    q, k, v = (2 * torch.randn(H, len(tokens), K, generator=draw) for _ in range(3))
    how, tensors = SoftmaxFormula(K**-0.5, softcap), {"q": q, "k": k, "v": v, **(more or {})}
    one = RecordedAttention(0, "decoder", "self", "0", "softmax", 0, 0, H, H, how, MaskRules(causal), **tensors)
    add_overview(made, one)
    made.attentions.append(one)
    return made


class Window:
    """A page in a browser: anything on its console, and any request but for itself, is a failure."""

    def __init__(self, browser, path, **context):
        self.uri, self.said = path.as_uri(), []
        self.context = browser.new_context(viewport={"width": 1300, "height": 1000}, accept_downloads=True, **context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("console", lambda m: self.said.append(m.text))
        self.page.on("pageerror", lambda e: self.said.append(str(e)))
        self.page.on("dialog", lambda d: self.said.append(f"dialog {d.message}"))
        self.page.on("request", lambda r: self.said.append(r.url) if not r.url.startswith(("data:", self.uri)) else 0)
        self.page.add_init_script(
            "addEventListener('securitypolicyviolation', e => console.log('policy: ' + e.violatedDirective))"
        )

    def show(self, state=""):
        """The page in a state, drawn to the end."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.uri}#{state}")
        self.settle()
        return self

    def settle(self):
        view = self.page.locator("main > section").get_attribute("aria-label")
        if view == "All heads":
            self.page.wait_for_selector(".heads[data-state=done]")
        elif view in ("One head", "Compare", "Masks", "Positions", "Memory"):
            self.until("[...document.querySelectorAll('.stage canvas')].every(c => c.dataset.state === 'done')")
        elif view == "Vectors":
            self.page.wait_for_selector(".vector")
        else:
            self.page.wait_for_selector(".dots")

    def until(self, wanted):
        """Waits for something to be true; playwright's own way evaluates strings, which the page's policy forbids."""
        for _ in range(1000):
            if self.page.evaluate(wanted):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"never true: {wanted}")

    def save(self, kind, note=""):
        """The bytes of a saved file, and its name."""
        self.page.keyboard.press("Escape") if self.page.locator("dialog[open]").count() else None
        self.page.get_by_role("button", name="Save…").click()
        self.page.locator("dialog[open] textarea").fill(note)
        with self.page.expect_download() as caught:
            self.page.get_by_role("button", name=f"{kind}:").click()
        return Path(caught.value.path()).read_bytes(), caught.value.suggested_filename

    def cells(self):
        """The numbers of the shown matrix, NaN where a cell is hidden; names of rows and of columns."""
        raw, _ = self.save("CSV")
        head, *rows = csv.reader(io.StringIO(raw.decode("utf-8-sig")))
        values = torch.tensor([[float(x) if x else torch.nan for x in row[1:]] for row in rows])
        return values, [row[0] for row in rows], head[1:]

    def fact(self, name):
        """A number of the vectors view."""
        row = self.page.locator("dl > div", has=self.page.locator("dt", has_text=re.compile(f"^{re.escape(name)}$")))
        return row.first.locator("dd").inner_text()

    def close(self):
        self.context.close()
        assert self.said == []


def number(text):
    return float(text.replace("−", "-"))


def holds(said, value):
    """Whether a number as the page writes it is right: stored and rounded, it may be off by one of its last digit."""
    if said.startswith("<"):
        return abs(value) <= 2 * number(said[1:])
    return abs(number(said) - value) <= 10.0 ** -len(said.partition(".")[2])
