"""Writing the pages of experiments, sweeps and runs from the files in their folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.data.tokenizers import TextError
from regard.errors import RegardError, RunError, quote
from regard.generate import generate
from regard.lab.base import EXPERIMENTS, REPORT, RESULTS
from regard.lab.runs.outcomes import outcomes_page
from regard.lab.runs.page import compare_page
from regard.lab.runs.summary import summarize_run
from regard.models import GPT, load
from regard.reading import check_path, read_json_object
from regard.report.page import Page, ReportError
from regard.sweep.run import SWEEP_CONFIG, Sweep
from regard.train.recipe import flatten
from regard.train.run import JOB, VERSIONS, Run, find_runs

SAMPLE_TOKENS = 300  # length of the sample that a language model writes for its page


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Writes a page and returns its path: that of one experiment or sweep, or one that compares several experiments, or
    all runs in the folders."""
    folders = [check_path(folder, RunError) for folder in folders]
    if len(folders) == 1 and (folders[0] / SWEEP_CONFIG).is_file():
        return Sweep.open(folders[0]).page().write(out or folders[0] / REPORT)
    if len(folders) == 1 and (folders[0] / RESULTS).is_file():
        return _draw_again(folders[0]).write(out or folders[0] / REPORT)
    if len(folders) > 1 and all((folder / RESULTS).is_file() for folder in folders):
        return _compare_experiments(folders).write(out or Path(REPORT))
    runs = [run for folder in folders for run in find_runs(folder)]
    if not runs:
        raise RunError(f"no runs in {', '.join(map(str, folders))}: expected folders that `regard train` made")
    place = out or (folders[0] if len(folders) == 1 else Path()) / REPORT
    return _runs_page(runs).write(place)


def _runs_page(runs: Sequence[Run]) -> Page:
    """Returns the page that compares runs."""
    return compare_page(
        [
            summarize_run(run) | _read_settings(run) | {"config_differences": changed, "sample": _write_sample(run)}
            for run, changed in _differing(runs)
        ]
    )


def _read_settings(run: Run) -> dict[str, Any]:
    """Returns the settings and the versions of libraries in a run's config.toml."""
    config = {key: value for key, value in run.config.items() if key != JOB}
    versions = config.pop(VERSIONS, {})
    return {"settings": dict(flatten(config)), "versions": versions}


def _write_sample(run: Run) -> str | None:
    """Returns a text that the language model of a finished run generates; None for unfinished runs and other models."""
    if run.config.get("task") != "lm" or not run.finished:
        return None
    model = load(run.path)
    assert isinstance(model, GPT) and model.tokenizer is not None
    try:
        start = model.tokenizer.encode("\n")
    except TextError:  # a text without lines
        start = [0]
    written = generate(model, start, max_tokens=SAMPLE_TOKENS, temperature=0.8, seed=0, slide=True)
    return model.tokenizer.decode(written.tokens)


def _compare_experiments(folders: Sequence[Path]) -> Page:
    """Returns one page about several experiments: the comparison that their kind defines if they are of one kind that
    has one, else their outcomes (and, of one kind, their runs) side by side."""
    names = _short_names(folders)
    documents = {}
    kinds = set()
    for name, folder in zip(names, folders, strict=True):
        documents[name] = read_json_object(folder / RESULTS, ReportError)
        kinds.add(documents[name].get("experiment") or documents[name].get("lab"))
    source = " and ".join(str(folder / RESULTS) for folder in folders)
    kind = kinds.pop()
    if not kinds and isinstance(kind, str) and kind in EXPERIMENTS and EXPERIMENTS[kind].compare is not None:
        compare = EXPERIMENTS[kind].compare
        assert compare is not None
        with _explain_damage(source):
            return compare(documents)
    with _explain_damage(source):
        page = outcomes_page(documents)
    runs = [run for folder in folders for run in find_runs(folder)]
    if runs and not kinds:  # runs of different experiments are not comparable
        page.add(*_runs_page(runs).blocks)
    return page


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Returns the names of folders, or their whole paths if two have the same name."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    return [str(folder) for folder in folders]


def _draw_again(folder: Path) -> Page:
    """Returns the page of an experiment, drawn from the results.json of its folder."""
    results = read_json_object(folder / RESULTS, ReportError)
    name = results.get("experiment") or results.get("lab")
    if not isinstance(name, str) or name not in EXPERIMENTS:
        raise ReportError(
            f"{folder / RESULTS}: experiment = {quote(name)} has no page; expected one of {', '.join(EXPERIMENTS)}"
        )
    with _explain_damage(str(folder / RESULTS)):
        return EXPERIMENTS[name].page(results)


@contextmanager
def _explain_damage(source: str) -> Iterator[None]:
    """Turns an error while a page is drawn into a ReportError that names the damaged file, `source`."""
    try:
        yield
    except RegardError:
        raise
    # A page is drawn from numbers that no type describes, such as the ends of an axis.
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ReportError(
            f"{source} is damaged: a page cannot be drawn from it ({type(error).__name__}: {quote(error)})"
        ) from error


def _differing(runs: Sequence[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """Returns each run with its values of the settings that are not the same in all runs."""
    settings = [dict(flatten({key: x for key, x in run.config.items() if key != JOB})) for run in runs]
    keys = sorted({key for one in settings for key in one if len({repr(other.get(key)) for other in settings}) > 1})
    return [(run, {key: one.get(key) for key in keys}) for run, one in zip(runs, settings, strict=True)]
