"""The trials of a sweep in an Optuna storage: who takes which, whose process has died, and what came out.

All trials are laid out beforehand, as trials that wait. To take one, a process locks a file of its own folder and then
marks the trial as running. A lock is the system's: it ends with its process, however that ends, so a trial that runs
without a lock was left behind, and waits again. Of trials on other machines, which have other folders, the time when
they were last heard of decides.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.data.seeds import derive
from regard.errors import ExtraMissingError, RegardError
from regard.models.locate import CHECKPOINTS
from regard.sweep.space import Parameter
from regard.train import checkpoint

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial, Trial

BEAT = 30.0  # seconds between signs of life
SILENT = 300.0  # without one, until a trial of another machine is given up
DEATHS = 3  # times that a trial's process may die without a new checkpoint
LOCKS = ".locks"


class SweepError(RegardError, RuntimeError):
    """A sweep that cannot begin or go on."""


class Taken(NamedTuple):
    """A trial that this process holds, and its values as they would be typed."""

    trial: Trial
    place: int
    texts: dict[str, str]


def place(trial: FrozenTrial | Trial) -> int:
    """The number of a trial in its sweep: its own, or that of the one that it is tried again for."""
    return int(trial.user_attrs.get("again", trial.number))


def values(trial: FrozenTrial) -> dict[str, Any]:
    """A trial's values, also before it was taken, where they are known then."""
    return dict(trial.params or trial.system_attrs.get("fixed_params", {}))


def folder(n: int) -> str:
    """The name of a trial's run folder."""
    return f"trial-{n:03d}"


class Study:
    """One sweep's trials. `at` tells this folder's trials from those of other machines; None where there are none."""

    def __init__(self, url: str, name: str, path: Path, at: str | None) -> None:
        self.storage, self.name, self.path, self.at = _storage(url), name, path, at

    def create(self, maximize: bool, settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
        """Makes the study, or joins one that is there; the settings that it was made with, and whether it was there."""
        import optuna

        joined = False
        try:
            which = optuna.study.StudyDirection.MAXIMIZE if maximize else optuna.study.StudyDirection.MINIMIZE
            optuna.create_study(storage=self.storage, study_name=self.name, direction=which)
        except optuna.exceptions.DuplicatedStudyError:
            joined = True
            self._wait(lambda: int("sweep" in self.optuna.user_attrs), 1)
        if "sweep" not in self.optuna.user_attrs:
            self.optuna.set_user_attr("sweep", dict(settings))
        return self.optuna.user_attrs["sweep"], joined

    @cached_property
    def optuna(self) -> Any:
        """Optuna's own view of it."""
        import optuna

        try:
            return optuna.load_study(study_name=self.name, storage=self.storage)
        except KeyError:
            raise SweepError(f"{self.path}: its storage has no study '{self.name}'; was it removed?") from None

    def trials(self) -> list[FrozenTrial]:
        """The latest trial of each place, in order."""
        latest = {place(trial): trial for trial in self.optuna.get_trials(deepcopy=False)}
        return [latest[n] for n in sorted(latest)]

    def ended(self) -> list[FrozenTrial]:
        """Those that have finished or failed."""
        return [trial for trial in self.trials() if trial.state.is_finished()]

    def waiting(self) -> int:
        """How many wait to be taken, with those whose process has died."""
        self._recover()
        return sum(trial.state.name == "WAITING" for trial in self.trials())

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """An error of ours where the storage cannot be read or written."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (SQLAlchemyError, StorageInternalError) as error:
            said = str(error).partition("\n")[0]
            raise SweepError(
                f"the storage of {self.path} failed: {said}. Go on with: regard sweep {self.path}"
            ) from error

    def lay_out(self, fixed: Sequence[Mapping[str, Any]], joined: bool) -> None:
        """Trials that wait, one for each of these values (none: it draws its own), but for those that are there.

        `joined`: another machine may have begun it, and may be at it.
        """
        if joined and self.at is not None:
            self._wait(lambda: len(self.trials()), len(fixed))
        with self._locked("study") as ours:
            for one in fixed[len(self.trials()) :] if ours else ():
                self.optuna.enqueue_trial(dict(one))

    def again(self) -> int:
        """Lets trials that failed wait once more; how many."""
        from optuna.trial import TrialState

        failed = [trial for trial in self.trials() if trial.state is TrialState.FAIL]
        for trial in failed:
            self.optuna.enqueue_trial(values(trial), user_attrs={"again": place(trial)})
        return len(failed)

    @contextlib.contextmanager
    def taken(self, parameters: Sequence[Parameter], seed: int) -> Iterator[Taken | None]:
        """A trial that waits, held by this process while this lasts; None where there is none."""
        import optuna
        from optuna.trial import TrialState

        self._recover()
        study = self.optuna
        for waiting in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            with self._locked(folder(place(waiting))) as ours:
                if not ours or not self._marked(waiting, TrialState.RUNNING):
                    continue
                trial = optuna.trial.Trial(study, waiting._trial_id)
                texts = {}
                with self._heard_of(trial):
                    for parameter in parameters:
                        # A draw depends on what was found before and on nothing else: not on who draws, nor on how
                        # often it was stopped.
                        own = derive(seed, "sweep", trial.number, parameter.key) % (1 << 32)
                        study.sampler = optuna.samplers.TPESampler(seed=own, constant_liar=True)
                        texts[parameter.key] = parameter.suggested(trial)
                    yield Taken(trial, place(trial), texts)
                return
        yield None

    def finish(self, taken: Taken, value: float, found: Mapping[str, Any]) -> None:
        """A trial has ended with this value, and what else was found."""
        taken.trial.set_user_attr("found", dict(found))
        self.optuna.tell(taken.trial, value, skip_if_finished=True)

    def fail(self, taken: Taken, error: str) -> None:
        """A trial cannot be done."""
        from optuna.trial import TrialState

        taken.trial.set_user_attr("found", {"error": error})
        self.optuna.tell(taken.trial, state=TrialState.FAIL, skip_if_finished=True)

    def give_back(self, taken: Taken) -> None:
        """A trial was stopped, and waits for someone to go on with it."""
        from optuna.trial import TrialState

        self._marked(taken.trial, TrialState.WAITING)

    def _marked(self, trial: FrozenTrial | Trial, state: Any) -> bool:
        from optuna.exceptions import UpdateFinishedTrialError

        try:
            return bool(self.storage.set_trial_state_values(trial._trial_id, state))
        except UpdateFinishedTrialError:
            return False

    def _recover(self) -> None:
        """Lets trials wait again whose process has died; one that kills its process each time has failed."""
        from optuna.trial import TrialState

        for trial in self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            name = folder(place(trial))
            if self.at is not None and trial.user_attrs.get("at") != self.at:
                heard = max(trial.user_attrs.get("seen", 0.0), trial.datetime_start.timestamp())
                if time.time() - heard > SILENT:
                    self._marked(trial, TrialState.WAITING)
                continue
            with self._locked(name) as ours:
                trial = self.storage.get_trial(trial._trial_id)  # as it is now that nobody else has it
                if not ours or trial.state is not TrialState.RUNNING:
                    continue
                step = max(checkpoint.steps(self.path / name / CHECKPOINTS), default=0)
                before, times = trial.user_attrs.get("died", [-1, 0])
                times = times + 1 if step <= before else 1
                self.storage.set_trial_user_attr(trial._trial_id, "died", [step, times])
                if times >= DEATHS:
                    said = f"its process was killed {times} times at the same place: is there enough memory?"
                    self.storage.set_trial_user_attr(trial._trial_id, "found", {"error": said})
                self._marked(trial, TrialState.FAIL if times >= DEATHS else TrialState.WAITING)

    @staticmethod
    def _wait(reached: Callable[[], int], wanted: int) -> None:
        """Waits while another machine writes, until nothing has come for a while."""
        had, began = reached(), time.monotonic()
        while had < wanted and time.monotonic() - began < BEAT:
            time.sleep(0.2)
            now = reached()
            had, began = (now, time.monotonic()) if now > had else (had, began)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[bool]:
        """Whether this process alone holds a name while this lasts.

        A lock of SQLite's: on every system the same, gone with its process, not inherited by a child's.
        """
        place = self.path / LOCKS / name
        place.parent.mkdir(exist_ok=True)
        held = sqlite3.connect(place, timeout=0, isolation_level=None)
        try:
            held.execute("BEGIN EXCLUSIVE")
            ours = True
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise SweepError(f"{place} cannot be locked: {error}; choose an --out on another disk") from None
            ours = False
        try:
            yield ours
        finally:
            held.close()

    @contextlib.contextmanager
    def _heard_of(self, trial: Trial) -> Iterator[None]:
        """Signs of life for other machines, while this lasts."""
        if self.at is None:
            yield
            return
        trial.set_user_attr("at", self.at)
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT):
                try:
                    self.storage.set_trial_user_attr(trial._trial_id, "seen", time.time())
                except Exception as error:
                    warnings.warn(f"the storage does not answer, the trial goes on: {error}", stacklevel=2)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _storage(url: str) -> RDBStorage:
    """A storage by its URL. Only databases: what Optuna keeps elsewhere is in part pickled."""
    if find_spec("optuna") is None:
        raise ExtraMissingError('sweeps need `optuna`: pip install "regard[sweep]"')
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    shown = url.rpartition("@")[2]  # without a password
    local = url.startswith("sqlite")
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}} if local else None)
    except ImportError as error:
        raise ExtraMissingError(f"--storage {shown}: {error}. Install what speaks to that database") from None
    except (SQLAlchemyError, ValueError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        raise SweepError(
            f"--storage {shown} cannot be opened: {said}. Expected a database's URL, e.g. postgresql://user@host/name"
        ) from None
