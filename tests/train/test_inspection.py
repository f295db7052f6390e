"""The first batch of a recipe as it is shown: ids, shifted input, targets and masks are those that training reads."""

import json

import pytest
import torch
from typer.testing import CliRunner

from regard.cli.app import app
from regard.data.batch import IGNORE
from regard.data.notices import NoticesConfig, notices
from regard.data.pairs import write_pairs
from regard.errors import OptionError, UnknownNameError
from regard.train.inspection import OWN_TEXT, first_batch
from regard.train.recipe import load as load_recipe
from regard.train.tasks.base import TASKS


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "train.jsonl"
    write_pairs(path, notices(NoticesConfig(people=60, held_out=10)).train)
    return path


def test_a_summary_is_shown_as_the_encoder_and_the_decoder_get_it(pairs, tmp_path):
    settings = ["data.tokenizer=bytes", "data.copies=0", "data.source=900", "data.target=300"]
    recipe = load_recipe("summarize", [f"data.train={pairs}", *settings])
    shown = first_batch(recipe, 3)
    task = TASKS["summarize"](recipe.data, recipe.train.seed, torch.device("cpu"), tmp_path, None)
    batch = task.batch(0, 3)
    assert [name for name, *_ in shown.tensors] == ["source", "source_visible", "x", "y", "visible"]
    for name, _, shape, dtype in shown.tensors:
        tensor = getattr(batch, name)
        assert shape == list(tensor.shape) and f"torch.{dtype}" == str(tensor.dtype)
    assert [row.ids for row in shown.source] == batch.source.tolist()
    assert [row.counted for row in shown.source] == batch.source_visible.tolist()
    for n, (x, y) in enumerate(zip(shown.x, shown.y, strict=True)):
        assert x.ids == batch.x[n].tolist() and y.ids == batch.y[n].tolist()
        length = sum(x.counted)
        # What is read is the target, one place later.
        assert x.tokens[0] == "<start>" and x.ids[1:length] == y.ids[: length - 1]
        assert y.tokens[length - 1] == "<end>" and y.ids[length:] == [IGNORE] * (len(y.ids) - length)
        assert x.text.removeprefix("<start>") == y.text.removesuffix("<end>")
    assert len({len(row.ids) - sum(row.counted) for row in shown.x}) > 1, "no padding: a batch that shows nothing"


@pytest.mark.parametrize("name", ["lm", "heads"])
def test_a_language_model_without_a_text_reads_that_of_python_and_says_so(name):
    shown = first_batch(load_recipe(name, ["data.tokenizer=bytes", "data.block=700"]), 2)
    assert shown.notes == [OWN_TEXT] and not shown.source
    for x, y in zip(shown.x, shown.y, strict=True):
        assert len(x.ids) == 700 and all(x.counted) and x.ids[1:] == y.ids[:-1]


def test_a_recipe_with_documents_of_its_own_is_shown_with_those(tmp_path):
    recipe = load_recipe("lens", ["data.world.people=60", "data.block=120", "data.again=0", "data.random=0"])
    shown = first_batch(recipe, 2)
    batch = TASKS["repeats"](recipe.data, recipe.train.seed, torch.device("cpu"), tmp_path, None).batch(0, 2)
    assert OWN_TEXT not in shown.notes and [row.ids for row in shown.x] == batch.x.tolist()


def test_a_training_says_where_no_text_was_named(tmp_path):
    """An unset variable of the shell, data.text=$FILE, is an empty text."""
    small = ["data.block=8", "train.steps=1", "model.layers=1", "model.width=8", "model.attention.heads=1"]
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 60)
    for text, said in (("", True), (tmp_path / "text.txt", False)):
        words = ["train", "lm", f"data.text={text}", "data.tokenizer=bytes", *small, "--out", str(tmp_path / f"{said}")]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0 and ("reads the prose of Python's own" in " ".join(done.stderr.split())) == said


def run(*words):
    return CliRunner().invoke(app, ["data", "show", *map(str, words)], catch_exceptions=False)


def test_the_command_shows_tensors_places_and_texts(pairs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ("summarize", f"data.train={pairs}", "data.tokenizer=bytes", "--n", 2)
    shown = run(*asked).stdout
    for part in ("source_visible", "the encoder reads", "the decoder reads", "target id", "padding)", "Row 1"):
        assert part in shown, part
    assert "are cut there (data.source)" in run(*asked).stderr
    found = json.loads(run(*asked, "--json").stdout)
    assert set(found["rows"][0]) == {"encoder", "decoder", "targets"} and len(found["rows"]) == 2
    other = json.loads(run(*asked, "--json", "--seed", 1).stdout)
    assert other["rows"][0]["encoder"]["ids"] != found["rows"][0]["encoder"]["ids"]
    plain = json.loads(run("lm", "data.tokenizer=bytes", "data.block=8", "--n", 1, "--json").stdout)
    assert set(plain["rows"][0]) == {"reads", "targets"} and len(plain["rows"][0]["reads"]["ids"]) == 8


def test_what_cannot_be_shown_is_named():
    with pytest.raises(UnknownNameError, match="Did you mean 'summarize'"):
        run("sumarize")
    with pytest.raises(OptionError, match=r"expected at least 1$"):
        run("lm", "--n", 0)
    with pytest.raises(OptionError, match="take changes by KEY=VALUE"):
        run("names", "data.block=3")
