"""The grader: whatever a submission does, its items get a clear line, and the others are graded."""

import json
import socket
import time
from pathlib import Path

import pytest
import torch

from regard.errors import DataError, OptionError, UnknownNameError
from regard.grade import SpecError, grade_objects, load_spec
from regard.grade.comparing import compare
from regard.grade.spec import GradeLimits
from regard.grade.submissions import Submission, convert_notebook, find_submissions

SOLUTIONS = Path(__file__).parent / "solutions"
PATIENT = GradeLimits(seconds=60.0, memory_mb=500)  # a busy machine is no fault of a submission
QUICK = PATIENT.but(seconds=1.0, import_seconds=1.0)
RIGHT = (SOLUTIONS / "merging" / "right.py").read_text()


@pytest.fixture
def judged(grader, tmp_path):
    """Grades a text as a submission to the exercise on merging heads, within limits."""

    def judge(text, name="someone.py"):
        path = tmp_path / name
        path.write_text(text)
        limits = QUICK if "while True" in text or "sleep" in text else PATIENT
        return grader.grade(load_spec("merging"), Submission(path.stem, path), limits)

    return judge


def by_item(grade):
    return {outcome.item: outcome for outcome in grade.outcomes}


def replaced(name, body):
    """The right solution with one function that does something else."""
    return f"{RIGHT}\n\nimport os, sys, torch\n\n\ndef {name}(*given):\n    {body}\n"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("while True: pass", "timeout", "longer than the 1 s that"),
        ("import time; time.sleep(60)", "timeout", "longer than the 1 s that"),
        ("sys.exit(0)", "error", "sys.exit"),
        ("os._exit(0)", "error", "ended its own process"),
        ("os.kill(os.getpid(), 11)", "error", "segmentation fault"),
        ("return [bytearray(10**7) for _ in range(10**6)]", "memory", "more memory"),
        ("return torch.zeros(10**13)", "memory", "more memory"),
        ("return split_heads(*given)", "error", "calls itself without end"),
        ("raise ValueError('odd')", "error", "ValueError: odd, at `raise ValueError('odd')`"),
        ("raise NotImplementedError", "missing", "not written yet"),
        ("return input()", "error", "input()"),
        ("pass", "failed", "is a `return` missing?"),
        ("os.closerange(3, 999)", "error", "ended its own process"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_a_fault_costs_its_item_and_no_other(judged, body, status, words):
    outcomes = by_item(judged(replaced("split_heads", body)))
    assert outcomes["split"].status == status and outcomes["split"].score == 0
    assert words in outcomes["split"].text
    others = [outcome for item, outcome in outcomes.items() if item != "split"]
    assert all(outcome.passed for outcome in others), [o.text for o in others]


def test_a_wait_for_a_busy_machine_costs_nothing(judged):
    """The limit of 1 s is one of CPU time; only what takes several times as long by the clock is stopped, too."""
    body = "    if not slept:\n        time.sleep(1.3)\n        slept.append(1)\n    return right(*given)\n"
    waits = f"{RIGHT}\n\nimport time\n\nright, slept = split_heads, []\n\n\ndef split_heads(*given):\n{body}"
    outcomes = by_item(judged(waits))
    assert all(outcome.passed for outcome in outcomes.values()), [o.text for o in outcomes.values()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def split_heads(:", "not valid Python: invalid syntax in line 1"),
        ("import sys\nsys.exit()", "sys.exit"),
        ("while True: pass", "While the file was imported"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("x = [0] * 10**11", "more memory"),
        ("import os\nos._exit(0)", "ended its own process"),
        ("", "defines no function 'split_heads'"),
        ("def Split_Heads(x): pass", "There is 'Split_Heads'"),
        ("split_heads = 3", "cannot be called"),
        ("import os\nfor n in range(3, 99):\n    try: os.write(n, b'{}\\n[]\\n')\n    except OSError: pass", "pipe"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_a_file_that_cannot_be_imported_gets_a_line(judged, text, words):
    grade = judged(text)
    assert grade.score == 0 and len(grade.outcomes) == 5
    assert words in grade.outcomes[0].text


def test_megabytes_of_output_are_cut(judged):
    grade = judged(f"print('x' * 5_000_000)\n{RIGHT}")
    assert grade.full
    assert len(grade.printed) < 5000 and "5,000,001 bytes were printed" in grade.printed


def test_what_it_starts_ends_with_it(judged, tmp_path):
    mark = tmp_path / "alive"
    start = f"subprocess.Popen(['sh', '-c', 'while :; do touch {mark}; sleep 0.05; done'])\ntime.sleep(0.5)\n"
    grade = judged(f"import subprocess, time\n{start}{RIGHT}")
    assert grade.full and mark.exists()
    mark.unlink()
    time.sleep(0.3)
    assert not mark.exists()


def test_the_network_is_out_of_reach_or_the_grade_says_so(judged):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        grade = judged(
            f"import socket\ntry:\n    socket.create_connection(('127.0.0.1', {port}), 2)\n    print('reached')\n"
            f"except OSError:\n    print('out of reach')\n{RIGHT}"
        )
    assert ("out of reach" in grade.printed) != any("network" in note for note in grade.notes)


def test_variables_of_the_grader_are_not_handed_on(judged):
    assert judged("import os\nprint(os.environ.get('A_KEY_OF_THE_TEACHER'))\n").printed.strip() == "None"


def test_a_submission_cannot_spoil_the_next(judged):
    spoilt = "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.Tensor.transpose = None\n" + RIGHT
    assert not judged(spoilt).full
    assert judged(RIGHT).full


# Notebooks and folders


def notebook(*cells):
    made = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in cells]
    return {"nbformat": 4, "cells": [{"cell_type": "markdown", "source": "# Title"}, *made]}


def test_notebooks_run_without_magics_and_in_spite_of_failing_cells(judged):
    text = RIGHT.partition("import torch\n")[2]
    cells = [
        "%matplotlib inline\n!pip install something\nimport torch\nfiles = !ls\ntorch.nn?",
        "%%time\nprint('100%%'\n      % ())",
        "%%bash\nrm -r everything",
        "open('data that is not here.csv')",
        "def broken(:",
        text.splitlines(keepends=True),
    ]
    grade = judged(json.dumps(notebook(*cells)), "someone.ipynb")
    assert grade.full, [o.text for o in grade.outcomes]
    assert any("Code cell 4 ended with FileNotFoundError" in note for note in grade.notes)
    assert any("Code cell 5 was left out: invalid syntax" in note for note in grade.notes)
    assert grade.printed.strip() == "100%"


def test_a_cell_that_is_python_keeps_its_percent_signs():
    text, notes = convert_notebook(notebook("x = (7\n% 4)", "from __future__ import annotations\ny = x"), "a")
    assert not notes
    assert text.startswith("from __future__ import annotations")
    assert "x = 7 % 4" in text


@pytest.mark.parametrize("document", [[], {"cells": 3}, {}, {"cells": [3, {"cell_type": "code", "source": None}]}])
def test_odd_notebooks_are_refused_or_empty(document):
    try:
        text, _ = convert_notebook(document, "odd.ipynb")
    except DataError as error:
        assert "odd.ipynb" in str(error)
    else:
        assert "def " not in text


@pytest.mark.parametrize("cell", ["-" * 20_000 + "1", "x = " + "+".join("1" * 20_000), "(" * 5000, "\x1b[2J = 1"])
def test_a_cell_that_python_cannot_parse_is_left_out_alone(cell):
    text, notes = convert_notebook(notebook(cell, "y = 1"), "a")
    assert "y = 1" in text
    assert notes[0].startswith("Code cell 1 was left out: ") and len(notes) == 1
    assert len(notes[0]) < 300 and "\x1b" not in notes[0]


@pytest.mark.timeout(60)
def test_a_notebook_of_nothing_but_magics_does_not_hold_the_others_up():
    text, notes = convert_notebook(notebook("%x\n" * 100_000, "y = 1"), "a")
    assert "y = 1" in text and len(notes) == 1


def test_a_folder_holds_files_and_folders(tmp_path):
    spec = load_spec("positions")
    (tmp_path / "anna.py").write_text("")
    (tmp_path / "anna.ipynb").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / ".hidden.py").write_text("")
    (tmp_path / "__pycache__").mkdir()
    for name, files in {"ben": ["positions.py", "helper.py"], "cleo": [], "dan": ["a.py", "b.py"]}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("")
    (tmp_path / "emil" / "deep").mkdir(parents=True)
    (tmp_path / "emil" / "deep" / "x.py").write_text("def sinusoidal_positions(length, width): pass")
    (tmp_path / "emil" / "deep" / "y.py").write_text("")
    found = {s.name: s for s in find_submissions(tmp_path, spec)}
    assert list(found) == ["anna.ipynb", "anna.py", "ben", "cleo", "dan", "emil"]
    assert found["ben"].path.name == "positions.py" and found["emil"].path.name == "x.py"
    assert "no .py" in found["cleo"].fault and "Several files" in found["dan"].fault
    assert found["anna.py"].folder == "" and found["ben"].folder == str(tmp_path / "ben")


def test_modules_beside_a_submission_are_found(grader, tmp_path):
    (tmp_path / "helper.py").write_text((SOLUTIONS / "positions" / "right.py").read_text())
    (tmp_path / "random.py").write_text("raise RuntimeError('not that of Python')")
    (tmp_path / "positions.py").write_text("import random\nfrom helper import sinusoidal_positions\n")
    spec = load_spec("positions")
    assert grader.grade(spec, Submission("someone", tmp_path / "positions.py")).full


@pytest.mark.parametrize("make", [lambda p: p / "missing.py", lambda p: p, lambda p: p / "a.txt"])
def test_what_is_no_submission_is_refused(tmp_path, make):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"expected|no submission"):
        find_submissions(make(tmp_path), load_spec("positions"))


# Grades


def test_gradescope_reads_what_is_written(judged):
    made = judged(replaced("split_heads", "return given[0]")).as_gradescope()
    assert json.loads(json.dumps(made)) == made
    assert made["score"] == 8 == sum(test["score"] for test in made["tests"])
    assert sum(test["max_score"] for test in made["tests"]) == 10
    first = made["tests"][0]
    assert first["name"] == "split" and first["status"] == "failed" and first["score"] == 0
    assert "shape" in first["output"] and first["visibility"] == "visible"
    assert [test["visibility"] for test in made["tests"]][-1] == "hidden"
    allowed = {"score", "max_score", "status", "name", "number", "output", "output_format", "visibility"}
    assert all(set(test) <= allowed for test in made["tests"])


def test_functions_at_hand_are_graded_in_place():
    import torch

    def concatenate_heads(x):
        return x.transpose(1, 2).flatten(2)

    def shift_heads(x):
        return concatenate_heads(torch.roll(x, -1, 1))

    grade = grade_objects("merging", concatenate_heads, shift_heads)
    assert [o.item for o in grade.outcomes] == ["concatenate", "shift"]
    assert grade.slips == ["shifted_backwards"]
    with pytest.raises(OptionError, match="has no items about"):
        grade_objects("merging", len)


# Specs

SPEC = """
title = "Twice"
file = "twice.py"
source = "mine.py"
[[exports]]
name = "twice"
[[items]]
name = "numbers"
kind = "reference"
points = 2
cases = "some"
reference = "double"
slips = ["squared"]
[slips]
squared = "This squares x; it is 2·x"
"""
MINE = """
def some(draw):
    yield (3.0,)
    yield (draw.normal(4),)

def double(x):
    return 2 * x

def squared(x):
    return x * x

def never_negative(f, x):
    return "a negative number" if (f(x) < 0) else None
"""


@pytest.fixture
def own(tmp_path):
    """Writes a spec of a teacher's own, with some text exchanged, and returns its path."""
    (tmp_path / "mine.py").write_text(MINE)

    def write(old="", new=""):
        assert old in SPEC
        path = tmp_path / "twice.toml"
        path.write_text(SPEC.replace(old, new, 1) if old else SPEC)
        return path

    return write


def test_a_spec_of_ones_own(own):
    def twice(x):
        return x**2

    assert grade_objects(own(), twice).slips == ["squared"]
    assert grade_objects(own(), twice=lambda x: x + x).full


def test_an_item_may_ask_for_no_slip_only(own):
    spec = own('kind = "reference"', 'kind = "slip"')
    assert grade_objects(spec, twice=lambda x: x + 1).full  # wrong, and not in that way
    assert grade_objects(spec, twice=lambda x: x * x).slips == ["squared"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('kind = "reference"', 'kind = "refrence"', "Did you mean 'reference'"),
        ("points = 2", "pointz = 2", "Did you mean 'points'"),
        ("points = 2", "points = -2", "points of 0 or more"),
        ('reference = "double"', 'reference = "doubble"', "no function 'doubble'. Did you mean 'double'"),
        ('cases = "some"', "", "needs the key 'cases'"),
        ('slips = ["squared"]', 'slips = ["cubed"]', "no function 'cubed'"),
        ("squared = ", "other = ", "no words for the slip 'squared'"),
        ('source = "mine.py"', 'source = "yours.py"', "no file"),
        ('source = "mine.py"', "", "no key 'source'"),
        ('name = "twice"', 'nam = "twice"', "Did you mean 'name'"),
        ('kind = "reference"', 'kind = "law"\nlaws = ["batsch"]', "Did you mean 'batch'"),
        ('kind = "reference"', 'kind = "reference"\nvisibility = "hiden"', "Did you mean 'hidden'"),
        ('title = "Twice"', 'title = "Twice"\n[limits]\nseconds = 0\n[x]', "more than 0"),
    ],
)
def test_specs_with_a_fault_say_which(own, old, new, words):
    with pytest.raises((SpecError, UnknownNameError), match=words):
        load_spec(own(old, new))


def test_a_fault_of_the_spec_is_not_the_students(own, grader, tmp_path):
    (tmp_path / "mine.py").write_text(MINE.replace("return 2 * x", "return 2 * y"))
    (tmp_path / "anna.py").write_text("def twice(x): return 2 * x")
    grade = grader.grade(load_spec(own()), Submission("anna", tmp_path / "anna.py"))
    assert "The spec itself failed" in grade.outcomes[0].words and "NameError" in grade.outcomes[0].words


def test_an_unknown_spec_is_answered_with_the_known():
    with pytest.raises(UnknownNameError, match="Did you mean 'attention'"):
        load_spec("atention")


# Comparing


def test_a_slip_that_gives_nan_is_recognised_and_nan_is_never_right():
    nan = torch.tensor([float("nan"), float("nan")])
    assert compare(nan, nan.clone(), 1e-4) is None
    assert "NaN" in compare(nan, torch.zeros(2), 1e-4).words
    assert compare(torch.zeros(2), nan, 1e-4) is not None


def test_a_spec_may_give_names_and_read_tagged_cells_alone(grader, tmp_path):
    (tmp_path / "given.py").write_text(
        "import math\n\n\ndef once(draw):\n    yield (4.0,)\n\n\ndef root(x):\n    return math.sqrt(x)\n"
    )
    table = (
        'title = "Roots"\nsource = "given.py"\ngiven = ["math"]\ncells = "exercise"\n\n[[exports]]\nname = "root"\n\n'
    )
    item = '[[items]]\nname = "values"\ncases = "once"\nreference = "root"\n'
    (tmp_path / "roots.toml").write_text(table + item)
    spec = load_spec(tmp_path / "roots.toml")
    book = notebook("raise SystemExit", "def root(x):\n    return math.sqrt(x)", "def root(x):\n    return 0.0")
    book["cells"][2]["metadata"] = {"tags": ["exercise"]}
    (tmp_path / "anna.ipynb").write_text(json.dumps(book))
    assert grader.grade(spec, Submission("anna", tmp_path / "anna.ipynb")).full
    (tmp_path / "roots.toml").write_text(table.replace('["math"]', '["mathh"]') + item)
    with pytest.raises(SpecError, match="mathh"):
        load_spec(tmp_path / "roots.toml")


class Interrupting:
    """Stands for a pipe at which whoever waits is interrupted."""

    def readline(self):
        raise KeyboardInterrupt


def test_after_an_interrupt_nobody_gets_the_grade_of_another(grader, judged, monkeypatch):
    wrong = replaced("split_heads", "return given[0]")
    with monkeypatch.context() as patch:
        patch.setattr(grader.process, "stdout", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            judged(wrong, "first.py")
    second = judged(RIGHT, "second.py")
    assert second.full, [(o.item, o.text) for o in second.outcomes if not o.passed]
