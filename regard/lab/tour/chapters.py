"""The chapters of the tour: each does what an ordinary command does on a small size, and names that command."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from regard.checking import DRAWS, Verdict, check, plugin
from regard.config import ConfigError, Section
from regard.data.questions import MARK, Question, prompt
from regard.lab.base import REPORT, RESULTS, RunOptions, write_results
from regard.lab.bench.config import QUICK, Race
from regard.lab.bench.page import bench_page
from regard.lab.bench.run import race
from regard.lab.experiment import ASKED, ResumableExperiment, Session, override_words, resume
from regard.lab.knowledge.plan import FOLDERS, WITH
from regard.lab.knowledge.results import AnsweredQuestion, KnowledgeResults
from regard.lab.results import read_results
from regard.lab.tour.results import AskedLaw, CheckChapter, RaceChapter, SeeChapter, TrainChapter
from regard.lab.tour.seeing import find_head
from regard.lens import Trace, attention_maps, write_page
from regard.lens.models import RecordableModel, open_recordable
from regard.models import Decoder
from regard.reading import read_json_object
from regard.report.page import ReportError
from regard.storage import write_text

KNOWLEDGE, CHECK, RACE = "knowledge", "check", "race"  # folders beside the report
LENS = "see.html"
LEAKY, OWN = "leaky_performer", "performer"
RACERS = ("softmax", "elu", "performer", "fourier")
RACE_SETTINGS = QUICK | {"tokens": (256, 512, 1024, 2048, 4096, 8192), "passes": ("forward",), "patience": 2.0}
MOST_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True)
class CheckSettings(Section):
    """How many cases are put to each law."""

    place: ClassVar[str] = CHECK

    draws: int = DRAWS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.draws <= MOST_DRAWS:
            raise ConfigError(f"check.draws = {self.draws}: expected 1 to {MOST_DRAWS:,}")


class TourPlan(NamedTuple):
    """What a tour is going to do.

    `training` is the session of the knowledge experiment inside the tour's folder, `questions` what it asks, by set.
    """

    session: Session
    seed: int
    check: CheckSettings
    knowledge: ResumableExperiment
    training: Session
    questions: Mapping[str, list[Question]]
    race: Race

    def path(self, name: str) -> Path:
        """Returns the place of a file or folder beside the report."""
        return self.session.out / name


def check_leak(plan: TourPlan) -> CheckChapter:
    """Writes a performer that leaks into a file, as somebody might have written it, and puts it to the laws."""
    began = time.monotonic()
    source = resources.files("regard.lab.tour").joinpath(f"{LEAKY}.txt").read_text("utf-8")
    file = plan.path(CHECK) / f"{LEAKY}.py"
    write_text(file, source)
    verdicts = check(plugin(str(file)), draws=plan.check.draws, seed=plan.seed)
    asked = [_asked_law(verdict) for verdict in verdicts if verdict.draws]
    broken = [law.law for law in asked if law.is_broken]
    own = []
    if broken:
        own = [_asked_law(verdict) for verdict in check(OWN, only=broken, draws=plan.check.draws, seed=plan.seed)]
    return CheckChapter(
        command=shlex.join(["regard", "check", "--plugin", str(file)]),
        seconds=_since(began),
        subject=LEAKY,
        source=source,
        trials=sum(verdict.draws for verdict in verdicts),
        laws=asked,
        own=OWN,
        own_laws=[law for law in own if law.status in ("holds", "broken")],
    )


def _asked_law(verdict: Verdict) -> AskedLaw:
    return AskedLaw(
        verdict.law,
        verdict.claim,
        verdict.status,
        verdict.error,
        verdict.limit,
        verdict.detail,
        verdict.reproducer,
    )


def train_knowledge(plan: TourPlan) -> TrainChapter:
    """Runs the knowledge experiment in a folder of its own, or resumes it."""
    began = time.monotonic()
    session = plan.training
    if (session.out / ASKED).is_file():
        document = resume(session.out, session.device, session.shown)
    else:
        options = RunOptions(session.variant, device=session.device)
        document = plan.knowledge.run(session.out, override_words(session.asked), options, session.shown)
    # The whole of it has a page and results of its own.
    whole = read_results(KnowledgeResults, document)
    short = KnowledgeResults(
        seed=whole.seed,
        mechanism=whole.mechanism,
        world=whole.world,
        model=whole.model,
        baselines=whole.baselines,
        models=whole.models,
    )
    return TrainChapter(session.command, max(_since(began), document["seconds"]), KNOWLEDGE, short)


def see_head(plan: TourPlan) -> SeeChapter:
    """Finds the head without which birthplaces are lost, and writes the lens's page of it beside an untrained model."""
    began = time.monotonic()
    run = plan.training.out / FOLDERS[WITH]
    trained = open_recordable(run, plan.session.device)
    untrained = open_recordable(f"random:{run}", plan.session.device, seed=plan.seed)
    results = read_results(KnowledgeResults, read_json_object(plan.training.out / RESULTS, ReportError))
    split = results.scored_split
    model, twin = trained.model, untrained.model
    assert isinstance(model, Decoder) and isinstance(twin, Decoder)
    search = find_head(model, twin, plan.questions["dev"], plan.questions[split])
    shown = _surest((results.answers or {})[WITH])
    text = prompt(shown.question) + (shown.expected or "") + MARK
    write_page(Trace.joined(trained.record(text), untrained.record(text)), plan.path(LENS))
    words = ["regard", "view", str(run), text, "--with", f"random:{run}", "-o", str(plan.path(LENS))]
    found = search.heads[0]
    ids = trained.ids(text)
    first = len(trained.ids(prompt(shown.question))) - 1  # the mark, where the answer's first letter is written
    columns = [trained.tokenizer.decode([token]) for token in ids[:-1]]
    maps = [_head_weights(one, ids[:-1], found.layer, found.head, first) for one in (trained, untrained)]
    return SeeChapter(
        command=shlex.join(words),
        seconds=_since(began),
        page=LENS,
        split=split,
        n=len(plan.questions[split]),
        accuracy=search.accuracy,
        chosen_by=len(plan.questions["dev"]),
        loss=search.loss,
        heads=search.heads,
        question=shown.question,
        answer=shown.expected or "",
        rows=columns[first:],
        columns=columns,
        trained=maps[0],
        untrained=maps[1],
    )


def _surest(answers: Iterable[AnsweredQuestion]) -> AnsweredQuestion:
    """Returns the surest right answer, or the surest of all where none is right."""
    return max(answers, key=lambda answer: (answer.right, answer.confidence))


def _head_weights(one: RecordableModel, ids: list[int], layer: int, head: int, first: int) -> list[list[float]]:
    """Returns what one head attends to from the token `first` on, a row a token."""
    maps = attention_maps(one.model, torch.tensor([ids], device=one.model.device))
    rows: list[list[float]] = maps[layer][0, head, first:].float().cpu().tolist()
    return rows


def race_mechanisms(plan: TourPlan) -> RaceChapter:
    """Races mechanisms over growing lengths; interrupted, it keeps what was measured until then."""
    began = time.monotonic()
    config = plan.race
    folder = plan.path(RACE)
    head = {"lab": "bench", "command": race_command(config)}
    results = race(config, RACERS)
    document = head | results.as_dict()
    write_results(folder, document)
    bench_page(document).write(folder / REPORT)
    return RaceChapter(head["command"], _since(began), f"{RACE}/{REPORT}", results.as_dict())


def race_command(config: Race) -> str:
    """Returns the command that races the same mechanisms over the same lengths."""
    words = ["regard", "bench", *RACERS, "--quick", "--tokens", ",".join(map(str, config.tokens))]
    words += ["--passes", ",".join(config.passes), "--patience", f"{config.patience:g}"]
    if config.device != "cpu":
        words += ["--device", config.device]
    return shlex.join(words)


def _since(began: float) -> float:
    """Returns the seconds since then."""
    return round(time.monotonic() - began, 1)
