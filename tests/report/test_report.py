"""Reports: pages that need nothing else, say what was found, and never run what a user's file says."""

from __future__ import annotations

import copy
import random
import re
import shlex
import subprocess
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import GPT, Encoder, Seq2Seq
from regard.errors import OptionError, RegardError, ShapeError
from regard.lab.knowledge.page import knowledge_page
from regard.lab.runs.page import compare_page
from regard.laws.case import difference
from regard.lens import attention_maps
from regard.mechanisms import mechanisms, mix
from regard.report import Page, ReportError, heads_grid, heat, plots
from regard.report.heat import token_label
from regard.report.markup import Markup, duration, escape, number, percent, strong, tag
from regard.report.page import command_listing, details, facts, heading, paragraph, samples, table
from regard.report.palette import CARD, INK, MUTED, PAGE, SERIES, WASH, styles

pytest.importorskip("matplotlib")

WITH, WITHOUT = "with pretraining", "without pretraining"
PLACES = ["London", "Kyoto", "Łódź", "São Paulo", "Bergen", "Accra", "Lima", "Oslo"]
FIRST, LAST = ["Anna", "Bo", "Chidi", "Dora", "Eun-ji"], ["Okafor", "Lind", "O’Hara", "Tanaka", "Núñez"]


def score(right, n):
    p = right / n
    return {"right": right, "n": n, "accuracy": p, "low": max(0.0, p - 0.043), "high": min(1.0, p + 0.045)}


def results():
    """What a run of the experiment gives, in the sizes of a real one; made up."""
    draw = random.Random(7)
    people = [f"{a} {b}" for a in FIRST for b in LAST]

    def answers(skill):
        for n in range(200):
            right = draw.random() < skill
            sure = min(0.99, max(0.02, draw.gauss(0.75 if right else 0.4, 0.2)))
            place = draw.choice(PLACES)
            wrong = draw.choice([p for p in PLACES if p != place])
            person = people[n % len(people)]
            yield {
                "question": f"Where was {person} born?", "person": person, "expected": place,
                "predicted": place if right else wrong, "confidence": sure, "right": right,
            }  # fmt: skip

    def stage(name, steps, floor, top):
        curve = [
            {"step": s, "loss": floor + 2.4 * 0.994 ** (s * 900 / steps) * draw.uniform(0.9, 1.1), "lr": 1e-3}
            for s in range(1, steps + 1, max(1, steps // 500))
        ]
        marks = [{"step": s, "dev/accuracy": top * (1 - 0.7 ** (s * 8 / steps))} for s in range(0, steps, steps // 10)]
        return {
            "name": name, "run": name.replace(" ", "-"), "steps": steps, "epochs": steps // 9, "seconds": steps / 7,
            "tokens": steps * 32768, "curve": curve, "evaluations": [] if name == "pretraining" else marks,
        }  # fmt: skip

    def calibrated(bend, ece):
        bins = [(n + 0.5) / 10 for n in range(10)]
        return {
            "rows": [{"confidence": c, "accuracy": c**bend, "n": 8 + 5 * k} for k, c in enumerate(bins)],
            "ece": ece,
        }

    question = "⁇Where was Anna Lind born?⁇"
    forms = [("two words", "Lima", 0.4), ("Scandinavian -sen", "Bergen", 0.8), ("with an accent", "São Paulo", 0.5)]
    return {
        "title": "What does a small model know from reading?", "seed": 1, "device": "cpu (2 threads)",
        "seconds": 1834.2, "versions": {"regard": "0.1.0", "torch": "2.13.0"}, "mechanism": "softmax",
        "world": {
            "people": 2500, "documents": 2937, "questions": {"train": 2000, "dev": 500, "test": 500},
            "example_documents": ["Anna Lind was born in Bergen and became a painter.", "Bo Tanaka of Lima…"],
            "example_questions": [["Where was Bo Tanaka born?", "Lima"], ["Where was Dora Núñez born?", "Łódź"]],
        },
        "model": {"parameters": 3_323_392, "summary": "GPT\n             parameters\nlayer 0 ×4   3,159,040"},
        "stages": [stage(WITHOUT, 585, 0.09, 0.03), stage("pretraining", 14950, 0.31, 0), stage(WITH, 80, 0.2, 0.5)],
        "baselines": [
            {"name": "most frequent place (Lima)", "dev": score(28, 500), "test": score(25, 500)},
            {"name": "constant (London)", "dev": score(25, 500), "test": score(27, 500)},
        ],
        "models": [
            {"name": WITHOUT, "dev": score(10, 500), "test": score(12, 500)},
            {"name": WITH, "dev": score(254, 500), "test": score(247, 500)},
        ],
        "answers": {WITHOUT: list(answers(0.03)), WITH: list(answers(0.5))},
        "calibration": {WITHOUT: calibrated(2.5, 0.213), WITH: calibrated(1.2, 0.061)},
        "coverage": {
            WITHOUT: [[n / 20, 0.05 - 0.03 * n / 20] for n in range(1, 21)],
            WITH: [[n / 20, 0.97 - 0.46 * (n / 20) ** 1.3] for n in range(1, 21)],
        },
        "unwritten": {
            WITH: {
                "n": 150, "mean_confidence": 0.31, "top_answers": [["Lima", 61], ["Bergen", 30], ["Oslo", 12]],
                "written_confidences": [min(0.99, max(0, draw.gauss(0.62, 0.25))) for _ in range(500)],
                "unwritten_confidences": [min(0.99, max(0, draw.gauss(0.31, 0.14))) for _ in range(150)],
                "by_form": [
                    {
                        "form": form, "n": 50, "mean_confidence": sure, "distinct": 9, "top": [place, sure],
                        "examples": [["Where was Nils Hansen born?", place, sure]],
                    }
                    for form, place, sure in forms
                ],
            }
        },
        "attention": {"tokens": list(question), "heads": heads(len(question))},
    }  # fmt: skip


def heads(T):
    """Causal weights of eight heads: two with a note."""
    made = torch.Generator().manual_seed(3)
    seen = torch.ones(T, T).tril().bool()
    weights = (3 * torch.randn(8, T, T, generator=made)).masked_fill(~seen, float("-inf")).softmax(-1)
    notes = {0: "The last ⁇ looks at the name.", 3: "Each character looks at the first of its word."}
    return [
        {"layer": n // 4, "head": n % 4, "weights": w.tolist(), "note": notes.get(n)} for n, w in enumerate(weights)
    ]


def run(name, mechanism, loss, accuracy, **more):
    curve = [{"step": s, "loss": loss + 3 * 0.99**s, "lr": 0.01} for s in range(0, 600, 2)]
    marks = [
        {"step": s, "dev/loss": loss + 0.1 + 3 * 0.99**s, "dev/accuracy": accuracy * s / 600} for s in (200, 400, 600)
    ]
    return {
        "name": name, "path": f"runs/{name}", "recipe": "knowledge/finetune", "status": "done", "steps": 600,
        "seconds": 181.0, "parameters": 3323392, "mechanism": mechanism, "metrics": {"loss": loss},
        "best": {"dev/loss": loss + 0.1, "dev/accuracy": accuracy}, "curve": curve, "evaluations": marks,
        "config_differences": {"model.mechanism": mechanism, "train.lr": 6e-4},
    } | more  # fmt: skip


def three_runs():
    return [
        run("softmax", "softmax", 0.2, 0.51), run("elu", "elu", 0.5, 0.32),
        run("synthesizer", "synthesizer", 0.8, 0.14, status="interrupted"),
    ]  # fmt: skip


class Reader(HTMLParser):
    """What a browser is given: every element closed in order, every id once, attributes, text."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.ids, self.said = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, name, attributes):
        assert not name.startswith("script")
        assert not any(key.startswith("on") for key, _ in attributes)
        self.elements.append((name, dict(attributes)))
        self.ids += [value for key, value in attributes if key == "id"]
        if name not in self.VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.handle_starttag(name, attributes)
        self.handle_endtag(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, text):
        self.said.append(text)

    def of(self, name):
        return [attributes for found, attributes in self.elements if found == name]

    @property
    def joined(self):
        return "".join(self.said)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.said)).replace("\u2060", "")


@pytest.fixture(scope="module")
def page():
    return knowledge_page(results()).html()


@pytest.fixture(scope="module")
def runs_page():
    return compare_page(three_runs()).html()


# The page


def test_page_is_well_formed_and_accessible(page):
    read = Reader(page)
    assert read.of("html") == [{"lang": "en"}]
    levels = [int(name[1]) for name, _ in read.elements if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in read.of("svg"))
    assert len(read.of("svg")) == len(read.of("figure")) == len(read.of("figcaption")) > 8
    assert len(read.of("caption")) == len(read.of("table"))
    assert all(a.get("scope") in ("row", "col") for a in read.of("th"))
    assert {a["href"][1:] for a in read.of("a")} <= set(read.ids)


def test_page_loads_nothing(page):
    policy = next(a["content"] for a in Reader(page).of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "script" not in policy
    assert not re.search(r"https?:|//[a-z]|@import|@font-face|file:", page)
    assert not re.search(r"url\((?!#)", page)
    sources = [a[key] for _, a in Reader(page).elements for key in ("src", "href") if key in a]
    assert all(source.startswith(("#", "data:image/png;base64,")) for source in sources)


def test_same_results_same_bytes(page, runs_page):
    assert knowledge_page(results()).html() == page
    assert compare_page(three_runs()).html() == runs_page


def test_whatever_a_file_says_stays_text(page, runs_page):
    """Every string of the results is hostile; the page shows it and has no element or attribute more than without."""
    evil = "</style></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"'&$x^{ \x00\ud800"

    def spoiled(x, key=None):
        if isinstance(x, dict):
            return {(k + evil if k in (WITH, WITHOUT) else k): spoiled(v, k) for k, v in x.items()}
        if isinstance(x, list):
            return [spoiled(v, key) for v in x]
        keeps = ("answers_of",)
        return x + evil if isinstance(x, str) and key not in keeps else x

    for made, spoil in (
        (page, knowledge_page(spoiled(results()))),
        (runs_page, compare_page([spoiled(r) for r in three_runs()])),
    ):
        plain, read = Reader(made), Reader(spoil.html())
        assert {name for name, _ in read.elements} <= {name for name, _ in plain.elements}
        assert "<script>alert(1)</script>" in read.text
        spoil.html().encode("utf-8")


@given(st.text())
def test_text_comes_back_as_it_was(text):
    read = Reader(tag("p", text, title=text))
    assert "".join(read.said) == re.sub("[^\t\n\r -~\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
    assert escape(Markup("<b>")) == "<b>" and escape("<b>") == "&lt;b&gt;"


def test_blocks_say_what_they_are_given():
    blocks = [
        heading("A & B"),
        paragraph("x ", strong("<y>"), quiet=True),
        table([["one", 1234, 0.5], ["two", 20, None]], ["name", "n", "share"], "Two rows.", highlight=[1]),
        facts({"seed": 3}),
        samples(["a", "b"]),
        details("more", paragraph("inside")),
    ]
    read = Reader(Page("T", "L", *blocks).html())
    for said in ("A & B", "<y>", "1,234", "0.5", "–", "Two rows.", "seed", "inside"):
        assert said in read.text
    assert [a.get("class") for a in read.of("tr")] == [None, None, "best"]
    assert [a.get("class") for a in read.of("td")] == ["n", "n"] * 2


def test_numbers_read_well():
    assert [number(x) for x in (1234567, 0.50802, 6e-4, 3e-7, 1e9, 2.0, float("nan"), None, "x", True)] == [
        "1,234,567", "0.508", "0.0006", "3e-07", "1e+09", "2", "–", "–", "x", "True",
    ]  # fmt: skip
    assert [percent(x) for x in (0.5084, 1, None, float("nan"))] == ["50.8%", "100.0%", "–", "–"]
    assert [duration(x) for x in (0.26, 59.6, 95.2, 7325, None)] == [
        "0.3 s",
        "1 min 0 s",
        "1 min 35 s",
        "2 h 2 min",
        "–",
    ]


def test_writing_replaces_the_file_or_leaves_it(tmp_path, monkeypatch):
    place = tmp_path / "new" / "report.html"
    Page("One", "x").write(place)
    Page("Two", "x").write(place)
    assert "Two" in place.read_text("utf-8")
    (tmp_path / "file").write_text("x")
    for unwritable in (tmp_path / "file" / "report.html", tmp_path / "new"):
        with pytest.raises(ReportError, match=re.escape(f"{unwritable} cannot be written")) as told:
            Page("Three", "x").write(unwritable)
        assert isinstance(told.value, RegardError)

    def full(*_):
        raise OSError(28, "No space left on device")

    for step in ("os.fsync", "pathlib.Path.replace"):
        with monkeypatch.context() as broken:
            broken.setattr(step, full)
            with pytest.raises(ReportError, match="No space left"):
                Page("Three", "x").write(place)
        assert "Two" in place.read_text("utf-8")
        assert list(place.parent.iterdir()) == [place]


# Colours


def contrast(a, b):
    def light(colour):
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_and_lines_are_legible(mode):
    for ground in (CARD, PAGE):
        for shade in (INK, MUTED, *SERIES):
            assert contrast(getattr(shade, mode), getattr(ground, mode)) >= 4.5, (shade.name, ground.name)
    assert contrast(getattr(INK, mode), getattr(WASH, mode)) >= 4.5


def test_colours_follow_the_page():
    svg = plots.curves({"a": [(0, 1), (1, 2)]})
    assert f"var(--{SERIES[0].name},{SERIES[0].light})" in svg
    drawn = set(re.findall(r"(?:fill|stroke): (#\w+)", svg))
    assert drawn == set(), "a colour that is not of the palette does not change in the dark"


def test_styles_never_repeat_among_a_dozen():
    assert len(set(styles(map(str, range(12))).values())) == 12


# Figures


def lines(svg):
    """Corners of the paths drawn in a series' colour."""
    return [len(re.findall(r"[ML] ", d)) for d in re.findall(r'<path d="([^"]*)"[^>]*--series-', svg)]


def test_curves_hold_every_point_until_there_are_too_many():
    wild = [(n, (n * 7919 % 101) + 1.0) for n in range(250)]
    assert max(lines(plots.curves({"a": wild}))) == 250
    many = [(n, (n * 7919 % 101) + 1.0) for n in range(5000)]
    assert 200 < max(lines(plots.curves({"a": many}))) <= plots.MOST


@pytest.mark.parametrize("log", [False, True])
def test_curves_bear_a_run_that_diverged(log):
    svg = plots.curves({"a": [(0, 2.0), (1, float("nan")), (2, float("inf")), (3, 0.5)], "b": []}, log=log)
    assert "0.5" in svg and "nan" not in svg.lower() and "inf" not in re.sub("<[^>]*>", "", svg)


def test_curves_mark_and_name_the_best():
    svg = plots.curves({"a": [(0, 0.1), (1, 0.9), (2, 0.3)]}, mark_best="max", shares=True)
    assert ">90.0%<" in svg and "max: a 90.0%" in svg
    assert "min: a 0.1" in plots.curves({"a": [(0, 0.3), (1, 0.1), (2, 0.2)]}, mark_best="min")


def test_names_at_line_ends_do_not_overlap():
    names = [f"run {n}" for n in range(5)]
    svg = plots.curves({name: [(0, 1), (1, 0.5 + 0.001 * n)] for n, name in enumerate(names)})
    heights = [float(y) for y in re.findall(r'translate\(\S+ ([\d.]+)\)"[^>]*>(?:run \d|0\.5\d*)<', svg)]
    assert len(heights) == 10
    assert min(b - a for a, b in pairwise(sorted(heights))) > 10
    y, height = map(float, re.search(r'<rect x="\S+" y="(\S+)" width="\S+" height="(\S+)"', svg).groups())
    assert max(heights) < y + height


def test_bars_say_value_interval_and_n():
    svg = plots.bars([("a", 0.5, 0.4, 0.6, 250)], {"guess": 0.05})
    assert "50.0%, n = 250" in svg and "guess 5.0%" in svg
    assert "40.0% to 60.0%" in svg


def test_calibration_points_are_as_large_as_their_bins():
    rows = [{"confidence": 0.2, "accuracy": 0.1, "n": 10}, {"confidence": 0.8, "accuracy": 0.9, "n": 90}]
    rows.append({"confidence": 0.5, "accuracy": float("nan"), "n": 0})
    svg = plots.calibration({"a": rows}, {"a": 0.1})
    points = [re.findall(r"(-?[\d.]+) -?[\d.]+ \n", d) for d in re.findall(r'<path d="([^"]*C [^"]*)"', svg)]
    few, many = (max(map(float, xs)) - min(map(float, xs)) for xs in points)
    assert many > 2 * few
    assert "90% at 80% (n = 90)" in svg and "calibration error 10.0%" in svg and "nan" not in svg


def test_coverage_reads_the_half():
    assert plots.interpolate([(0.2, 1.0), (0.6, 0.5), (1.0, 0.25)], 0.5) == pytest.approx(0.625)
    assert plots.interpolate([(0.2, 1.0)], 0.5) == plots.interpolate([(0.7, 1.0)], 0.5) == 1.0
    svg = plots.coverage({"a": [(1.0, 0.25), (0.2, 1.0), (0.6, 0.5)]})
    assert "a 62.5% on the surest half, 25.0% on all" in svg


def test_histogram_counts_shares():
    svg = plots.histogram({"a": [0.1, 0.1, 0.1, 0.9], "b": [1.0, 0.0]}, bins=2)
    assert "a: n = 4, mean 30.0%" in svg and "b: n = 2, mean 50.0%" in svg


def pixels(svg):
    """Opacities of the first picture in a figure."""
    import base64
    import io

    import numpy as np
    from PIL import Image

    data = re.search(r'href="data:image/png;base64,([^"]*)"', svg)[1]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")).astype(float) / 255


def test_heat_shows_every_weight():
    weights = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.1, 0.2, 0.4]]
    by_row = pixels(heat(weights, "abc"))[..., 3]
    assert by_row == pytest.approx(torch.tensor([[1, 0, 0], [1, 1, 0], [0.25, 0.5, 1]]).numpy(), abs=1 / 250)
    by_all = pixels(heat(weights, "abc", scale="all"))[..., 3]
    assert by_all == pytest.approx(torch.tensor(weights).numpy(), abs=1 / 250)


def test_negative_weights_have_another_colour_and_a_legend():
    svg = heat([[1.0, -0.5], [0.0, 1.0]], "ab")
    shown = pixels(svg)
    assert shown[0, 1, 3] == pytest.approx(0.5, abs=1 / 250)
    assert abs(shown[0, 0, :3] - shown[0, 1, :3]).max() > 0.3
    assert ">negative<" in svg and ">negative<" not in heat([[1.0]], "a")


def test_heads_grid_has_every_head_and_labels_where_they_fit():
    few = heads_grid([torch.eye(3)] * 5, ["the", " cat", "\n"], [f"head {n}" for n in range(5)])
    assert all(f">head {n}<" in few for n in range(5)) and ">␣cat<" in few and ">⏎<" in few
    many = heads_grid([torch.eye(200)], [f"t{n}" for n in range(200)], ["head"])
    assert ">t7<" not in many
    assert token_label("") == "∅"
    assert ">$x^{$<" in heat([[1.0]], ["$x^{$"]), "not taken for a formula"


def test_maps_that_do_not_fit_their_tokens_are_refused():
    with pytest.raises(ShapeError, match=r"shape \[2, 2\] for 3 rows"):
        heat(torch.eye(2), "abc")
    with pytest.raises(ShapeError, match="1 maps and 2 titles"):
        heads_grid([torch.eye(2)], "ab", ["x", "y"])


def test_an_axis_of_whole_numbers_has_no_others():
    """Three epochs are 1, 2 and 3: no 1.5 in between."""
    whole = plots.curves({"a": [(1, 0.5), (2, 0.4), (3, 0.3)]})
    halves = plots.curves({"a": [(1, 0.5), (1.5, 0.4), (3, 0.3)]})
    assert ">1.5<" not in str(whole) and ">1.5<" in str(halves)


def test_matplotlib_is_left_as_it_was():
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.histogram({"日本": [0.5]})
    assert dict(matplotlib.rcParams) == before


# The page of the experiment

SECTIONS = {
    "models": ("Outcome", "254 of 500"),
    "stages": ("Learning", "14,950"),
    "answers": ("Right and wrong answers", "12 of 9"),
    "calibration": ("Does it know how sure to be?", "6.1%"),
    "coverage": ("When it may stay silent", "of the others"),
    "unwritten": ("People it never read of", "Scandinavian -sen"),
    "attention": ("Where it looks", "Layer 0, head 3"),
}


def test_every_section_is_there(page):
    read = Reader(page)
    for title, said in SECTIONS.values():
        assert title in read.text and said in read.text.replace("\xa0", " ")
    assert "Left out" not in read.text
    assert "regard run knowledge --seed 1" in read.text
    for said in ("49.4%", "2.4%", "45.1–53.9%", "constant (London)", "31.0%", "3,323,392"):
        assert said in read.text


@pytest.mark.parametrize("key", SECTIONS)
def test_a_part_alone_is_shown_and_the_missing_ones_are_told(key):
    read = Reader(knowledge_page(dict.fromkeys(SECTIONS) | {key: results()[key]}).html())
    for other, (title, said) in SECTIONS.items():
        anchor = title.lower().replace(" ", "-").strip("?")
        assert (anchor in read.ids) is (other == key)
        assert (f"{title} :" in read.text) is (other != key)
        assert (said in read.text.replace("\xa0", " ")) is (other == key)


def test_a_test_file_without_answers_is_told():
    blind = {key: results()[key] for key in ("models", "baselines")}
    for row in (*blind["models"], *blind["baselines"]):
        row["test"] = None
    read = Reader(knowledge_page(blind).html())
    assert "Accuracy on the test questions : their file has no answers." in read.text
    assert "50.8% of 500 development answers" in read.text


@pytest.mark.parametrize(
    "without, reading, baseline, best",
    [
        (12, 247, 25, WITH),
        (0, 0, 25, "always Elm"),
        (0, 25, 25, None),
        (40, 30, 25, WITHOUT),
        (30, 30, 25, None),
        (0, 0, 0, None),
    ],
)
def test_what_is_brought_out_is_the_best_alone(without, reading, baseline, best):
    document = {"answers_of": "test", "models": [], "baselines": [{"name": "always Elm", "test": score(baseline, 500)}]}
    for name, right in ((WITHOUT, without), (WITH, reading)):
        document["models"].append({"name": name, "test": score(right, 500)})
    page = knowledge_page(document).html()
    said = re.sub(r"\s+", " ", Reader(page).joined)
    assert ("no less, and takes no knowledge" in said) is (baseline >= reading)
    assert page.count('class="best"') == (best is not None)
    if best is not None:
        assert re.search(rf'class="best"><th[^>]*>{best}<', page)


def test_an_answer_of_spaces_is_seen():
    document = results()
    model = document["answers"][WITH]
    said = [" " * 80 + "Ban", "", "St.  Ives", " Rome", "São Paulo"]
    document["answers"][WITH] = [
        model[0] | {"question": f"{n}?", "predicted": text, "right": False} for n, text in enumerate(said)
    ]
    read = Reader(knowledge_page(document).html()).joined
    for shown in ("␣×80 Ban", "(nothing)", "St.␣×2 Ives", "␣Rome", "São Paulo"):
        assert shown in read, shown


def test_nothing_at_all_still_makes_a_page():
    read = Reader(knowledge_page({}).html())
    assert "No answers were scored." in read.text and "Left out" in read.text


def test_a_malformed_part_is_named():
    with pytest.raises(ReportError, match=r"part 'calibration'.*KeyError"):
        knowledge_page({"calibration": {WITH: {"ece": 0.1}}})


def test_one_colour_a_model_everywhere(page):
    """The name of a model is written in one colour in all figures, and no other model has it."""
    colours = {}
    for colour, name in re.findall(r"fill: var\(--([\w-]+),[^>]*>(with|without)(?: pretraining)?<", page):
        colours.setdefault(name, set()).add(colour)
    assert colours == {"with": {"series-0"}, "without": {"series-1"}}


def test_heads_without_a_note_say_how_far_they_look():
    before = [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]  # each at the one before it, the first at itself
    heads = [{"layer": n, "head": 0, "weights": before, "note": ""} for n in range(2)]
    read = Reader(knowledge_page({"attention": {"tokens": list("a b"), "heads": heads, "question": "a b?"}}).html())
    assert read.joined.count("It looks 0.7 tokens back on average, from the last one mostly at “␣” (100%).") == 2
    assert "The question is “a b?”" in read.joined and len(read.of("svg")) == 2


def test_calibration_of_a_model_that_is_never_right_is_not_praised():
    """A model that is right in 0 of 50 cases and never sure is off by 0.0%, which must not be said of it."""
    never = {"rows": [{"confidence": 1e-4, "accuracy": 0.0, "n": 50}], "ece": 1e-4}
    some = {"rows": [{"confidence": 0.5, "accuracy": 0.4, "n": 50}], "ece": 0.1, "separation": 0.8, "skill": 0.25}
    said = Reader(knowledge_page({"calibration": {WITHOUT: never, WITH: some}}).html()).joined
    assert "off by 0.0%" not in said and "The model with pretraining is off by 10.0%" in said
    assert f"It cannot be told of the model {WITHOUT} (0 of 50 right)" in said
    assert "80.0%25.0%" in said and "always stating the share of right answers" in said


def test_unwritten_people_are_told_apart_by_rank():
    """Of the four pairs three are in order and one is a tie."""
    found = {"n": 2, "mean_confidence": 0.3, "written_confidences": [0.5, 0.9], "unwritten_confidences": [0.1, 0.5]}
    assert (
        "surer of the one that it read of in 88%" in Reader(knowledge_page({"unwritten": {WITH: found}}).html()).joined
    )


@pytest.mark.parametrize("right", [0, 4, 5])
def test_who_knows_nothing_is_not_said_to_know_what_it_does_not_know(right):
    """Confidence follows the length of names, too, so that a model that knows nothing may tell strangers apart."""
    found = {"n": 2, "mean_confidence": 0.3, "written_confidences": [0.5, 0.9], "unwritten_confidences": [0.1, 0.2]}
    curve = {"rows": [{"confidence": 0.7, "accuracy": right / 50, "n": 50}]}
    said = Reader(knowledge_page({"unwritten": {WITH: found}, "calibration": {WITH: curve}}).html()).text
    assert "read of in 100% of the cases" in said
    assert ("it mostly knows what it does not know" in said) == (right == 5)
    assert (f"of those that it read of it gets {right} of 50 right" in said) == (right < 5)


def test_answers_that_do_not_end_are_cut(results_of_babble):
    said = Reader(knowledge_page(results_of_babble).html()).joined
    assert "Born Born" in said and "Born " * 20 not in said


@pytest.fixture
def results_of_babble():
    """Results of a model that writes on until it must stop."""
    babble = "Born " * 90
    row = {"question": "Where was Bo born?", "person": "Bo", "expected": "Elm", "predicted": babble, "confidence": 0.0}
    form = {"form": "two words", "n": 2, "mean_confidence": 0.3, "distinct": 1, "top": [babble, 1.0]}
    form["examples"] = [["Where was Bo Ek born?", babble, 0.1]]
    unwritten = {"n": 2, "mean_confidence": 0.3, "top_answers": [[babble, 2]], "by_form": [form]}
    answers = [{**row, "right": False}, {**row, "right": True}]
    return {"answers": {WITH: answers}, "unwritten": {WITH: unwritten}}


def score_of(right, n=40):
    return {"right": right, "n": n, "accuracy": right / n, "low": 0.0, "high": 0.5}


def candidates_of(*rights, baseline=2, splits=("dev",)):
    """Results of an experiment with several models, which have so many right answers."""

    def one(name, right, split):
        model = {"name": WITH, split: score_of(right)}
        answers = [
            {"question": f"{n}?", "person": "", "expected": "", "predicted": "", "confidence": 0.5, "right": n < right}
            for n in range(40)
        ]
        results = {"models": [{"name": WITHOUT, split: score_of(0)}, model], "answers": {WITH: answers}}
        results |= {"baselines": [{"name": "always Elm", split: score_of(baseline)}], "answers_of": split}
        return {"name": name, "folder": name, "results": results}

    names = "abcd"[: len(rights)]
    return {"candidates": [one(*row) for row in zip(names, rights, splits * len(rights), strict=False)], "run": "a"}


@pytest.mark.parametrize(
    "rights, words",
    [
        ((0, 0), "None of them gives a right answer to one of 40 development questions"),
        ((4, 9, 9), "Most is known by b and c: 22.5% of 40 development answers are right"),
        ((9, 4), "Most is known by a: 22.5%"),
        ((2, 1), "The best baseline, always Elm, gets 5.0%: that is no less than any of them"),
    ],
)
def test_the_first_sentence_says_who_knows_most_if_any(rights, words):
    page = knowledge_page(candidates_of(*rights)).html()
    assert words in re.sub(r"\s+", " ", Reader(page).joined)
    assert page.count('class="best"') == (rights.count(max(rights)) if max(rights) else 0)


def test_answers_on_different_sets_are_not_compared():
    """One experiment has the answers of test, the other does not: what is known of the first one's dev is its share."""
    page = Reader(knowledge_page(candidates_of(9, 4)).html()).joined
    assert "other questions" not in page
    document = candidates_of(9, 4)
    first = document["candidates"][0]["results"]
    first |= {"answers_of": "test", "models": [first["models"][0], {"name": WITH, "dev": score_of(9)}]}
    said = Reader(knowledge_page(document).html()).joined
    assert "answers on dev were not kept" in said and "other questions" not in said


def test_baselines_that_agree_are_one():
    """One experiment knows the answers of its test questions, the other those of dev alone."""
    document = candidates_of(9, 4)
    second = document["candidates"][1]["results"]
    second["baselines"] = [{"name": "always Elm", "dev": score_of(2), "test": score_of(7)}]
    page = Reader(knowledge_page(document).html()).text
    assert page.count("always Elm") == 2 + 1 and "always Elm, b" not in page  # in the lead, the table and the figure
    second["baselines"][0]["dev"] = score_of(3)
    page = Reader(knowledge_page(document).html()).text
    assert "always Elm, a" in page and "always Elm, b" in page


def test_a_long_command_is_folded_between_its_words():
    command = shlex.join(["regard", "run", "knowledge", *(f"data.key{n}=a b, 'c' \\ {n}" for n in range(9))])
    (listing,) = re.findall(r"<code>(.*?)</code>", command_listing(command), re.S)
    lines = unescape(listing).split("\n")
    assert len(lines) > 2 and max(map(len, lines)) <= 90
    found = subprocess.run(["bash", "-c", f"set -- {unescape(listing)}; printf '%s\\n' \"$@\""], capture_output=True)
    assert found.stdout.decode().split("\n")[:-1] == shlex.split(command)
    assert "a 'quote" in unescape(command_listing("a 'quote " * 30))  # that does not close: as it is


# The page that compares runs


def test_runs_are_compared(runs_page):
    read = Reader(runs_page)
    for said in ("3 runs", "Best by dev/accuracy: softmax with 51.0%", "Not finished: synthesizer", "model.mechanism"):
        assert said in read.joined
    assert [a.get("class") for a in read.of("tr")].count("best") == 1
    assert len(read.of("svg")) == 2  # accuracy and loss, each with train and dev in one
    assert "Loss, train and dev" in read.joined and "Accuracy, train and dev" in read.joined


def test_one_run_and_unlike_runs_make_pages():
    bare = {"name": "new", "path": "runs/new", "recipe": "lm", "status": "begun", "best": None}
    assert "no run has logged anything yet" in Reader(compare_page([bare]).html()).text
    read = Reader(compare_page([bare, run("new", "elu", 0.3, 0.4)]).html())
    assert "runs/new [1]" in read.text and "runs/new [2]" in read.text and "The configs are the same." not in read.text
    with pytest.raises(ReportError, match="no runs"):
        compare_page([])


# Maps of heads

SIZES = {"width": 12, "layers": 2, "length": 16, "attention": {"heads": 3}}


def watched(model, *args):
    """v, mask and output of each call of a layer's own attention."""
    calls = []
    hooks = [
        block.attention.mechanism.register_forward_hook(lambda _, given, out: calls.append((*given[2:], out)))
        for block in model.stack.layers
    ]
    with torch.no_grad():
        model.eval()(*args)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize("name", sorted(name for name, cls in mechanisms().items() if not cls.causal_only))
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [GPT, Encoder, Seq2Seq])
def test_maps_are_the_weights_behind_the_output(kind, name, padded):
    torch.manual_seed(0)
    if kind is Seq2Seq:
        sides = {"encoder": SIZES, "decoder": SIZES | {"mechanism": name}}
        model = Seq2Seq(vocabulary=11, **sides).double()
    else:
        model = kind(vocabulary=11, mechanism=name, **SIZES).double()
    tokens, source = torch.randint(0, 11, (2, 7)), torch.randint(0, 11, (2, 5))
    visible = torch.arange(7) >= torch.tensor([[2], [0]]) if padded else None
    given = (source, tokens, None, visible) if kind is Seq2Seq else (tokens, visible)
    calls = watched(model, *given)
    maps = attention_maps(model, tokens, visible, **({"source": source} if kind is Seq2Seq else {}))
    assert len(maps) == len(calls) == 2
    for weights, (v, mask, out) in zip(maps, calls, strict=True):
        assert weights.shape == (2, 3, 7, 7)
        assert difference(mix(weights, mask.zero_hidden(v)), out) < 1e-8


def test_maps_leave_the_model_as_it_was():
    model = GPT(vocabulary=11, dropout=0.5, **SIZES).train()
    model.stack.layers[0].attention.eval()
    before = [part.training for part in model.modules()]
    state = copy.deepcopy(model.state_dict())
    tokens, draws = torch.zeros(1, 4, dtype=torch.long), torch.get_rng_state()
    first, second = attention_maps(model, tokens), attention_maps(model, tokens)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(first, second, strict=True))
    assert [part.training for part in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(torch.equal(x, state[n]) for n, x in model.state_dict().items())
    with pytest.raises(RegardError):
        attention_maps(model, torch.zeros(1, 17, dtype=torch.long))
    assert [part.training for part in model.modules()] == before
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_seq2seq_needs_what_it_reads():
    model = Seq2Seq(vocabulary=11, encoder=SIZES, decoder=SIZES)
    with pytest.raises(OptionError, match="source="):
        attention_maps(model, torch.zeros(1, 4, dtype=torch.long))


# In a browser


@pytest.mark.browser
def test_pages_open_in_a_browser(tmp_path, page, runs_page, chromium):
    """No message, no request, nothing to scroll sideways on a phone; light or dark as the reader likes."""
    for text, scheme in ((page, "light"), (runs_page, "dark")):
        place = tmp_path / f"{scheme}.html"
        place.write_text(text, encoding="utf-8")
        opened = chromium.new_page(viewport={"width": 400, "height": 800}, color_scheme=scheme)
        said, asked = [], []
        opened.on("console", lambda message, said=said: said.append(message.text))
        opened.on("pageerror", lambda error, said=said: said.append(str(error)))
        opened.on("request", lambda request, asked=asked: asked.append(request.url))
        opened.goto(place.as_uri())
        opened.evaluate("for (const e of document.querySelectorAll('details')) e.open = true")
        assert opened.evaluate("document.documentElement.scrollWidth") <= 400
        assert said == []
        assert [url for url in asked if url != place.as_uri() and not url.startswith("data:")] == []
        ground = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        wanted = getattr(PAGE, scheme)
        assert ground == f"rgb({', '.join(str(int(wanted[n : n + 2], 16)) for n in (1, 3, 5))})"
        opened.close()
