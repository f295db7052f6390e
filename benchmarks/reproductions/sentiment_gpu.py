"""Fine-tuning an encoder on sentences with a label: a grid of settings, and three optimisers at their best rates.

    python benchmarks/reproductions/sentiment_gpu.py DATA ENCODER OUT [DEVICE] [EPOCHS] [WORKERS]

DATA holds train.tsv, dev.tsv and test.tsv (`text, tab, 0 or 1`); ENCODER is a folder as transformers saves it. OUT gets
trainings.json and, of the three optimisers for EPOCHS epochs, results.json, of which `regard report` makes the page.

First {64, 128, 256} rows × rates of {1e-4, 5e-5, 1e-5} × {2, 5} epochs with AdamW and with Adagrad, and other rates of
Adagrad and SGD; then each optimiser at the batch and rate that are best on dev, and the best of all with other seeds.
Of each training the checkpoint that is best on dev is judged; several trainings share the GPU.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch

from regard.data.sentences import SentenceSplit
from regard.hub.classifier import Classifier
from regard.lab import experiment
from regard.lab.sentiment import run as sentiment
from regard.models.locate import MODEL
from regard.train import recipe, train
from regard.train.run import versions
from regard.train.tasks.sentiment import Sentiment, classify, encode_sentences

BATCHES, RATES, EPOCHS = (64, 128, 256), (1e-4, 5e-5, 1e-5), (2, 5)
OTHER = {"adagrad": (3e-4, 1e-3, 3e-3), "sgd": (3e-3, 1e-2, 3e-2, 1e-1), "adamw": (2e-4, 4e-4)}
SEEDS = (1, 2, 3, 4)


class Place(NamedTuple):
    """What all trainings share."""

    data: str
    encoder: str
    out: str
    device: str

    @property
    def asked(self) -> dict[str, Any]:
        files = {name: str(Path(self.data, f"{name}.tsv").resolve()) for name in SentenceSplit._fields}
        return {"data": files, "model": {"name": str(Path(self.encoder).resolve())}}


class Setting(NamedTuple):
    """One training."""

    optimizer: str
    batch: int
    rate: float
    epochs: int
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.batch}-{self.rate:g}-{self.epochs}-{self.seed}"

    def recipe(self, place: Place) -> recipe.Recipe:
        how = {"name": self.optimizer, "options": sentiment.OPTIONS.get(self.optimizer, {})}
        own = {"optimizer": how, "batch": self.batch, "lr": self.rate, "epochs": self.epochs, "seed": self.seed}
        own |= {"evaluation": {"every": 1 / self.epochs}, "saving": {"every": 0, "keep": 1}}
        tables = recipe.apply_variant(recipe.read_tables("sentiment"), "full", "sentiment")
        return recipe.resolve("sentiment", tables, place.asked | {"train": own})


def trained(setting: Setting, place: Place, keep: str | None = None) -> dict[str, Any]:
    """Trains, judges the best checkpoint on train, dev and test, and leaves nothing behind unless `keep` names it."""
    began = time.perf_counter()
    made = setting.recipe(place)
    run = train(made, Path(place.out) / (keep or setting.name), place.device)
    seconds, rows = time.perf_counter() - began, run.metrics()
    model = Classifier(name=str(run.path / MODEL)).to(place.device).eval()
    task = Sentiment(made.data, setting.seed, torch.device(place.device), run.path, model.tokenizer)  # type: ignore[arg-type]
    parts = {"train": task.train, "dev": task.dev}
    parts["test"] = encode_sentences(model.tokenizer, task.sentences.test, task.config, "test")
    with torch.no_grad():
        right = {key: int((classify(model, part).argmax(1) == part.labels).sum()) for key, part in parts.items()}
    found = {
        **setting._asdict(), "seconds": round(seconds, 1), "best_step": run.best,
        **{k: {"right": n, "n": len(parts[k].ids), "accuracy": n / len(parts[k].ids)} for k, n in right.items()},
        "evaluations": [row for row in rows if "lr" not in row], "last": [row for row in rows if "lr" in row][-1],
    }  # fmt: skip
    shutil.rmtree(run.path if keep is None else run.checkpoints)
    return found


def main(data: str, encoder: str, out: str, device: str = "cuda", epochs: str = "20", workers: str = "6") -> None:
    place, began = Place(data, encoder, "/tmp/sentiment", device), time.perf_counter()
    shutil.rmtree(place.out, ignore_errors=True)
    grid = [Setting(name, *rest) for name in ("adamw", "adagrad") for rest in product(BATCHES, RATES, EPOCHS)]
    grid += [Setting(name, 64, rate, 5) for name, rates in OTHER.items() for rate in rates]
    grid.sort(key=lambda setting: -setting.epochs / setting.batch)  # the long ones first
    found: list[dict[str, Any]] = []

    def told(row: dict[str, Any]) -> None:
        found.append(row)
        accuracy = " ".join(f"{key} {row[key]['accuracy']:.4f}" for key in SentenceSplit._fields)
        print(f"{time.perf_counter() - began:4.0f} s", Setting(*list(row.values())[:5]).name, accuracy, flush=True)
        document = {"device": torch.cuda.get_device_name() if device == "cuda" else device, "versions": versions()}
        Path(out, "trainings.json").write_text(
            json.dumps(document | {"workers": int(workers), "rows": found}, indent=1)
        )

    with ProcessPoolExecutor(int(workers), get_context("spawn")) as pool:
        for one in [pool.submit(trained, setting, place) for setting in grid]:
            told(one.result())
        best = {name: _best([row for row in found if row["optimizer"] == name]) for name in sentiment.OPTIMISERS}
        top = _best(found)
        jobs = [
            pool.submit(trained, Setting(name, row["batch"], row["rate"], int(epochs)), place, f"three/{name}")
            for name, row in best.items()
        ]
        jobs += [pool.submit(trained, top_setting(top, seed), place) for seed in SEEDS]
        for one in jobs:
            told(one.result())
    asked = place.asked | {name: {"train": {"batch": row["batch"], "lr": row["rate"]}} for name, row in best.items()}
    asked |= {"train": {"epochs": int(epochs)}}
    document = {"experiment": "sentiment", "device": device, "asked": asked, "variant": "full"}
    Path(place.out, "three", experiment.ASKED).write_text(tomli_w.dumps(document))
    known = experiment.EXPERIMENTS["sentiment"]
    experiment.EXPERIMENTS["sentiment"] = replace(known, page=_no_page)  # drawn later, where matplotlib is
    experiment.require_matplotlib = lambda: None  # type: ignore[assignment]
    experiment.resume(Path(place.out, "three"))
    shutil.copy(Path(place.out, "three", "results.json"), Path(out, "results.json"))
    print(f"{time.perf_counter() - began:.0f} s in all")


class _no_page:
    def __init__(self, results: Any) -> None:
        pass

    def write(self, path: Path) -> None:
        pass


def top_setting(row: dict[str, Any], seed: int) -> Setting:
    return Setting(row["optimizer"], row["batch"], row["rate"], row["epochs"], seed)


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return max(rows, key=lambda row: row["dev"]["right"])


if __name__ == "__main__":
    main(*sys.argv[1:])
