"""All of regard in one report, which fills as its chapters finish: check, train, see, race.

Each chapter does what a command of its own does, on small sizes; all of it takes less than five minutes on two cores.
results.json and the report are complete after each chapter, and a resumed tour does only the chapters that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from regard.lab.base import EXPERIMENTS, REPORT, RESULTS, Shown, versions, write_results
from regard.lab.bench.config import Race
from regard.lab.experiment import ResumableExperiment, Session, TrainingExperiment
from regard.lab.knowledge.plan import FOLDERS, STAGES, WITH, KnowledgePlan
from regard.lab.knowledge.run import FILES
from regard.lab.results import OutcomeTable, read_results, to_json
from regard.lab.tour.chapters import (
    KNOWLEDGE,
    RACE_SETTINGS,
    CheckSettings,
    TourPlan,
    check_leak,
    race_mechanisms,
    see_head,
    train_knowledge,
)
from regard.lab.tour.page import CHAPTERS, outcome_rows, tour_page
from regard.lab.tour.results import TourResults
from regard.reading import read_json_object
from regard.report.page import ReportError

ABOUT = "All of regard in one report: a leak caught, a model taught, its head seen, mechanisms raced."
OWN_SECTIONS = ("check", "bench")

DO: dict[str, Callable[[TourPlan], Any]] = {
    "check": check_leak,
    "train": train_knowledge,
    "see": see_head,
    "race": race_mechanisms,
}


@dataclass(frozen=True)
class Tour(ResumableExperiment):
    """One experiment of four chapters."""

    def carry_out(self, session: Session) -> dict[str, Any]:
        """Does the chapters that are not done yet, with the report written anew after each."""
        plan = plan_tour(session)
        done = _read_done(session.out)
        results = _write(session, done)
        for number, chapter in enumerate(CHAPTERS, 1):
            if is_done(done, chapter.key):
                continue
            session.shown.say(f"{number} of {len(CHAPTERS)}  {chapter.title}: {chapter.doing}")
            done = replace(done, **{chapter.key: DO[chapter.key](plan)})
            results = _write(session, done)
            session.shown.say(f"        {outcome_rows(done)[number - 1][1]}")
            if not is_done(done, chapter.key):  # the race keeps what it had when it was interrupted
                raise KeyboardInterrupt
        return results


def plan_tour(session: Session) -> TourPlan:
    """Returns the plan of the tour; raises for invalid settings of any chapter before the first begins."""
    knowledge = cast(TrainingExperiment, EXPERIMENTS[KNOWLEDGE])
    asked = {key: value for key, value in session.asked.items() if key not in OWN_SECTIONS}
    training = replace(session, name=KNOWLEDGE, out=session.out / KNOWLEDGE, asked=asked)
    seed = asked.get("train", {}).get("seed", 0)
    race = Race().but(**RACE_SETTINGS, device=session.device, seed=seed).but(**session.asked.get("bench", {}))
    check = CheckSettings().but(**session.asked.get("check", {}))
    # The knowledge experiment plans again, and tells what it read, when its chapter comes.
    planned = cast(KnowledgePlan, knowledge.plan(replace(training, shown=Shown())))
    return TourPlan(session, seed, check, knowledge, training, planned.sets, race)


def is_done(results: TourResults, key: str) -> bool:
    """Returns whether a chapter is done; a race that was interrupted is not."""
    found = getattr(results, key)
    return found is not None and not (key == "race" and found.race["interrupted"])


def _read_done(folder: Path) -> TourResults:
    """Returns what an earlier session has done, nothing where there was none."""
    if not (folder / RESULTS).is_file():
        return TourResults()
    return read_results(TourResults, read_json_object(folder / RESULTS, ReportError))


def _write(session: Session, done: TourResults) -> dict[str, Any]:
    """Writes results.json and the report as far as the tour has come, and returns the results."""
    table = OutcomeTable(["chapter", "what came out", "s"], outcome_rows(done))
    results: dict[str, Any] = {"experiment": session.name, "command": session.command, "device": session.machine}
    results |= {"versions": versions(), **to_json(replace(done, outcome=table))}
    if done.train is not None:
        results["run"] = f"{done.train.folder}/{FOLDERS[WITH]}"  # the model that `regard view` and others open
    parts = (getattr(done, chapter.key) for chapter in CHAPTERS)
    results["seconds"] = round(sum(part.seconds for part in parts if part is not None), 1)
    write_results(session.out, results)
    tour_page(results).write(session.out / REPORT)
    return results


EXPERIMENTS.put("tour", Tour("tour", ABOUT, tour_page, stages=STAGES, files=FILES, sections=OWN_SECTIONS))
