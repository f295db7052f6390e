"""Files made to do harm: each is refused with a RegardError, in time and without taking memory."""

import json
import os
import re
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hostile import bomb
from safetensors.torch import load_file, save_file
from training import gpt, trainer
from typer.testing import CliRunner

import regard
from regard.cli import app as command_line
from regard.cli.app import app
from regard.config import ConfigError
from regard.convert import run as conversions
from regard.data.files import DataError
from regard.data.sentences import read_sentences
from regard.data.tokenizers import BPE, TokenizerFileError, load_tokenizer
from regard.data.tokens import TokenFile
from regard.errors import RegardError, RunError
from regard.lab import experiment
from regard.lens.trace.arrays import TraceError
from regard.lens.trace.format import MAGIC
from regard.models.folder import ModelFolderError, ModelSaveError
from regard.models.locate import model_folder
from regard.report.experiment import build_page
from regard.report.page import ReportError, build_part
from regard.reporting import write_report
from regard.storage import MANIFEST, find_damage, hash_file
from regard.sweep import Sweep
from regard.train import recipe as recipes
from regard.train.checkpoint import CheckpointError
from regard.train.progress import format_metrics
from regard.train.run import Run, find_runs

WEIGHTS = "model.safetensors"
BEHAVIOUR = {"behavior": "Removed", "invert": False}
LINES = [b'{"step": "x"}', b'{"step": 1, "loss": []}', b"\xff", b"[" * 5000, b"3", b'{"loss": 1}']
RECIPES = ["[train]\nself = 1", "[train]\nepochs = 1e308", "[data]\nself = 1", "[model]\nself = 1"]


@pytest.fixture
def saved(tmp_path):
    gpt().save(tmp_path / "model")
    return tmp_path / "model"


def change_json(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# Models


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json"])
def test_a_pipe_or_a_device_as_a_model_file_is_refused(saved, name):
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (saved / name).unlink()
        make(saved / name)
        with pytest.raises(ModelFolderError, match="a pipe or a device"):
            regard.load(saved)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json"])
def test_a_sparse_file_is_refused(saved, name):
    os.truncate(saved / name, 1 << 42)
    with pytest.raises(ModelFolderError, match="has 4,398,046,511,104 bytes; expected at most"):
        regard.load(saved)


@pytest.mark.parametrize("key, value", [("width", 1 << 16), ("layers", 1 << 10), ("length", 1 << 24)])
def test_sizes_are_compared_with_the_file_before_memory_is_taken(saved, key, value, monkeypatch):
    change_json(saved / "config.json", lambda document: document["config"].update({key: value, "position": "learned"}))
    built = []
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: built.append(size) or real(*size, **options))
    with pytest.raises(ModelFolderError, match=r"does not fit config\.json"):
        regard.load(saved)


def test_many_empty_tensors_are_refused(saved):
    tensors = load_file(saved / WEIGHTS)
    save_file(tensors | {f"empty{n}": torch.zeros(0) for n in range(140_000)}, saved / WEIGHTS)
    with pytest.raises(ModelFolderError, match=r"has 140,0.. tensors; expected at most 131,072"):
        regard.load(saved)


def test_a_model_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / ("x" * 300), "a\0b", "/proc/nowhere"):
        with pytest.raises(ModelSaveError):
            gpt().save(folder)
    shared = gpt()
    shared.extra = torch.nn.Parameter(torch.zeros(4))
    shared.more = torch.nn.Parameter(shared.extra.data[:2])
    with pytest.raises(ModelSaveError, match="cannot be written"):
        shared.save(tmp_path / "shared")


@pytest.mark.parametrize("name", ["x" * 300, "y/" * 3000, "a\0b"])
def test_a_name_that_no_file_has_is_told(name):
    for read in (regard.load, regard.hub.load, regard.lens.load, Run.open, recipes.load, find_runs):
        with pytest.raises(RegardError) as caught:
            read(name)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["x" * 300, "y/" * 3000, "a\0b"])
def test_a_name_that_no_folder_of_results_has_is_told(name, stopped):
    def report_beside(name):
        write_report([stopped, Path(name)])

    def report(name):
        write_report([Path(name)])

    for read in (report, report_beside, experiment.resume, Sweep.open, conversions.resume):
        with pytest.raises(RegardError) as caught:
            read(name)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["model"]["vocab"].update(x=2**31),
        lambda d: d["added_tokens"][0].update(id=2**40),
        lambda d: d.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(" * 50}, "behavior": "Removed", "invert": False}
        ),
        lambda d: d.update(ends="ab"),
        lambda d: d.update(ends=5),
    ],
)
def test_a_hostile_tokenizer_is_refused(tmp_path, change):
    BPE.train(["the cat"], 300, ["<end>"]).save(tmp_path / "tokenizer.json")
    change_json(tmp_path / "tokenizer.json", change)
    with pytest.raises(TokenizerFileError):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_panic_in_another_language_is_told(tmp_path):
    tokenizer = BPE.train(["the cat"], 300)

    class Panic(BaseException):
        pass

    class Inner:
        def encode(self, text):
            raise Panic("called `Result::unwrap()`")

    tokenizer._inner = Inner()
    with pytest.raises(RegardError, match="called"):
        tokenizer.encode("a")


# Runs


@pytest.fixture
def stopped(tmp_path):
    made = trainer(tmp_path / "run", steps=4)
    made.fit()
    return tmp_path / "run"


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("state"),
        lambda d: d.update(state=[]),
        lambda d: d["state"].update(step="4"),
        lambda d: d["state"].update(step=-(10**30)),
        lambda d: d["state"].update(sums=[1]),
        lambda d: d["state"].update(seconds=10**400),
        lambda d: d.update(optimizer={"nonsense": 1}),
        lambda d: d.update(optimizer={"999999.step": 1}),
        lambda d: d.update(scaler=None),
    ],
)
def test_a_state_that_matches_its_hash_and_makes_no_sense_is_told(stopped, change):
    place = stopped / "checkpoints" / "step-4"
    change_json(place / "state.json", change)
    _match(place)
    with pytest.raises(CheckpointError, match=re.escape(str(place))):
        trainer(stopped, steps=6).resume()


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {},
        lambda tensors: {"x": torch.zeros(2)},
        lambda tensors: {"²³.exp_avg": torch.zeros(2)},
        lambda tensors: {name: x[:1] if x.dim() else x for name, x in tensors.items()},
        lambda tensors: {name: x.to(torch.int8) for name, x in tensors.items()},
        lambda tensors: {name: x for name, x in tensors.items() if not name.endswith("exp_avg")},
    ],
)
def test_an_optimisers_state_that_matches_its_hash_and_does_not_fit_is_told(stopped, change):
    place = stopped / "checkpoints" / "step-4"
    save_file(change(load_file(place / "optimizer.safetensors")), place / "optimizer.safetensors")
    _match(place)
    with pytest.raises(CheckpointError, match="does not fit its run"):
        trainer(stopped, steps=6).resume()


def _match(place):
    (place / MANIFEST).write_text(json.dumps({x.name: hash_file(x) for x in place.iterdir() if x.name != MANIFEST}))


def test_a_manifest_names_only_files_of_its_folder(stopped):
    place = stopped / "checkpoints" / "step-4"
    change_json(place / MANIFEST, lambda hashes: hashes.update({"/dev/zero": "0"}))
    with pytest.warns(UserWarning, match="which is no file of its folder"):
        assert trainer(stopped, steps=6).resume() == 0


@pytest.mark.parametrize(
    "line", [b'{"step": "x"}', b'{"step": 1, "loss": []}', b"\xff", b"[" * 5000, b"3", b'{"loss": 1}']
)
def test_one_bad_run_does_not_hide_the_others(tmp_path, line):
    for name in ("bad", "good"):
        made = Run.create(tmp_path / name, recipes.load("lm", ["data.text=x"]).as_dict())
        made.log({"step": 1, "loss": 2.0, "lr": 0.1})
    with (tmp_path / "bad" / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2"):
        Run(tmp_path / "bad").metrics()
    with pytest.warns(UserWarning, match="passed over"):
        shown = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert shown.exit_code == 0 and "good" in shown.output
    (tmp_path / "bad" / "config.toml").write_bytes(b"\xff")
    with pytest.warns(UserWarning, match="passed over"):
        shown = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert shown.exit_code == 0 and "good" in shown.output


@pytest.mark.parametrize("run", ["..", "../outside", "/", ".", "", "a\0b", "x" * 300, "none"])
def test_an_experiment_names_only_runs_of_its_own(tmp_path, run):
    gpt().save(tmp_path / "outside")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "results.json").write_text(json.dumps({"run": run}))
    with pytest.raises(RunError):
        model_folder(tmp_path / "experiment")


@pytest.mark.parametrize("text", ["step-²", "step-", "7", "step-1\nstep-2", "step-" + "9" * 30, "../x", ""])
def test_a_damaged_best_is_told(tmp_path, text):
    (tmp_path / "best").write_text(text)
    with pytest.raises(RunError, match="best is damaged"):
        model_folder(tmp_path)


# Settings


@pytest.mark.parametrize(
    "text", ["[train]\nself = 1", "[train]\nepochs = 1e308", "[data]\nself = 1", "[model]\nself = 1"]
)
def test_a_hostile_recipe_is_refused(tmp_path, text):
    (tmp_path / "own.toml").write_text(f'task = "lm"\n{text}\n')
    with pytest.raises(ConfigError):
        recipes.load(str(tmp_path / "own.toml")).train.total(rows=10)


@pytest.mark.parametrize("label", ["\x1d0", "²", "٠", "0\x00", "00"])
def test_a_label_is_0_or_1(tmp_path, label):
    (tmp_path / "x.tsv").write_text(f"text\t{label}\n", encoding="utf-8")
    with pytest.raises(DataError):
        read_sentences(tmp_path / "x.tsv")


@pytest.mark.parametrize("temperature", [10**30, 1e30, 1e-30, 1e308])
def test_any_temperature_gives_tokens(temperature):
    made = regard.generate(gpt(), [1, 2], max_tokens=2, temperature=temperature, seed=0)
    assert len(made.tokens) == 2


@pytest.mark.parametrize("header", ["{'descr': (", "{'descr': '<u2', 'shape': (10**30,)}", "(" * 500, "é"])
def test_a_token_file_with_a_damaged_header_is_told(tmp_path, header):
    text = (header + "\n").encode("latin-1")
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    with pytest.raises(DataError, match="cannot be read"):
        TokenFile.open(tmp_path / "x.npy")


# Traces


def test_a_trace_bomb_takes_no_memory(tmp_path):
    packed = bomb(1 << 28)
    entry = {"block": 0, "at": 0, "bytes": len(packed), "type": "u8", "shape": [1, 1, 1 << 28]}
    attention = {"arrays": {"n": entry}}
    tokens = {"name": "x", "text": "", "tokens": ["a"]}
    header = {"format": "regard-trace", "version": 1, "blocks": [len(packed)], "models": []}
    card = {"name": "", "class": "", "home": "", "mechanisms": []}
    card |= dict.fromkeys(("parameters", "layers", "heads", "groups", "width", "key_width", "value_width"), 1)
    header["models"] = [card]
    header["recordings"] = [
        {"name": "x", "model": 0, "sequences": [tokens], "attentions": [attention] * 8, "loss": None, "labels": None}
    ]
    text = json.dumps(header).encode()
    path = tmp_path / "bomb.trace"
    path.write_bytes(MAGIC + struct.pack("<Q", len(text)) + text + packed)
    assert path.stat().st_size < 400_000
    tracemalloc.start()
    with pytest.raises(TraceError, match="take more memory than a trace of this size"):
        regard.lens.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20


# Sets of files that were committed and not moved


@pytest.mark.parametrize("moves", [{WEIGHTS: 0.5}, {WEIGHTS: "../x"}, {"../x": ".x.01234567.staged"}, {WEIGHTS: []}])
def test_a_commit_names_only_files_of_its_folder(saved, moves):
    (saved / ".commit").write_text(json.dumps(moves))
    for use in (regard.load, gpt().save):
        with pytest.raises(RegardError, match=r"expected files of this folder\. Remove it"):
            use(saved)


# The terminal


HOSTILE = "a\x1b[2J\u202eb\x9b31m\x07"


@pytest.mark.filterwarnings("ignore")
def test_nothing_that_a_terminal_acts_on_is_printed(tmp_path, capsys, monkeypatch):
    from regard.cli import show

    made = show.table("name", HOSTILE, title=HOSTILE)
    made.add_row(HOSTILE, "x")
    show.console().print(made)
    show.console().print(HOSTILE)
    show.print_json({HOSTILE: HOSTILE})
    show.print_error(HOSTILE)
    show.print_warning(HOSTILE)
    monkeypatch.setattr("sys.argv", ["regard", "generate", HOSTILE, "x"])
    with pytest.raises(SystemExit):
        command_line.main()
    for printed in capsys.readouterr():
        assert printed and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", printed), printed
    show.print_json({HOSTILE: HOSTILE})
    assert json.loads(capsys.readouterr().out) == {HOSTILE: HOSTILE}


def test_a_models_text_is_escaped_on_a_terminal_only(capsys, monkeypatch):
    from regard.cli import show

    show.print_text(HOSTILE)
    assert capsys.readouterr().out == HOSTILE + "\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show.print_text(HOSTILE)
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_name_that_no_system_takes_is_missing(tmp_path, name):
    assert str(find_damage(tmp_path / name, "")).endswith("is missing")


@pytest.mark.parametrize("name", ["tokens_per_second", "mfu", "loss", "accuracy"])
def test_a_metric_that_was_not_measured_is_unknown(name):
    assert "unknown" in format_metrics({"step": 1, name: None})


@pytest.mark.parametrize("place", ["options", "position_options"])
@pytest.mark.parametrize("name", ["self", "name", "size", "offered", "mechanism", "options", "more"])
def test_options_named_like_parameters_inside_are_refused(place, name):
    with pytest.raises(RegardError, match=name):
        regard.GPT(gpt().config.but(**{place: {name: 1}}))


@pytest.mark.parametrize("name", ["self", "name", "size"])
def test_options_of_attend_named_like_parameters_inside_are_refused(name):
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(RegardError, match=name):
        regard.attend(q, q, q, "softmax", **{name: 1})


def test_a_metric_beyond_all_numbers_is_refused(tmp_path):
    run = Run.create(tmp_path / "run", {})
    (run.path / "metrics.jsonl").write_text('{"step": 1, "loss": 1' + "0" * 400 + "}\n")
    with pytest.raises(RunError, match="expected a number"):
        run.metrics()


@pytest.mark.parametrize("words", [["data.tokenizer=" + "y" * 10_000], ["data.task=" + "y" * 10_000]])
def test_messages_quote_little(words):
    with pytest.raises(RegardError) as raised:
        recipes.load("lm", words)
    assert len(str(raised.value)) < 2500


@pytest.mark.parametrize("section", ["compare", "data", "train", "model"])
def test_an_experiment_asked_for_a_list_in_place_of_a_table_is_refused(tmp_path, section):
    (tmp_path / "experiment.toml").write_text(f'experiment = "recall"\ndevice = "cpu"\n[asked]\n{section} = [1]\n')
    with pytest.raises(RegardError, match=rf"{section}.*: expected a"):
        experiment.resume(tmp_path)


def test_an_experiment_asked_for_text_in_place_of_a_table_is_refused(tmp_path):
    (tmp_path / "experiment.toml").write_text('experiment = "knowledge"\ndevice = "cpu"\n[asked]\n"" = "0"\n')
    with pytest.raises(RegardError):
        experiment.resume(tmp_path)


def test_an_experiment_with_a_long_name_is_quoted_in_part(tmp_path):
    (tmp_path / "experiment.toml").write_text(f'experiment = "{"y" * 10_000}"\ndevice = "cpu"\n[asked]\n')
    with pytest.raises(RegardError) as raised:
        experiment.resume(tmp_path)
    assert len(str(raised.value)) < 2500


@pytest.mark.parametrize(
    "draw",
    [
        lambda build: build_page("A page", build, [], {}),
        lambda build: build_part("part", build, {}, "regard.lab"),
    ],
    ids=["page", "part"],
)
def test_results_with_a_long_name_are_quoted_in_part(draw):
    with pytest.raises(ReportError) as raised:
        draw(lambda results: results["y" * 10_000])
    assert len(str(raised.value)) < 500
