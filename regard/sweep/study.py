"""The trials of a sweep in an Optuna storage: claiming them, finding dead ones, and storing results.

All trials are enqueued first. To claim one, a process locks a file in the sweep's folder and then marks the trial as
running. The system ends a lock with its process, however that ends; so a running trial without a lock is dead, and is
requeued. Trials on other machines, which have other folders, write heartbeats; one that has written none for long, by
the clock of the process that waits for it, is dead.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.data.seeds import derive
from regard.errors import ExtraMissingError, RegardError, quote
from regard.locks import LockState, lock_file
from regard.models.locate import CHECKPOINTS
from regard.sweep.space import Parameter
from regard.train import checkpoint

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial, Trial

HEARTBEAT = 30.0  # seconds between heartbeats
TIMEOUT = 300.0  # seconds without a heartbeat after which a trial of another machine is dead
MAX_DEATHS = 3  # times that a trial's process may die without a new checkpoint
LOCKS = ".locks"


Sign = tuple[Any, Any]  # a heartbeat: the id of the folder that runs a trial, and the time that it wrote last


class SweepError(RegardError, RuntimeError):
    """A sweep that cannot start or continue."""


class ClaimedTrial(NamedTuple):
    """A trial that this process has claimed, its number in the sweep, and its values as they would be typed."""

    trial: Trial
    number: int
    texts: dict[str, str]


def trial_number(trial: FrozenTrial | Trial) -> int:
    """Returns the number of a trial in its sweep: its own, or that of the failed trial that it retries."""
    return int(trial.user_attrs.get("again", trial.number))


def trial_values(trial: FrozenTrial) -> dict[str, Any]:
    """Returns a trial's values; before it is claimed, those that it was enqueued with."""
    return dict(trial.params or trial.system_attrs.get("fixed_params", {}))


def sign_of_life(trial: FrozenTrial) -> Sign:
    """Returns the last heartbeat of a trial on another machine; each one differs from the one before."""
    return trial.user_attrs.get("at"), trial.user_attrs.get("seen")


def trial_folder(number: int) -> str:
    """Returns the name of a trial's run folder."""
    return f"trial-{number:03d}"


class Study:
    """The trials of one sweep. `at` marks this folder's trials in a storage that machines share; else None."""

    def __init__(self, url: str, name: str, path: Path, at: str | None) -> None:
        self.storage = _open_storage(url)
        self.name = name
        self.path = path
        self.at = at
        # For each trial on another machine: its last heartbeat, and when this process first saw that one.
        self._signs: dict[int, tuple[Sign, float]] = {}

    def create(self, maximize: bool, settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
        """Creates the study, or joins an existing one; returns the settings it was created with, and if it existed."""
        import optuna

        direction = optuna.study.StudyDirection.MINIMIZE
        if maximize:
            direction = optuna.study.StudyDirection.MAXIMIZE
        joined = False
        try:
            optuna.create_study(storage=self.storage, study_name=self.name, direction=direction)
        except optuna.exceptions.DuplicatedStudyError:
            joined = True
            if self.at is not None:  # the machine that created it may not have written its settings yet
                self._wait_for(lambda: int("sweep" in self.optuna.user_attrs), 1)
        if "sweep" not in self.optuna.user_attrs:
            self.optuna.set_user_attr("sweep", dict(settings))
        return self.optuna.user_attrs["sweep"], joined

    @cached_property
    def optuna(self) -> Any:
        """Returns Optuna's study."""
        import optuna

        try:
            return optuna.load_study(study_name=self.name, storage=self.storage)
        except KeyError:
            raise SweepError(f"{self.path}: its storage has no study '{self.name}'; was it removed?") from None

    def trials(self) -> list[FrozenTrial]:
        """Returns the trials in the order of their numbers; of a retried one, only the latest try."""
        with self.storage_errors():
            try:
                found = self.optuna.get_trials(deepcopy=False)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                # Optuna parses dates and numbers of the storage without checking them.
                raise SweepError(
                    f"the storage of {self.path} is damaged ({type(error).__name__}: {quote(error)}); put back a copy "
                    "of it, or begin the sweep in another folder"
                ) from error
        latest = {trial_number(trial): trial for trial in found}
        return [latest[n] for n in sorted(latest)]

    def ended(self) -> list[FrozenTrial]:
        """Returns the trials that have finished or failed."""
        return [trial for trial in self.trials() if trial.state.is_finished()]

    def waiting(self) -> int:
        """Returns how many trials wait to be claimed, after requeueing dead ones."""
        self._requeue_dead()
        return sum(trial.state.name == "WAITING" for trial in self.trials())

    def wait_for_trials(self) -> int:
        """Returns how many trials wait to be claimed; 0 if all have ended, or certainly run elsewhere.

        If none waits, but one is marked as running on another machine, its next heartbeat is awaited: it may be dead.
        """
        from optuna.trial import TrialState

        signs: dict[int, Sign] = {}
        while not (waiting := self.waiting()):
            running = self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            others = [trial for trial in running if self.at is not None and trial.user_attrs.get("at") != self.at]
            alive = [signs.setdefault(trial._trial_id, sign_of_life(trial)) != sign_of_life(trial) for trial in others]
            if all(alive):
                break
            time.sleep(min(1.0, HEARTBEAT / 10))
        return waiting

    @contextlib.contextmanager
    def storage_errors(self) -> Iterator[None]:
        """Turns errors of a storage that cannot be read or written into a SweepError."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (SQLAlchemyError, StorageInternalError) as error:
            said = quote(str(error).partition("\n")[0], marks=False)
            raise SweepError(
                f"the storage of {self.path} failed: {said}. Go on with: regard sweep {self.path}"
            ) from error

    def enqueue(self, fixed: Sequence[Mapping[str, Any]], joined: bool) -> None:
        """Enqueues a trial for each of these values ({}: chosen by the search), except those that exist already.

        `joined`: another machine may have created the study, and may still be enqueuing.
        """
        if joined and self.at is not None:
            self._wait_for(lambda: len(self.trials()), len(fixed))
        for values in fixed[len(self.trials()) :]:
            self.optuna.enqueue_trial(dict(values))

    def retry_failed(self) -> int:
        """Enqueues all failed trials again, and returns how many they are."""
        from optuna.trial import TrialState

        failed = [trial for trial in self.trials() if trial.state is TrialState.FAIL]
        for trial in failed:
            self.optuna.enqueue_trial(trial_values(trial), user_attrs={"again": trial_number(trial)})
        return len(failed)

    @contextlib.contextmanager
    def claim_trial(self, parameters: Sequence[Parameter], seed: int) -> Iterator[ClaimedTrial | None]:
        """Yields a waiting trial, claimed by this process while the block runs; None if none waits."""
        import optuna
        from optuna.trial import TrialState

        self._requeue_dead()
        for waiting in self.optuna.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            number = trial_number(waiting)
            with self.lock(trial_folder(number)) as locked:
                if not locked or not self._set_state(waiting, TrialState.RUNNING):
                    continue
                trial = optuna.trial.Trial(self.optuna, waiting._trial_id)
                with self._heartbeat(trial):
                    yield ClaimedTrial(trial, number, self._suggest(trial, parameters, seed))
                return
        yield None

    def _suggest(self, trial: Trial, parameters: Sequence[Parameter], seed: int) -> dict[str, str]:
        """Returns the values of a trial: those that it was enqueued with, or those that the search chooses."""
        import optuna

        texts = {}
        for parameter in parameters:
            # A choice depends on earlier results alone, not on the process that makes it, nor on how often it was
            # stopped.
            own_seed = derive(seed, "sweep", trial.number, parameter.key) % (1 << 32)
            self.optuna.sampler = optuna.samplers.TPESampler(seed=own_seed, constant_liar=True)
            texts[parameter.key] = parameter.suggest(trial)
        return texts

    def finish(self, claimed: ClaimedTrial, value: float, details: Mapping[str, Any]) -> None:
        """Marks a trial as finished with this value, and stores the details."""
        claimed.trial.set_user_attr("found", dict(details))
        self.optuna.tell(claimed.trial, value, skip_if_finished=True)

    def fail(self, claimed: ClaimedTrial, error: str) -> None:
        """Marks a trial as failed."""
        from optuna.trial import TrialState

        claimed.trial.set_user_attr("found", {"error": error})
        self.optuna.tell(claimed.trial, state=TrialState.FAIL, skip_if_finished=True)

    def requeue(self, claimed: ClaimedTrial) -> None:
        """Marks a trial that was stopped as waiting, so that it can be claimed again."""
        from optuna.trial import TrialState

        self._set_state(claimed.trial, TrialState.WAITING)

    def _set_state(self, trial: FrozenTrial | Trial, state: Any) -> bool:
        """Sets the state of a trial; returns False if another process was first."""
        from optuna.exceptions import UpdateFinishedTrialError

        try:
            # A heartbeat comes first: with the last one of an earlier process, the trial would look dead at once.
            self._give_sign(trial)
            return bool(self.storage.set_trial_state_values(trial._trial_id, state))
        except UpdateFinishedTrialError:
            return False

    def _requeue_dead(self) -> None:
        """Requeues trials whose process has died; one whose process has died too often fails."""
        from optuna.trial import TrialState

        for trial in self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self.at is not None and trial.user_attrs.get("at") != self.at:
                if self._silence(trial) > TIMEOUT:
                    self._set_state(trial, TrialState.WAITING)
                continue
            with self.lock(trial_folder(trial_number(trial))) as locked:
                # Read again, as it may have ended before the lock was taken.
                trial = self.storage.get_trial(trial._trial_id)
                if locked and trial.state is TrialState.RUNNING:
                    self._note_death(trial)

    def _give_sign(self, trial: FrozenTrial | Trial) -> None:
        """Writes a heartbeat for other machines: the time, which is new each time."""
        if self.at is not None:
            self.storage.set_trial_user_attr(trial._trial_id, "seen", time.time())

    def _silence(self, trial: FrozenTrial) -> float:
        """Returns the seconds since the last heartbeat of a trial on another machine, by this process's own clock.

        Heartbeats are only compared with earlier ones of the same trial, as clocks of other machines may be wrong.
        """
        sign = sign_of_life(trial)
        now = time.monotonic()
        last_sign, since = self._signs.get(trial._trial_id, (sign, now))
        if sign != last_sign:
            since = now
        self._signs[trial._trial_id] = (sign, since)
        return now - since

    def _note_death(self, trial: FrozenTrial) -> None:
        """Counts the deaths of a trial's process since its last new checkpoint, and requeues or fails the trial."""
        from optuna.trial import TrialState

        step = max(checkpoint.steps(self.path / trial_folder(trial_number(trial)) / CHECKPOINTS), default=0)
        last_step, deaths = trial.user_attrs.get("died", [-1, 0])
        if step > last_step:
            deaths = 0
        deaths += 1
        self.storage.set_trial_user_attr(trial._trial_id, "died", [step, deaths])
        if deaths < MAX_DEATHS:
            self._set_state(trial, TrialState.WAITING)
            return
        said = f"its process was killed {deaths} times at the same place: is there enough memory?"
        self.storage.set_trial_user_attr(trial._trial_id, "found", {"error": said})
        self._set_state(trial, TrialState.FAIL)

    @staticmethod
    def _wait_for(count: Callable[[], int], wanted: int) -> None:
        """Waits until `count()` reaches `wanted`, or has not grown for HEARTBEAT seconds."""
        last = count()
        since = time.monotonic()
        while last < wanted and time.monotonic() - since < HEARTBEAT:
            time.sleep(0.2)
            now = count()
            if now > last:
                last = now
                since = time.monotonic()

    @contextlib.contextmanager
    def lock(self, name: str, wait: bool = False) -> Iterator[bool]:
        """Yields whether this process alone has the lock of a name while the block runs."""
        path = self.path / LOCKS / name
        path.parent.mkdir(exist_ok=True)
        with lock_file(path, wait) as state:
            if state is LockState.UNSUPPORTED:
                # Without locks, running and dead trials could not be distinguished.
                raise SweepError(f"{path} cannot be locked; choose an --out on another disk")
            yield state is LockState.OURS

    @contextlib.contextmanager
    def _heartbeat(self, trial: Trial) -> Iterator[None]:
        """Writes heartbeats for other machines while the block runs."""
        from optuna.exceptions import UpdateFinishedTrialError

        if self.at is None:
            yield
            return
        trial.set_user_attr("at", self.at)
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(HEARTBEAT):
                try:
                    self._give_sign(trial)
                except UpdateFinishedTrialError:
                    return
                except Exception as error:
                    warnings.warn(f"the storage does not answer; the trial continues: {error}", stacklevel=2)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _open_storage(url: str) -> RDBStorage:
    """Returns the storage of a URL, which must be a database: Optuna's other storages use pickle in part."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    shown = url.rpartition("@")[2]  # without a password
    options: dict[str, Any] | None = None
    if url.startswith("sqlite"):
        options = {"connect_args": {"timeout": 60}}  # seconds to wait for other processes
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=options)
    except ImportError as error:
        raise ExtraMissingError(f"--storage {shown}: {error}. Install the Python driver of that database") from None
    except (SQLAlchemyError, ValueError, RuntimeError) as error:
        said = quote(str(error).partition("\n")[0], marks=False)
        raise SweepError(
            f"--storage {shown} cannot be opened: {said}. Expected a database's URL, e.g. postgresql://user@host/name"
        ) from None
