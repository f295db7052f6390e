"""Grading submissions. The students' code runs in separate processes, see `server`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from regard.errors import DataError, OptionError, RegardError, quote
from regard.grade.advice import SUBMITTED
from regard.grade.judging import judge_item
from regard.grade.outcomes import Grade, ItemOutcome, failed_everywhere
from regard.grade.spec import GradeLimits, Spec, load_spec
from regard.grade.submissions import Submission, find_submissions, read_source
from regard.reading import parse_json

OPEN_NETWORK = "This machine does not let users make namespaces: submissions could use the network."

KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TRITON_CACHE_DIR", "VIRTUAL_ENV")


class GraderError(RegardError, RuntimeError):
    """The server process that grades has ended, or cannot grade a job."""


@dataclass
class Grader:
    """A context manager for grading submissions: it runs the server process, which imports torch only once."""

    seed: int = 0
    process: subprocess.Popen[str] | None = None
    asked: int = 0

    def __enter__(self) -> Grader:
        if not hasattr(os, "fork"):
            raise OptionError("grading starts processes by fork, which Windows does not have; use Linux, macOS or WSL")
        # -P: a file called random.py beside the submissions must not be imported instead of Python's own.
        words = [sys.executable, "-P", "-m", "regard.grade.server"]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for this process, which then ends the other
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()  # it has no state to save, and an interrupt must not wait for a submission that loops
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def grade(self, spec: Spec, submission: Submission, limits: GradeLimits | None = None) -> Grade:
        """Returns the grade of one submission; `limits` are by default the spec's."""
        if submission.fault:
            return Grade(submission.name, spec.name, tuple(failed_everywhere(spec, "missing", submission.fault)))
        try:
            source, notes = read_source(submission.path, spec.table.cells)
        except DataError as error:
            return Grade(submission.name, spec.name, tuple(failed_everywhere(spec, "missing", str(error))))
        with tempfile.TemporaryDirectory(prefix="regard-grade-") as folder:
            file = Path(folder) / SUBMITTED
            file.write_text(source, encoding="utf-8")
            answer = self._ask(
                {
                    "spec": str(spec.path),
                    "file": str(file),
                    "folder": submission.folder,
                    "seed": self.seed,
                    "limits": (limits or spec.table.limits).as_dict(),
                }
            )
        outcomes = tuple(ItemOutcome(**one) for one in answer["outcomes"])
        notes += answer["notes"]
        if not answer["isolated"]:
            notes.append(OPEN_NETWORK)
        return Grade(submission.name, spec.name, outcomes, tuple(notes), answer["printed"])

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a job to the server and returns its answer.

        Answers to earlier jobs, whose grading was interrupted, are skipped: they are about other submissions.
        """
        assert self.process is not None and self.process.stdin is not None
        self.asked += 1
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({**message, "number": self.asked}) + "\n")
            self.process.stdin.flush()
        answer = self._read_answer()
        while answer["number"] != self.asked:
            answer = self._read_answer()
        if "error" in answer:
            raise GraderError(answer["error"])
        return answer

    def _read_answer(self) -> dict[str, Any]:
        """Returns the next answer of the server; raises a GraderError if it has ended."""
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise GraderError(f"the process that grades has ended with code {code}; its messages are above")
        answer: dict[str, Any] = parse_json(line, "the answer of the process that grades", GraderError)
        return answer


def _environment() -> dict[str, str]:
    """Returns the environment variables for submissions: those that Python needs, and none that may hold secrets."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",  # a plot in a notebook opens no window
    }


def grade(
    spec: str | Path | Spec, path: str | Path, *, seed: int = 0, limits: GradeLimits | None = None
) -> Iterator[Grade]:
    """Yields the grade of each submission of a path: a Python file, a notebook, or a folder of them.

    `spec` is the name of one that comes with regard, or a TOML file.
    """
    if not isinstance(spec, Spec):
        spec = load_spec(spec)
    found = find_submissions(path, spec)
    with Grader(seed) as grader:
        for submission in found:
            yield grader.grade(spec, submission, limits)


def grade_objects(spec: str | Path | Spec, *things: Any, seed: int = 0, **named: Any) -> Grade:
    """Returns the grade of the given functions and classes, judged in this process and without limits.

    They are found by their own names, or by keywords; only items about these are judged.
    """
    if not isinstance(spec, Spec):
        spec = load_spec(spec)
    names = {getattr(thing, "__name__", quote(thing)): thing for thing in things} | named
    exports = [export.name for export in spec.exports]
    unknown = [name for name in names if name not in exports]
    if unknown:
        raise OptionError(f"spec '{spec.name}' has no items about {unknown[0]}; expected {', '.join(exports)}")
    asked = [n for n, item in enumerate(spec.items) if spec.export_of(item).name in names]
    return Grade(", ".join(names), spec.name, tuple(judge_item(spec, n, names, seed) for n in asked))
