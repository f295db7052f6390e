"""Specs: TOML files that say which functions or classes a submission must define, and which items give points.

title = "Sinusoidal positions"
file = "positions.py"              # the file that --template writes
source = "positions.py"            # Python with cases, references, slips and properties; beside the spec
template = '''…'''                 # what students begin with
given = ["math", "torch"]          # names of the source that a submission finds defined; none unless said
cells = "exercise"                 # of a notebook only cells with this tag are read; all unless said

[[exports]]
name = "sinusoidal_positions"      # kind = "class" for a class

[[items]]
name = "values"
kind = "reference"                 # or "shape", "property", "slip", "law"
points = 3
cases = "usual"                    # functions of the source
reference = "right"
slips = ["halves"]

[slips]
halves = "Sines fill the first half and cosines the second; …"
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, get_args

from regard.config import ConfigError, Section
from regard.errors import RegardError, UnknownNameError, did_you_mean, quote
from regard.laws import LAWS
from regard.plugins import run_file
from regard.reading import check_path, read_toml

ExportKind = Literal["function", "class"]

# reference: the output equals the reference's. shape: shape and type do. property: a function of the spec's source
# returns None. slip: the outputs are not those of known mistakes. law: laws of `regard check` hold.
ItemKind = Literal["reference", "shape", "property", "slip", "law"]

# The values of Gradescope.
Visibility = Literal["visible", "hidden", "after_due_date", "after_published"]


class SpecError(RegardError, ValueError):
    """A spec of the grader that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class GradeLimits(Section):
    """Limits of a submission: seconds for each item, seconds for its import, and megabytes beyond what torch takes."""

    place: ClassVar[str] = "limits"
    seconds: float = 10.0
    import_seconds: float = 60.0
    memory_mb: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seconds", "import_seconds", "memory_mb"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"limits.{name} = {getattr(self, name)}: expected more than 0")


@dataclass(frozen=True, kw_only=True)
class Export(Section):
    """A function or class that submissions define. `takes_first`: if it returns a tuple, the first entry counts."""

    place: ClassVar[str] = "exports"
    name: str = ""
    kind: str = "function"
    takes_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_of(self.kind, get_args(ExportKind), "exports", self.name, "kind")


@dataclass(frozen=True, kw_only=True)
class GradeItem(Section):
    """One item of a spec: what is required of which export, and its points.

    `cases`, `reference` and `check` name functions of the spec's source, `slips` keys of the spec's table of slips.
    """

    place: ClassVar[str] = "items"
    name: str = ""
    kind: str = "reference"
    points: float = 1.0
    visibility: str = "visible"
    export: str = ""
    cases: str = ""
    reference: str = ""
    check: str = ""
    slips: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    like: str = ""
    constructor: tuple[int, ...] = ()
    tolerance: float = 1e-4
    hint: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_of(self.kind, get_args(ItemKind), "items", self.name, "kind")
        _require_one_of(self.visibility, get_args(Visibility), "items", self.name, "visibility")
        if self.points < 0 or self.tolerance <= 0:
            raise ConfigError(f"item {quote(self.name)}: expected points of 0 or more and a tolerance above 0")


# The keys that each kind of item needs.
NEEDS = {
    "reference": ("cases", "reference"),
    "shape": ("cases", "reference"),
    "property": ("cases", "check"),
    "slip": ("cases", "reference", "slips"),
    "law": ("laws",),
}


@dataclass(frozen=True, kw_only=True)
class SpecTable(Section):
    """The keys of a spec's file except its tables of exports and items."""

    place: ClassVar[str] = "spec"
    title: str = ""
    file: str = ""
    source: str = ""
    template: str = ""
    given: tuple[str, ...] = ()
    cells: str = ""
    slips: Mapping[str, str] = field(default_factory=dict)
    limits: GradeLimits = GradeLimits()


@dataclass(frozen=True)
class Spec:
    """A spec that was read: `path` is its file, `module` the Python with cases, references, slips and properties."""

    name: str
    path: Path
    table: SpecTable
    exports: tuple[Export, ...]
    items: tuple[GradeItem, ...]
    module: ModuleType

    def function(self, name: str) -> Callable[..., Any]:
        """Returns a function of the spec's source."""
        found: Callable[..., Any] = getattr(self.module, name)
        return found

    def export_of(self, item: GradeItem) -> Export:
        """Returns the export that an item is about: the one it names, else the first."""
        return next((e for e in self.exports if e.name == item.export), self.exports[0])

    @property
    def points(self) -> float:
        return sum(item.points for item in self.items)


def shipped_specs() -> dict[str, Path]:
    """Returns the files of the specs that come with regard, by name."""
    folder = Path(str(resources.files("regard.grade") / "specs"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_spec(name: str | Path) -> Spec:
    """Returns the spec of a name that comes with regard, or of a TOML file; importing its source runs that file."""
    shipped = shipped_specs()
    path = check_path(name, SpecError)
    is_file = path.suffix == ".toml" or path.is_file()
    if not is_file and str(name) not in shipped:
        raise UnknownNameError(f"no spec is called {quote(str(name))}.{did_you_mean(str(name), shipped)} Or file.toml.")
    if not is_file:
        path = shipped[str(name)]
    tables = read_toml(path, SpecError)
    exports = tables.pop("exports", [])
    items = tables.pop("items", [])
    try:
        table = SpecTable().but(**tables)
        made = Spec(
            path.stem,
            path.resolve(),
            table,
            tuple(Export().but(**one) for one in _tables(exports, "exports", path)),
            tuple(GradeItem().but(**one) for one in _tables(items, "items", path)),
            _import_source(path.resolve(), table.source),
        )
    except ConfigError as error:
        raise SpecError(f"{path}: {error}") from None
    _check(made)
    return made


def _tables(value: Any, name: str, path: Path) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise SpecError(f"{path}: a spec needs at least one table [[{name}]]")
    return value


def _require_one_of(value: str, known: tuple[str, ...], place: str, name: str, key: str) -> None:
    if value not in known:
        raise ConfigError(f"{place} {quote(name)}: {key} = {quote(value)}.{did_you_mean(value, known)}")


def _import_source(path: Path, source: str) -> ModuleType:
    """Returns the Python module of a spec: a file beside it, or a module of regard.grade.exercises."""
    if not source:
        raise SpecError(f"{path}: no key 'source'; expected the Python file with cases and references, beside the spec")
    if not source.endswith(".py"):
        try:
            return importlib.import_module(f"regard.grade.exercises.{source}")
        except ModuleNotFoundError:
            raise SpecError(f"{path}: source = {quote(source)} is no file.py beside the spec") from None
    file = path.parent / source
    if not check_path(file, SpecError).is_file():
        raise SpecError(f"{path}: source = {quote(source)}: no file {quote(str(file))}")
    return run_file(file, f"regard_grade_{file.stem}", SpecError)


def _check(spec: Spec) -> None:
    """Raises a SpecError if items name exports, functions or slips that do not exist; an unknown law raises its own."""
    exports = [export.name for export in spec.exports]
    for name in spec.table.given:
        if not hasattr(spec.module, name):
            raise SpecError(f"{spec.path}: given names {quote(name)}, but {spec.table.source} does not define it")
    for n, item in enumerate(spec.items, 1):
        place = f"{spec.path}: item {n} ({item.name or 'without a name'})"
        if not item.name:
            raise SpecError(f"{place}: no key 'name'")
        for key in NEEDS[item.kind]:
            if not getattr(item, key):
                raise SpecError(f"{place}: an item of kind '{item.kind}' needs the key '{key}'")
        if item.export and item.export not in exports:
            raise SpecError(f"{place}: export = {quote(item.export)}.{did_you_mean(item.export, exports)}")
        functions = [item.cases, item.reference, item.check, *item.slips]
        for name in filter(None, functions):
            if not callable(getattr(spec.module, name, None)):
                known = [n for n, x in vars(spec.module).items() if callable(x) and not n.startswith("_")]
                raise SpecError(f"{place}: {spec.table.source} has no function '{name}'.{did_you_mean(name, known)}")
        for slip in item.slips:
            if slip not in spec.table.slips:
                raise SpecError(f"{place}: no words for the slip '{slip}' in [slips]")
        for law in item.laws:
            LAWS.find(law)
