"""Every shipped spec passes its right solution, takes points from the wrong ones, and says what is wrong with them.

A solution begins with `# slip: NAME`, the slip that the grader is to name, or `# slip: none`.
"""

import ast
import re
from pathlib import Path

import pytest

from regard.grade import Grader, load_spec, shipped_specs
from regard.grade.cases import make_cases
from regard.grade.comparing import compare
from regard.grade.spec import GradeLimits
from regard.grade.submissions import find_submissions

SOLUTIONS = Path(__file__).parent / "solutions"
SPECS = sorted(shipped_specs())
LIMITS = GradeLimits(seconds=60.0)  # a busy machine is no fault of a solution
every_spec = pytest.mark.parametrize("name", SPECS)


def promised(path):
    return re.match(r"# slip: (\w+)\n", path.read_text())[1]


@every_spec
def test_right_passes_and_slips_are_named(name, grader):
    spec = load_spec(name)
    submissions = find_submissions(SOLUTIONS / name, spec)
    wrong = [s for s in submissions if s.name != "right"]
    assert len(wrong) >= 5
    named = 0
    for submission in submissions:
        grade = grader.grade(spec, submission, LIMITS)
        told = [(o.item, o.text) for o in grade.outcomes if not o.passed]
        if submission.name == "right":
            assert grade.full and grade.score == spec.points, told
            continue
        assert not grade.full, f"{submission.name} gets all points"
        assert all(text for _, text in told), f"{submission.name} is not told why"
        slip = promised(submission.path)
        if slip == "none":
            assert not grade.slips, f"{submission.name}: {grade.slips}"
        else:
            assert grade.first_fault.slip == slip, f"{submission.name}: {told}"
            assert spec.table.slips[slip] in " ".join(text for _, text in told)
            named += 1
    assert named >= 0.8 * len(wrong), f"{named} of {len(wrong)} named"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [101, 202, 303])
def test_other_numbers_give_the_same_grades(seed):
    """Nothing hangs on one draw: with other seeds right stays right and wrong wrong, and slips are named."""
    wrong = []
    with Grader(seed) as grader:
        for name in SPECS:
            spec = load_spec(name)
            for submission in find_submissions(SOLUTIONS / name, spec):
                grade = grader.grade(spec, submission, LIMITS)
                told = (name, submission.name, [o.text for o in grade.outcomes if not o.passed])
                slip = promised(submission.path)
                if grade.full != (submission.name == "right") or slip not in ("none", *grade.slips):
                    wrong.append(told)
    assert not wrong


@every_spec
def test_specs_are_whole(name):
    spec = load_spec(name)
    assert spec.table.title and spec.table.file.endswith(".py")
    assert spec.points == 10
    assert len({item.name for item in spec.items}) == len(spec.items)
    assert any(item.visibility == "hidden" for item in spec.items)
    tree = ast.parse(spec.table.template)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {export.name for export in spec.exports} <= defined
    assert "NotImplementedError" in spec.table.template
    for slip, words in spec.table.slips.items():
        assert len(words) > 20, slip
        told_by_property = f'"{slip}"' in Path(spec.module.__file__).read_text()
        assert hasattr(spec.module, slip) or told_by_property, f"nothing finds the slip {slip}"


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("multihead", "corruption")])  # classes
def test_slips_differ_from_what_is_right(name):
    """A slip that gave the reference's outputs would accuse right solutions' neighbours of it."""
    spec = load_spec(name)
    asked = {}
    for item in spec.items:
        if item.kind == "reference":
            reference = spec.function(item.reference)
            cases = make_cases(spec.function(item.cases), 7)
            asked[item] = [(case.arguments, reference(*case.arguments)) for case in cases]
    for slip in spec.table.slips:
        function = getattr(spec.module, slip, None)
        if function is None:
            continue
        items = [item for item in asked if not item.slips or slip in item.slips]
        assert any(_differs(function, asked[item], item.tolerance) for item in items), slip


def _differs(function, cases, tolerance):
    """Returns whether a slip gives something else than the reference in one of the cases."""
    for arguments, want in cases:
        try:
            given = function(*arguments)
        except (TypeError, RuntimeError, AssertionError):
            continue  # another export's slip, or sizes that it is impossible with
        if compare(given, want, tolerance) is not None:
            return True
    return False
