"""The code that runs in a submission's process: limits, the import, and the items, each reported as a line of JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from regard.errors import quote
from regard.grade.advice import SubmissionError, explain_error
from regard.grade.judging import judge_item
from regard.grade.limits import die_with_parent, leave_network, limit_resources
from regard.grade.outcomes import outcome_of
from regard.grade.spec import GradeLimits, Spec
from regard.grade.submissions import describe_failed_cells

MAX_HANDLES = 4096
REPORTED = ("status", "words", "advice", "slip", "seconds")  # fields that are reported; the server sets the points


@dataclass(frozen=True)
class Job:
    """The work of one process: the Python file of a submission, and the numbers of the spec's items to judge."""

    spec: str
    file: str
    folder: str  # the folder of the submission, for imports from it
    items: tuple[int, ...]
    seed: int
    limits: GradeLimits


def run_job(spec: Spec, job: Job, results: int, printed: int) -> NoReturn:
    """Does a job and ends this process, a fork of the server. `results` and `printed` are pipes to write to."""
    try:
        _prepare(job, results, printed)
        report = _Report(results)
        isolated = leave_network()
        report.send({"begun": "import", "isolated": isolated})
        _grade(spec, job, report)
    except BaseException as error:  # no exception may reach the server's loop in this fork
        os.write(results, (json.dumps({"broken": f"{type(error).__name__}: {quote(error)}"}) + "\n").encode())
    finally:
        os._exit(0)


class _Report:
    """The pipe to the server. It is not protected from a submission that writes to its descriptor."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def send(self, message: dict[str, Any]) -> None:
        os.write(self.handle, (json.dumps(message) + "\n").encode())


def _prepare(job: Job, results: int, printed: int) -> None:
    """Starts a session, moves to a new folder, redirects output to the server's pipe, and closes other descriptors."""
    os.setsid()
    die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.closerange(3, results)
    os.closerange(results + 1, MAX_HANDLES)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="replace")  # noqa: SIM115
    scratch = Path(job.file).parent / "scratch"
    scratch.mkdir(exist_ok=True)
    os.chdir(scratch)
    tempfile.tempdir = str(scratch)
    if job.folder:
        sys.path.append(job.folder)  # last, so that it cannot replace modules of Python or torch
    sys.argv = [job.file]
    torch.set_num_threads(1)
    seconds = job.limits.import_seconds + job.limits.seconds * len(job.items)
    limit_resources(job.limits.memory_mb, seconds)


def _grade(spec: Spec, job: Job, report: _Report) -> None:
    """Imports the submission and reports an outcome for each item of the job."""
    try:
        names = _import_submission(job.file, spec)
    except SubmissionError as fault:
        report.send({"import": f"{fault} {fault.advice}".strip(), "status": fault.status})
        return
    report.send({"notes": describe_failed_cells(names)})
    for number in job.items:
        item = spec.items[number]
        report.send({"begun": number})
        try:
            outcome = judge_item(spec, number, names, job.seed)
        except SystemExit as error:
            outcome = outcome_of(item, "error", str(explain_error(error, "It")))
        except Exception as error:  # an error in the spec's own functions must not end the grading
            words = f"The spec itself failed here, not the submission: {type(error).__name__}: {quote(error)}"
            outcome = outcome_of(item, "error", words)
        reported = {key: value for key, value in asdict(outcome).items() if key in REPORTED}
        report.send({"outcome": reported, "number": number})
    sys.stdout.flush()
    sys.stderr.flush()
    report.send({"done": True})


def _import_submission(file: str, spec: Spec) -> dict[str, Any]:
    """Returns what a submission defines, by name; the spec's `given` names are defined before it runs."""
    found = importlib.util.spec_from_file_location("submitted", file)
    assert found is not None and found.loader is not None
    module: ModuleType = importlib.util.module_from_spec(found)
    sys.modules["submitted"] = module
    vars(module).update({name: getattr(spec.module, name) for name in spec.table.given})
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise SubmissionError(f"The file is not valid Python: {error.msg} in line {error.lineno}, `{line}`.") from error
    except (Exception, SystemExit) as error:
        raise explain_error(error, "Importing the file") from error
    return vars(module)
