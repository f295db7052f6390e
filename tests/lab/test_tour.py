"""The tour at a toy size: four chapters in one report that is whole after each of them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training import CTRL_C, MODEL, Crash, StopAt

import regard
from regard import plugin
from regard.cli import bench
from regard.cli.app import app
from regard.config import ConfigError
from regard.cost.crossing import Point, interpolated
from regard.data.questions import Question, vocabulary
from regard.lab import experiment
from regard.lab.base import Shown
from regard.lab.bench import run as races
from regard.lab.bench.config import Race
from regard.lab.tour import chapters, seeing
from regard.lab.tour import run as tour
from regard.lab.tour.page import CHAPTERS, outcome_rows, tour_page
from regard.lab.tour.results import TourResults
from regard.lens import attention_maps
from regard.reporting import write_report
from regard.train import Interrupted, RunError
from regard.train.progress import Progress

pytest.importorskip("matplotlib")  # reports draw

ROOT = Path(__file__).parents[2]
COMMANDS = {"check": "check", "train": "run", "see": "view", "race": "bench"}
TOY = ["data.world.people=30", "data.world.asked=20", "data.world.held_out=5", "data.world.places=3", *MODEL]
TOY += ["train.batch=16", "train.lr=0.02", "train.epochs=0", "train.steps=4", "train.evaluation.every=2"]
TOY += ["check.draws=2", "bench.tokens=[16, 32]", "bench.heads=2", "bench.groups=2", "bench.width=8"]
TOY += ["bench.seconds=0.001", "bench.features=8", "bench.draws=0"]


class Readers(list):
    """Notes what the report says whenever the tour says something."""

    def __init__(self, out):
        self.out = out

    def __call__(self, text):
        self.append((text, (self.out / "report.html").read_text(), json.loads((self.out / "results.json").read_text())))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("tour") / "whole"
    said = Readers(out)
    return out, experiment.run("tour", out, TOY, shown=Shown(said)), said


def test_the_page_is_whole_after_each_chapter(whole):
    out, _, said = whole
    begun = [(page, results) for text, page, results in said if re.match(r"\d of 4  ", text)]
    begun.append(((out / "report.html").read_text(), json.loads((out / "results.json").read_text())))
    assert len(begun) == 5
    for done, (page, results) in enumerate(begun):
        assert page.startswith("<!doctype html>") and page.endswith("</html>\n")
        assert page.count("Not done yet") == 4 - done
        for n, chapter in enumerate(CHAPTERS):
            assert (results[chapter.key] is not None) == (n < done)
            assert (chapter.promise in page) == (n >= done)
        assert len(results["outcome"]["rows"]) == done


def test_the_report_needs_nothing_else_and_links_to_what_is_there(whole):
    out, results, _ = whole
    page = (out / "report.html").read_text()
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    links = {link.partition("#")[0] for link in re.findall(r'<a href="([^#"][^"]*)"', page)}
    assert links == {"knowledge/report.html", "see.html", "race/report.html"}
    assert all((out / link).is_file() for link in links)
    for chapter in CHAPTERS:
        assert results[chapter.key]["command"].split()[:2] == ["regard", COMMANDS[chapter.key]]
    assert write_report([out], out / "again.html").read_text() == page
    assert write_report([out / "race"], out / "race-again.html").read_text() == (out / "race/report.html").read_text()


def test_the_leak_is_caught_and_its_reproducer_runs(whole):
    out, results, _ = whole
    broken = [law for law in results["check"]["laws"] if law["status"] == "broken"]
    assert "looks-ahead" in {law["law"] for law in broken}
    for law in broken:
        assert law["error"] > law["limit"]
    assert {law["status"] for law in results["check"]["own_laws"]} == {"holds"}
    assert {law["law"] for law in results["check"]["own_laws"]} == {law["law"] for law in broken}
    code = next(law["reproducer"] for law in broken if law["law"] == "looks-ahead")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "before token" in ran.stdout
    (again,) = regard.check(plugin(str(out / "check/leaky_performer.py")), only=["looks-ahead"]).broken
    assert again.law == "looks-ahead"


def test_the_leak_is_that_of_the_example():
    shipped = (ROOT / "regard/lab/tour/leaky_performer.txt").read_bytes()
    assert shipped == (ROOT / "examples/leaky_performer.py").read_bytes()


def test_training_is_that_of_the_knowledge_experiment(whole, tmp_path):
    out, results, _ = whole
    alone = experiment.run("knowledge", tmp_path / "alone", [x for x in TOY if not x.startswith(("check.", "bench."))])
    for key in ("models", "baselines", "world", "seed"):
        assert json.loads(json.dumps(results["train"]["knowledge"][key])) == json.loads(json.dumps(alone[key])), key
    assert regard.load(out).config.width == 16  # the tour's model is the one that has read


def test_the_command_of_the_knowledge_chapter_makes_the_same(whole):
    command = whole[1]["train"]["command"]
    assert command.startswith("regard run knowledge ") and "bench" not in command and "check" not in command


def test_a_head_that_answers_hang_on_is_found():
    """Of a model in which all heads but one add nothing, that one is found, and the others cost nothing."""
    torch.manual_seed(0)
    tokenizer = vocabulary(["Where was Abc born?", "London", "Paris", "Xyz"])
    model = regard.GPT(vocabulary=tokenizer.size, length=40, width=16, layers=2, attention={"heads": 2})
    model.tokenizer = tokenizer
    with torch.no_grad():
        for n, block in enumerate(model.stack.layers):
            block.attention.out.weight[:, :8] = 0
            block.attention.out.weight[:, 8:] *= 0 if n == 0 else 30
    asked = [Question("Where was Abc born?", "Paris"), Question("Where was Xyz born?", "London")]
    search = seeing.find_head(model, model, asked, asked)
    costs = {(head.layer, head.head): abs(head.loss - search.loss) for head in search.heads}
    assert costs.pop((1, 1)) > 1e-3 and max(costs.values()) < 1e-6
    losses = [head.loss for head in search.heads]
    assert losses == sorted(losses, reverse=True)


def test_weight_on_a_name_is_that_of_the_maps():
    torch.manual_seed(0)
    tokenizer = vocabulary(["Where was Abc born?", "Paris"])
    model = regard.GPT(vocabulary=tokenizer.size, length=40, width=8, layers=1, attention={"heads": 2})
    model.tokenizer = tokenizer
    question = Question("Where was Abc born?", "Paris")
    (shares,) = seeing.weight_on_names(model, seeing.ask_rows(model, [question]))
    ids = tokenizer.encode("Where was Abc born?⁇Paris")
    (weights,) = attention_maps(model, torch.tensor([ids]))
    # From the mark, where the first letter is written, to the last letter, where the closing mark is.
    expected = weights[0, :, len("Where was Abc born?") :, 10:13].sum(-1).mean(-1)
    torch.testing.assert_close(shares, expected)


# Stopping and going on


def test_ctrl_c_keeps_what_there_is_and_the_tour_goes_on(whole, tmp_path, monkeypatch):
    out = tmp_path / "tour"
    shown = Shown(progress=lambda name: StopAt(2, CTRL_C) if name == "pretraining" else Progress())
    with pytest.raises(Interrupted):
        experiment.run("tour", out, TOY, shown=shown)
    assert (out / "report.html").read_text().count("Not done yet") == 3
    with pytest.raises(RunError, match="--resume"):
        experiment.run("tour", out, TOY)
    monkeypatch.setitem(tour.DO, "check", None)  # what is done is not done again
    results = experiment.resume(out)
    assert "Not done yet" not in (out / "report.html").read_text()
    again = json.loads(json.dumps(results["train"]["knowledge"]))
    assert again == json.loads(json.dumps(whole[1]["train"]["knowledge"]))


def test_an_interrupted_race_is_kept_and_run_again(whole, tmp_path, monkeypatch):
    out = tmp_path / "tour"
    shutil.copytree(whole[0], out)
    document = json.loads((out / "results.json").read_text())
    (out / "results.json").write_text(json.dumps(document | {"race": None}))
    timed = races.time_interleaved
    calls = []

    def interrupted(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return timed(*arguments, **named)

    monkeypatch.setattr(races, "time_interleaved", interrupted)
    with pytest.raises(KeyboardInterrupt):
        experiment.resume(out)
    kept = json.loads((out / "results.json").read_text())["race"]["race"]
    assert kept["interrupted"] and {row["N"] for row in kept["rows"]} == {16}
    assert "The race was interrupted" in (out / "report.html").read_text()
    finished = experiment.resume(out)["race"]["race"]
    assert not finished["interrupted"] and {row["N"] for row in finished["rows"]} == {16, 32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("check.draws=0", "check.draws = 0: expected 1 to"),
        ("bench.tokens=[32, 16]", "bench.tokens"),
        ("bench.tokns=[16]", "tokens"),
        ("race.tokens=[16]", "no such section or stage in tour"),
        ("compare.strangers=5", "no such section or stage in tour"),
        ("data.world.people=3", "data.world.people = 3"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_done(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        experiment.run("tour", tmp_path / "tour", [*TOY, change])
    assert not (tmp_path / "tour").exists()


# What is shown


def test_the_table_at_the_end_fits_a_small_terminal(whole):
    results = whole[1]
    rows = results["outcome"]["rows"]
    assert [row[0] for row in rows] == ["Check", "Train", "See", "Race"]
    assert max(len("  ".join(row)) for row in rows) <= 80
    assert sum(results[chapter.key]["seconds"] for chapter in CHAPTERS) == pytest.approx(results["seconds"], abs=0.1)


def test_an_empty_tour_has_a_page():
    document = {"command": "regard run tour", "versions": {}}
    page = tour_page(document).html()
    assert page.count("Not done yet") == 4 and outcome_rows(TourResults()) == []


def test_the_command_of_the_race_races_the_same(monkeypatch, tmp_path):
    config = Race().but(**chapters.RACE_SETTINGS)
    raced = []

    def race(*arguments):
        raced.append(arguments[:2])
        raise Crash

    monkeypatch.setattr(bench, "race", race)
    words = shlex.split(chapters.race_command(config))[2:]
    with pytest.raises(Crash):
        app(["bench", *words, "--device", "cpu", "-o", str(tmp_path / "race")], standalone_mode=False)
    ((settings, names),) = raced
    assert settings.torch_dtype == config.torch_dtype and settings.but(dtype=config.dtype) == config
    assert names == list(chapters.RACERS)


def test_crossings_lie_on_straight_lines_between_what_was_timed():
    # 1 ms a token against 1 µs a squared token: equal at 1,000 tokens.
    lengths = (256, 512, 1024, 2048)
    points = [Point(N, 1e-3 * N, 1e-6 * N * N) for N in lengths]
    assert interpolated("elu", "softmax", points).tokens in (1000, 1001)
    assert interpolated("softmax", "elu", [Point(*p[:1], p.second, p.first) for p in points]).describe() == (
        "up to N = 1,000"
    )
    assert interpolated("a", "b", points[:2]).describe() == "never, up to N = 512"
    assert interpolated("a", "b", points[2:]).describe() == "always, from N = 1,024 to 2,048"


@pytest.mark.slow
def test_a_tour_on_the_command_line(tmp_path):
    """As `make demo` does it, in a terminal of 80 columns."""
    out = tmp_path / "tour"
    command = [sys.executable, "-m", "regard", "run", "tour", "--out", str(out), "--seed", "1", *TOY]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"}, check=True)
    assert f"Report: {(out / 'report.html').resolve()}" in ran.stdout
    for number, chapter in enumerate(CHAPTERS, 1):
        assert f"{number} of 4  {chapter.title}: {chapter.doing}\n" in ran.stderr
        assert len(f"{number} of 4  {chapter.title}: {chapter.doing}") < 80
    results = json.loads((out / "results.json").read_text())
    assert results["train"]["knowledge"]["seed"] == 1 and "train.seed=1" in results["command"]
    words = [sys.executable, "-m", *shlex.split(results["see"]["command"])]  # regard may not be on the path here
    viewed = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert viewed.returncode == 0, viewed.stderr
