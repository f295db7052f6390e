"""What README and docs show must run, and must say what is true."""

import re
import shlex
import sys
import tomllib
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest
import shown
import typer

import regard
from regard.cli import main
from regard.cli.app import app
from regard.config import Section
from regard.data.notices import NoticesConfig, notices
from regard.data.pairs import write_pairs
from regard.data.reviews import ReviewsConfig, reviews
from regard.data.sentences import write_sentences
from regard.data.tokenizers import Characters
from regard.data.tokens import write_tokens
from regard.lab import EXPERIMENTS
from regard.lab.tour import run as tour
from regard.laws import LAWS
from regard.train import TrainConfig, Trainer, recipe, train
from regard.train.optimizer import OPTIMIZERS, SCHEDULES
from regard.train.run import Run
from regard.train.settings import COMPILES, PRECISIONS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TAG = re.compile(r"run|gpu|shown: .+")


def blocks(page, language):
    """The code blocks of a language on a page: what stands behind the language, and the code."""
    return re.findall(rf"^```{language}\b *([^\n]*)\n(.*?)^```", page.read_text(), re.M | re.S)


def lines(code):
    """The commands of a block, and the exit code that a comment behind one promises: `# exits with 1: …`."""
    for line in code.splitlines():
        command, _, comment = line.partition("  #")
        promised = re.match(r" *exits with (\d)", comment)
        yield command.strip(), int(promised[1]) if promised else 0


def tagged(*kinds):
    """Each command once that a block of such a tag holds."""
    found = (c for p in PAGES for tag, code in blocks(p, "console") if tag.startswith(kinds) for c, _ in lines(code))
    return sorted(set(found))


def short(path):
    return str(path.relative_to(ROOT))


PYTHON = [pytest.param(code, id=f"{short(p)}-{i}") for p in PAGES for i, (_, code) in enumerate(blocks(p, "python"))]
LONG = ("docs/laws.md",)  # all laws of all mechanisms
SESSIONS = [
    pytest.param(p, id=short(p), marks=[pytest.mark.slow] if short(p) in LONG else [])
    for p in PAGES
    if any(tag == "run" for tag, _ in blocks(p, "console"))
]
TORCHRUN = "torchrun --standalone --nproc-per-node 2 -m "
NOT_RUN = [c for c in (c.removeprefix(TORCHRUN) for c in tagged("gpu", "shown")) if c.startswith("regard ")]


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_commands_say_whether_they_are_run(page):
    """Behind the word console: run (by the next test), gpu (needs one), or shown, and why it is not run."""
    for tag, code in blocks(page, "console"):
        assert TAG.fullmatch(tag), f"a block without a tag (run, gpu or shown: reason), or with an odd one:\n{code}"
        for command, _ in lines(code):
            assert command.startswith(("regard ", "make ", "pip ", f"{TORCHRUN}regard ")), f"not a command: {command}"
            assert tag != "run" or command.startswith("regard "), f"only regard's commands are run: {command}"
            assert tag != "gpu" or "cuda" in command, f"what is the GPU for? {command}"


@pytest.mark.parametrize("code", PYTHON)
def test_python_shown_runs(code, tmp_path):
    (tmp_path / "program.py").write_text(code)
    left, printed = shown.program(tmp_path / "program.py", tmp_path)
    assert left == 0, printed


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "index.md"], ids=short)
def test_the_first_example_says_the_error_that_it_prints(page, tmp_path):
    """As shown, and with q and k of unit variance, where it warns of it."""
    (_, code), *_ = blocks(page, "python")
    small, large = re.search(r"# (\d+%); with q and k of unit variance it would be (\d+%), and attend", code).groups()
    for scale, error in (("0.32 *", small), ("1.0 *", large)):
        (tmp_path / "program.py").write_text(code.replace("0.32 *", scale))
        left, printed = shown.program(tmp_path / "program.py", tmp_path)
        assert left == 0 and error in printed.splitlines(), printed
        assert ("UserWarning: performer" in printed) == (scale == "1.0 *"), printed
    assert float(small[:-1]) <= 15


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
    names = {"MODEL": "model", "FOLDER": "model", "TEXT": "text.txt", "TOKENS": "tokens"}
    world = {"DOCUMENTS": "documents.txt", "wiki.txt": "documents.txt", "FILE": "dev.tsv"}
    world |= {name: name for name in ("train.tsv", "dev.tsv", "test_inputs.tsv")}
    data = {name: f"asked/data/{file}" for name, file in world.items()}
    for name, pairs in notices(NoticesConfig(people=60, held_out=10))._asdict().items():
        write_pairs(here / f"{name}.jsonl", pairs)
        names[f"{name}.jsonl"] = f"{name}.jsonl"
    write_sentences(here / "sentences.tsv", reviews(ReviewsConfig(sentences=200)).train)
    names["sentences.tsv"] = "sentences.tsv"
    made = {name: str(here / path) for name, path in (names | data | {"LM": "lm", "ASKED": "asked"}).items()}
    made["PICTURE"] = str(ROOT / "docs" / "images" / "lens-head.png")
    return made | {
        name: str(ROOT / "examples" / name) for name in ("keys.csv", "query.csv", "tokens.csv", "outputs.csv")
    }


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", SESSIONS)
def test_commands_shown_run(page, things, tmp_path):
    """Those of a page one after the other in one folder, as a reader would, beside the files that the page shows."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, code in re.findall(r'^```\w+ title="([\w.]+)"\n(.*?)^```', page.read_text(), re.M | re.S):
        (tmp_path / name).write_text(code.replace("TEXT", things["TEXT"]))
    for tag, code in blocks(page, "console"):
        for command, promised in lines(code) if tag == "run" else ():
            left, printed = shown.command(typed(command, things), tmp_path)
            assert left == promised, f"{command}\n{printed}"


class Understood(Exception):
    """An experiment has trained its last stage."""


@pytest.mark.parametrize("command", [c for c in NOT_RUN if c.split()[1] in ("train", "run")])
def test_trainings_shown_are_understood(command, things, here, monkeypatch):
    """Everything but the steps: the real command reads recipe, changes and data, and builds model and optimiser.

    A training ends at once with the model as it was made, and an experiment after its last stage. A GPU is left out."""

    def ends(trainer):
        trainer.model.save(trainer.run.path / "model")

    def asks(*arguments):
        raise Understood

    words = [word for word in typed(command, things) if word not in ("--device", "cuda")]
    monkeypatch.setattr(Trainer, "fit", ends)
    for name, known in EXPERIMENTS.items():
        if known.is_runnable and not isinstance(known, tour.Tour):
            monkeypatch.setitem(EXPERIMENTS, name, replace(known, measure=asks))
    for chapter in tour.DO:
        monkeypatch.setitem(tour.DO, chapter, asks)
    if words[1] == "run":
        with pytest.raises(Understood):
            here(words)
    else:
        assert here(words) == 0


@pytest.mark.parametrize("command", [c for c in NOT_RUN if c.split()[1] not in ("train", "run")])
def test_other_commands_shown_can_be_read(command):
    """Every option that they use exists, and nothing that is needed is missing."""
    group, words = typer.main.get_command(app), shlex.split(command)[1:]
    while isinstance(group, typer.core.TyperGroup):
        name, *words = words
        group = group.get_command(typer.Context(group), name)
    group.make_context(name, words)


def test_the_oldest_torch_that_is_declared_is_the_one_of_make_test_floor():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (declared,) = (need.removeprefix("torch>=") for need in project["dependencies"] if need.startswith("torch>="))
    held_back = re.search(r"^torch==(\d+\.\d+)\.\d+$", (ROOT / "constraints-floor.txt").read_text(), re.M)
    assert held_back and held_back[1] == declared


@pytest.mark.parametrize("command", [c for c in tagged("run", "gpu", "shown") if c.startswith("make ")])
def test_make_targets_shown_exist(command):
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_the_table_of_mechanisms_is_the_registry():
    listed = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "README.md").read_text(), re.M)
    assert listed == list(regard.mechanisms())


def test_the_table_of_laws_is_the_registry():
    page = (ROOT / "docs" / "laws.md").read_text()
    of_functions, of_models = page.split("Whole models have laws of their own")
    assert re.findall(r"^\| `([a-z-]+)` \|", of_functions, re.M) == list(LAWS)
    assert re.findall(r"^\| `([a-z-]+)` \|", of_models.split("\n## ")[0], re.M) == ["packed", "window", "long"]


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


def anchors(page):
    """The anchors that a page's headings have on the site and where repositories are shown."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in plain}


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks/README.md", ROOT / "examples/README.md"], ids=short)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", prose(page)):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), f"{target}#{anchor}"


def test_everything_public_is_named():
    assert set(regard.__all__) <= set(dir(regard))
    assert all(getattr(regard, name).__doc__ for name in regard.__all__)
