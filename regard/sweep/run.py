"""Sweeps: one recipe trained with many settings, each trial a run of its own: all of a grid, or what a search draws.

A sweep is a folder: sweep.toml (what was asked), trials.db (the study, unless another storage was named), a run folder
for each trial, results.json and report.html.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
import torch

from regard.devices import resolve_device
from regard.errors import OptionError, RegardError, did_you_mean
from regard.lab.base import Shown
from regard.models.locate import RESULTS
from regard.models.locate import RUN_CONFIG as CONFIG
from regard.report.canvas import require_matplotlib
from regard.report.markup import number
from regard.report.page import Page
from regard.sweep.page import sweep_page
from regard.sweep.settings import SweepConfig, recipe_of
from regard.sweep.study import Study, SweepError, Taken, folder, place, values
from regard.train import stage
from regard.train.loop import Interrupted
from regard.train.recipe import flatten
from regard.train.run import Run, claim, write_text

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

SWEEP_CONFIG, TRIALS, REPORT, ERROR = "sweep.toml", "trials.db", "report.html", "error.txt"
STATES = {"COMPLETE": "finished", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
QUARTER, ENOUGH = 0.25, 8  # importance is what the best quarter has in common, of at least so many trials
STOPPED = 130  # the exit code of a worker that was asked to stop
QUIET = Shown()


class Sweep:
    """One sweep's folder."""

    def __init__(self, path: Path, config: SweepConfig, here: Mapping[str, Any]) -> None:
        self.path, self.config, self.here = path, config, here
        self.root = Path(here["root"])
        url = here.get("storage") or f"sqlite:///{(path / TRIALS).resolve()}"
        self.study = Study(url, here["name"], path, here["id"] if here.get("storage") else None)

    @classmethod
    def create(cls, path: str | Path, config: SweepConfig, storage: str | None = None) -> Sweep:
        """A new folder, or one that holds this very sweep, which can go on; another sweep's is an error."""
        path = Path(path)
        if (path / SWEEP_CONFIG).is_file():
            made = cls.open(path)
            _agree(made.config.as_dict(), config.as_dict(), f"{path} holds another sweep", path)
            made.extend(config.trials)
            return made
        here = {"root": str(Path.cwd()), "name": path.resolve().name, "id": secrets.token_hex(8)}
        claim(path, TRIALS, RESULTS, CONFIG)
        made = cls(path, config, here | ({"storage": storage} if storage else {}))
        made._write()
        try:
            with made.study.reached():
                made._prepare()
        except SweepError:
            (path / SWEEP_CONFIG).unlink()  # nothing has begun: the folder is free for another try
            raise
        return made

    @classmethod
    def open(cls, path: str | Path) -> Sweep:
        """A folder that `regard sweep` made."""
        path = Path(path)
        if not (path / SWEEP_CONFIG).is_file():
            raise SweepError(f"{path} is no sweep: expected a folder with {SWEEP_CONFIG}, as `regard sweep` makes")
        try:
            document = tomllib.loads((path / SWEEP_CONFIG).read_text(encoding="utf-8"))
            return cls(path, SweepConfig().but(**document["sweep"]), document["here"])
        except (OSError, ValueError, KeyError) as error:
            raise SweepError(f"{path / SWEEP_CONFIG} cannot be read: {error}") from None

    def extend(self, trials: int) -> None:
        """A search of more trials than it was begun with."""
        if trials and self.config.grid:
            raise OptionError(f"--trials {trials}: {self.path} is a grid, which has as many trials as combinations")
        if trials and trials < self.config.trials:
            raise OptionError(f"--trials {trials}: {self.path} has {self.config.trials} already; expected more")
        if trials:
            self.config = replace(self.config, trials=trials)
            self._write()

    def run(self, devices: Sequence[str] = ("cpu",), workers: int = 1, shown: Shown = QUIET) -> dict[str, Any]:
        """Trains what has not been trained, in so many processes that share the devices; what came out."""
        require_matplotlib()
        for device in devices:
            resolve_device(device)
        with self.study.reached():
            self._prepare()
            try:
                if workers > 1:
                    self._spread(devices, workers, shown)
                else:
                    self.work(devices[0], shown)
            except (Interrupted, KeyboardInterrupt):
                self.write()
                said = f"stopped; what was done is saved. Go on with: regard sweep {shlex.quote(str(self.path))}"
                raise Interrupted(said) from None
            return self.write()

    def work(self, device: str, shown: Shown = QUIET) -> None:
        """Takes one trial after the other, until none waits."""
        while True:
            with self.study.taken(self.config.parameters, self.config.seed) as taken:
                if taken is None:
                    return
                self._try(taken, device, shown)
            shown.say(self._said(taken.place))

    def _try(self, taken: Taken, device: str, shown: Shown) -> None:
        """One trial, from the beginning or from where it was stopped; a failure is noted and the sweep goes on."""
        path = self.path / folder(taken.place)
        progress = shown.progress(path.name)
        try:
            if (path / CONFIG).is_file():
                run = stage.resume(path, device, progress)
            else:
                run = stage.train(recipe_of(self.config, taken.texts, self.root), path, device, progress)
            value, step = best_value(run, self.config.metric, self.config.maximize)
        except (Interrupted, KeyboardInterrupt):
            self.study.give_back(taken)
            raise
        except Exception as error:  # whatever it is, others may be well
            write_text(path / ERROR, traceback.format_exc())
            self.study.fail(taken, f"{type(error).__name__}: {error}")
        else:
            seconds = next((row["seconds"] for row in reversed(run.metrics()) if "seconds" in row), None)
            self.study.finish(taken, value, {"step": step, "seconds": seconds, "host": socket.gethostname()})

    def results(self) -> dict[str, Any]:
        """What came out so far: plain data, as the report and --json have it."""
        rows = [self._row(trial) for trial in self.study.trials()]
        best = self._best(rows)
        return {
            "experiment": "sweep",
            "recipe": self.config.recipe,
            "variant": self.config.variant,
            "fixed": list(self.config.fixed),
            "metric": self.config.metric,
            "maximize": self.config.maximize,
            "parameters": [{"key": p.key, "values": p.listed, "log": p.log} for p in self.config.parameters],
            "counts": {state: n for state in STATES.values() if (n := sum(row["state"] == state for row in rows))},
            "trials": rows,
            "importance": self._importance(),
            "best": best and best["trial"],
            "command": best and self.config.command(best["settings"]),
            "again": f"regard sweep {shlex.quote(str(self.path))}",
            **({"run": best["folder"]} if best and (self.path / best["folder"]).is_dir() else {}),
        }

    def page(self, found: Mapping[str, Any] | None = None) -> Page:
        """The report of what came out so far."""
        found = found or self.results()
        return sweep_page({**found, "curves": {r["trial"]: self._curve(r["folder"]) for r in found["trials"]}})

    def write(self) -> dict[str, Any]:
        """Writes results.json and the report; the results."""
        found = self.results()
        write_text(self.path / RESULTS, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        self.page(found).write(self.path / REPORT)
        return found

    def _row(self, trial: FrozenTrial) -> dict[str, Any]:
        found = trial.user_attrs.get("found", {})
        return {
            "trial": place(trial),
            "folder": folder(place(trial)),
            "state": STATES[trial.state.name],
            "value": trial.value,
            "settings": values(trial),
            **{key: found.get(key) for key in ("step", "seconds", "host", "error")},
        }

    def _best(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The best of the trials that have finished; of equal ones the first."""
        sign = -1 if self.config.maximize else 1
        return min(
            (row for row in rows if row["state"] == "finished"), key=lambda row: sign * row["value"], default=None
        )

    def _curve(self, name: str) -> list[tuple[int, float]]:
        """The metric over the steps of a trial whose run is here."""
        rows = Run(self.path / name).metrics()
        return [(row["step"], row[self.config.metric]) for row in rows if _known(row.get(self.config.metric))]

    def _importance(self) -> dict[str, float]:
        """How far the settings of the best quarter of the trials differ from those of all (PED-ANOVA), as shares."""
        import optuna

        values = [trial.value for trial in self.study.trials() if trial.state.name == "COMPLETE"]
        if len(values) < ENOUGH or len(set(values)) == 1 or len(self.config.parameters) == 1:
            return {}
        asks = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=QUARTER)
        return dict(optuna.importance.get_param_importances(self.study.optuna, evaluator=asks))

    def _said(self, n: int) -> str:
        """A trial that has ended, in a line."""
        rows = {place(trial): self._row(trial) for trial in self.study.trials()}
        row, best = rows[n], self._best(list(rows.values()))
        ended = sum(one["state"] in ("finished", "failed") for one in rows.values())
        if row["state"] != "finished":
            came = f"{row['state']}: {row['error'] or 'another process has it'}"
        else:
            came = f"{self.config.metric} {number(row['value'])}"
            came += f" (best: {number(best['value'])}, {best['folder']})" if best and row is not best else ", the best"
        return f"{row['folder']}, {ended} of {len(rows)}: {format_settings(row['settings'])} → {came}"

    def _write(self) -> None:
        document = {"sweep": self.config.as_dict(), "here": dict(self.here)}
        write_text(self.path / SWEEP_CONFIG, tomli_w.dumps(document, multiline_strings=False))

    def _prepare(self) -> None:
        """The study with all its trials; one that is there must have been made for the same."""
        before, joined = self.study.create(self.config.maximize, self.config.as_dict())
        what = f"the study '{self.study.name}' in that storage is another sweep"
        _agree(before, self.config.as_dict(), what, self.path)
        self.study.lay_out(self.config.laid_out, joined)

    def _spread(self, devices: Sequence[str], workers: int, shown: Shown) -> None:
        """Several processes, each with its share of the threads; one that has died is replaced."""
        threads = max(1, torch.get_num_threads() // workers)
        told = {place(trial) for trial in self.study.ended()}
        before = None
        while waiting := self.study.waiting():
            after = [(trial.state, trial.user_attrs.get("died")) for trial in self.study.trials()]
            if after == before:
                raise SweepError(f"workers end before any trial does; what one says: regard sweep {self.path}")
            before = after
            on = [(str(self.path), devices[n % len(devices)], threads) for n in range(min(workers, waiting))]
            for _ in _processes(on):
                for n in sorted({place(trial) for trial in self.study.ended()} - told):
                    told.add(n)
                    shown.say(self._said(n))


def _processes(arguments: Sequence[tuple[str, str, int]]) -> Iterator[None]:
    """Starts workers and says every second that they are at it; they are asked to save and stop where this is left."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=_worker, args=one) for one in arguments]
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for the one that started them
    try:
        for process in started:
            process.start()
        signal.signal(signal.SIGINT, usual)
        while alive := [process.sentinel for process in started if process.is_alive()]:
            wait(alive, timeout=1.0)
            yield
    finally:
        signal.signal(signal.SIGINT, usual)
        for process in started:
            if process.is_alive():
                process.terminate()
        for process in started:
            if process.pid is not None:
                process.join()
    if STOPPED in {process.exitcode for process in started}:
        raise Interrupted("a worker was asked to stop")


def _worker(path: str, device: str, threads: int) -> None:
    """One process of several: stops where it is asked to, and where the one that started it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def stop(*signalled: Any) -> None:
        raise KeyboardInterrupt

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    os.setsid()
    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        Sweep.open(path).work(device)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(STOPPED)
    except RegardError as error:
        sys.exit(f"error: {error}")


def _agree(begun: Mapping[str, Any], asked: Mapping[str, Any], what: str, path: Path) -> None:
    """An error that says the difference where other settings are asked than a sweep was begun with."""
    had, has = (dict(flatten({**settings, "trials": 0})) for settings in (begun, asked))
    differ = [key for key in {**had, **has} if had.get(key) != has.get(key)]
    if differ:
        told = "; ".join(f"{key} was {had.get(key)!r} and is now {has.get(key)!r}" for key in differ[:3])
        raise SweepError(f"{what}: {told}. Choose another --out, or go on with what is there: regard sweep {path}")


def format_settings(settings: Mapping[str, Any]) -> str:
    """The settings of a trial in a line."""
    return " ".join(f"{key}={x:.4g}" if isinstance(x, float) else f"{key}={x}" for key, x in settings.items())


def best_value(run: Run, metric: str, maximize: bool) -> tuple[float, int]:
    """The best value of a metric that a run measured, and its step; of what training logs, the last."""
    rows = run.metrics()
    found = [row for row in rows if _known(row.get(metric))]
    measured = [row for row in found if "lr" not in row]
    if not found:
        known = dict.fromkeys(key for row in rows for key in row if key != "step")
        what = "is never a finite number" if metric in known else "is not measured"
        raise SweepError(f"'{metric}' {what} in {run.path}.{did_you_mean(metric, known)}")
    row = (max if maximize else min)(measured, key=lambda row: row[metric]) if measured else found[-1]
    return row[metric], row["step"]


def _known(value: Any) -> bool:
    """Whether this is a number that can be compared."""
    return isinstance(value, int | float) and math.isfinite(value)
