"""What README and docs show must run, and must say what is true."""

import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from dataclasses import fields
from pathlib import Path

import pytest

import regard
from regard.cli import main
from regard.config import Section
from regard.data.tokenizers import Characters
from regard.data.tokens import write_tokens
from regard.lab import LABS
from regard.laws import LAWS
from regard.train import TrainConfig, Trainer, knowledge, recipe, train
from regard.train.optimizer import OPTIMIZERS, SCHEDULES
from regard.train.run import Run
from regard.train.settings import COMPILES, PRECISIONS

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


# A comment behind a command that begins so marks it as too long, or not possible here, to be run as written.
MARKS = ("minutes", "gpu")


def commands():
    """Each command once, and whether it is only to be understood."""
    for page in PAGES:
        for line in "".join(blocks(page, "console")).splitlines():
            command, _, comment = line.partition("#")
            yield command.strip(), comment.strip().startswith(MARKS)


PYTHON = [pytest.param(code, id=f"{p.name}-{i}") for p in PAGES for i, code in enumerate(blocks(p, "python"))]
COMMANDS = sorted(set(commands()))
LONG = [c for c, marked in COMMANDS if c.startswith("regard ") and marked]
CHECKS = [c for c, marked in COMMANDS if c.startswith("regard check") and not marked]
SHORT = [c for c, marked in COMMANDS if c.startswith("regard ") and not marked and c not in CHECKS]


@pytest.mark.parametrize("code", PYTHON)
def test_python_shown_runs(code, tmp_path):
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.fixture(scope="session")
def things(tmp_path_factory):
    """What the words in capitals stand for: a model, a text, its tokens, runs, documents and questions."""
    here = tmp_path_factory.mktemp("things")
    model = regard.GPT.preset("nano", vocabulary=12, length=64)
    model.tokenizer = Characters.of("Once upon a time")
    model.save(here / "model")
    (here / "text.txt").write_text("ROMEO: what light is this, and whose?\n" * 20)
    write_tokens(here / "text.txt", here / "tokens")
    small = ["train.steps=2", "model.width=16", "model.layers=1", "model.attention.heads=2"]
    train(recipe.load("lm", [f"data.text={here / 'text.txt'}", *small]), here / "lm")
    train(recipe.load("knowledge/scratch", ["data.world.people=30", *small]), here / "asked")
    (mine,) = blocks(ROOT / "docs" / "training.md", "toml")
    (here / "mine.toml").write_text(mine.replace("TEXT", str(here / "text.txt")))
    names = {"MODEL": "model", "FOLDER": "model", "TEXT": "text.txt", "TOKENS": "tokens", "mine.toml": "mine.toml"}
    world = {"DOCUMENTS": "documents.txt", "wiki.txt": "documents.txt", "FILE": "dev.tsv"}
    world |= {name: name for name in ("train.tsv", "dev.tsv", "test_inputs.tsv")}
    data = {name: f"asked/data/{file}" for name, file in world.items()}
    made = {name: str(here / path) for name, path in (names | data | {"LM": "lm", "ASKED": "asked"}).items()}
    return made | {name: str(ROOT / "examples" / name) for name in ("keys.csv", "query.csv")}


def typed(command, things):
    """The words of a command with things in place of their names; a RUN is one that the command can take."""
    asks = re.search("evaluate|predict|knowledge/", command)
    named = things | {"RUN": things["ASKED" if asks else "LM"]}
    return [
        re.sub(rf"(^|=)({'|'.join(map(re.escape, named))})$", lambda m: m[1] + named[m[2]], word)
        for word in shlex.split(command)
    ]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs the words of a command in an empty folder and returns its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def run(words):
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code

    return run


@pytest.mark.parametrize("command", SHORT)
def test_commands_shown_run(command, things, here):
    assert here(typed(command, things)) == 0


@pytest.mark.parametrize("command", CHECKS)
def test_checks_shown_run(command, things):
    """They load files of mechanisms, and so are processes of their own; only a file of the reader's may be missing."""
    words = typed(command, things)
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    if "my_attention.py" in command or "cosine.py" in command:
        assert done.returncode == 2 and "no file" in done.stderr
    elif "--device cuda" in command:
        assert done.returncode in (0, 2)
    else:
        assert done.returncode == (1 if "leaky" in command else 0), done.stderr


class Understood(Exception):
    """An experiment has trained its last stage."""


@pytest.mark.parametrize("command", LONG)
def test_long_commands_shown_are_understood(command, things, here, monkeypatch):
    """Everything but the steps: the real command reads recipe, changes and data, and builds model and optimiser.

    A training ends at once with the model as it was made, and an experiment after its last stage. A GPU is left out."""

    def ends(trainer):
        trainer.model.save(trainer.run.path / "model")

    def asks(*arguments):
        raise Understood

    words = [word for word in typed(command, things) if word not in ("--device", "cuda")]
    monkeypatch.setattr(Trainer, "fit", ends)
    monkeypatch.setattr(knowledge, "_results", asks)
    for name, one in LABS.items():
        monkeypatch.setitem(LABS, name, one._replace(measure=asks))
    if words[1] == "run":
        with pytest.raises(Understood):
            here(words)
    else:
        assert words[1] == "train", "only trainings may be marked"
        assert here(words) == 0


@pytest.mark.parametrize("command", [c for c, _ in COMMANDS if c.startswith("make ")])
def test_make_targets_shown_exist(command):
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_the_table_of_mechanisms_is_the_registry():
    listed = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "README.md").read_text(), re.M)
    assert listed == list(regard.mechanisms())


def test_the_table_of_laws_is_the_registry():
    listed = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "laws.md").read_text(), re.M)
    assert listed == list(LAWS)


TRAINING = ROOT / "docs" / "training.md"


def table(page, prefix):
    """The rows of a page's tables whose first cell is a key that begins so: key, and the other cells."""
    rows = re.findall(rf"^\| `({prefix}[a-z_.]+)` \| (.*) \|$", page.read_text(), re.M)
    return {key: rest.split(" | ") for key, rest in rows}


def keys(section, prefix):
    for f in fields(section):
        value = getattr(section, f.name)
        yield from keys(value, f"{prefix}.{f.name}") if isinstance(value, Section) else [(f"{prefix}.{f.name}", value)]


def plain(value):
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("prefix", ["train", "data"])
def test_the_tables_of_settings_are_the_settings(prefix):
    """Every key in its order, with its default: that of the section `train`, and of `data` that of the recipe lm."""
    section = TrainConfig() if prefix == "train" else recipe.load("lm").data
    listed = [(k, tomllib.loads(f"x = {cells[0][1:-1]}")["x"]) for k, cells in table(TRAINING, f"{prefix}.").items()]
    assert listed == [(key, plain(value)) for key, value in keys(section, prefix)]


def test_the_choices_named_are_those_there_are():
    listed = table(TRAINING, "train.")
    for key, known in {"precision": PRECISIONS, "compile": COMPILES, "schedule.name": SCHEDULES}.items():
        assert all(name in listed[f"train.{key}"][1] for name in known)
    assert set(re.findall("[a-z]+", listed["train.optimizer.name"][1].split(": ")[1])) <= set(OPTIMIZERS)


def test_the_keys_of_metrics_are_those_written(things):
    text = TRAINING.read_text()
    listed = re.findall(r"^\| `([a-z_]+)` \|", text[text.index("two kinds of lines") :], re.M)
    assert listed == list(Run(things["LM"]).metrics()[0])


def test_the_violation_shown_is_the_one_found():
    (verdict,) = regard.check(regard.plugin(str(ROOT / "examples" / "leaky_performer.py")), only=["looks-ahead"]).broken
    shown = (ROOT / "README.md").read_text()
    assert verdict.claim in shown and verdict.detail in shown
    assert all(f"    {line}" in shown for line in verdict.reproducer.splitlines()[3:])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", prose):
        assert (page.parent / target).exists(), target


def test_everything_public_is_named():
    assert set(regard.__all__) <= set(dir(regard))
    assert all(getattr(regard, name).__doc__ for name in regard.__all__)
