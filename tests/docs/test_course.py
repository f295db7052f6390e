"""The course: every notebook has run, runs again, and judges its exercises: wrong as shipped, right as answered."""

import json
import re
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"), key=lambda p: int(p.name.partition("-")[0]))
LIMIT = 180  # seconds of a notebook on two cores …
ALONE = 1.5  # … of which a test has one: so many times as long
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def opened(path):
    return nbformat.read(path, as_version=4)


def tagged(cell, tag):
    return tag in cell.metadata.get("tags", [])


def named(cell, kind):
    """The NAME of a cell whose first line is `# kind: NAME`."""
    found = re.match(rf"# {kind}: (\w+)\n", cell.source)
    assert found, f"a cell tagged {kind} begins with '# {kind}: NAME', not with {cell.source[:40]!r}"
    return found[1]


def answers_of(path):
    """The answers of a notebook as cells, by name: each part of its file that begins with `# answer: NAME`."""
    _, *parts = re.split(r"^(?=# answer: )", (EXAMPLES / "answers" / f"{path.stem}.py").read_text(), flags=re.M)
    cells = [nbformat.v4.new_code_cell(part.rstrip()) for part in parts]
    return {named(cell, "answer"): cell for cell in cells}


def exercises(notebook, answered):
    """(name, exercise cell, the verdict that follows it, answer as a cell), in order."""
    answers = dict(answered)
    found = []
    for n, cell in enumerate(notebook.cells):
        if tagged(cell, "exercise"):
            name = named(cell, "exercise")
            verdict = next(c for c in notebook.cells[n + 1 :] if c.cell_type == "code")
            assert tagged(verdict, "verdict"), f"no verdict follows the exercise {name}"
            found.append((name, cell, verdict, answers.pop(name)))
    assert not answers, f"answers to no exercise: {list(answers)}"
    return found


def printed(cell):
    return "".join(o.get("text", "") for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")


def right(cell):
    """Whether a verdict cell found nothing wrong; an error is printed as a line that begins with ✗."""
    marks = re.findall("^[✓✗]", printed(cell), re.M)
    assert marks, f"a verdict says nothing: {printed(cell)!r}"
    return "✗" not in marks


def texts(notebook):
    """Everything that a reader sees: sources and printed outputs."""
    for cell in notebook.cells:
        yield cell.source
        for output in cell.get("outputs", []):
            yield output.get("text", "")
            yield from (x for kind, x in output.get("data", {}).items() if kind.startswith("text/"))


def test_there_is_a_course():
    numbers = [int(p.name.partition("-")[0]) for p in NOTEBOOKS]
    assert numbers[:8] == list(range(1, 9)) and len(set(numbers)) == len(numbers)
    listed = re.findall(r"^\| (\d+) \| \[[^]]+\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text(), re.M)
    assert listed == [(str(n), p.name) for n, p in zip(numbers, NOTEBOOKS, strict=True)]
    page = (EXAMPLES.parent / "docs" / "course.md").read_text()
    assert re.findall(r"^\| \[(\d+) · [^]]+\]\(\.\./examples/([^)]+)\)", page, re.M) == listed


@every_notebook
def test_has_run_in_order_and_keeps_what_it_showed(path):
    notebook = opened(path)
    nbformat.validate(notebook)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    outputs = [o for c in code for o in c.outputs]
    assert all(o.output_type != "error" and o.get("name") != "stderr" for o in outputs)
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) >= 2
    assert path.stat().st_size <= 500_000


@every_notebook
def test_is_the_same_on_every_machine(path):
    notebook = opened(path)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    ids = [c.id for c in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert all(set(c.metadata) <= {"tags", "jupyter", "collapsed"} for c in notebook.cells)
    for text in texts(notebook):
        assert not re.search(r"(?<![\w.])/(home|root|tmp|usr|work|opt|mnt)/|[A-Z]:\\\\|site-packages", text), text
        assert not re.search(r"\bat 0x[0-9a-f]{6}", text), text


@every_notebook
def test_formulas_are_balanced_and_links_lead_somewhere(path):
    for cell in opened(path).cells:
        if cell.cell_type != "markdown":
            continue
        prose = re.sub(r"`[^`\n]*`", "", cell.source)
        blocks = re.findall(r"\$\$(.+?)\$\$", prose, re.S)
        rest = re.sub(r"\$\$.+?\$\$", "", prose, flags=re.S)
        lines = re.findall(r"\$([^$\n]+)\$", rest)
        assert "$" not in re.sub(r"\$[^$\n]+\$", "", rest), f"a lone $ in: {cell.source}"
        for formula in blocks + lines:
            bare = formula.replace(r"\{", "").replace(r"\}", "")
            assert bare.count("{") == bare.count("}"), formula
            assert len(re.findall(r"\\left\b", formula)) == len(re.findall(r"\\right\b", formula)), formula
            assert re.findall(r"\\begin\{(\w+)\}", formula) == re.findall(r"\\end\{(\w+)\}", formula), formula
            assert not re.search(r"\\(tag|newcommand|def)\b", formula), formula
        for target in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", prose):
            assert (path.parent / target).exists(), target


@every_notebook
def test_exercises_ship_wrong_with_an_answer_elsewhere(path):
    notebook = opened(path)
    assert not [c for c in notebook.cells if tagged(c, "answer") or c.source.startswith("# answer")]
    found = exercises(notebook, answers_of(path))
    assert 2 <= len(found) <= 4
    for name, _, verdict, answer in found:
        assert not right(verdict), f"{name} as shipped is judged right"
        assert re.search(rf"^(def|class) {name}\b|^{name} = ", answer.source, re.M), f"no definition of {name}"


def woven(path):
    """The notebook with each exercise answered after its verdict, judged again, and put back as it was shipped."""
    notebook = opened(path)
    found = exercises(notebook, answers_of(path))
    inserted = {id(verdict): [answer, verdict, exercise] for _, exercise, verdict, answer in found}
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        cells += inserted.get(id(cell), [])
    notebook.cells = [nbformat.from_dict(json.loads(json.dumps(c)) | {"id": f"cell-{n}"}) for n, c in enumerate(cells)]
    return notebook


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # of the notebook machinery; the kernel is a process of its own
@every_notebook
def test_runs_again_and_tells_right_from_wrong(path):
    shipped, notebook = opened(path), woven(path)
    start = time.monotonic()
    client = NotebookClient(
        notebook, timeout=int(ALONE * LIMIT), kernel_name="python3", resources={"metadata": {"path": EXAMPLES}}
    )
    client.execute()
    assert time.monotonic() - start < ALONE * LIMIT
    verdicts = [c for c in notebook.cells if tagged(c, "verdict")]
    for n, (name, _, before, _) in enumerate(exercises(shipped, answers_of(path))):
        wrong, answered = verdicts[2 * n : 2 * n + 2]
        assert not right(wrong), f"{name} as shipped"
        assert right(answered), f"{name} as answered: {printed(answered)}"
        assert printed(wrong).splitlines()[0] == printed(before).splitlines()[0], f"{name} is judged differently now"
