"""Converting a trained model: fewer key/value heads or another mechanism, taught by the model that it was.

Surgery first, then distillation of each converted layer (`distil.py`), then uptraining of the whole with the ordinary
loss, that of the model's own task or of a plain text; beside them a control that spends the steps of both on the
ordinary loss alone. One folder holds surgery/ (a model), distillation/, uptraining/ and control/ (runs), results.json,
report.html and lens.html.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard import hub
from regard.config import ConfigError, Section
from regard.convert import measures
from regard.convert.distil import NAME as DISTIL
from regard.convert.distil import head_errors, held_out, mean_error
from regard.convert.page import convert_page
from regard.convert.surgery import ConvertError, changed_layers, converted, layers_of
from regard.devices import resolve_device
from regard.errors import RunError, did_you_mean
from regard.lab.base import EXPERIMENTS, Experiment, Shown, write_results
from regard.lab.experiment import Session
from regard.models import Encoder, Model, load
from regard.models.locate import MODEL, RESULTS, model_folder
from regard.report.canvas import require_matplotlib
from regard.report.markup import number, percent
from regard.train import recipe as recipes
from regard.train.recipe import merge_tables
from regard.train.run import Run, claim, find_runs, run_of, versions, write_text
from regard.train.settings import resolve_steps
from regard.train.tasks.base import TASKS, Task
from regard.train.tasks.corruption import KnowledgeData
from regard.train.tasks.lm import TOKENS, LMData, token_files
from regard.train.tasks.questions import Questions

ASKED = "convert.json"
ORIGINAL, SURGERY, DISTILLATION, UPTRAINING, CONTROL = "original", "surgery", "distillation", "uptraining", "control"
STAGES = {"distil": DISTILLATION, "uptrain": UPTRAINING, "control": CONTROL}
LONGEST = 256  # tokens of a window where nobody said how long
UNTOLD_LR = 1e-3  # of distillation, where no run says what the model learned with
EXPERIMENTS.put("convert", Experiment("convert", "Fewer heads.", convert_page, command="regard convert MODEL"))
TENTH = 0.1  # of the steps that a model was trained for, to be uptrained


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Section):
    """What is converted, and how it is taught.

    `kv_heads`, `mechanism` and `options` as of `converted`; `only`: the layers that get the mechanism. `text`: a UTF-8
    file to read instead of what the model's own run read. `steps`: of distillation. `uptrain`: steps with the ordinary
    loss, or below 1 a share of those of the model's run; a tenth unless said. `control`: also spend the steps of both
    on the ordinary loss alone.
    """

    place = "convert"

    kv_heads: int | None = None
    mechanism: str | None = None
    only: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    steps: int = 300
    uptrain: float | None = None
    control: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "uptrain"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1 << 40:
                raise ConfigError(f"{self.place}.{name} = {value}: expected 0 or more")


@dataclass(frozen=True)
class Reading:
    """What a model reads while it is taught and measured: a task with its data, settings of training, and for how many
    steps the model itself was trained, 0 where that is not known."""

    task: str
    data: dict[str, Any]
    train: dict[str, Any]
    steps: int


class Taught(NamedTuple):
    """A conversion whose trainings are done: its settings, what was read, and the model after each stage."""

    document: dict[str, Any]
    config: ConvertConfig
    reading: Reading
    data: dict[str, Any]
    models: dict[str, Model[Any]]


def convert(
    model: Model[Any],
    source: str | Path,
    out: str | Path,
    config: ConvertConfig,
    overrides: Sequence[str] = (),
    device: str = "cpu",
    shown: Shown = Shown(),  # noqa: B008
) -> Mapping[str, Any]:
    """Converts a model into a new folder; its results. `source` is where the model comes from: a run says what it read.

    `overrides` change what is read and how it is trained (`data.block=64 train.lr=1e-4`), under `distil.`, `uptrain.`
    or `control.` the training of that stage alone.
    """
    require_matplotlib()  # an error about a missing library comes before minutes of training
    return resume(begin(model, source, out, config, overrides, device), device, shown)


def begin(
    model: Model[Any],
    source: str | Path,
    out: str | Path,
    config: ConvertConfig,
    overrides: Sequence[str] = (),
    device: str = "cpu",
) -> Path:
    """Surgery, and all that has to be known for the rest, in a new folder."""
    asked = _parsed(overrides)
    what: dict[str, Any] = {key: getattr(config, key) for key in ("kv_heads", "mechanism", "options")}
    student = converted(model, layers=config.only, **what)
    reading = _reading(student, source, config, asked)
    config = config.but(uptrain=float(_uptraining(student, config, reading)))
    if config.text:
        config = config.but(text=str(Path(config.text).resolve()))
    path = claim(out, ASKED, RESULTS)
    if find_runs(path):
        raise RunError(f"{path} holds runs already: choose another --out")
    folder = model_folder(source)
    if not folder.is_dir() or hub.is_hub_folder(folder):
        folder = path / ORIGINAL
        model.save(folder)
    student.save(path / SURGERY)
    document = {
        "source": str(source),
        "original": str(folder.resolve()),
        "class": type(model).__name__,
        "device": resolve_device(device),
        "convert": config.as_dict(),
        "reading": vars(reading),
        "asked": asked,
    }
    write_text(path / ASKED, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return path


def teach(path: Path, device: str | None = None, shown: Shown = Shown()) -> Taught:  # noqa: B008
    """The trainings of a conversion that was begun: those that have ended stay, the others are done."""
    if not (path / ASKED).is_file():
        raise RunError(f"{path} is no conversion: expected a folder with {ASKED}, as `regard convert` makes")
    document = json.loads((path / ASKED).read_text(encoding="utf-8"))
    config, reading = ConvertConfig().but(**document["convert"]), Reading(**document["reading"])
    where = resolve_device(device or document["device"])
    this = _experiment(path, where, shown)
    models = {ORIGINAL: load(document["original"], where), SURGERY: load(path / SURGERY, where)}
    data = _data(reading, path, models[ORIGINAL])
    for name, recipe in _recipes(config, reading, document, path, data).items():
        run = this.train(recipe, name, name)
        models[name] = load(run.path / MODEL, where)
    return Taught(document, config, reading, data, models)


def resume(path: str | Path, device: str | None = None, shown: Shown = Shown()) -> Mapping[str, Any]:  # noqa: B008
    """Goes on with a conversion that was begun: what has ended stays, the rest is done."""
    require_matplotlib()
    path, began = Path(path), time.perf_counter()
    taught = teach(path, device, shown)
    shown.say("Measuring …")
    results = measure(path, taught)
    results["seconds"] = round(max(time.perf_counter() - began, results["seconds"]), 1)
    write_results(path, results)
    convert_page(results).write(path / "report.html")
    return results


def _experiment(path: Path, device: str, shown: Shown) -> Session:
    return Session("convert", path, {}, None, device, shown)


def _parsed(overrides: Sequence[str]) -> dict[str, Any]:
    asked = recipes.parse(overrides)
    for key, table in asked.items():
        allowed = ("data", "train", *STAGES)
        if key not in allowed:
            raise ConfigError(f"'{key}': no such section or stage in convert.{did_you_mean(key, allowed)}")
        if key in STAGES and (set(table) != {"train"} or not isinstance(table["train"], Mapping)):
            raise ConfigError(
                f"{key}.{next(iter(table))}: expected {key}.train and a key of it, e.g. {key}.train.lr=1e-4"
            )
    return asked


def _reading(model: Model[Any], source: str | Path, config: ConvertConfig, asked: Mapping[str, Any]) -> Reading:
    """A text that was given, or what the model's run read; settings of training as the run had them."""
    folder = model_folder(source)
    run = run_of(folder) if folder.is_dir() else None
    known: dict[str, Any] = {} if run is None else run.config
    task, data = known.get("task", ""), dict(known.get("data", {}))
    if task == DISTIL:  # a conversion is converted further: it reads what it was taught on
        task, data = data["task"], dict(data["data"])
    if config.text:
        longest = getattr(model, "limit", None) or model.config.length
        task, data = "lm", {"text": str(Path(config.text).resolve()), "block": data.get("block", min(longest, LONGEST))}
    if task not in TASKS:
        raise ConvertError(
            f"{source} does not say what the model has read; give a text to measure it on, and to teach it: --text FILE"
        )
    if model.tokenizer is None:
        raise ConvertError(f"{source} has no tokenizer.json, so it cannot read text")
    data = TASKS[task].Config().but(**data).but(**asked.get("data", {})).as_dict()
    train = {key: x for key, x in known.get("train", {"lr": 1e-4, "batch": 8}).items() if key not in ("init", "epochs")}
    return Reading(task, data, train, _steps(run))


def _steps(run: Run | None) -> int:
    """For how many steps a model was trained, the runs that it started from counted in."""
    total, seen = 0, set()
    while run is not None and run.path not in seen:
        seen.add(run.path)
        total += max((row["step"] for row in run.metrics()), default=0)
        init = run.config.get("train", {}).get("init")
        run = run_of(model_folder(init)) if init and Path(init).is_dir() else None
    return total


def _uptraining(model: Model[Any], config: ConvertConfig, reading: Reading) -> int:
    """For how many steps the whole model is trained."""
    if isinstance(model, Encoder):
        if config.uptrain:
            raise ConvertError("--uptrain: an encoder has no loss on plain text here; it is distilled only")
        return 0
    asked = config.uptrain
    if asked is None:
        asked = TENTH if reading.steps else config.steps
    if 0 < asked < 1 and not reading.steps:
        raise ConvertError(
            f"--uptrain {asked:g}: a share of what? No run says how long it was trained; say how many steps"
        )
    return resolve_steps(asked, reading.steps)


def _data(reading: Reading, path: Path, model: Model[Any]) -> dict[str, Any]:
    """The data for all stages: a text is turned into tokens once."""
    if not reading.data.get("text"):
        return reading.data
    if not (path / TOKENS).is_dir():
        few = {key: reading.data[key] for key in ("text", "share")}
        token_files(LMData().but(**few), path, model.tokenizer)
    return {**reading.data, "text": "", "tokens": str((path / TOKENS).resolve())}


def _recipes(
    config: ConvertConfig, reading: Reading, document: Mapping[str, Any], path: Path, data: Mapping[str, Any]
) -> dict[str, recipes.Recipe]:
    """The trainings, in order: those that have any steps."""
    teach = {"teacher": document["original"], "task": reading.task, "data": data}
    uptrain, asked = int(config.uptrain or 0), document["asked"]
    start, taught = str((path / SURGERY).resolve()), str((path / DISTILLATION).resolve())
    # Values of layers that keep theirs get no gradient, and should get no decay either.
    own: dict[str, Any] = {"optimizer": {"name": "adamw", "decay": 0.0, "options": {}}, "evaluation": {"metric": ""}}
    if not reading.steps:
        own["lr"] = UNTOLD_LR
    plans: list[tuple[str, str, str, Mapping[str, Any], int, str, dict[str, Any]]] = [
        ("distil", DISTILLATION, DISTIL, teach, config.steps, start, own),
        ("uptrain", UPTRAINING, reading.task, data, uptrain, taught if config.steps else start, {}),
        ("control", CONTROL, reading.task, data, config.steps + uptrain, start, {}),
    ]
    if not config.control or not config.steps or document["class"] == "Encoder":
        plans.pop()
    made = {}
    for key, name, task, read, steps, init, more in plans:
        if not steps:
            continue
        train = merge_tables(merge_tables(reading.train, more), asked.get("train", {}))
        train = merge_tables(train, asked.get(key, {}).get("train", {}))
        train |= {"epochs": 0.0, "steps": steps, "init": init, "seed": config.seed}
        tables = {"task": task, "data": read, "model": {}, "train": train}
        made[name] = recipes.resolve(f"convert/{key}", tables)
    return made


def measure(path: Path, taught: Taught) -> dict[str, Any]:
    """All that the report of a conversion needs, in plain numbers; and the lens page beside it."""
    document, config, reading, data, models = taught
    cls, first = TASKS[reading.task], models[ORIGINAL]
    task: Task = cls(cls.Config().but(**data), config.seed, first.device, path, first.tokenizer)
    probe = held_out(task)
    last = next(name for name in (UPTRAINING, DISTILLATION, SURGERY) if name in models)
    stages = []
    for name, model in models.items():
        row = {"name": name, "mechanism": model.config.mechanism, **_trained(path / name)}
        row |= measures.measured(task, probe, first, model)
        if isinstance(task, Questions):
            row["answers"] = measures.answered(KnowledgeData().but(**data), path, model)
        if name not in (ORIGINAL, CONTROL):
            row["error"] = mean_error(first, model, probe)
            row["heads"] = {str(n): errors for n, errors in head_errors(first, model, probe).items()}
        stages.append(row)
    errors = {int(n): errors for n, errors in next(row for row in stages if row["name"] == last)["heads"].items()}
    name = hub.display_name(document["source"])
    measures.lens_page(path / "lens.html", {name: first, f"{name}, converted": models[last]}, probe, errors)
    results: dict[str, Any] = {
        "experiment": "convert",
        "run": last,
        "source": document["source"],
        "command": _command(document),
        "device": str(first.device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "config": {**config.as_dict(), "data": reading.data, "train": reading.train},
        "change": _change(first, models[SURGERY]),
        "task": reading.task,
        "trained": reading.steps,
        "measured": {"tokens": int(sum(task.targets(part) for part in probe))},
        "parameters": {key: _count(models[n]) for key, n in {"before": ORIGINAL, "after": last}.items()},
        "stages": stages,
        "seconds": round(sum(row["seconds"] for row in stages), 1),
        "states": measures.states(first, models[last]),
        "speed": measures.speeds(first, models[last], probe),
    }
    results["outcome"] = _outcome(results)
    return results


def _count(model: Model[Any]) -> int:
    return sum(p.numel() for p in model.parameters())


def _trained(path: Path) -> dict[str, Any]:
    """Steps, seconds and curves of a stage; of a model that was not trained here, none."""
    run = Run(path)
    rows = run.metrics() if (path / "config.toml").is_file() else []
    curve = [row for row in rows if "lr" in row]
    return {
        "steps": curve[-1]["step"] if curve else 0,
        "seconds": curve[-1]["seconds"] if curve else 0.0,
        "curve": [[row["step"], row["loss"]] for row in curve],
        "errors": [[row["step"], row["error"]] for row in rows if "error" in row],
    }


def _change(before: Model[Any], after: Model[Any]) -> dict[str, Any]:
    """What the conversion changed."""
    sizes = [layers_of(m)[0].size for m in (before, after)]
    return {
        "heads": sizes[0].H,
        "kv_heads": [size.G for size in sizes],
        "layers": changed_layers(before, after),
        "of": before.config.layers,
        "mechanisms": [list(m.config.per_layer) for m in (before, after)],
        "options": dict(after.config.options),
    }


def _command(document: Mapping[str, Any]) -> str:
    """The command that does it again."""
    config, words = document["convert"], ["regard", "convert", document["source"]]
    for key in ("kv_heads", "mechanism"):
        words += [] if config[key] is None else [f"--{key.replace('_', '-')}", str(config[key])]
    if config["only"] is not None:
        words += ["--layers", ",".join(map(str, config["only"]))]
    words += [word for key, value in config["options"].items() for word in ("--option", f"{key}={json.dumps(value)}")]
    words += ["--text", config["text"]] if config["text"] else []
    words += ["--steps", str(config["steps"]), "--uptrain", f"{config['uptrain']:g}"]
    words += [] if config["control"] else ["--no-control"]
    words += [f"{key}={json.dumps(value)}" for key, value in recipes.flatten(document["asked"]) if key]
    words += [] if not config["seed"] else ["--seed", str(config["seed"])]
    words += [] if document["device"] == "cpu" else ["--device", document["device"]]
    return shlex.join(words)


def _outcome(results: Mapping[str, Any]) -> dict[str, Any]:
    """The table for a terminal."""
    stages = results["stages"]
    asked = [key for key in ("dev", "test") if key in stages[0].get("answers", {})]
    encoder = "change" in stages[0]
    columns = [
        "",
        "steps",
        "change" if encoder else "perplexity",
        *(f"right, {key}" for key in asked),
        "error of attention",
    ]
    rows = []
    for row in stages:
        cells = [row["name"], f"{row['steps']:,}" if row["steps"] else ""]
        cells.append(percent(row["change"]) if encoder else number(row["perplexity"]))
        cells += [percent(row["answers"][key]["accuracy"]) for key in asked]
        rows.append([*cells, percent(row["error"], 0) if "error" in row else ""])
    return {"columns": columns, "rows": rows}
