"""How large the lens's page is, how soon it shows something, and how bertviz's model view compares in the same run.

    python benchmarks/speed/lens_page.py [--peers FOLDER] [--save]

Heads are made of random queries and keys whose scores have a deviation of 0.5 to 6, from nearly even to nearly one-hot,
so that no value compresses better than a trained model's. Long ones are causal, those beside bertviz look both ways.
Times are medians of three openings in headless Chromium, from the navigation until the pixels are there; a file is
opened from disk, and requests to any host are counted and refused.

bertviz loads three scripts from a CDN. FOLDER is where `npm install d3@5.7.0 jquery@2.1.4 requirejs@2.3.6` put them;
they are served to it from there (jQuery 2.0.0, which it names, is not on npm). Exits with 1 where a figure misses its
target.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Browser, Page, Route, sync_playwright

import regard
from regard.lens import Card, RecordedAttention, Recording, Trace
from regard.lens.pages.page import write_page
from regard.lens.recording.overview import add_overview
from regard.lens.trace.formulas import SoftmaxFormula
from regard.lens.trace.rules import MaskRules
from regard.lens.trace.tokens import Tokens

WIDTH = 64
TURNS = 3
SCRIPTS = {"require.min.js": "requirejs/require.js", "d3.min.js": "d3/dist/d3.min.js"}
SCRIPTS |= {"jquery.min.js": "jquery/dist/jquery.min.js"}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]

# Resolves once the browser has painted what is there.
FRAME = "() => new Promise((ok) => requestAnimationFrame(() => requestAnimationFrame(ok)))"

# Milliseconds until a head's matrix is first there, and, where that is asked for, until it is exact.
OPEN = """([name, whole]) => new Promise((ok) => {
  const start = performance.now();
  let first = null;
  const look = () => {
    const state = document.querySelector(".matrix .stage canvas")?.dataset.state;
    if (first === null && (state === "refining" || state === "done")) first = performance.now() - start;
    if (state === "done" || (first !== null && !whole)) ok([first, performance.now() - start]);
    else setTimeout(look, 4);
  };
  document.querySelector(`[data-k="${name}"]`).click();
  look();
})"""


def made(layers: int, heads: int, T: int, causal: bool) -> Trace:
    """A trace of random vectors."""
    draw = torch.Generator().manual_seed(0)
    words = [f"word{n % 997}" for n in range(T)]
    starts = [sum(len(w) + 1 for w in words[:n]) for n in range(T)] if T < 300 else [-1] * T
    ends = [s + len(w) if s >= 0 else -1 for s, w in zip(starts, words, strict=True)]
    tokens = Tokens("text", " ".join(words) if T < 300 else "", words, starts=starts, ends=ends)
    sizes = {"width": WIDTH * heads, "key_width": WIDTH, "value_width": WIDTH}
    card = Card("random vectors", "none", "regard", 0, layers, heads, heads, mechanisms=("softmax",), **sizes)
    recording = Recording("text", card, [tokens], [])
    spread = torch.linspace(math.log(0.5), math.log(6), heads).exp().sqrt()[:, None, None]
    for layer in range(layers):
        q, k, v = (torch.randn(heads, T, WIDTH, generator=draw) for _ in range(3))
        place = (layer, "decoder", "self", f"layers.{layer}", "softmax", 0, 0, heads, heads)
        one = RecordedAttention(
            *place, SoftmaxFormula(WIDTH**-0.5), MaskRules(causal=causal), q=q * spread, k=k * spread, v=v
        )
        add_overview(recording, one)
        recording.attentions.append(one)
    return Trace([recording])


def fresh(browser: Browser, refused: list[str]) -> Page:
    """A page that may read files and nothing else."""
    page = browser.new_context(viewport={"width": 1400, "height": 1000}).new_page()

    def route(asked: Route) -> None:
        refused.append(asked.request.url)
        asked.abort()

    page.route(lambda url: not url.startswith(("file:", "data:", "blob:")), route)
    page.on("pageerror", lambda error: refused.append(str(error)))
    return page


def opened(browser: Browser, path: Path, head: str, whole: bool) -> dict[str, Any]:
    """Seconds to the first picture, to a head, and to all of its cells."""
    refused: list[str] = []
    page = fresh(browser, refused)
    start = time.perf_counter()
    page.goto(path.as_uri(), wait_until="commit")
    page.wait_for_selector(".heads[data-state=done]", timeout=120_000)
    page.evaluate(FRAME)
    grid = time.perf_counter() - start
    page.wait_for_load_state("load", timeout=120_000)
    first, exact = page.evaluate(OPEN, [head, whole])
    found = {"first picture": grid, "head": first / 1000, "head exact": exact / 1000, "requests": len(refused)}
    found["hover"] = _hovered(page) if whole else []
    page.context.close()
    return found


def _hovered(page: Page) -> list[float]:
    """A query, a key and the weight that the page says they have, under the mouse at a few places."""
    box = page.locator(".matrix .stage canvas").bounding_box()
    assert box is not None
    said = []
    for x, y in ((0.05, 0.6), (0.4, 0.8), (0.7, 0.95), (0.93, 0.94)):
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        page.evaluate(FRAME)
        pair, rest = page.locator(".readout").first.inner_text().split(": weight ")
        query, key = (int(part.split("(")[1].split(")")[0]) for part in pair.split(" → "))
        said.append([query, key, float(rest.split(",")[0].replace("−", "-"))])
    return said


def lens(
    browser: Browser, folder: Path, layers: int, heads: int, T: int, head: tuple[int, int], causal: bool = True
) -> dict[str, Any]:
    """Size and times of the page of so many heads and tokens."""
    trace = made(layers, heads, T, causal)
    path = folder / f"{layers}x{heads}x{T}.html"
    size = write_page(trace, path)
    runs = [opened(browser, path, f"{head[0]}.{head[1]}", n == 0) for n in range(TURNS)]
    times = {key: statistics.median(run[key] for run in runs) for key in ("first picture", "head")}
    wrong = 0.0
    for i, j, said in runs[0]["hover"]:
        wrong = max(wrong, abs(said - trace.weights(head[0], head[1], [int(i)])[0, int(j)].item()))
    path.unlink()
    times["all cells of the head"] = runs[0]["head exact"]
    return {"bytes": size, **times, "requests": sum(run["requests"] for run in runs), "hover error": wrong}


def bertviz(browser: Browser, folder: Path, scripts: Path, layers: int, heads: int, T: int) -> dict[str, Any]:
    """Returns size and opening time of the same heads in bertviz's model view; its last head takes minutes."""
    from bertviz import model_view

    trace = made(layers, heads, T, causal=False)
    weights = [torch.stack([trace.weights(n, h) for h in range(heads)])[None] for n in range(layers)]
    shown = model_view(weights, trace.tokens, html_action="return")
    path = folder / "bertviz.html"
    path.write_text(shown.data, "utf-8")
    page = browser.new_context(viewport={"width": 1400, "height": 1000}).new_page()
    for name, place in SCRIPTS.items():
        body = (scripts / "node_modules" / place).read_bytes()
        page.route(f"**/{name}", partial(_serve, body))
    start = time.perf_counter()
    page.goto(path.as_uri(), wait_until="commit")
    drawn = f"document.querySelector('#vis svg')?.childElementCount >= {layers * heads}"
    page.wait_for_function(drawn, timeout=600_000)
    page.evaluate(FRAME)
    taken = time.perf_counter() - start
    page.context.close()
    size = path.stat().st_size
    path.unlink()
    return {"bytes": size, "first picture": taken}


def told(what: str, found: dict[str, Any]) -> dict[str, Any]:
    """Prints what was measured on one line and returns it."""
    print(f"{what:18}", ", ".join(f"{key} {value:,.4g}" for key, value in found.items()), flush=True)
    return found


def _serve(body: bytes, route: Route) -> None:
    route.fulfill(body=body, content_type="text/javascript")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="the folder with bertviz's scripts in its node_modules")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/lens-page-<date>.json")
    asked = parser.parse_args()
    results: dict[str, Any] = {}
    checks: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        small = results["12x12x128"] = told("12x12x128", lens(browser, folder, 12, 12, 128, (5, 7), causal=False))
        if asked.peers is not None:
            peer = told("bertviz 12x12x128", bertviz(browser, folder, asked.peers, 12, 12, 128))
            smaller, quicker = peer["bytes"] / small["bytes"], peer["first picture"] / small["first picture"]
            results["bertviz 12x12x128"] = {**peer, "smaller by": smaller, "quicker by": quicker}
            checks |= {"20× smaller than bertviz": smaller >= 20, "10× quicker than bertviz": quicker >= 10}
        long = results["1x1x16384"] = told("1x1x16384", lens(browser, folder, 1, 1, 16384, (0, 0)))
        checks |= {
            "one head × 16,384 tokens: at most 10 MB": long["bytes"] <= 10e6,
            "first picture and its head in 3 s": long["first picture"] + long["head"] <= 3,
        }
        large = results["12x12x2048"] = told("12x12x2048", lens(browser, folder, 12, 12, 2048, (5, 7)))
        checks |= {
            "12×12 heads × 2,048 tokens: at most 140 MB": large["bytes"] <= 140e6,
            "first picture in 5 s": large["first picture"] <= 5,
            "a head in 0.5 s": large["head"] <= 0.5,
            "hover right to 2e-3": large["hover error"] <= 2e-3,
        }
        checks["no request to any host"] = not any(found.get("requests") for found in results.values())
        version = browser.version
        browser.close()
    for what, held in checks.items():
        print("✓" if held else "✗", what)
    if asked.save:
        today = datetime.date.today().isoformat()
        place = Path(__file__).parents[1] / "results" / f"lens-page-{today}.json"
        known = {"date": today, "regard": regard.__version__, "chromium": version, "cpu": platform.machine()}
        place.write_text(json.dumps({**known, "results": results, "checks": checks}, indent=2) + "\n", "utf-8")
        print(f"written to {place}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
