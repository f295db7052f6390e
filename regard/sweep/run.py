"""Running a sweep: one recipe is trained with many settings, each in a run of its own, a trial.

A sweep is a folder: sweep.toml (its settings), trials.db (the study, unless another storage is used), a run folder for
each trial, results.json and report.html.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import tomli_w
import torch

from regard import plugins
from regard.config import ConfigError
from regard.devices import resolve_device
from regard.errors import Interrupted, OptionError, RegardError, RunError
from regard.lab.base import Shown
from regard.models.locate import RESULTS
from regard.models.locate import RUN_CONFIG as CONFIG
from regard.reading import check_fields, check_path, read_toml
from regard.report.learning import TrainAndDev
from regard.report.page import Page
from regard.storage import write_text
from regard.sweep.page import sweep_page
from regard.sweep.results import (
    STATES,
    best_row,
    best_value,
    measure_importance,
    metric_curves,
    summarize_trial,
    trial_row,
)
from regard.sweep.settings import SweepConfig, trial_recipe
from regard.sweep.study import ClaimedTrial, Study, SweepError, trial_folder, trial_number
from regard.train import stage
from regard.train.claim import claimed
from regard.train.recipe import flatten
from regard.train.run import Run

SWEEP_CONFIG = "sweep.toml"
TRIALS = "trials.db"
REPORT = "report.html"
ERROR = "error.txt"
STOPPED = 130  # the exit code of a worker that was asked to stop
GRACE = 15.0  # seconds for a worker to save and stop, before it is asked once more
PAUSE = 0.1  # seconds
QUIET = Shown()


class Sweep:
    """One sweep in its folder. `origin` is where it was started: `root` (the current folder), `name`, `id`,
    `storage`."""

    def __init__(self, path: Path, config: SweepConfig, origin: Mapping[str, Any]) -> None:
        self.path = path
        self.config = config
        self.origin = origin
        self.root = Path(origin["root"])
        if origin.get("storage"):
            self.study = Study(origin["storage"], origin["name"], path, origin["id"])
        else:
            self.study = Study(f"sqlite:///{(path / TRIALS).resolve()}", origin["name"], path, None)

    @classmethod
    def create(cls, path: str | Path, config: SweepConfig, storage: str | None = None) -> Sweep:
        """Creates the folder of a sweep, or opens it to continue the same sweep; another sweep in it is an error."""
        path = Path(path)
        is_new = False
        # Processes that start the same sweep at the same time wait here, and then open it.
        with claimed(path, (), lambda: not is_new, wait=True):
            if (path / SWEEP_CONFIG).is_file():
                sweep = cls.open(path)
                _check_same(sweep.config.as_dict(), config.as_dict(), f"{path} holds another sweep", path)
                sweep.extend(config.trials)
                return sweep
            _refuse_other_results(path)
            is_new = True
            origin: dict[str, Any] = {"root": str(Path.cwd()), "name": path.resolve().name, "id": secrets.token_hex(8)}
            if storage:
                origin["storage"] = storage
            used = plugins.describe(config.mechanisms)
            if used:
                origin[plugins.KEY] = used
            # Written before the study, so that the same command can continue from here if this is killed.
            _write_config(path, config, origin)
            sweep = cls(path, config, origin)
            with sweep.study.storage_errors():
                sweep._prepare_study()
            return sweep

    @classmethod
    def open(cls, path: str | Path) -> Sweep:
        """Opens a folder that `regard sweep` made."""
        path = check_path(path, SweepError)
        if not (path / SWEEP_CONFIG).is_file():
            raise SweepError(f"{path} is no sweep: expected a folder with {SWEEP_CONFIG}, as `regard sweep` makes")
        source = str(path / SWEEP_CONFIG)
        document = check_fields(read_toml(source, SweepError), {"sweep": dict, "here": dict}, source, SweepError)
        try:
            config = SweepConfig().but(**document["sweep"])
        except ConfigError as error:
            raise SweepError(f"{source} cannot be read: {error}") from None
        origin = {"root": str, "name": str, "id": str, "storage": str | None, plugins.KEY: dict | None}
        return cls(path, config, check_fields(document["here"], origin, f"{source}, here", SweepError))

    @property
    def again(self) -> str:
        """Returns the command that continues the sweep."""
        return shlex.join(["regard", "sweep", str(self.path), *plugins.words(self.config.mechanisms)])

    def extend(self, trials: int) -> None:
        """Increases the number of a search's trials to `trials` (0: leaves it unchanged)."""
        if not trials:
            return
        if self.config.grid:
            raise OptionError(f"--trials {trials}: {self.path} is a grid, which has as many trials as combinations")
        if trials < self.config.trials:
            raise OptionError(f"--trials {trials}: {self.path} has {self.config.trials} already; expected more")
        self.config = replace(self.config, trials=trials)
        _write_config(self.path, self.config, self.origin)

    def run(self, devices: Sequence[str] = ("cpu",), workers: int = 1, shown: Shown = QUIET) -> dict[str, Any]:
        """Trains all trials that are left, in `workers` processes that share the devices, and returns the results."""
        plugins.require(self.origin.get(plugins.KEY), self.path)
        for device in devices:
            resolve_device(device)
        with self.study.storage_errors():
            self._prepare_study()
            try:
                if workers > 1:
                    self._run_workers(devices, workers, shown)
                else:
                    self.work(devices[0], shown)
            except (Interrupted, KeyboardInterrupt):
                self.write()
                raise Interrupted(f"stopped; what was done is saved. Go on with: {self.again}") from None
            return self.write()

    def work(self, device: str, shown: Shown = QUIET) -> None:
        """Runs one trial after another until none waits."""
        while True:
            with self.study.claim_trial(self.config.parameters, self.config.seed) as claimed:
                if claimed is not None:
                    self._run_trial(claimed, device, shown)
            if claimed is not None:
                shown.say(self._summarize_trial(claimed.number))
            elif self.study.wait_for_trials():
                time.sleep(PAUSE)  # another process is claiming or requeueing it
            else:
                return

    def _run_trial(self, claimed: ClaimedTrial, device: str, shown: Shown) -> None:
        """Trains one trial, from the beginning or its last checkpoint; an error ends only this trial."""
        path = self.path / trial_folder(claimed.number)
        progress = shown.progress(path.name)
        try:
            if (path / CONFIG).is_file():
                run = stage.resume(path, device, progress)
            else:
                run = stage.train(trial_recipe(self.config, claimed.texts, self.root), path, device, progress)
            found = best_value(run, self.config.metric, self.config.maximize)
        except (Interrupted, KeyboardInterrupt):
            self.study.requeue(claimed)
            raise
        except Exception as error:  # any error, as other trials may succeed
            write_text(path / ERROR, traceback.format_exc())
            self.study.fail(claimed, f"{type(error).__name__}: {error}")
        else:
            seconds = next((row["seconds"] for row in reversed(run.metrics()) if "seconds" in row), None)
            details = {"step": found.step, "train": found.train, "seconds": seconds, "host": socket.gethostname()}
            self.study.finish(claimed, found.value, details)

    def results(self) -> dict[str, Any]:
        """Returns the results so far as plain data, for the report and --json."""
        rows = self._rows()
        best = best_row(rows, self.config.maximize)
        results = {
            "experiment": "sweep",
            "recipe": self.config.recipe,
            "variant": self.config.variant,
            "fixed": list(self.config.fixed),
            "metric": self.config.metric,
            "maximize": self.config.maximize,
            "parameters": [{"key": p.key, "values": p.axis_values, "log": p.log} for p in self.config.parameters],
            "counts": {state: n for state in STATES.values() if (n := sum(row["state"] == state for row in rows))},
            "trials": rows,
            "importance": measure_importance(self.study, len(self.config.parameters)),
            "best": best and best["trial"],
            "command": best and self.config.command(best["settings"]),
            "again": self.again,
        }
        if best and (self.path / best["folder"]).is_dir():  # the run may be on another machine
            results["run"] = best["folder"]
        return results

    def page(self, results: Mapping[str, Any] | None = None) -> Page:
        """Returns the report of the results so far."""
        results = results or self.results()
        curves = {row["trial"]: self._curves(row["folder"]) for row in results["trials"]}
        learned = {
            "curves": {trial: curve.dev for trial, curve in curves.items()},
            "train_curves": {trial: curve.train for trial, curve in curves.items()},
        }
        return sweep_page({**results, **learned})

    def write(self) -> dict[str, Any]:
        """Writes results.json and the report, and returns the results."""
        results = self.results()
        write_text(self.path / RESULTS, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        self.page(results).write(self.path / REPORT)
        return results

    def _rows(self) -> list[dict[str, Any]]:
        """Returns the rows of all trials in results.json."""
        return [trial_row(trial) for trial in self.study.trials()]

    def _curves(self, name: str) -> TrainAndDev:
        """Returns the curves of the metric of a trial whose run is on this machine."""
        return metric_curves(Run(self.path / name).metrics(), self.config.metric)

    def _summarize_trial(self, n: int) -> str:
        """Returns a line about a trial that has ended."""
        return summarize_trial(n, self._rows(), self.config.metric, self.config.maximize)

    def _prepare_study(self) -> None:
        """Creates the study with all its trials; an existing one must belong to the same sweep."""
        with self.study.lock("study", wait=True):
            before, joined = self.study.create(self.config.maximize, self.config.as_dict())
            what = f"the study '{self.study.name}' in that storage is another sweep"
            _check_same(before, self.config.as_dict(), what, self.path)
            self.study.enqueue(self.config.planned_trials, joined)

    def _run_workers(self, devices: Sequence[str], workers: int, shown: Shown) -> None:
        """Runs the trials in several processes, each with its share of the threads; those that died are replaced."""
        threads = max(1, torch.get_num_threads() // workers)
        files = sorted({*plugins.imported_paths(), *plugins.paths(self.config.mechanisms)})
        printed = {trial_number(trial) for trial in self.study.ended()}
        before = None
        while waiting := self.study.wait_for_trials():
            after = [(trial.state, trial.user_attrs.get("died")) for trial in self.study.trials()]
            if after == before:  # else workers that die at once would be restarted forever
                raise SweepError(f"workers stop before any trial ends; to see why: regard sweep {self.path}")
            before = after
            count = min(workers, waiting)
            arguments = [(str(self.path), files, devices[n % len(devices)], threads) for n in range(count)]
            for _ in _run_processes(arguments):
                for n in sorted({trial_number(trial) for trial in self.study.ended()} - printed):
                    printed.add(n)
                    shown.say(self._summarize_trial(n))


def _refuse_other_results(path: Path) -> None:
    """Raises a RunError if a folder has other results than a sweep's; a study without trials is no result."""
    marks = [RESULTS, CONFIG]
    if any(path.glob("trial-*")):
        marks.append(TRIALS)
    for name in marks:
        if (path / name).exists():
            raise RunError(f"{path} holds results already ({name}); choose another --out")


def _write_config(path: Path, config: SweepConfig, origin: Mapping[str, Any]) -> None:
    """Writes the settings of a sweep and where it was started."""
    document = {"sweep": config.as_dict(), "here": dict(origin)}
    write_text(path / SWEEP_CONFIG, tomli_w.dumps(document, multiline_strings=False))


def _run_processes(arguments: Sequence[tuple[str, Sequence[str], str, int]]) -> Iterator[None]:
    """Starts a worker for each of the arguments, and yields every second while one is alive.

    If the caller leaves early, workers are asked to save and stop.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_work_in_process, args=words) for words in arguments]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the workers: the parent handles Ctrl-C
    try:
        for process in processes:
            process.start()
        signal.signal(signal.SIGINT, handler)
        while alive := [process.sentinel for process in processes if process.is_alive()]:
            wait(alive, timeout=1.0)
            yield
    finally:
        signal.signal(signal.SIGINT, handler)
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join(GRACE)
            while process.is_alive():  # the signal's exception is lost if Python cannot raise it
                process.terminate()
                process.join(GRACE)
    if STOPPED in {process.exitcode for process in processes}:
        raise Interrupted("a worker was asked to stop")


def _work_in_process(path: str, files: Sequence[str], device: str, threads: int) -> None:
    """Runs trials in a worker process, which stops when it is asked to or when its parent has ended.

    `files` are the plugins of the parent.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def stop(*signalled: Any) -> None:
        raise KeyboardInterrupt

    def watch_parent() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    os.setsid()  # a terminal's signals are for the parent
    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=watch_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        for file in files:
            plugins.import_file(file)
        Sweep.open(path).work(device)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(STOPPED)
    except RegardError as error:
        sys.exit(f"error: {error}")


def _check_same(begun: Mapping[str, Any], asked: Mapping[str, Any], what: str, path: Path) -> None:
    """Raises a SweepError that names the differences if the settings are not those of an existing sweep.

    The number of trials may differ: a search can be extended.
    """
    before = dict(flatten({**begun, "trials": 0}))
    now = dict(flatten({**asked, "trials": 0}))
    differ = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if differ:
        shown = "; ".join(f"{key} was {before.get(key)!r} and is now {now.get(key)!r}" for key in differ[:3])
        raise SweepError(f"{what}: {shown}. Choose another --out, or continue the existing one: regard sweep {path}")
