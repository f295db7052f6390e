"""What README and docs show must run, and must say what is true."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard.data.tokenizers import Characters
from regard.laws import LAWS

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


PYTHON = [pytest.param(code, id=f"{p.name}-{i}") for p in PAGES for i, code in enumerate(blocks(p, "python"))]
COMMANDS = sorted({line.split("#")[0].strip() for p in PAGES for b in blocks(p, "console") for line in b.splitlines()})


@pytest.mark.parametrize("code", PYTHON)
def test_python_shown_runs(code, tmp_path):
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("regard ")])
def test_commands_shown_are_understood(command, tmp_path):
    """Each command of regard runs as written; only what it cannot have here (a GPU, the reader's own file) may fail."""
    model = regard.GPT.preset("nano", vocabulary=12, length=64)
    model.tokenizer = Characters.of("Once upon a time")
    model.save(tmp_path / "model")
    words = [str(tmp_path / "model") if w in ("MODEL", "FOLDER") else w for w in shlex.split(command)]
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    if "my_attention.py" in command or "cosine.py" in command:
        assert done.returncode == 2 and "no file" in done.stderr
    elif "--device cuda" in command:
        assert done.returncode in (0, 2)
    else:
        assert done.returncode == (1 if "leaky" in command else 0), done.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_targets_shown_exist(command):
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_the_table_of_mechanisms_is_the_registry():
    listed = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "README.md").read_text(), re.M)
    assert listed == list(regard.mechanisms())


def test_the_table_of_laws_is_the_registry():
    listed = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "laws.md").read_text(), re.M)
    assert listed == list(LAWS)


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
