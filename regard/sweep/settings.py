"""What a sweep was asked: a recipe, changes of all trials, and what differs between them; checked before any begins."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from regard.config import ConfigError, Section
from regard.errors import OptionError
from regard.lab.base import EXPERIMENTS
from regard.sweep.space import Choices, Parameter, Texts, check, combinations, read
from regard.train import recipe as recipes
from regard.train.optimizer import build_optimizer, lr_factor
from regard.train.recipe import Recipe
from regard.train.tasks.base import TASKS


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Section):
    """What a sweep was asked. `base` is the recipe with its variant, as its file said when the sweep began; `fixed` are
    changes of all trials; `grid` or `search` is what differs; a trial's value is the best `metric` of its run."""

    place = "sweep"

    recipe: str = ""
    variant: str = ""
    fixed: tuple[str, ...] = ()
    grid: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    trials: int = 0
    metric: str = ""
    maximize: bool = False
    seed: int = 0
    base: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> list[Parameter]:
        return read(self.grid or self.search, ranges=not self.grid)[0]

    @property
    def laid_out(self) -> list[dict[str, Any]]:
        """The values of each trial; those of a search are drawn later."""
        if not self.grid:
            return [{}] * self.trials
        kept = [p for p in self.parameters if isinstance(p, Choices)]
        stored = {p.key: dict(zip(p.texts, p.choices, strict=True)) for p in kept}
        return [{key: stored[key][text] for key, text in one.items()} for one in combinations(kept)]

    def command(self, values: Mapping[str, Any]) -> str:
        """What to type to train with these values of the study."""
        pairs = [f"{p.key}={p.text(values[p.key])}" for p in self.parameters]
        variant = ["--variant", self.variant] if self.variant else []
        return " ".join(["regard train", *map(shlex.quote, [self.recipe, *self.fixed, *pairs, *variant])])


def asked(
    recipe: str,
    fixed: Sequence[str] = (),
    grid: Sequence[str] = (),
    search: Sequence[str] = (),
    trials: int | None = None,
    variant: str | None = None,
    metric: str | None = None,
    maximize: bool | None = None,
    seed: int | None = None,
) -> SweepConfig:
    """The settings of a sweep, every value checked against the recipe."""
    stages = [name for name in recipes.recipe_names() if name.startswith(f"{recipe}/")]
    if recipe in EXPERIMENTS and stages and recipe not in recipes.recipe_names():
        raise ConfigError(f"{recipe} is an experiment of several trainings; sweep one of them: {', '.join(stages)}")
    if bool(grid) == bool(search):
        raise OptionError(
            f"{'both --grid and --search' if grid else 'neither --grid nor --search'}: expected one of them, e.g. "
            "--grid train.lr=1e-3,2e-3 model.layers=2,4 or --trials 20 --search train.lr=1e-4..1e-2:log"
        )
    if bool(search) != (trials is not None) or (trials is not None and trials < 1):
        said = "a grid has as many trials as combinations" if grid else "say how many trials, e.g. --trials 20"
        raise OptionError(f"--trials {trials}: {said}" if trials is not None else f"--search: {said}")
    parameters, single = read(grid or search, ranges=not grid)
    if not parameters:
        raise OptionError("nothing is varied: expected a key with several values, e.g. train.lr=1e-3,2e-3")
    fixed = [*fixed, *single, *([] if seed is None else [f"train.seed={seed}"])]
    twice = {p.key for p in parameters} & {text.partition("=")[0].strip() for text in fixed}
    if twice:
        raise ConfigError(f"{min(twice)} is varied and also set; expected one of the two")
    base = recipes.apply_variant(recipes.read_tables(recipe), variant, recipe)
    plain = recipes.resolve(recipe, base, recipes.parse(fixed))
    task = TASKS[plain.task]
    own = plain.train.evaluation.metric or task.metric or "loss"
    if metric and "/" in metric and metric != own:  # a run keeps the model that is best by what the sweep looks at
        fixed.append(f"train.evaluation.metric={metric}")
    more = task.__new__(task).more_is_better(metric or own)
    made = SweepConfig(
        recipe=recipe,
        variant=variant or "",
        fixed=tuple(fixed),
        grid=tuple(grid),
        search=tuple(search),
        trials=trials or 0,
        metric=metric or own,
        maximize=more if maximize is None else maximize,
        seed=seed or 0,
        base=base,
    )
    here = Path.cwd()
    check(parameters, bool(grid), lambda texts: possible(recipe_of(made, texts, here)))
    return made


def recipe_of(config: SweepConfig, texts: Texts, root: Path) -> Recipe:
    """A trial's recipe, with files named from the folder that the sweep was begun in."""
    pairs = [f"{key}={text}" for key, text in texts.items()]
    changes = recipes.parse([*config.fixed, *pairs])
    task = config.base.get("task")
    files = TASKS[task].files if isinstance(task, str) and task in TASKS else ()
    tables = [_rooted(table, files, root) for table in (config.base, changes)]
    return recipes.resolve(config.recipe, *tables)


def _rooted(tables: Mapping[str, Any], files: Sequence[str], root: Path) -> dict[str, Any]:
    made = dict(tables)
    for section, names in {"data": files, "train": ("init",)}.items():
        table = made.get(section, {})
        if isinstance(table, Mapping):
            named = {n: str(root / x) for n, x in table.items() if n in names and isinstance(x, str) and x}
            made |= {section: {**table, **named}} if named else {}
    return made


def possible(recipe: Recipe) -> None:
    """An error where this cannot be trained, as far as can be told without reading data or taking memory."""
    named = {f"data.{name}": getattr(recipe.data, name) for name in TASKS[recipe.task].files}
    for key, path in {**named, "train.init": recipe.train.init}.items():
        if path and not Path(path).exists():
            raise ConfigError(f"{key} = {path}: there is no such file or folder")
    recipe.train.total(rows=1)
    lr_factor(recipe.train.schedule, 0, 1)
    cls, config = recipes.resolve_model(recipe.model)
    own = not cls.has_weights and not recipe.train.init  # others read files where they are built
    with torch.random.fork_rng([]), torch.device("meta"):
        model = cls(config) if own else torch.nn.Linear(1, 1)
        build_optimizer(recipe.train.optimizer, model, recipe.train.lr)
