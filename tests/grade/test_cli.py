"""`regard grade` as it is typed: tables that fit 80 columns, JSON, Gradescope's files, templates, exit codes."""

import json
import os
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from regard.cli import grade as command
from regard.cli import main
from regard.grade import Grader, shipped_specs

SOLUTIONS = Path(__file__).parent / "solutions"


@pytest.fixture
def typed(grader, monkeypatch, tmp_path, capsys):
    """Runs the words of a command in an empty folder, 80 columns wide, with the server that is there already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "Grader", lambda seed: nullcontext(grader))
    monkeypatch.setattr(
        command, "console", lambda stderr=False: Console(width=80, stderr=stderr, highlight=False, markup=False)
    )

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["regard", "grade", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        assert "--json" in words or all(len(line.rstrip()) <= 80 for line in printed.out.splitlines())
        return left.value.code, printed.out, printed.err

    return run


def test_the_list_names_every_spec(typed):
    code, out, _ = typed("--list")
    assert code == 0 and all(re.search(rf"^{name} ", out, re.M) for name in shipped_specs())
    code, out, _ = typed("--list", "--json")
    assert [one["name"] for one in json.loads(out)] == list(shipped_specs())


def test_one_submission_is_told_what_is_wrong_once(typed):
    code, out, _ = typed("attention", SOLUTIONS / "attention" / "no_scale.py")
    assert code == 1 and "3 of 10 points" in out
    assert out.count("divide q·k by √K") == 1 and out.count("→ as at 'values without a mask'") == 3
    assert "(hidden)" in out
    code, out, _ = typed("attention", SOLUTIONS / "attention" / "no_scale.py", "--student")
    assert code == 1 and "hidden" not in out and "of 7 points" in out


def test_a_folder_that_is_stopped_keeps_what_was_graded(typed, grader, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for name in ("a", "b"):
        shutil.copy(SOLUTIONS / "merging" / "right.py", tmp_path / "folder" / f"{name}.py")
    judge = grader.grade

    def stop_at_b(spec, submission, limits):
        if submission.name == "b":
            raise KeyboardInterrupt
        return judge(spec, submission, limits)

    monkeypatch.setattr(grader, "grade", stop_at_b)
    code, _, _ = typed("merging", tmp_path / "folder", "--gradescope", tmp_path / "results")
    assert code == 130 and [path.name for path in (tmp_path / "results").iterdir()] == ["a.json"]


def test_what_no_file_can_hold_is_written_to_gradescope_in_words(typed, tmp_path):
    (tmp_path / "odd.py").write_text("print('\\ud800')\nraise ValueError('\\ud800')")
    code, _, _ = typed("merging", tmp_path / "odd.py", "--gradescope", tmp_path / "results.json")
    assert code == 1 and "ud800" in (tmp_path / "results.json").read_text("utf-8")


def test_an_interrupt_at_the_terminal_does_not_reach_the_process_that_grades():
    with Grader() as made:
        assert os.getpgid(made.process.pid) != os.getpgid(0)


def test_a_right_submission_leaves_with_zero(typed):
    code, out, _ = typed("merging", SOLUTIONS / "merging" / "right.py")
    assert code == 0 and "10 of 10 points" in out and "✗" not in out


def test_a_folder_gives_a_table_and_a_file_each(typed, tmp_path):
    folder = tmp_path / "submissions"
    folder.mkdir()
    for name in ("right", "view_only", "frobenius"):
        shutil.copy(SOLUTIONS / "merging" / f"{name}.py", folder)
    (folder / "broken.ipynb").write_text("not JSON")
    (folder / "empty").mkdir()
    code, out, _ = typed("merging", folder, "--gradescope", tmp_path / "results")
    assert code == 1
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert rows["right"][-1] == "10" and rows["view_only"][-2:] == ["8", "split_by_view"]
    assert rows["broken"][1:7] == ["0", "0", "0", "0", "0", "0"] and rows["empty"][6] == "0"
    assert "5 submissions, 1 with all points" in out
    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()}
    assert written["right"]["score"] == 10 and written["view_only"]["score"] == 8
    assert set(written) == {"right", "view_only", "frobenius", "broken", "empty"}
    code, out, _ = typed("merging", folder, "--json")
    assert code == 1
    assert {one["submission"]: one["score"] for one in json.loads(out)["grades"]}["frobenius"] == 6


def test_a_template_is_written_once_and_graded_zero(typed, tmp_path):
    code, out, _ = typed("positions", "--template")
    assert code == 0 and "regard grade positions positions.py" in out
    before = (tmp_path / "positions.py").read_text()
    code, _, err = typed("positions", "--template")
    assert code == 2 and "is there already" in err and (tmp_path / "positions.py").read_text() == before
    code, out, _ = typed("positions", "positions.py")
    assert code == 1 and "It is not written yet" in out and "0 of 10 points" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "expected a spec"),
        (("atention", "x.py"), "Did you mean 'attention'"),
        (("attention",), "expected what to grade"),
        (("attention", "missing.py"), "no file or folder 'missing.py'"),
        (("attention", "missing.toml"), "no file or folder"),
        (("missing.toml", "x.py"), "does not exist"),
        (("attention", ".", "--seconds", "0"), "more than 0"),
    ],
)
def test_bad_input_is_told_in_a_line(typed, words, told):
    code, _, err = typed(*words)
    assert code == 2 and told in err and "Traceback" not in err
