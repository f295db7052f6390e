"""Help, keys, and what is said to a wrong name."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import regard
from regard.cli import app, commands
from regard.cli.app import app as typed_app
from regard.config import Section
from regard.train import claim
from regard.train.keys import find_keys, list_keys
from regard.train.recipe import flatten, load, recipe_names
from regard.train.tasks.base import TASKS

WIDE = 80


def run(*words):
    return CliRunner().invoke(typed_app, list(map(str, words)))


def test_the_help_and_the_completion_of_commands_need_no_pytorch():
    code = "import sys; from regard.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'numpy', 'regard.train') if name in sys.modules])"
    for words, environment in [
        (["--help"], {}),
        (["-h"], {}),
        ([], {"_REGARD_COMPLETE": "complete_bash", "COMP_WORDS": "regard su", "COMP_CWORD": "1"}),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.argv = {['regard', *words]}\n{code}"],
            capture_output=True,
            text=True,
            env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **environment},
        )
        assert done.stdout.endswith("[]\n"), done.stdout + done.stderr
        if environment:
            assert done.stdout.split() == ["summarize", "[]"]


def test_every_command_stands_in_a_group_with_a_whole_sentence():
    shown = run("--help").output
    assert run("-h").output == shown and max(map(len, shown.splitlines())) <= WIDE
    for name, entry in commands.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(entry.says)}$", shown, re.MULTILINE), name
        assert entry.says.endswith(".") and entry.group in commands.GROUPS
    assert set(commands.ALSO_CALLED.values()) <= set(commands.COMMANDS)
    assert not set(commands.ALSO_CALLED) & set(commands.COMMANDS)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_the_two_examples_of_a_command_are_understood(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")
    shown = run(name, "-h").output
    for example in commands.COMMANDS[name].examples:
        assert f"  {example}\n" in shown
        program, command, *words = shlex.split(example)
        assert (program, command) == ("regard", name)
        group = app.typer.main.get_group(typed_app)
        made = group.get_command(None, name)
        context = made.make_context(name, list(words))  # an unknown option would raise
        if hasattr(made, "commands"):
            made.get_command(context, words[0]).make_context(words[0], words[1:])


def test_a_command_shows_all_of_its_help():
    shown = run("data", "-h").output
    assert "Print examples as a model gets them: x, and y at each place of x." in shown
    assert "...\n" not in shown.partition("Options")[2]


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["trian"], "no command is called 'trian'. Did you mean 'train'?"),
        (["race"], "Did you mean 'bench'?"),
        (["evalaute"], "Did you mean 'evaluate'?"),
        (["train", "ml"], "Did you mean 'lm'?"),
        (["train", "lm", "--lr", "3e-4"], "Settings are written behind the name, without dashes: train.lr=…"),
        (["train", "lm", "--n-layer=2"], "model.layers=…"),
        (["train", "lm", "--labels"], "`regard train -h` lists its options"),
        (
            ["heads", "RUN", "some text"],
            "'some text': too much for `regard heads`, it takes MODEL. Texts",
        ),
        (["heads", "RUN", "some text"], '`regard view MODEL "a text"` shows a text'),
        (["doctor", "x", "y"], "'x' 'y': too much for `regard doctor`, it takes options only"),
        (["view", "--lables"], "no option --lables in `regard view`. Did you mean --labels?"),
        (["train", "lm", "model.heads=3"], "Did you mean 'model.attention.heads'?"),
        (["train", "lm", "train.decay=3"], "Did you mean 'train.optimizer.decay'?"),
        (["train", "lm", "attention.heads=3"], "Did you mean 'model.attention.heads'?"),
        (["train", "lm", "lr=3e-4"], "expected section.key=value, e.g. train.lr=3e-4"),
        # Habits from nanoGPT, transformers and Lightning.
        (["train", "lm", "n_head=4"], "e.g. model.attention.heads=4\n"),
        (["train", "lm", "model.n_head=4"], "Did you mean 'model.attention.heads'?"),
        (["train", "lm", "model.dim=32"], "Did you mean 'width'?"),
        (["train", "lm", "model.num_hidden_layers=2"], "Did you mean 'layers'?"),
        (["train", "lm", "model.attention.num_key_value_heads=2"], "Did you mean 'groups'?"),
        (["train", "lm", "model.block_size=64"], "Did you mean 'length'?"),
        (["train", "lm", "block_size=64"], "e.g. data.block=64\n"),
        (["train", "lm", "train.learning_rate=1e-3"], "Did you mean 'lr'?"),
        (["train", "lm", "train.warmup_steps=10"], "Did you mean 'train.schedule.warmup'?"),
        (["train", "lm", "data.path=t.txt"], "Did you mean 'text'?"),
        (["train", "lm", "model.attention=elu"], "set one by one. Did you mean 'model.mechanism'?"),
        (["train", "lm", "max_iters=10"], "e.g. train.steps=10\n"),
        (["train", "lm", "own.txt"], "e.g. data.text=own.txt\n"),
        (["train", "lm", "--max-iters", "10"], "without dashes: train.steps=…\n"),
        (["train", "lm", "--model.n_layer=2"], "without dashes: model.layers=…\n"),
        (["train", "lm", "--dtype", "bf16"], "without dashes: train.precision=…\n"),
        (["train", "lm", "--wandb"], "without dashes: train.saving.log=…\n"),
        (["train", "lm", "--output-dir", "x"], "Did you mean --out?"),
        (["train", "gpt2"], "It is a preset of GPT: lm model.preset=gpt2."),
        (["train", "own.txt"], "lm data.text=own.txt."),
        (["train", "knowledge"], "`regard run knowledge`"),
        (["train", "--resume"], "--resume needs a value. `regard train -h`"),
        (["run", "lm"], "It is a recipe: `regard train lm`."),
        (["sweep", "lm", "--grid", "lr=1e-3,2e-3"], "expected section.key=values, e.g. train.lr=1e-3,2e-3\n"),
        (["check", "--plugin"], "--plugin needs a value."),
        (["check", "theirs.py"], "theirs.py is a file of Python: regard check --plugin theirs.py"),
        (["generate", "x", "--max-new-tokens", "5"], "Did you mean --max?"),
        (["generate", "x", "--temp", "1"], "Did you mean --temperature?"),
        (["bench", "softmax", "--seqlen", "64"], "Did you mean --tokens?"),
        (["help"], "`regard -h` lists the commands"),
        (["version"], "`regard --version` prints it"),
    ],
)
def test_a_wrong_name_gets_the_right_one(words, fragment, tmp_path, monkeypatch, capfd):
    """A fragment that ends with a line break is the end of what is said."""
    monkeypatch.setattr(sys, "argv", ["regard", *words])
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_text("to be, or not to be\n")
    with pytest.raises(SystemExit) as left:
        app.main()
    assert left.value.code == 2 and fragment in " ".join(capfd.readouterr().err.split()) + "\n"


def test_numbers_and_truths_are_read_as_python_writes_them():
    changes = ["model.dropout=.1", "train.clip=1.", "train.deterministic=True", "data.text=.hidden"]
    made = load("lm", changes)
    assert made.model["dropout"] == 0.1 and made.train.clip == 1.0 and made.train.deterministic is True
    assert made.data.text == ".hidden"


# Keys


@pytest.mark.parametrize("name", recipe_names())
def test_every_key_of_a_recipe_has_its_value_and_a_meaning(name):
    """A key without a meaning is to be added to regard/train/meanings.py."""
    recipe = load(name)
    keys = {key.name: key for key in list_keys(recipe)}
    assert all(key.meaning for key in keys.values()), [name for name, key in keys.items() if not key.meaning]
    for path, value in flatten({"train": _leaves(recipe.train), "data": _leaves(recipe.data)}):
        assert keys[path].default == value, path


def _leaves(section):
    """A section as nested dictionaries whose other values are as they are, in tuples so that they stay whole."""
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    inner = {name: _leaves(value) for name, value in values.items() if isinstance(value, Section)}
    return {name: value for name, value in values.items() if not isinstance(value, Section | dict)} | inner


def test_keys_that_are_listed_can_be_set(tmp_path):
    text = run("train", "lm", "--keys").output
    rows = json.loads(run("train", "lm", "--keys", "--json").output)
    assert all(row["name"] in text for row in rows) and len(rows) > 50
    assert {"name": "train.lr", "default": 2e-3, "meaning": "the highest learning rate"} in rows
    changed = json.loads(run("train", "lm", "train.lr=1.0", "--keys", "--json").output)
    assert {"name": "train.lr", "default": 1.0, "meaning": "the highest learning rate"} in changed
    # What is listed is understood as it is shown: the value of each key changes nothing.
    plain = load("lm")
    words = [
        f"{row['name']}={json.dumps(row['default'])}" for row in rows if not isinstance(row["default"], dict | None)
    ]
    assert load("lm", words).train == plain.train and load("lm", words).data == plain.data


def test_keys_are_found_by_their_end_and_by_the_names_of_others():
    assert find_keys("lr", ["lm"]) == ["train.lr"]
    assert find_keys("weight-decay", ["lm"]) == ["train.optimizer.decay"]
    assert find_keys("hidden_size", ["lm"]) == ["model.width"]  # and not that of a convolution inside
    assert find_keys("heads", ["knowledge"]) == ["model.attention.heads"]
    assert find_keys("cut") == ["data.cut"] and find_keys("nonsense") == []
    assert set(TASKS)


# Lists


def test_runs_lists_experiments_and_measurements_with_whole_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long = "runs/an-experiment-with-a-name-that-is-rather-long-and-has-to-be-read-to-its-last-letter"
    Path("a.txt").write_text("to be, or not to be: that is the question. " * 9)
    small = ["model.width=8", "model.layers=1", "model.attention.heads=1", "data.block=8", "train.batch=2"]
    assert run("train", "lm", "data.text=a.txt", "train.steps=2", *small, "--out", "runs/lm").exit_code == 0
    assert run("run", "two-heads", "draws=50", "--out", long).exit_code == 0
    Path("runs/began").mkdir()
    Path("runs/began/experiment.toml").write_text('experiment = "knowledge"\n')
    rows = {row["name"]: row for row in json.loads(run("runs", "--json").output)}
    assert {name: (row["kind"], row["recipe"], row["status"]) for name, row in rows.items()} == {
        "lm": ("run", "lm", "finished"),
        Path(long).name: ("measurement", "two-heads", "finished"),
        "began": ("experiment", "knowledge", "stopped"),
    }
    with claim.locked(Path("runs/began")):
        assert "running" in {row["status"] for row in json.loads(run("runs", "--json").output)}
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", run("runs").output)
    assert Path(long).name in shown.replace("\n", "") and max(map(len, shown.splitlines())) <= WIDE
    assert "lm, softmax, finished after 2 steps" in shown


def test_what_writes_its_results_as_it_goes_on_is_finished_at_its_end(tmp_path, monkeypatch):
    """A race writes them after each size, the tour after each chapter."""
    monkeypatch.chdir(tmp_path)
    chapters = {"experiment": "tour", "check": {}, "train": {}, "see": {}}
    documents = {
        "race": {"lab": "bench", "interrupted": False},
        "part of a race": {"lab": "bench", "interrupted": True, "seconds": 4.0},
        "tour": chapters | {"race": {"race": {"interrupted": False}}},
        "part of a tour": chapters | {"race": None},
        "tour with a part of a race": chapters | {"race": {"race": {"interrupted": True}}},
    }
    for name, document in documents.items():
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "results.json").write_text(json.dumps(document))
    rows = {row["name"]: row["status"] for row in json.loads(run("runs", "--json").output)}
    assert rows == {name: "stopped" if "part" in name else "finished" for name in documents}


def test_nothing_is_lost_by_importing_late():
    assert set(regard.__all__) <= set(dir(regard))
    for name in dir(regard):
        assert getattr(regard, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'attends'"):
        regard.attends  # noqa: B018
