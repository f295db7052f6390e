"""One way to open a model by name: what each kind of name stands for, and what regard.load says of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard.cli.app import app
from regard.data.tokenizers import Bytes
from regard.errors import HubError, OptionError
from regard.hub import find_source, load_regard_model, open_model
from regard.hub.opening import ModelSource
from regard.hub.small_model import shipped
from regard.models import GPT, ModelFolderError


def small(folder: Path) -> GPT:
    torch.manual_seed(7)
    model = GPT.preset("nano", vocabulary=256, length=16)
    model.tokenizer = Bytes()
    model.save(folder)
    return model


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Path]:
    """A model folder, a run and an experiment whose model it is, and the same model as transformers saves it."""
    run = tmp_path / "experiment" / "run"
    model = small(run / "model")
    (tmp_path / "experiment" / "results.json").write_text(json.dumps({"run": "run"}), encoding="utf-8")
    regard.hub.export(model, tmp_path / "theirs")
    return {"folder": run / "model", "run": run, "experiment": run.parent, "theirs": tmp_path / "theirs"}


@pytest.mark.parametrize("kind", ["folder", "run", "experiment"])
def test_a_run_an_experiment_and_a_model_folder_are_one_model(kind: str, names: dict[str, Path]) -> None:
    opened, loaded = open_model(names[kind]), regard.load(names[kind])
    assert isinstance(opened.model, GPT) and (opened.name, opened.trained) == ("run/model", True)
    assert opened.tokenizer is not None and loaded.tokenizer is not None
    for other in (loaded, load_regard_model(names[kind])):
        assert torch.equal(opened.model.embedding.weight, other.embedding.weight)


def test_random_before_a_name_keeps_the_architecture_and_the_tokenizer(names: dict[str, Path]) -> None:
    trained, first, again = (open_model(name) for name in (names["run"], *[f"random:{names['run']}"] * 2))
    other = open_model(f"random:{names['run']}", seed=1)
    assert (first.name, first.trained) == ("random:run/model", False) and first.tokenizer is not None
    assert torch.equal(first.model.embedding.weight, again.model.embedding.weight)
    for model in (trained, other):
        assert not torch.equal(first.model.embedding.weight, model.model.embedding.weight)
    with pytest.raises(OptionError, match="random weights; expected a trained model"):
        load_regard_model(f"random:{names['run']}")


def test_a_hugging_face_folder_is_opened_by_transformers_or_converted(names: dict[str, Path]) -> None:
    pytest.importorskip("transformers")
    opened = open_model(names["theirs"])
    assert type(opened.model).__name__ == "GPT2LMHeadModel" and (opened.name, opened.trained) == ("theirs", True)
    twin = open_model(f"random:{names['theirs']}")
    assert type(twin.model) is type(opened.model) and (twin.name, twin.trained) == ("random:theirs", False)
    assert isinstance(load_regard_model(names["theirs"]), GPT)


def test_a_name_is_told_apart_before_anything_is_opened(names: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"")
    for name, want in {
        str(names["run"]): ("regard", str(names["folder"]), True),
        f"random:{names['theirs']}": ("transformers", str(names["theirs"]), False),
        "openai-community/gpt2": ("transformers", "openai-community/gpt2", True),
        str(tmp_path / "some.gguf"): ("gguf", str(tmp_path / "some.gguf"), True),
        "./nothing": ("missing", "./nothing", True),
    }.items():
        assert find_source(name) == ModelSource(*want)


def test_the_bundled_model_has_a_name_wherever_a_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, trained in (("small", True), ("random:small", False)):
        assert find_source(name) == ModelSource("regard", str(shipped()), trained)
        assert open_model(name).trained == trained
    assert isinstance(load_regard_model("small"), GPT)
    run = CliRunner().invoke(app, ["generate", "small", "xqzv jkwp xqzv jk", "--max", "7"], catch_exceptions=False)
    assert run.exit_code == 0 and run.stdout.rstrip("\n").endswith("wp xqzv")
    (tmp_path / "small").mkdir()  # what stands here comes first
    assert find_source("small").location == "small"


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")
    with pytest.raises(OptionError, match="nothing does not exist; expected a model folder"):
        open_model(tmp_path / "nothing")
    with pytest.raises(OptionError, match=r"notes\.txt is no model; expected a model folder"):
        open_model(tmp_path / "notes.txt")
    with pytest.raises(OptionError, match="device 'tpu' cannot be used here"):
        open_model("random:gpt2", "tpu")
    with pytest.raises(HubError, match="download"):
        open_model("nobody/nothing")


def test_regard_load_names_hub_load_for_anything_of_hugging_face(names: dict[str, Path]) -> None:
    folder = names["theirs"]
    with pytest.raises(ModelFolderError, match=r"holds a Hugging Face model; regard\.hub\.load") as caught:
        regard.load(folder)
    assert repr(str(folder)) in str(caught.value)
    with pytest.raises(ModelFolderError, match=r"Hugging Face, by folder or name, is loaded by regard\.hub\.load"):
        regard.load("openai-community/gpt2")
