"""Figures on pages that name the result they come from, behind the number, are that result, rounded as shown.

    takes .29<!--= race-h200-2026-11-16c rows[what=elu,pass=forward,N=65536].seconds.1*1000 --> ms

The file lies in benchmarks/results. A path goes by keys and places; brackets choose the one entry of a list with these
values. The number may be multiplied at the end.
"""

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FIGURE = re.compile(
    r"(?P<shown>[\d,]*\.?\d+)(?P<unit>%?)<!--= (?P<file>\S+) (?P<path>.+?)(?:\*(?P<factor>[\d.e-]+))? -->"
)
STEP = re.compile(r"(?P<key>[^.\[\]]+)(?:\[(?P<values>[^\]]*)\])?(?:\.|$)")


def looked_up(document, path):
    """The number at a path."""
    for step in STEP.finditer(path):
        key = step["key"]
        document = document[int(key)] if isinstance(document, list) else document[key]
        if step["values"]:
            wanted = dict(pair.split("=", 1) for pair in step["values"].split(";"))
            (document,) = [row for row in document if all(str(row.get(k)) == v for k, v in wanted.items())]
    return document


def shows(shown, value):
    """Whether a number as written is this value, rounded to the digits that stand there."""
    written = Decimal(shown.replace(",", ""))
    digit = Decimal(1).scaleb(written.as_tuple().exponent)
    if "." not in shown and written >= 1000:  # zeros at the end of 529,000 are no digits
        digit = Decimal(1).scaleb(written.normalize().as_tuple().exponent)
    return abs(Decimal(repr(value)) - written) <= digit / 2


FIGURES = [(page, found) for page in PAGES for found in FIGURE.finditer(page.read_text())]


@pytest.mark.parametrize(("page", "found"), FIGURES, ids=lambda x: getattr(x, "name", None))
def test_a_figure_is_the_result_that_it_names(page, found):
    document = json.loads((RESULTS / f"{found['file']}.json").read_text())
    value = float(looked_up(document, found["path"])) * float(found["factor"] or 1)
    if found["unit"]:
        value *= 100
    assert shows(found["shown"], value), f"{page.name}: {found[0]} is {value}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_mark_is_read(page):
    assert page.read_text().count("<!--=") == len(FIGURE.findall(page.read_text()))


def test_wrong_figures_are_found():
    assert shows("4.8", 4.84) and not shows("4.8", 4.86)
    assert shows("529,000", 529200.5) and not shows("529,000", 528000.0)
    assert shows("20", 20.4) and not shows("20", 22.0)
    assert looked_up({"a": [{"b": 1, "c": 2}, {"b": 3, "c": 4}]}, "a[b=3].c") == 4
    with pytest.raises(ValueError, match="unpack"):
        looked_up({"a": [{"b": 1}, {"b": 1}]}, "a[b=1].b")


def test_the_speeds_in_the_readme_and_in_the_table_name_their_results():
    readme = (ROOT / "README.md").read_text()
    speed = (ROOT / "docs" / "bench.md").read_text().split("## Speed in one table")[1].split("\n## ")[0]
    measured = re.findall(r"\d(?:\.\d+)? ?(?:ms\b|×|GB\b)", re.sub(r"<!--.*?-->", "", readme))
    assert len(re.findall("<!--=", readme)) >= len(measured)
    rows = [line for line in speed.splitlines() if re.match(r"\| .*\d", line)]
    assert rows and all("<!--=" in row for row in rows)


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("kernels", "masks-cpu-2026-11-19"),
        ("kernels", "masks-h200-2026-11-18"),
        ("knowledge", "knowledge-cpu-2026-11-20"),
        ("knowledge", "knowledge-h200-2026-11-15"),
        ("recall", "recall-cpu-2026-11-19"),
        ("sentiment", "sentiment-h200-2026-11-15"),
        ("summarize", "summarize-h200-2026-11-15"),
        ("training", "train-h200-2026-11-18"),
    ],
)
def test_a_table_of_what_was_measured_names_its_result(page, file):
    named = [found for path, found in FIGURES if path.stem == page and found["file"] == file]
    assert len(named) >= 8
