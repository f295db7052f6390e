"""One training from a recipe: data, model, loop, in a run's folder; and going on with one that was stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from regard.checking import usable
from regard.config import ConfigError
from regard.models import Model, load
from regard.train import recipe as recipes
from regard.train.loop import Process, Trainer
from regard.train.progress import Progress, Several, logs
from regard.train.recipe import Recipe
from regard.train.run import MODEL, Run, model_folder
from regard.train.seeds import derive
from regard.train.task import TASKS, Task


def train(recipe: Recipe, out: str | Path, device: str = "cpu", progress: Progress | None = None) -> Run:
    """Trains from the beginning into a new folder."""
    usable(device)
    recipe, start = _start(recipe, device)
    recipe = _absolute(recipe)
    recipe.train.total(rows=1)  # an error before anything is written
    run = Run.create(out, {**recipe.as_dict(), "device": device})
    trainer = _trainer(recipe, run, torch.device(device), start, progress)
    trainer.fit()
    return run


def resume(path: str | Path, device: str | None = None, progress: Progress | None = None) -> Run:
    """Goes on where a run was stopped; one that has ended is left as it is."""
    run = Run.open(path)
    if run.finished:
        return run
    tables = dict(run.config)
    device = usable(device or str(tables.pop("device", "cpu")))
    recipe = recipes.resolve(tables.get("recipe", str(path)), {k: v for k, v in tables.items() if k != "device"})
    trainer = _trainer(recipe, run, torch.device(device), _start(recipe, device)[1], progress)
    trainer.resume()
    trainer.fit()
    return run


def built_task(recipe: Recipe, run: Run, device: torch.device, start: Model[Any] | None) -> Task:
    """The task of a recipe, with its data read."""
    tokenizer = None if start is None else start.tokenizer
    return TASKS[recipe.task](recipe.data, recipe.train.seed, device, run.path, tokenizer)


def _absolute(recipe: Recipe) -> Recipe:
    """The recipe with its files named so that it can be resumed from anywhere."""
    named = {name: getattr(recipe.data, name) for name in TASKS[recipe.task].files}
    found = {name: str(Path(path).resolve()) for name, path in named.items() if path}
    init = str(Path(recipe.train.init).resolve()) if recipe.train.init else ""
    return replace(recipe, data=recipe.data.but(**found), train=recipe.train.but(init=init))


def _start(recipe: Recipe, device: str) -> tuple[Recipe, Model[Any] | None]:
    """The model to start from, if any, and the recipe with that run's data where none were asked for."""
    if not recipe.train.init:
        return recipe, None
    folder = model_folder(recipe.train.init)
    model = load(folder, device)
    if model.tokenizer is None:
        raise ConfigError(f"train.init = {recipe.train.init}: that model has no tokenizer.json, so it cannot read text")
    asked = {key: value for key, value in recipe.asked.get("model", {}).items() if key not in ("class", "preset")}
    if asked:
        changed = type(model)(model.config.but(**asked)).to(device)
        changed.load_state_dict(model.state_dict())
        changed.tokenizer, model = model.tokenizer, changed
    run = Run(folder.parent if folder.name == MODEL else folder.parent.parent)
    if "data" not in recipe.asked and (run.path / "config.toml").is_file():
        theirs, ours = run.config.get("data", {}), recipe.data.as_dict()
        same = {key: value for key, value in theirs.items() if key in ours}
        recipe = replace(recipe, data=recipe.data.but(**same))
    return recipe, model


def _trainer(
    recipe: Recipe, run: Run, device: torch.device, start: Model[Any] | None, progress: Progress | None
) -> Trainer:
    task = built_task(recipe, run, device, start)
    model = start
    if model is None:
        cls, config = recipes.model_config(recipe.model, vocabulary=task.tokenizer.size, length=task.length)
        with torch.random.fork_rng([]):
            torch.manual_seed(derive(recipe.train.seed, "model"))
            model = cls(config)
        model.tokenizer = task.tokenizer
        model.to(device)
    shown = [progress or Progress(), *logs(recipe.train.saving.log, run)]
    return Trainer(model, task, recipe.train, run, Several(shown), Process.here())
