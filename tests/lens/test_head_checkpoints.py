"""Heads over a training: which checkpoints count, when a score has appeared, and the command with its figure."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from regard.cli.app import app
from regard.errors import OptionError, RunError
from regard.lens.heads.checkpoints import appearances, examine_checkpoints, find_checkpoints
from regard.lens.heads.examine import default_texts, examine
from regard.lens.heads.labels import HeadLabel, Score, choose_label
from regard.lens.models import Sample, open_recordable
from regard.lens.small_model import shipped
from regard.train import checkpoint

TEXTS = [text[:90] for text in default_texts()[:5]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose model is random at steps 10 and 20 and then, at step 30, the trained one that comes with regard."""
    path = tmp_path_factory.mktemp("run")
    for step, name in ((10, f"random:{shipped()}"), (20, f"random:{shipped()}"), (30, shipped())):
        model = open_recordable(name, seed=step).model
        checkpoint.write(path / "checkpoints", step, model, {"x": torch.zeros(1)}, {})
    (path / "config.toml").write_text("")
    rows = [{"step": step, "loss": loss, "dev/loss": loss + 0.1} for step, loss in ((10, 5.5), (20, 5.0), (30, 1.5))]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts"
    file.write_text("\n".join(TEXTS))
    return file


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def made(effects, layer=0, head=0):
    """A label with these effects, all of which are certain."""
    scores = {name: Score(e, 0.0, e, e - 0.01, e + 0.01, 12) for name, e in effects.items()}
    return HeadLabel(0, layer, "decoder", head, choose_label(scores), scores)


def test_a_score_has_appeared_where_some_head_does_it_from_then_on():
    history = [
        [made({"induction": 0.0, "previous": 0.5}), made({"induction": 0.5}, head=1)],  # one head does it once …
        [made({"induction": 0.0, "previous": 0.5}), made({"induction": 0.0}, head=1)],  # … and no longer
        [made({"induction": 0.3, "previous": 0.5}), made({"induction": 0.0}, head=1)],
        [made({"induction": 0.0, "previous": 0.5}), made({"induction": 0.4}, head=1)],  # another head takes over
    ]
    found = {row["score"]: row for row in appearances([10, 20, 30, 40], history)}
    assert set(found) == {"induction", "previous"}  # what nobody does at the end has not appeared
    assert (found["induction"]["before"], found["induction"]["step"]) == (20, 30)
    assert (found["induction"]["head"], found["induction"]["heads"], found["induction"]["effect"]) == (1, 1, 0.4)
    assert (found["previous"]["before"], found["previous"]["step"]) == (None, 10)


def test_the_curves_of_a_run_are_the_scores_of_its_checkpoints(run):
    found = examine_checkpoints(run, TEXTS, seed=3)
    last, _ = examine(open_recordable(shipped()), [Sample(text) for text in TEXTS], seed=3)
    assert found["steps"] == [10, 20, 30] and found["texts"] == len(TEXTS)
    for over_steps, head in zip(found["heads"], last["heads"], strict=True):
        assert over_steps["labels"][2] == head["label"]
        assert {name: s["effect"][2] for name, s in over_steps["scores"].items()} == {
            name: s["effect"] for name, s in head["scores"].items()
        }
        assert over_steps["labels"][:2] == ["mixed", "mixed"]
    rows = {row["score"]: row for row in found["appeared"]}
    assert {"induction", "previous"} <= set(rows)
    assert all((row["before"], row["step"]) == (20, 30) for row in rows.values())


def test_the_command_prints_and_draws_when_induction_appeared(run, texts, tmp_path):
    shown = call("heads", run, "--checkpoints", "--texts", texts, "--plot", tmp_path / "curves.svg")
    assert shown.exception is None, shown.exception
    assert "induction appeared between steps 20 and 30" in shown.stdout and "5.100" in shown.stdout
    drawn = (tmp_path / "curves.svg").read_text("utf-8")
    assert all(f">{word}<" in drawn for word in ("induction", "previous", "loss", "step", "effect"))
    found = json.loads(call("heads", run, "--checkpoints", "--texts", texts, "--json").stdout)
    assert found["steps"] == [10, 20, 30] and found["losses"] == {"dev/loss": [[10, 5.6], [20, 5.1], [30, 1.6]]}


def test_long_trainings_have_a_row_for_some_checkpoints():
    from regard.cli.heads_checkpoints import _spread

    assert _spread(3) == [0, 1, 2]
    assert _spread(100)[0] == 0 and _spread(100)[-1] == 99 and len(set(_spread(100))) == 16


def test_checkpoints_are_found_in_order_and_damaged_ones_passed_over(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.copytree(copy / "checkpoints" / "step-30", copy / "checkpoints" / "step-5")
    assert [found.step for found in find_checkpoints(copy)] == [5, 10, 20, 30]
    (copy / "checkpoints" / "step-20" / "config.json").write_text("{}")
    with pytest.warns(UserWarning, match="passed over.*step-20"):
        assert [found.step for found in find_checkpoints(copy)] == [5, 10, 30]
    experiment = tmp_path / "experiment"
    (experiment).mkdir()
    shutil.move(copy, experiment / "inner")
    (experiment / "results.json").write_text('{"run": "inner"}')
    with pytest.warns(UserWarning, match="passed over"):
        assert [found.step for found in find_checkpoints(experiment)] == [5, 10, 30]


def test_checkpoints_of_transformers_trainer_are_found(tmp_path):
    for step in (9, 10, 100):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        save_file({}, folder / "model.safetensors")
    (tmp_path / "checkpoint-best").mkdir()
    assert [found.step for found in find_checkpoints(tmp_path)] == [9, 10, 100]


@pytest.mark.parametrize("kept, words", [((), "has no checkpoint"), ((10,), "has one checkpoint, of step 10")])
def test_too_few_checkpoints_say_how_to_keep_more(run, tmp_path, kept, words):
    for step in kept:
        shutil.copytree(run / "checkpoints" / f"step-{step}", tmp_path / "checkpoints" / f"step-{step}")
    with pytest.raises(RunError, match=rf"{words}.*train\.saving\.keep=1000"):
        find_checkpoints(tmp_path)


@pytest.mark.parametrize(
    "given, words",
    [
        (("--checkpoints", "--ablate"), "--ablate is about one model"),
        (("--checkpoints", "--prune"), "--prune is about one model"),
        (("--plot", "x.svg"), "--plot belongs to --prune or --checkpoints"),
        (("--checkpoints", "--plot", "x.gif"), "ends in .png, .svg or .pdf"),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_is_read(run, given, words):
    found = call("heads", run, *given)
    assert isinstance(found.exception, OptionError) and words in str(found.exception)
