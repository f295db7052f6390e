"""One training from a recipe: data, model, loop, in a run's folder; and going on with one that was stopped."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from regard.config import ConfigError, Section
from regard.data.seeds import derive
from regard.devices import resolve_device
from regard.models import Model, Seq2Seq, load
from regard.models.locate import model_folder
from regard.train import recipe as recipes
from regard.train.distributed import Process
from regard.train.loop import Trainer
from regard.train.progress import Progress, Several, logs
from regard.train.recipe import Recipe
from regard.train.run import Run, run_of
from regard.train.tasks.base import TASKS, Task


def train(recipe: Recipe, out: str | Path, device: str = "cpu", progress: Progress | None = None) -> Run:
    """Trains from the beginning into a new folder."""
    process = Process.from_environment()
    place = resolve_device(process.device(device))
    recipe.train.total(rows=1)  # an error before anything is written
    start = _start(recipe, place, recipe.asked.get("model", {}))
    recipe = _absolute(recipe if start is None else _following(recipe, start))
    process.init_group(torch.device(place))
    run = Run(process.broadcast_path(out))
    if process.is_main:
        run = Run.create(out, {**recipe.as_dict(), "device": device})
    _fit(recipe, run, torch.device(place), start, progress, process, new=True)
    return run


def resume(path: str | Path, device: str | None = None, progress: Progress | None = None) -> Run:
    """Goes on where a run was stopped; one that has ended is left as it is."""
    run = Run.open(path)
    if run.finished:
        return run
    tables = dict(run.config)
    process = Process.from_environment()
    place = resolve_device(process.device(device or str(tables.get("device", "cpu"))))
    recipe = recipes.resolve(tables.get("recipe", str(path)), {k: v for k, v in tables.items() if k != "device"})
    start = _start(recipe, place, recipe.model)
    process.init_group(torch.device(place))
    _fit(recipe, run, torch.device(place), start, progress, process, new=False)
    return run


def _fit(
    recipe: Recipe, run: Run, device: torch.device, start: Model[Any] | None, progress: Progress | None,
    process: Process, new: bool,
) -> None:  # fmt: skip
    """Trains in the run's folder, which the first process keeps others out of. One that cannot begin is given up."""
    with run.locked() if process.is_main else nullcontext():
        try:
            trainer = _trainer(recipe, run, device, start, progress, process)
        except BaseException:
            if new and process.is_main:
                run.release()
            raise
        if not new:
            trainer.resume()
        trainer.fit()


def _absolute(recipe: Recipe) -> Recipe:
    """The recipe with its files named so that it can be resumed from anywhere."""
    named = {name: getattr(recipe.data, name) for name in TASKS[recipe.task].files}
    found = {name: str(Path(path).resolve()) for name, path in named.items() if path}
    init = str(Path(recipe.train.init).resolve()) if recipe.train.init else ""
    return replace(recipe, data=recipe.data.but(**found), train=recipe.train.but(init=init))


def _start(recipe: Recipe, device: str, changes: Mapping[str, Any]) -> Model[Any] | None:
    """The model to start from, if any, with changes that leave its weights as they are, e.g. to its dropout."""
    init = recipe.train.init
    kind, config = recipes.resolve_model(recipe.model)
    if kind.has_weights:
        return _pretrained(recipe, kind, config, device)
    if not init:
        return None
    with torch.random.fork_rng([]):  # building a model draws numbers
        model = load(model_folder(init), device)
        if model.tokenizer is None:
            raise ConfigError(f"train.init = {init}: that model has no tokenizer.json, so it cannot read text")
        rest = {key: value for key, value in changes.items() if (key, value) != ("class", type(model).__name__)}
        fixed = {"class", "preset"} & set(rest)
        if fixed:
            raise ConfigError(f"model.{min(fixed)} = {rest[min(fixed)]!r}: train.init = {init} says what the model is")
        changed = type(model)(model.config.but(**rest)).to(device, next(model.parameters()).dtype)
    got, want = model.state_dict(), changed.state_dict()
    wrong = [n for n in {**want, **got} if n not in got or n not in want or got[n].shape != want[n].shape]
    if wrong:
        asked = ", ".join(f"model.{key}" for key in rest)
        raise ConfigError(f"train.init = {init}: its {wrong[0]} does not fit the changes asked for; leave out {asked}")
    changed.load_state_dict(got)
    changed.tokenizer = model.tokenizer
    return changed


def _pretrained(recipe: Recipe, kind: type[Model[Any]], config: Section, device: str) -> Model[Any]:
    """Builds a model that reads its own weights; what its files lack depends on the seed alone."""
    if recipe.train.init:
        raise ConfigError(f"train.init = {recipe.train.init}: a {kind.__name__} is named by model.name instead")
    with torch.random.fork_rng([]):
        torch.manual_seed(derive(recipe.train.seed, "model"))
        return kind(config).to(device)


def _following(recipe: Recipe, start: Model[Any]) -> Recipe:
    """The recipe with the model that it starts from, and that run's settings of data: its files too, where no others
    are named."""
    recipe = replace(recipe, model={"class": type(start).__name__, **start.config.as_dict()})
    asked, init = recipe.asked.get("data", {}), recipe.train.init
    run = run_of(model_folder(init)) if init else None
    if run is None:
        return recipe
    ours, files = recipe.data.as_dict(), {"world", *TASKS[recipe.task].files}
    own = files if files & set(asked) else set()
    same = {key: value for key, value in run.config.get("data", {}).items() if key in ours and key not in own}
    return replace(recipe, data=recipe.data.but(**same).but(**asked))


def _trainer(
    recipe: Recipe, run: Run, device: torch.device, start: Model[Any] | None, progress: Progress | None,
    process: Process,
) -> Trainer:  # fmt: skip
    tokenizer = None if start is None else start.tokenizer
    with process.main_first():  # the others find what the first has made of the data
        task: Task = TASKS[recipe.task](recipe.data, recipe.train.seed, device, run.path, tokenizer)
        if process.world_size > 1:
            run.mark_started()
    model = start
    read = {"block": (getattr(start, "limit", None), task.length)}
    if isinstance(start, Seq2Seq):
        read = {"target": read["block"], "source": (start.encoder.limit, task.source or 0)}
    for key, (limit, length) in read.items():
        if limit is not None and length > limit:
            raise ConfigError(
                f"train.init = {recipe.train.init}: that model reads {limit} tokens, rows have {length}; "
                f"expected at most {limit}: lower data.{key}"
            )
    if model is None:
        cls, config = recipes.resolve_model(recipe.model, **task.given)
        with torch.random.fork_rng([]):
            torch.manual_seed(derive(recipe.train.seed, "model"))
            model = cls(config)
        model.tokenizer = task.tokenizer
        model.to(device)
    task.prepare(model)
    shown = [progress or Progress(), *logs(recipe.train.saving.log, run)] if process.is_main else []
    return Trainer(model, task, recipe.train, run, Several(shown), process)
