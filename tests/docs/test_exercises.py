"""Every exercise of the course goes through `regard grade`: no points as shipped, all of them as answered."""

import json
import re
from pathlib import Path

import pytest

from regard.grade import Grader, load_spec
from regard.grade.submissions import Submission

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"), key=lambda p: int(p.name.partition("-")[0]))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
BY_LAWS = "1245"  # whose exercises all laws are asked of, which takes seconds
every_notebook_graded = pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.name.partition("-")[0] in BY_LAWS)) for p in NOTEBOOKS],
    ids=lambda p: p.stem,
)


def exercises(path):
    """The names of a notebook's exercises, in order."""
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(c["source"]) for c in cells if "exercise" in c["metadata"].get("tags", [])]
    return [re.match(r"# exercise: (\w+)\n", source)[1] for source in sources]


@pytest.fixture(scope="module")
def graded():
    """Grades a file by the spec of a notebook."""
    with Grader() as grader:
        yield lambda stem, file: grader.grade(
            load_spec(EXAMPLES / "grading" / f"{stem}.toml"), Submission(stem, file, alone=False)
        )


@every_notebook
def test_each_exercise_is_an_item(path):
    spec = load_spec(EXAMPLES / "grading" / f"{path.stem}.toml")
    assert [export.name for export in spec.exports] == exercises(path)
    assert [item.export for item in spec.items] == exercises(path)
    assert spec.points == 10


@every_notebook_graded
def test_as_shipped_no_exercise_gets_its_points_and_each_is_told_why(path, graded):
    grade = graded(path.stem, path)
    assert not grade.score, [o.item for o in grade.outcomes if o.passed]
    assert all(o.status == "failed" and len(o.text) > 40 for o in grade.outcomes), [o.text for o in grade.outcomes]
    slips = set(load_spec(EXAMPLES / "grading" / f"{path.stem}.toml").table.slips)
    assert set(grade.slips) == slips, "each slip of the spec is that of an exercise as it is shipped"


@every_notebook_graded
def test_as_answered_every_exercise_gets_its_points(path, graded):
    grade = graded(path.stem, EXAMPLES / "answers" / f"{path.stem}.py")
    assert grade.full, [o.text for o in grade.outcomes if not o.passed]
