"""Running one training from a recipe in a run's folder, and resuming one that was stopped."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from regard import plugins
from regard.config import ConfigError, Section
from regard.data.seeds import derive
from regard.devices import explain_memory, require_memory, resolve_device, without_values
from regard.errors import quote
from regard.models import Model, load
from regard.models.locate import model_folder
from regard.train import recipe as recipes
from regard.train.distributed import Process, peer_errors
from regard.train.inspection import READS_OWN_TEXT, reads_own_text
from regard.train.loggers import build_loggers
from regard.train.loop import Trainer
from regard.train.progress import Progress, ProgressGroup
from regard.train.recipe import Recipe
from regard.train.rendezvous import job_id
from regard.train.run import COMPILED, JOB, Run, find_begun, run_of, timestamped_path
from regard.train.tasks.base import TASKS, Task

_LOWER = (
    "Lower train.batch, set train.micro (rows that are computed at a time), shorten the rows, or take a smaller model"
)


@peer_errors()
def train(recipe: Recipe, out: str | Path | None, device: str = "cpu", progress: Progress | None = None) -> Run:
    """Trains from the beginning into a new folder, and returns the run. If torchrun has started this job again, and an
    earlier attempt has begun the same training, goes on with that. `out` None: runs/NAME-<time>."""
    process = Process.from_environment()
    place = torch.device(resolve_device(process.device(device)))
    recipe.train.total(rows=1)  # an error before anything is written
    start = _load_start(recipe, place, recipe.asked.get("model", {}))
    if start is not None:
        recipe = _adopt_start(recipe, start)
    recipe = _with_absolute_paths(recipe)
    process.init_group(place)
    config = {**recipe.as_dict(), "device": device, JOB: job_id()}
    used = plugins.describe(_mechanisms_of(recipe))
    if used:
        config[plugins.KEY] = used
    path = Path(out or find_begun(recipe.name, config) or timestamped_path(recipe.name))
    run = Run(process.broadcast_path(path))  # each process may have named it by its own clock
    if process.any_rank(process.is_main and run.was_begun_as(config)):
        return resume(run.path, device, progress)
    began = False
    claim: AbstractContextManager[Any] = nullcontext()
    if process.is_main:
        claim = run.claimed(config, lambda: began)
    with claim, explain_memory("training", _LOWER):
        trainer = _build_trainer(recipe, run, place, start, progress, process)
        began = True
        if progress is not None and process.is_main and reads_own_text(recipe):
            progress.note(READS_OWN_TEXT)  # an unset variable of the shell, data.text=$FILE, is no text, too
        trainer.fit()
    return run


@peer_errors()
def resume(path: str | Path, device: str | None = None, progress: Progress | None = None) -> Run:
    """Resumes a run from its newest checkpoint, and returns it; a run that has ended is left as it is."""
    run = Run.open(path)
    process = Process.from_environment()
    if run.finished and process.world_size == 1:
        return run
    tables = dict(run.config)
    for key in (JOB, COMPILED):
        tables.pop(key, None)
    plugins.require(tables.pop(plugins.KEY, None), run.path)
    saved_device = str(tables.pop("device", "cpu"))
    place = torch.device(resolve_device(process.device(device or saved_device)))
    process.init_group(place)
    # Rank 0 decides for all: one that ended while others go on would leave them waiting.
    if process.any_rank(process.is_main and run.finished):
        return run
    recipe = recipes.resolve(tables.get("recipe", str(path)), tables)
    start = _load_start(recipe, place, recipe.model)
    with _lock(run, process), explain_memory("training", _LOWER):
        trainer = _build_trainer(recipe, run, place, start, progress, process)
        trainer.resume()
        trainer.fit()
    return run


def _mechanisms_of(recipe: Recipe) -> set[str]:
    """Returns the mechanisms that the model of a recipe has."""
    return set(plugins.mechanism_names(recipes.resolve_model(recipe.model)[1].as_dict()))


def _lock(run: Run, process: Process) -> AbstractContextManager[None]:
    """Returns the lock of a run's folder; rank 0 holds it for all."""
    if process.is_main:
        return run.locked()
    return nullcontext()


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """Returns the recipe with absolute paths, so that the run can be resumed from any folder."""
    files = {name: getattr(recipe.data, name) for name in TASKS[recipe.task].files}
    absolute = {name: str(Path(path).resolve()) for name, path in files.items() if path}
    init = recipe.train.init
    if init:
        init = str(Path(init).resolve())
    return replace(recipe, data=recipe.data.but(**absolute), train=recipe.train.but(init=init))


def _load_start(recipe: Recipe, device: torch.device, changes: Mapping[str, Any]) -> Model[Any] | None:
    """Loads the model to start from; returns None if the model is new.

    Its config may be changed where its weights stay as they are, e.g. in its dropout.
    """
    init = recipe.train.init
    cls, config = recipes.resolve_model(recipe.model)
    if cls.has_weights:
        return _build_pretrained(recipe, cls, config, device)
    if not init:
        return None
    with torch.random.fork_rng([]):  # building a model draws numbers
        model = load(model_folder(init), device)
        if model.tokenizer is None:
            raise ConfigError(f"train.init = {init}: that model has no tokenizer.json, so it cannot read text")
        # A resumed run names the class that the model has anyway.
        changes = {key: value for key, value in changes.items() if (key, value) != ("class", type(model).__name__)}
        fixed = {"class", "preset"} & set(changes)
        if fixed:
            key = min(fixed)
            raise ConfigError(f"model.{key} = {quote(changes[key])}: train.init = {init} says what the model is")
        changed = type(model)(model.config.but(**changes)).to(device, next(model.parameters()).dtype)
    saved = {name: x.shape for name, x in model.state_dict().items()}
    expected = {name: x.shape for name, x in changed.state_dict().items()}
    wrong = [name for name in {**expected, **saved} if saved.get(name) != expected.get(name)]
    if wrong:
        keys = ", ".join(f"model.{key}" for key in changes)
        raise ConfigError(f"train.init = {init}: its {wrong[0]} does not fit the changes asked for; leave out {keys}")
    changed.load_state_dict(model.state_dict())
    changed.tokenizer = model.tokenizer
    return changed


def _build_pretrained(recipe: Recipe, cls: type[Model[Any]], config: Section, device: torch.device) -> Model[Any]:
    """Builds a model that reads its own weights; what its files lack depends on the seed alone."""
    if recipe.train.init:
        raise ConfigError(f"train.init = {recipe.train.init}: a {cls.__name__} is named by model.name instead")
    return _build_seeded(recipe, cls, config).to(device)


def _build_seeded(recipe: Recipe, cls: type[Model[Any]], config: Any) -> Model[Any]:
    """Builds a model on the CPU, so that its weights depend on the seed alone; the caller's random state is kept."""
    with torch.random.fork_rng([]):
        torch.manual_seed(derive(recipe.train.seed, "model"))
        return cls(config)


def _require_room(cls: type[Model[Any]], config: Any, device: torch.device) -> None:
    """Raises ResourceError if a model's weights need more memory than the machine, or the device, has.

    They are counted on the device "meta", where tensors have no values: a system that runs out of memory while layers
    are built kills the process without a message.
    """
    with torch.random.fork_rng([]), without_values():
        weights = cls(config).state_dict().values()
    needed = sum(x.numel() * x.element_size() for x in weights)
    for place in {torch.device("cpu"), device}:
        require_memory(needed, place, "the model is built", "Lower model.width, model.layers or the vocabulary")


def _adopt_start(recipe: Recipe, start: Model[Any]) -> Recipe:
    """Returns the recipe with the config of the model that it starts from, and with that run's settings of data.

    The run's files are adopted too, unless the user names data of their own.
    """
    recipe = replace(recipe, model={"class": type(start).__name__, **start.config.as_dict()})
    if not recipe.train.init:
        return recipe
    run = run_of(model_folder(recipe.train.init))
    if run is None:
        return recipe
    task = TASKS[recipe.task]
    asked = recipe.asked.get("data", {})
    sources = {*task.files, *task.generated}
    adopted = set(recipe.data.as_dict())
    if sources & set(asked):
        adopted -= sources
    settings = {key: value for key, value in run.config.get("data", {}).items() if key in adopted}
    return replace(recipe, data=recipe.data.but(**settings).but(**asked))


def _build_trainer(
    recipe: Recipe,
    run: Run,
    device: torch.device,
    start: Model[Any] | None,
    progress: Progress | None,
    process: Process,
) -> Trainer:
    """Reads the data, builds the model unless it starts from one, and returns their trainer."""
    tokenizer = None
    if start is not None:
        tokenizer = start.tokenizer
    with process.main_first():  # the others find what rank 0 has made of the data
        task: Task = TASKS[recipe.task](recipe.data, recipe.train.seed, device, run.path, tokenizer)
        if process.world_size > 1:
            run.mark_started()
    if start is None:
        cls, config = recipes.resolve_model(recipe.model, **task.given)
        _require_room(cls, config, device)
        model = _build_seeded(recipe, cls, config)
        model.tokenizer = task.tokenizer
        model.to(device)
    else:
        _check_lengths(recipe, task, start)
        model = start
    task.prepare(model)
    shown: list[Progress] = []
    if process.is_main:
        shown = [progress or Progress(), *build_loggers(recipe.train.saving.log, run)]
    return Trainer(model, task, recipe.train, run, ProgressGroup(shown), process)


def _check_lengths(recipe: Recipe, task: Task, start: Model[Any]) -> None:
    """Raises where the rows of a task are longer than the model to start from can read."""
    for key, (limit, length) in task.lengths(start).items():
        if limit is not None and length > limit:
            raise ConfigError(
                f"train.init = {recipe.train.init}: that model reads {limit} tokens, rows have {length}; "
                f"expected at most {limit}: lower data.{key}"
            )
