"""Every package reads the way docs/architecture.md says, as far as a test can tell."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import regard

ROOT = Path(regard.__file__).parent
PACKAGES = sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file())
CONDITIONALS = 14  # per 1,000 lines of a package
PARALLEL = 6  # per 1,000 lines of a package
BAD_OPENINGS = ("Of ", "As ", "Around ", "The same", "The opposite")


def sources(package: str) -> Iterator[tuple[Path, str, ast.Module]]:
    """Yields the files of a package, or of the top level, with their syntax trees."""
    if package == "regard":
        files = sorted(ROOT.glob("*.py"))
    else:
        files = sorted((ROOT / package).rglob("*.py"))
    for path in files:
        text = path.read_text(encoding="utf-8")
        yield path, text, ast.parse(text)


def places(package: str, wanted: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path, _, tree in sources(package):
        for node in ast.walk(tree):
            if isinstance(node, wanted):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node


def is_parallel(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


@pytest.mark.parametrize("package", ["regard", *PACKAGES])
def test_one_idea_a_line(package: str) -> None:
    lines = sum(text.count("\n") for _, text, _ in sources(package))
    conditionals = [node for _, node in places(package, ast.IfExp)]
    nested = [
        place
        for place, node in places(package, ast.IfExp)
        if any(isinstance(inner, ast.IfExp) for child in ast.iter_child_nodes(node) for inner in ast.walk(child))
    ]
    wide = [
        place
        for place, node in places(package, ast.Assign)
        if isinstance(node.targets[0], ast.Tuple) and len(node.targets[0].elts) > 4
    ]
    parallel = [place for place, node in places(package, ast.Assign) if is_parallel(node)]
    assert not nested, f"nested conditional expressions: {nested}"
    assert not wide, f"unpackings of more than four names: {wide}"
    assert len(conditionals) <= CONDITIONALS * lines / 1000, f"{len(conditionals)} conditional expressions"
    assert len(parallel) <= PARALLEL * lines / 1000, f"parallel assignments: {parallel}"


@pytest.mark.parametrize("package", ["regard", *PACKAGES])
def test_docstrings_have_a_subject(package: str) -> None:
    documented = (ast.FunctionDef, ast.ClassDef, ast.Module)
    bad = []
    for path, _, tree in sources(package):
        for node in ast.walk(tree):
            if isinstance(node, documented) and (ast.get_docstring(node) or "").startswith(BAD_OPENINGS):
                bad.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}")
    assert not bad, bad


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for package in ["regard", *PACKAGES]
        for path, node in places(package, ast.ClassDef)
        if "eject" not in Path(path).parts  # what ejected files are written from has the names of what it stands for
    )
    assert not [name for name, count in names.items() if count > 1]


def triton_programs() -> Iterator[tuple[Path, str, ast.FunctionDef]]:
    """Yields every function with the decorator triton.jit."""
    for path, text, tree in sources("kernels"):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                yield path, text, node


PROGRAMS = [
    pytest.param(path, text, node, id=f"{path.parent.name}/{path.stem}.{node.name}")
    for path, text, node in triton_programs()
]


@pytest.mark.parametrize(("path", "text", "node"), PROGRAMS)
def test_triton_programs_document_their_tensors(path: Path, text: str, node: ast.FunctionDef) -> None:
    said = ast.get_docstring(node)
    assert said, f"{path.name}: {node.name} has no docstring"
    if not node.name.endswith("_kernel") and "_kernel" not in node.name:
        return  # a helper: what it is given are blocks in registers
    pointers = [argument.arg for argument in node.args.args if argument.arg.endswith("_ptr")]
    missing = [name for name in pointers if name.removesuffix("_ptr") not in said]
    assert not missing, f"{path.name}: {node.name} does not say what {missing} are"


@pytest.mark.parametrize(("path", "text", "node"), PROGRAMS)
def test_shapes_stand_above_products(path: Path, text: str, node: ast.FunctionDef) -> None:
    lines = text.splitlines()
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.dot":
            around = "\n".join(lines[max(node.lineno - 1, call.lineno - 8) : call.lineno])
            assert "[" in around and ("·" in around or "@" in around or "→" in around or "->" in around), (
                f"{path.name}:{call.lineno}: no shapes above a product"
            )
