"""The settings of a sweep, checked before it starts: a recipe, changes for all trials, and what they vary."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from regard import plugins
from regard.config import ConfigError, Section
from regard.devices import without_values
from regard.errors import OptionError
from regard.lab.base import EXPERIMENTS
from regard.reading import check_path
from regard.sweep.space import Choices, Parameter, Texts, check_values, combinations, parse_parameters
from regard.train import recipe as recipes
from regard.train.optimizer import build_optimizer, lr_factor
from regard.train.recipe import Recipe
from regard.train.tasks.base import TASKS


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Section):
    """The settings of a sweep.

    `base` is the recipe with its variant, as it was when the sweep started; `fixed` are changes for all trials; `grid`
    or `search` are the varied settings. A trial's value is the best `metric` of its run.
    """

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
        """Returns the varied settings."""
        return parse_parameters(self.grid or self.search, ranges=not self.grid)[0]

    @property
    def planned_trials(self) -> list[dict[str, Any]]:
        """Returns the values of each trial as the study stores them; {} for a search, which chooses them later."""
        if not self.grid:
            return [{}] * self.trials
        choices = [p for p in self.parameters if isinstance(p, Choices)]
        stored = {p.key: dict(zip(p.texts, p.choices, strict=True)) for p in choices}
        return [{key: stored[key][text] for key, text in texts.items()} for texts in combinations(choices)]

    @cached_property
    def mechanisms(self) -> set[str]:
        """Returns the names of the mechanisms in the settings of its trials."""
        texts = [f"{p.key}={text}" for p in self.parameters if isinstance(p, Choices) for text in p.texts]
        tables = [self.base, recipes.parse(self.fixed), *(recipes.parse([text]) for text in texts)]
        return {name for table in tables for name in plugins.mechanism_names(table)}

    def command(self, values: Mapping[str, Any]) -> str:
        """Returns the command that trains with these values of the study."""
        changes = [*self.fixed, *(f"{p.key}={p.text(values[p.key])}" for p in self.parameters)]
        words = [self.recipe, *changes]
        if self.variant:
            words += ["--variant", self.variant]
        words += plugins.words(plugins.mechanism_names(recipes.merge_tables(self.base, recipes.parse(changes))))
        return " ".join(["regard train", *map(shlex.quote, words)])


def configure_sweep(
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
    """Returns the settings of a sweep, after checking every value against the recipe."""
    stages = [name for name in recipes.recipe_names() if name.startswith(f"{recipe}/")]
    if recipe in EXPERIMENTS and stages and recipe not in recipes.recipe_names():
        raise ConfigError(f"{recipe} is an experiment of several trainings; sweep one of them: {', '.join(stages)}")
    _check_kind(grid, search, trials)
    parameters, single = parse_parameters(grid or search, not grid, recipe)
    if not parameters:
        raise OptionError("nothing is varied: expected a key with several values, e.g. train.lr=1e-3,2e-3")
    fixed = [*fixed, *single]
    if seed is not None:
        fixed.append(f"train.seed={seed}")
    twice = {p.key for p in parameters} & {text.partition("=")[0].strip() for text in fixed}
    if twice:
        raise ConfigError(f"{min(twice)} is varied and also set; expected one of the two")
    base = recipes.apply_variant(recipes.read_tables(recipe), variant, recipe)
    plain = recipes.resolve(recipe, base, recipes.parse(fixed, recipe=recipe))
    task = TASKS[plain.task]
    own_metric = plain.train.evaluation.metric or task.metric or "loss"
    metric = metric or own_metric
    if "/" in metric and metric != own_metric:  # so that a run keeps the model that is best by the metric of the sweep
        fixed.append(f"train.evaluation.metric={metric}")
    if maximize is None:
        # An instance without __init__, which would read the data.
        maximize = task.__new__(task).more_is_better(metric)
    config = SweepConfig(
        recipe=recipe,
        variant=variant or "",
        fixed=tuple(fixed),
        grid=tuple(grid),
        search=tuple(search),
        trials=trials or 0,
        metric=metric,
        maximize=maximize,
        seed=seed or 0,
        base=base,
    )
    root = Path.cwd()
    check_values(parameters, bool(grid), lambda texts: check_trainable(trial_recipe(config, texts, root)))
    return config


asked = configure_sweep  # its name in earlier versions


def _check_kind(grid: Sequence[str], search: Sequence[str], trials: int | None) -> None:
    """Raises an OptionError unless there is either a grid, or a search with a number of trials."""
    if bool(grid) == bool(search):
        given = "neither --grid nor --search"
        if grid:
            given = "both --grid and --search"
        raise OptionError(
            f"{given}: expected one of them, e.g. "
            "--grid train.lr=1e-3,2e-3 model.layers=2,4 or --trials 20 --search train.lr=1e-4..1e-2:log"
        )
    if grid and trials is not None:
        raise OptionError(f"--trials {trials}: a grid has as many trials as combinations")
    if search and trials is None:
        raise OptionError("--search needs a number of trials, e.g. --trials 20")
    if trials is not None and trials < 1:
        raise OptionError(f"--trials {trials}: expected at least 1, e.g. --trials 20")


def trial_recipe(config: SweepConfig, texts: Texts, root: Path) -> Recipe:
    """Returns a trial's recipe, with relative paths joined to the folder in which the sweep was started.

    Its checkpoints are removed when it has ended, unless train.saving.keep is set.
    """
    changes = recipes.parse([*config.fixed, *(f"{key}={text}" for key, text in texts.items())])
    task = config.base.get("task")
    files: tuple[str, ...] = ()
    if isinstance(task, str) and task in TASKS:
        files = TASKS[task].files
    # A trial that has ended keeps its model; checkpoints, three times as large, are only needed to continue.
    base = recipes.merge_tables(config.base, {"train": {"saving": {"keep": 0}}})
    tables = _join_root(base, files, root)
    return recipes.resolve(config.recipe, tables, _join_root(changes, files, root))


def _join_root(tables: Mapping[str, Any], files: Sequence[str], root: Path) -> dict[str, Any]:
    """Returns the tables of a recipe with `root` joined to its paths: those of `files` in `data`, and `train.init`."""
    joined = dict(tables)
    for section, names in {"data": files, "train": ("init",)}.items():
        table = joined.get(section, {})
        if not isinstance(table, Mapping):
            continue  # an error that is raised when the recipe is resolved
        paths = {n: str(root / x) for n, x in table.items() if n in names and isinstance(x, str) and x}
        if paths:
            joined[section] = {**table, **paths}
    return joined


def check_trainable(recipe: Recipe) -> None:
    """Raises an error if a recipe cannot be trained, as far as that shows without reading data or taking memory."""
    paths = {f"data.{name}": getattr(recipe.data, name) for name in TASKS[recipe.task].files}
    for key, path in {**paths, "train.init": recipe.train.init}.items():
        if path and not check_path(path, ConfigError).exists():
            raise ConfigError(f"{key} = {path}: there is no such file or folder")
    recipe.train.total(rows=1)
    lr_factor(recipe.train.schedule, 0, 1)
    cls, config = recipes.resolve_model(recipe.model)
    with torch.random.fork_rng([]), without_values():
        model: torch.nn.Module = torch.nn.Linear(1, 1)
        # Other models read files when they are built; for them the optimiser is checked with a small module.
        if not cls.has_weights and not recipe.train.init:
            model = cls(config)
        build_optimizer(recipe.train.optimizer, model, recipe.train.lr)
