"""The grading server: a process with torch imported that forks for each submission, watches the fork and reports.

It reads jobs as lines of JSON from standard input and answers each with one line: its number, the outcomes of all
items, notes and the beginning of what was printed. An item that ends its process, or takes too long, gets no points;
the items after it are judged in a new process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regard.errors import RegardError
from regard.grade.outcomes import ItemOutcome, ItemStatus, failed_everywhere, outcome_of
from regard.grade.spec import GradeLimits, Spec, load_spec
from regard.grade.worker import Job, run_job
from regard.reading import parse_json

MAX_PRINTED = 4000  # characters of what a submission prints that are kept
MOST_WAITING = 4.0  # times the seconds allowed: how long an item may take by the clock, most of it without a processor
MAX_REPORT = 1 << 24  # bytes of reports of one process
IMPORT = "import"


@dataclass
class Watched:
    """The state of a watched process: what it does, since when, and what it has reported and printed."""

    spec: Spec
    doing: str | int = IMPORT
    done: bool = False
    since: float = field(default_factory=time.monotonic)
    outcomes: dict[int, ItemOutcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    import_fault: tuple[ItemStatus, str] | None = None
    printed: bytes = b""
    printed_bytes: int = 0
    reported: bytes = b""
    isolated: bool = True

    def take_printed(self, data: bytes) -> None:
        self.printed_bytes += len(data)
        self.printed = (self.printed + data)[: 4 * MAX_PRINTED]

    def take_report(self, data: bytes) -> None:
        """Takes bytes of a report, and reads its complete lines."""
        self.reported += data
        *lines, self.reported = self.reported.split(b"\n")
        for line in lines:
            self._take(parse_json(line, "the report"))

    def _take(self, message: Mapping[str, Any]) -> None:
        self.done = self.done or "done" in message
        if "begun" in message:
            self.doing = message["begun"]
            self.since = time.monotonic()
            self.isolated = message.get("isolated", self.isolated)
        elif "outcome" in message:
            fields = dict(message["outcome"])
            seconds = float(fields.pop("seconds"))
            item = self.spec.items[message["number"]]
            self.outcomes[message["number"]] = replace(outcome_of(item, **fields), seconds=seconds)
        elif "import" in message:
            self.import_fault = (message["status"], message["import"])
        elif "notes" in message:
            self.notes += message["notes"]
        elif "broken" in message:
            self.import_fault = ("error", f"The grader could not begin: {message['broken']}")
        elif "done" not in message:
            raise ValueError("not a report of the grader")


def grade_submission(spec: Spec, job: Job) -> dict[str, Any]:
    """Returns the outcomes of all items of a submission; after an item that ends its process, a new one is started."""
    outcomes: dict[int, ItemOutcome] = {}
    remaining = tuple(range(len(spec.items)))
    first: Watched | None = None
    while remaining:
        watched, ended = _run_process(spec, replace(job, items=remaining))
        first = first or watched
        outcomes |= watched.outcomes
        if watched.import_fault is not None:
            status, words = watched.import_fault
            return _answer(failed_everywhere(spec, status, words), first)
        left = [number for number in remaining if number not in outcomes]
        if not left:
            break
        status, words = ended
        if watched.doing == IMPORT:
            return _answer(failed_everywhere(spec, status, f"While the file was imported: {words}"), first)
        lost = left[0]
        outcomes[lost] = outcome_of(spec.items[lost], status, words)
        remaining = tuple(left[1:])
    assert first is not None
    return _answer([outcomes[number] for number in sorted(outcomes)], first)


def _answer(outcomes: list[ItemOutcome], watched: Watched) -> dict[str, Any]:
    printed = watched.printed.decode("utf-8", "replace")[:MAX_PRINTED]
    if watched.printed_bytes > len(printed.encode()):
        printed += f"\n… ({watched.printed_bytes:,} bytes were printed)"
    return {
        "outcomes": [vars(outcome) for outcome in outcomes],
        "notes": watched.notes,
        "printed": printed,
        "isolated": watched.isolated,
    }


def _run_process(spec: Spec, job: Job) -> tuple[Watched, tuple[ItemStatus, str]]:
    """Forks a process for a job and waits for its end; returns what it reported and how it ended, in words."""
    results, results_in = os.pipe()
    printed, printed_in = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(results)
        os.close(printed)
        run_job(spec, job, results_in, printed_in)
    os.close(results_in)
    os.close(printed_in)
    watched = Watched(spec)
    ended: tuple[ItemStatus, str] | None = None
    status = None
    try:
        ended = _watch(watched, child, job.limits, results, printed)
        if ended is None:
            status = _await_end(child)
    finally:
        _kill_session(child)
        if status is None:
            os.waitpid(child, 0)
        os.close(results)
        os.close(printed)
    return watched, ended or _describe_end(status, job.limits)


def _await_end(child: int) -> int | None:
    """Returns the exit status of a process that is about to end; None if it does not end within a second."""
    for _ in range(100):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    return None


def _cpu_seconds(child: int) -> float | None:
    """Returns the seconds of CPU time that a process has used; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    try:
        return time.clock_gettime((~child << 3) | 2)  # the number that clock_getcpuclockid(3) gives
    except OSError:
        return None


def _watch(
    watched: Watched, child: int, limits: GradeLimits, results: int, printed: int
) -> tuple[ItemStatus, str] | None:
    """Reads both pipes until the report ends and returns None; or status and words if an item takes too long."""
    takers = {results: watched.take_report, printed: watched.take_printed}
    received = 0
    since = watched.since
    used_before = _cpu_seconds(child)
    while results in takers and not watched.done:
        allowed = limits.seconds
        if watched.doing == IMPORT:
            allowed = limits.import_seconds
        used = _cpu_seconds(child)
        if since != watched.since:
            since = watched.since
            used_before = used
        taken = time.monotonic() - since
        if used is not None and used_before is not None:  # on a busy machine little of the time is the submission's
            taken = max(used - used_before, taken / MOST_WAITING)
        left = allowed - taken
        if left <= 0:
            return "timeout", f"It took longer than the {allowed:g} s that it may take. Is there an endless loop?"
        ready, _, _ = select.select(list(takers), [], [], left)
        for handle in sorted(ready, key=lambda one: one == results):  # first what was printed before a report
            data = os.read(handle, 1 << 16)
            if not data:
                del takers[handle]
                continue
            received += len(data) * (handle == results)
            try:
                takers[handle](data)
            except (ValueError, TypeError, KeyError, IndexError):
                received = MAX_REPORT + 1  # not a report of the grader
        if received > MAX_REPORT:
            return "error", "It wrote to a pipe of the grader."
    return None


def _kill_session(child: int) -> None:
    """Kills a process and the processes that it started."""
    for kill, target in ((os.killpg, child), (os.kill, child)):
        try:
            kill(target, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _describe_end(status: int | None, limits: GradeLimits) -> tuple[ItemStatus, str]:
    """Returns status and words for a process that ended too early; `status` None: it runs, but closed its pipe."""
    if status is None:
        return "error", "It closed files that are not its own."
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return "timeout", "It used up all of its time. Is there an endless loop?"
    if code == -signal.SIGKILL:
        return "memory", "It was killed, as the system does when its memory runs out."
    if code == -signal.SIGSEGV:
        return "error", "The process crashed (segmentation fault)."
    if code == -signal.SIGABRT:
        return "memory", f"The process gave up, as it does without memory; {limits.memory_mb} MB are allowed."
    if code < 0:
        return "error", f"The process was ended by {signal.Signals(-code).name}."
    return "error", "It ended its own process (os._exit or the like); a function should return."


def serve() -> None:
    """Answers jobs until standard input ends."""
    specs: dict[str, Spec] = {}
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of a spec's own Python must not mix with the answers
    for line in sys.stdin:
        message = parse_json(line, "the job")
        number = message.pop("number")
        limits = GradeLimits(**message.pop("limits"))
        job = Job(**message | {"items": (), "limits": limits})
        try:
            if job.spec not in specs:
                specs[job.spec] = load_spec(job.spec)
            answer = grade_submission(specs[job.spec], job)
        except RegardError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer | {"number": number}) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
