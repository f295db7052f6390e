"""The results of a conversion: scores of each stage's model, what was changed, and the command that repeats it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard import hub
from regard.convert import measures
from regard.convert.distil import head_errors, held_out_batches, mean_error
from regard.convert.settings import ConvertConfig, SourceTraining
from regard.convert.stages import CONTROL, DISTILLATION, ORIGINAL, SURGERY, UPTRAINING
from regard.convert.surgery import attention_layers, changed_layers
from regard.data.batch import Batch
from regard.models import Model
from regard.models.locate import RUN_CONFIG
from regard.report.markup import number, percent
from regard.train import recipe as recipes
from regard.train.run import Run, versions
from regard.train.tasks.base import TASKS, Task
from regard.train.tasks.corruption import KnowledgeData
from regard.train.tasks.questions import Questions


class TrainedConversion(NamedTuple):
    """A conversion whose trainings are done: its settings, the data, and the model after each stage.

    `document` is the content of convert.json; `data` is `source.data` with its text as token files.
    """

    document: dict[str, Any]
    config: ConvertConfig
    source: SourceTraining
    data: dict[str, Any]
    models: dict[str, Model[Any]]

    @property
    def last(self) -> str:
        """Returns the name of the stage whose model is the final one."""
        return next(name for name in (UPTRAINING, DISTILLATION, SURGERY) if name in self.models)


def measure_conversion(path: Path, conversion: TrainedConversion) -> dict[str, Any]:
    """Returns the results of a conversion as plain data, for its report; also writes the lens page."""
    config = conversion.config
    source = conversion.source
    first = conversion.models[ORIGINAL]
    after = conversion.models[conversion.last]
    cls = TASKS[source.task]
    task: Task = cls(cls.Config().but(**conversion.data), config.seed, first.device, path, first.tokenizer)
    probe = held_out_batches(task)
    stages = [_measure_stage(path, conversion, task, probe, name) for name in conversion.models]
    heads = next(row for row in stages if row["name"] == conversion.last)["heads"]
    title = hub.display_name(conversion.document["source"])
    errors = {int(n): layer for n, layer in heads.items()}
    measures.write_lens_page(path / "lens.html", {title: first, f"{title}, converted": after}, probe, errors)
    results: dict[str, Any] = {
        "experiment": "convert",
        "run": conversion.last,
        "source": conversion.document["source"],
        "command": _command(conversion.document),
        "device": str(first.device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "config": {**config.as_dict(), "data": source.data, "train": source.train},
        "change": _describe_change(first, conversion.models[SURGERY]),
        "task": source.task,
        "trained": source.steps,
        "measured": {"tokens": int(sum(task.targets(part) for part in probe))},
        "parameters": {"before": _count_parameters(first), "after": _count_parameters(after)},
        "stages": stages,
        "seconds": round(sum(row["seconds"] for row in stages), 1),
        "states": measures.measure_states(first, after),
        "speed": measures.measure_speed(first, after, probe),
    }
    results["outcome"] = _outcome_table(results)
    return results


def _measure_stage(
    path: Path, conversion: TrainedConversion, task: Task, probe: list[Batch], name: str
) -> dict[str, Any]:
    """Returns the row of one stage: how it was trained, and its model's scores."""
    first = conversion.models[ORIGINAL]
    model = conversion.models[name]
    row: dict[str, Any] = {"name": name, "mechanism": model.config.mechanism, **_training_curves(path / name)}
    row |= measures.measure_loss(task, probe, first, model)
    if isinstance(task, Questions):
        row["answers"] = measures.score_answers(KnowledgeData().but(**conversion.data), path, model)
    # The control is not trained to imitate the original's layers, so its heads are not compared with them.
    if name not in (ORIGINAL, CONTROL):
        row["error"] = mean_error(first, model, probe)
        row["heads"] = {str(n): errors for n, errors in head_errors(first, model, probe).items()}
    return row


def _count_parameters(model: Model[Any]) -> int:
    return sum(p.numel() for p in model.parameters())


def _training_curves(path: Path) -> dict[str, Any]:
    """Returns steps, seconds and curves of a stage; zeros and no points for a model that was not trained here."""
    rows: list[Any] = []
    if (path / RUN_CONFIG).is_file():
        rows = Run(path).metrics()
    training = [row for row in rows if "lr" in row]
    last = {"step": 0, "seconds": 0.0}
    if training:
        last = training[-1]
    return {
        "steps": last["step"],
        "seconds": last["seconds"],
        "curve": [[row["step"], row["loss"]] for row in training],
        "errors": [[row["step"], row["error"]] for row in rows if "error" in row],
    }


def _describe_change(before: Model[Any], after: Model[Any]) -> dict[str, Any]:
    """Returns what the conversion changed: heads, key/value heads, layers, mechanisms and options."""
    old = attention_layers(before)[0].size
    new = attention_layers(after)[0].size
    return {
        "heads": old.H,
        "kv_heads": [old.G, new.G],
        "layers": changed_layers(before, after),
        "of": before.config.layers,
        "mechanisms": [list(before.config.per_layer), list(after.config.per_layer)],
        "options": dict(after.config.options),
    }


def _command(document: Mapping[str, Any]) -> str:
    """Returns the command that repeats the conversion."""
    config = document["convert"]
    words = ["regard", "convert", document["source"]]
    if config["kv_heads"] is not None:
        words += ["--kv-heads", str(config["kv_heads"])]
    if config["mechanism"] is not None:
        words += ["--mechanism", str(config["mechanism"])]
    if config["only"] is not None:
        words += ["--layers", ",".join(map(str, config["only"]))]
    for key, value in config["options"].items():
        words += ["--option", f"{key}={json.dumps(value)}"]
    if config["text"]:
        words += ["--text", config["text"]]
    words += ["--steps", str(config["steps"]), "--uptrain", f"{config['uptrain']:g}"]
    if not config["control"]:
        words.append("--no-control")
    words += [f"{key}={json.dumps(value)}" for key, value in recipes.flatten(document["asked"]) if key]
    if config["seed"]:
        words += ["--seed", str(config["seed"])]
    if document["device"] != "cpu":
        words += ["--device", document["device"]]
    return shlex.join(words)


def _outcome_table(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table for a terminal: `columns`, and `rows` of as many texts."""
    stages = results["stages"]
    splits = [key for key in ("dev", "test") if key in stages[0].get("answers", {})]
    measure = "perplexity"
    if "change" in stages[0]:
        measure = "change"  # of an encoder's vectors
    columns = ["", "steps", measure, *(f"right, {key}" for key in splits), "error of attention"]
    return {"columns": columns, "rows": [_outcome_row(row, measure, splits) for row in stages]}


def _outcome_row(row: Mapping[str, Any], measure: str, splits: list[str]) -> list[str]:
    """Returns the texts of one stage; empty where a stage has no steps or no error."""
    steps = ""
    error = ""
    value = number(row["perplexity"]) if measure == "perplexity" else percent(row["change"])
    if row["steps"]:
        steps = f"{row['steps']:,}"
    if "error" in row:
        error = percent(row["error"], 0)
    answers = [percent(row["answers"][key]["accuracy"]) for key in splits]
    return [row["name"], steps, value, *answers, error]
