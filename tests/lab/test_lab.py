"""The lab's experiments: what they measure agrees with what can be derived, and what they write is never lost."""

from __future__ import annotations

import copy
import json
import math
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
import torch

from regard.config import ConfigError
from regard.data.seeds import generator
from regard.errors import RunError, UnknownNameError
from regard.lab import base
from regard.lab.approximate import run as approximate
from regard.lab.argmax import run as selecting
from regard.lab.base import EXPERIMENTS, LabConfig, Measurement, lab, normal, quartiles, run
from regard.lab.results import to_json
from regard.lab.runs.summary import summarize_run
from regard.lab.scale import run as scale
from regard.mechanisms import mechanism
from regard.report.chart import Axis, Series, chart
from regard.report.page import Page, ReportError
from regard.report.palette import style
from regard.train.run import Run

pytest.importorskip("matplotlib")

SMALL = {
    "two-heads": {"draws": 300, "betas": [5.0, 10.0]},
    "approximate": {"features": [8, 32], "widths": [4, 8], "draws": 3, "tokens": 6, "redraws": 20},
    "scale": {"widths": [4, 16], "head_widths": [4, 16], "tokens": 6, "pairs": 50, "draws": 8},
    "argmax": {"steps": 4, "every": 2, "runs": 2, "symbols": 6, "tokens": 3, "batch": 4},
}


# Where a number of the table that a terminal shows stands in the results: row, column, the number.
SHOWN = {
    "two-heads": (1, 2, lambda r: next(x["mean"] for x in r["rows"] if (x["beta"], x["heads"]) == (10.0, 2))),
    "approximate": (0, 3, lambda r: 100 * r["errors"][0]["output"][1]),
    "scale": (0, 1, lambda r: r["products"][0]["measured_variance"][0]),
    "argmax": (1, 1, lambda r: 100 * sum(r["ways"][1]["final"]) / 2),
}


@pytest.fixture(scope="module", params=SMALL)
def done(request, tmp_path_factory):
    """A small run of each: its name, folder, results and what it said."""
    folder, said = tmp_path_factory.mktemp(request.param), []
    return request.param, folder, run(request.param, folder, SMALL[request.param], said.append), said


def test_a_run_is_a_folder_that_can_be_made_again(done):
    name, folder, results, said = done
    assert (said or name == "two-heads") and results["lab"] == name and EXPERIMENTS[name].about
    parts = [re.match(r"(\d+) of (\d+): ", line) for line in said]
    if name in ("approximate", "argmax"):  # those that take minutes: every part is told, to the last
        assert [(int(part[1]), int(part[2])) for part in parts] == [(n + 1, len(said)) for n in range(len(said))]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "config.toml", "report.html", "results.json"]
    assert json.loads((folder / "results.json").read_text()) == results
    written = tomllib.loads((folder / "config.toml").read_text())
    assert written["lab"] == name and written["versions"] == results["versions"]
    config = EXPERIMENTS[name].Config().but(**written[name])
    assert config == EXPERIMENTS[name].Config().but(**SMALL[name]) != EXPERIMENTS[name].Config()
    again = to_json(EXPERIMENTS[name].measure(config, said.append))
    assert again == {key: results[key] for key in again}
    other = to_json(EXPERIMENTS[name].measure(config.but(seed=1), said.append))
    assert all(other[key] != again[key] for key in again if key != "chance")


def test_the_command_shown_asks_for_the_same(done):
    name, _, results, _ = done
    *words, first = reversed(shlex.split(results["command"])[2:])
    assert first == name
    typed = {key: json.loads(value) for key, _, value in (word.partition("=") for word in words)}
    assert typed == SMALL[name]


def test_the_page_stands_alone_and_names_what_it_lacks(done):
    name, folder, results, _ = done
    page = (folder / "report.html").read_text()
    assert "<script" not in page and "https://" not in page and "http://" not in page
    pictures = {"two-heads": 2}.get(name, 4)
    assert page.count("<svg") >= pictures and not re.search(r"\bnan\b|\binf\b", page)
    parts = [key for key, value in results.items() if isinstance(value, list | dict) and key != "outcome"]
    for key in (parts[-1], "command"):
        with pytest.raises(ReportError, match="the part '"):
            EXPERIMENTS[name].page({k: v for k, v in results.items() if k != key})


def test_results_are_never_written_over(tmp_path):
    run("argmax", tmp_path, SMALL["argmax"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RunError, match=r"holds results already \(config.toml\); choose another --out"):
        run("argmax", tmp_path, SMALL["argmax"] | {"seed": 1})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write into"):
        run("argmax", tmp_path / "file", SMALL["argmax"])


def test_what_fails_leaves_the_folder_free(tmp_path, monkeypatch):
    def interrupted(config, say):
        assert (tmp_path / "config.toml").is_file()
        raise KeyboardInterrupt

    monkeypatch.setitem(EXPERIMENTS, "argmax", replace(EXPERIMENTS["argmax"], measure=interrupted))
    with pytest.raises(KeyboardInterrupt):
        run("argmax", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lab_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.lab.base.EXPERIMENTS", copy.deepcopy(EXPERIMENTS))

    @lab("mine", LabConfig, lambda results: Page("mine", results["found"]))
    def measure(config, say):
        """What it is about.

        More of it."""
        return {"found": config.seed}

    from regard.lab.base import EXPERIMENTS as known

    assert isinstance(known["mine"], Measurement) and known["mine"].about == "What it is about."
    assert run("mine", tmp_path, {"seed": 5})["found"] == 5


def test_a_long_measurement_tells_how_long_it_may_take(monkeypatch):
    said = []
    monkeypatch.setattr(base.time, "monotonic", lambda: 40.0)
    for text in ("1 of 5: first", "3 of 5: third", "a remark"):
        base._say_with_time(said.append, 10.0, text)
    assert said == ["1 of 5: first", "3 of 5: third (30 s so far, about 45 s left)", "a remark"]


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("approximate", {"feature": [8]}, "no key 'feature' in approximate. Did you mean 'features'"),
        ("approximate", {"features": 8}, "approximate.features = 8: expected a list, each a whole number"),
        ("approximate", {"widths": []}, r"approximate.widths = \[\]: expected numbers in rising order, at least one"),
        ("approximate", {"widths": [8, 4]}, r"approximate.widths = \[8, 4\]: expected numbers in rising order"),
        ("approximate", {"features": [0, 8]}, r"approximate.features = \[0, 8\]: expected 1 to 65536"),
        ("scale", {"draws": 1}, "scale.draws = 1: expected 2 to 100000"),
        ("scale", {"std": float("nan")}, "scale.std = nan: expected"),
        ("argmax", {"tokens": 99}, "argmax.tokens = 99: expected at most argmax.symbols, 32"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(name, asked, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        run(name, tmp_path / "out", asked)
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_is_an_error():
    with pytest.raises(UnknownNameError, match=r"no experiment 'scales'\. Did you mean 'scale'"):
        run("scales", "nowhere")


def test_a_chart_leaves_out_what_a_logarithm_cannot_show():
    zero, half = (
        Series(name, [(1, 0.0), (2, last)], style(0), [(0.0, 1.0)] * 2) for name, last in (("a", 0.0), ("b", 2.0))
    )
    svg = chart([zero, half], Axis("x"), Axis("y", log=True), values=True)
    assert ">b<" in svg and ">a<" not in svg and "inf" not in svg
    assert ">a<" in chart([zero, half], Axis("x"), Axis("y"))


def test_quartiles_are_those_of_torch():
    x = normal(generator(0), 7, 3)
    expected = torch.quantile(x.flatten(), torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    assert torch.allclose(torch.tensor(quartiles(x), dtype=torch.float64), expected)
    assert quartiles([4.0]) == [4.0] * 3


def test_the_law_of_fouriers_variance():
    """(1 − e^{−δ²})²/2F for the Gaussian kernel, within four standard errors, which are a few percent."""
    config = approximate.Approximate(redraws=4000)
    for row in approximate.variance_law(config, "fourier", F=16).rows:
        assert math.isclose(row.predicted, (1 - math.exp(-row.shift)) ** 2 / 32, rel_tol=1e-9)
        assert row.error < 0.05 * row.predicted
        assert abs(row.measured - row.predicted) < 4 * row.error


def test_the_law_of_performers_variance():
    """With what orthogonal directions save; without that the law is off by many standard errors."""
    config = approximate.Approximate(redraws=4000)
    rows = [row for row in approximate.variance_law(config, "performer", F=16).rows if row.shift <= 1]
    for row in rows:
        assert abs(row.measured - row.predicted) < 4 * row.error
    independent = math.expm1(rows[-1].shift) / 16
    assert independent - rows[-1].measured > 5 * rows[-1].error


def test_orthogonal_directions_save_nothing_alone_and_less_in_a_broken_block():
    s = torch.tensor([0.5, 2.0], dtype=torch.float64)
    one, part, whole = (8 * approximate.relative_variance("performer", s, F, 8) * F / 8 for F in (1, 4, 8))
    assert torch.allclose(one, torch.expm1(s))
    assert (whole < part).all() and (part < one).all()


def test_the_hypergeometric_series():
    special = pytest.importorskip("scipy.special")
    z = torch.tensor([0.0, 0.1, 3.0, 40.0], dtype=torch.float64)
    for a, b in ((4, 2.0), (64, 32.0), (3, 3.0)):
        expected = torch.from_numpy(special.hyp1f1(a, b, z.numpy()))
        assert torch.allclose(approximate._hypergeometric(a, b, z), expected, rtol=1e-12)


@pytest.mark.parametrize("name", approximate.NAMES)
def test_the_kernel_is_unbiased_and_the_ratio_is_not(name):
    few, many = approximate.bias(approximate.Approximate(redraws=800), name, sizes=(16, 128)).rows
    for row in (few, many):
        middle, low, high = row.kernel
        assert abs(middle) < 2 * (high - low) and high - low < 0.03
    assert few.bias > 2 * few.noise
    assert many.bias < 0.5 * few.bias
    assert many.spread < 0.6 * few.spread


@pytest.mark.parametrize("name", approximate.NAMES)
def test_relative_kernel_is_one_with_many_features(name):
    q, k = (normal(generator(n), 1, 1, 5, 4) / 4 for n in range(2))
    found = approximate.relative_kernel(approximate._build(name, 60_000, 4, 0), q, k)
    assert (found - 1).abs().max() < 0.02


def test_a_terminal_shows_the_main_numbers(done):
    name, _, results, _ = done
    table = results["outcome"]
    row, column, find = SHOWN[name]
    shown = re.match(r"[-\d.]+", table["rows"][row][column])
    assert float(shown[0]) == pytest.approx(find(results), rel=0.06, abs=0.06)
    assert all(len(line) == len(table["columns"]) for line in table["rows"])
    widths = [max(map(len, column)) for column in zip(table["columns"], *table["rows"], strict=True)]
    assert sum(widths) + 2 * len(widths) <= 80


def test_errors_fall_by_the_root_of_features_only_where_they_are_small():
    config = approximate.Approximate(features=(64, 512), widths=(4, 64), draws=12, tokens=32, redraws=2)
    found = approximate.measure(config, lambda text: None)
    slope = {(s.mechanism, s.variance, s.width): s for s in found.slopes}
    for name in approximate.NAMES:
        assert abs(slope[name, "1/K", 64].output[0] + 0.5) < 0.06
        assert slope[name, "1", 64].output[0] > -0.25
        error = {(e.variance, e.width, e.features): e for e in found.errors if e.mechanism == name}
        assert error["1", 64, 512].output[1] > 1 > 0.5 > error["1", 4, 512].output[1]
        assert error["1/K", 64, 512].output[1] < 0.6 * error["1/K", 4, 512].output[1]
        small = error["1/K", 64, 512]
        assert abs(small.kernel[1] / small.predicted - 1) < 0.1
    assert abs(slope["fourier", "1", 64].kernel[0] + 0.5) < 0.05  # the law holds however large the error


@pytest.mark.parametrize("mean", [0.0, 0.5, -2.0])
def test_mean_and_variance_of_products(mean):
    found = scale.products(scale.Scale(std=1.5, pairs=40_000), 12, mean)
    for key, expected in (("mean", 12 * mean**2), ("variance", 12 * 1.5**4 + 2 * 1.5**2 * 12 * mean**2)):
        middle, low, _ = getattr(found, f"measured_{key}")
        assert math.isclose(getattr(found, f"predicted_{key}"), expected)
        assert abs(middle - expected) < 2 * (middle - low)  # four standard errors


def test_gradients_of_softmax_are_those_of_autograd():
    q, k = normal(generator(1), 1, 1, 1, 3), normal(generator(2), 1, 1, 5, 3)
    softmax = mechanism("softmax")
    p = softmax.weights(q * math.sqrt(3), k)
    scores = (q @ k.mT)[0, 0, 0]
    jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), scores)
    assert torch.allclose(scale.jacobian_norm(p)[0, 0, 0], jacobian.norm())
    moved = torch.autograd.functional.jacobian(lambda x: softmax.weights(x * math.sqrt(3), k), q)
    assert torch.allclose(scale.gradient_norm(p, k)[0], moved.norm())


def test_softmax_saturates_without_the_root():
    config = scale.Scale(draws=200)
    near, far = (scale.saturation(config, d, scaled=True) for d in (16, 1024))
    for key in ("entropy", "largest", "jacobian", "gradient"):
        assert abs(getattr(near, key)[1] / getattr(far, key)[1] - 1) < 0.1
    plain = scale.saturation(config, 1024, scaled=False)
    assert plain.largest[1] > 0.99 and plain.entropy[1] < 0.05
    assert plain.jacobian[1] < 0.05 * far.jacobian[1] and plain.gradient[1] < 0.5 * far.gradient[1]


def test_queries_give_one_and_keys_get_unequally():
    narrow, wide = (scale.sums(scale.Scale(draws=100), K) for K in (4, 64))
    for found in (narrow, wide):
        assert found.given_off_one < 1e-12
        assert math.isclose(sum(found.sorted) / len(found.sorted), 1, rel_tol=1e-9)
        assert found.least[0] < found.got[1] < 1 < found.most[0]
    assert narrow.std[0] > 1.5 * wide.std[0] and narrow.lengths > 0.75 > wide.lengths > 0.3


@pytest.mark.parametrize(("K", "known"), [(4, 0.103), (16, 0.372), (64, 0.938)])
def test_queries_that_are_keys_come_near_the_identity(K, known):
    found = scale.identity(scale.Scale(draws=200), K)
    assert abs(found.diagonal[0] - known) < 0.01
    assert abs(found.diagonal[0] - found.predicted) < 0.02


def test_only_argmax_cannot_learn_where_to_look():
    config = selecting.Selecting(steps=250, runs=1, every=50)
    ways = {way: selecting.train(config, way, seed=1) for way in selecting.WAYS}
    for way in ("softmax", "straight-through"):
        assert ways[way].curve[-1].accuracy > 0.97 and ways[way].finds > 0.97
        assert min(getattr(row, key) for row in ways[way].curve for key in ("dq", "dk")) > 0
    stuck = ways["argmax"]
    assert all(row.dq == row.dk == 0 for row in stuck.curve)
    by_luck = stuck.finds + (1 - stuck.finds) / config.labels
    assert abs(stuck.curve[-1].accuracy - by_luck) < 0.06
    assert stuck.finds == selecting.train(config.but(steps=1), "argmax", seed=1).finds


def test_a_row_asks_for_a_symbol_that_it_holds_once():
    config = selecting.Selecting()
    asked, symbols, labels, answers = selecting.draw_rows(config, 500, generator(0))
    held = symbols == asked[:, None]
    assert (held.sum(-1) == 1).all() and torch.equal(labels[held], answers)
    assert all(len(set(row)) == config.tokens for row in symbols.tolist())


def test_experiments_are_known_by_their_folders_and_imported_when_looked_up():
    code = (
        "import sys; from regard.lab import EXPERIMENTS; known = list(EXPERIMENTS); "
        "assert 'knowledge' in known and 'regard.lab.knowledge.run' not in sys.modules; "
        "EXPERIMENTS['knowledge']; assert 'regard.lab.knowledge.run' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_median_of_an_even_count_is_the_mean_of_the_two_in_the_middle(monkeypatch):
    """Six queries have six errors of the output, of which torch.median would take the third."""
    seen = []
    monkeypatch.setattr(approximate, "quartiles", lambda x: seen.append(x.clone()) or quartiles(x))
    config = approximate.Approximate().but(**SMALL["approximate"])
    (measured, *_) = approximate._measure_errors(config, "performer", "1/K", 4)
    draws = [x for x in seen if len(x) == 6][:3]
    expected = [float(x.sort().values[2:4].mean()) for x in draws]
    assert measured.medians[1].tolist() == pytest.approx(expected, rel=1e-12)
    assert measured.medians[1].tolist() != pytest.approx([float(x.median()) for x in draws], rel=1e-12)


@pytest.mark.parametrize("speeds, median", [([5.0, 100.0, 200.0, 7.0], 53.5), ([3.0], 3.0), ([None], None)])
def test_the_speed_of_a_run_is_that_of_its_middle_line(speeds, median, tmp_path):
    """The last line alone may be of a moment in which the machine did something else."""
    run = Run.create(tmp_path / "run", {"recipe": "toy", "model": {}})
    for step, speed in enumerate(speeds):
        run.log({"step": step, "loss": 1.0, "lr": 0.1, "tokens_per_second": speed, "mfu": None})
    metrics = summarize_run(run)["metrics"]
    assert metrics["tokens_per_second"] == median and metrics["mfu"] is None


def test_a_run_that_is_stopped_before_its_first_line_has_the_steps_that_were_saved(tmp_path):
    run = Run.create(tmp_path / "run", {"recipe": "toy", "model": {}})
    assert [summarize_run(run)[key] for key in ("status", "steps")] == ["begun", 0]
    (run.checkpoints / "step-7").mkdir(parents=True)
    assert [summarize_run(run)[key] for key in ("status", "steps")] == ["stopped", 7]
    run.log({"step": 10, "loss": 1.0, "lr": 0.1})
    assert [summarize_run(run)[key] for key in ("status", "steps")] == ["stopped", 10]
    with run.locked():  # as its training holds it
        assert summarize_run(run)["status"] == "running"
