"""Files of version 0.1.0 still open: runs, an experiment, models, a trace, a sweep, a conversion, a lab's results.

`fixtures/v0.1.0.zip` was written by that version's commands at the smallest sizes, and is never written again.
"""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import regard
from regard.cli.app import app
from regard.lens.trace.format import MAGIC
from regard.train import checkpoint

# A run that was stopped at step 4 of 8 and one that was not, with checkpoints of version 2 and hashes of their models.
CHECKPOINTS = Path(__file__).parent / "fixtures" / "checkpoints-2.zip"
PACKED = Path(__file__).parent / "fixtures" / "v0.1.0.zip"
TEXT = "abc dej hia"


@pytest.fixture
def old(tmp_path):
    with zipfile.ZipFile(PACKED) as packed:
        packed.extractall(tmp_path)
    return tmp_path


def run(*words):
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_models_of_every_kind_compute_what_they_did(old):
    expected = load_file(old / "models" / "expected.safetensors")
    assert len(expected) == 6
    for name, want in expected.items():
        model = regard.load(old / "models" / name)
        ids = torch.tensor([model.tokenizer.encode(TEXT)])
        with torch.no_grad():
            if name == "seq2seq":
                got = model(ids, ids[:, :5])
            elif name == "encoder":
                got = model.vectors(ids)
            else:
                got = model(ids)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_trace_holds_the_weights_that_it_held(old):
    trace = regard.lens.load(old / "recorded.trace")
    expected = load_file(old / "weights.safetensors")
    for layer, head in ((0, 1), (1, 2)):  # softmax and elu
        got = torch.as_tensor(trace.weights(layer=layer, head=head)).float()
        torch.testing.assert_close(got, expected[f"layer{layer}"], rtol=1e-5, atol=1e-6)
    run("view", old / "recorded.trace", "--out", old / "page.html")


def test_a_stopped_run_goes_on_to_the_weights_of_the_one_that_ended(old):
    run("train", "--resume", old / "unfinished")
    got, want = (load_file(old / name / "model" / "model.safetensors") for name in ("unfinished", "run"))
    assert got.keys() == want.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-6)


def test_a_stopped_run_with_checkpoints_of_version_2_goes_on(tmp_path):
    with zipfile.ZipFile(CHECKPOINTS) as packed:
        packed.extractall(tmp_path)
    state = json.loads((tmp_path / "unfinished" / "checkpoints" / "step-4" / "state.json").read_text())
    assert state["format_version"] == checkpoint.FORMAT == 2  # a new version is given a fixture of its own
    regard.load(tmp_path / "run")
    run("train", "--resume", tmp_path / "unfinished")
    got, want = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("unfinished", "run"))
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-6)


def test_the_trace_of_the_fixture_is_of_the_version_that_is_written(old):
    assert (old / "recorded.trace").read_bytes()[: len(MAGIC)] == MAGIC  # a new version is given a fixture of its own


def test_runs_are_listed_reported_generated_from_and_checked(old):
    rows = json.loads(run("runs", old, "--json"))
    assert {Path(row["path"]).name for row in rows} >= {"run", "unfinished", "with-pretraining", "trial-001"}
    assert run("generate", old / "run", "Permission", "--max", 5)
    assert run("generate", old / "experiment", "Where", "--max", 5)
    run("check", old / "run", "--draws", 4)
    run("report", old / "run", old / "unfinished", "--out", old / "compared.html")


@pytest.mark.parametrize("name", ["experiment", "lab", "sweep", "converted"])
def test_a_report_is_drawn_again_from_results(old, name):
    run("report", old / name, "--out", old / "again.html")
    assert (old / "again.html").stat().st_size > 5_000


def test_an_experiment_and_a_sweep_that_have_ended_go_on_to_the_same_results(old):
    before = json.loads((old / "experiment" / "results.json").read_text())
    run("run", "--resume", old / "experiment")
    after = json.loads((old / "experiment" / "results.json").read_text())
    assert after["models"] == before["models"]
    counts = json.loads(run("sweep", old / "sweep", "--json"))["counts"]
    assert counts == {"finished": 2}


def test_what_was_exported_is_loaded_again(old):
    theirs = regard.hub.load(old / "exported")
    ours = regard.load(old / "run" / "model")
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(theirs(ids), ours(ids), rtol=1e-5, atol=1e-5)
