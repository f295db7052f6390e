"""What the experiment "knowledge" trains: for each mechanism and setting answering without reading, reading, and
answering after it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from regard.config import ConfigError, Section
from regard.data.questions import Question, read_documents, read_questions
from regard.data.world import read_world
from regard.errors import did_you_mean, quote
from regard.lab.experiment import Session, Training, TrainingPlan
from regard.lab.knowledge.strangers import invent_strangers, read_strangers
from regard.train.recipe import COMPARE, SECTIONS, Recipe, flatten, merge_tables, resolve_model
from regard.train.tasks.corruption import KnowledgeData, KnowledgeFiles, data_files

WITHOUT, READING, WITH = "without pretraining", "pretraining", "with pretraining"
STAGES = ("scratch", "pretrain", "finetune")
FOLDERS = {name: name.replace(" ", "-") for name in (WITHOUT, READING, WITH)}
MOST_STRANGERS = 10_000


@dataclass(frozen=True, kw_only=True)
class KnowledgeComparison(Section):
    """What is compared: `mechanisms`, and `settings`, named tables of changes to the usual ones
    ({wide = {model = {width = 512}}}). Without both there is one model, as the recipes have it.

    With documents of the user's, questions about people whom no document mentions are asked too: `strangers` invented
    ones for each form of name, or those in `strangers_file`, a question a line. An invented world has its own.
    """

    place = COMPARE

    mechanisms: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    strangers: int = 50
    strangers_file: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.mechanisms)) < len(self.mechanisms):
            raise ConfigError(f"compare.mechanisms = {list(self.mechanisms)}: expected none twice")
        if not 0 <= self.strangers <= MOST_STRANGERS:
            raise ConfigError(f"compare.strangers = {self.strangers}: expected 0 to {MOST_STRANGERS:,}")
        for name, changes in self.settings.items():
            if not isinstance(changes, Mapping):
                raise ConfigError(
                    f"compare.settings.{name} = {quote(changes)}: expected changes, e.g. "
                    f"compare.settings.{name}.model.width=256"
                )


class Candidate(NamedTuple):
    """One mechanism with one setting: its name, the folder of its runs, and the titles of its trainings by stage."""

    name: str
    folder: str
    titles: Mapping[str, str]


@dataclass(frozen=True)
class KnowledgePlan(TrainingPlan):
    """The trainings of all candidates, with the files that all of them read, the questions in these files, and those
    about people of whom no document tells, by the form of their names."""

    files: KnowledgeFiles
    sets: Mapping[str, list[Question]]
    strangers: Mapping[str, list[Question]]
    candidates: Sequence[Candidate]


def plan(session: Session) -> KnowledgePlan:
    """Returns three trainings for each candidate: answering without reading, reading, and answering after reading."""
    for key in ("documents", "train", "dev", "test", "world"):
        session.refuse(f"data.{key}", f"all stages read the same data; say data.{key} for all of them", STAGES)
    compare = session.compare("knowledge/pretrain", KnowledgeComparison)
    probe = session.recipe("knowledge/pretrain").data
    assert isinstance(probe, KnowledgeData)
    _refuse_unused(session, probe, compare)
    files = data_files(probe, session.out)
    sets = _read_sets(files)
    documents = read_documents(files.documents)
    if files.unwritten is not None:
        say = f"An invented world: {len(documents):,} biographies, "
    else:
        say = f"{len(documents):,} documents, "
    session.shown.say(say + f"{len(sets['train']):,} questions to learn from, {len(sets['dev']):,} to choose by (dev)")
    trainings: list[Training] = []
    candidates = []
    for name, folder, changed in _list_candidates(session, compare):
        titles = _add_trainings(trainings, changed, files, name, folder)
        candidates.append(Candidate(name, folder, titles))
    strangers = _find_strangers(compare, files, sets, documents)
    if compare.strangers and not strangers:
        session.refuse(
            "compare.strangers",
            "the questions differ in more than a name, so that no strangers can be made of them; say "
            "compare.strangers_file, or compare.strangers=0",
        )
    return KnowledgePlan(trainings, files, sets, strangers, candidates)


def _refuse_unused(session: Session, data: KnowledgeData, compare: KnowledgeComparison) -> None:
    """Raises where a key was asked for that cannot have an effect with these data."""
    for key in ("compare.strangers", "compare.strangers_file"):
        if not data.documents:
            session.refuse(key, "an invented world has strangers of its own; say data.world.unwritten instead")
    if compare.strangers_file:
        session.refuse("compare.strangers", "compare.strangers_file names them already; leave one of them out")


def _list_candidates(session: Session, compare: KnowledgeComparison) -> list[tuple[str, str, Session]]:
    """Returns the name, the folder and the session, with its changes, of each mechanism and setting."""
    mechanism = resolve_model(session.recipe("knowledge/pretrain", "pretrain").model)[1].mechanism
    if not compare.mechanisms and not compare.settings:
        return [(mechanism, "", session)]
    if compare.mechanisms:
        session.refuse("model.mechanism", "compare.mechanisms says it already; leave one of them out", ("", *STAGES))
    found = []
    for name in compare.mechanisms or (mechanism,):
        chosen = session
        if compare.mechanisms:
            chosen = _with_changes(session, "compare.mechanisms", {"model": {"mechanism": name}})
        found.append((name, _folder(name), chosen))
        for key, changes in compare.settings.items():
            changed = _with_changes(chosen, f"compare.settings.{key}", changes)
            found.append((f"{name}, {key}", _folder(f"{name}-{key}"), changed))
    return found


def _folder(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def _with_changes(session: Session, place: str, changes: Mapping[str, Any]) -> Session:
    """Returns the session with changes; raises ConfigError if one has no effect or would change the data."""
    allowed = (*SECTIONS, *STAGES)
    for section in changes:
        if section not in allowed:
            raise ConfigError(f"{place}.{section}: no such section or stage.{did_you_mean(section, allowed)}")
    for key, _ in flatten(changes):
        stage, _, rest = key.partition(".")
        own = rest if stage in STAGES else key
        if own.startswith(("data.documents", "data.train", "data.dev", "data.test", "data.world")):
            raise ConfigError(f"{place}.{key}: all candidates read the same data; say {own} for all of them")
        if stage not in STAGES:
            session.refuse(key, f"{place}.{key} says it for all stages; leave one of them out", STAGES)
    return replace(session, asked=merge_tables(session.asked, changes))


def _add_trainings(
    trainings: list[Training], session: Session, files: KnowledgeFiles, name: str, folder: str
) -> dict[str, str]:
    """Adds the trainings of a candidate that no candidate before it has, and returns the title of each stage."""
    data = {
        "data": {key: str(path) for key, path in files._asdict().items() if path is not None and key != "unwritten"}
    }
    titles: dict[str, str] = {}

    def add(stage_name: str, stage: str, recipe: Recipe) -> str:
        same = next((one for one in trainings if (one.stage, one.recipe) == (stage, recipe)), None)
        if same is None:
            title = f"{name}: {stage_name}" if folder else stage_name
            path = f"{folder}/{FOLDERS[stage_name]}" if folder else FOLDERS[stage_name]
            same = Training(stage, title, path, recipe)
            trainings.append(same)
        titles[stage_name] = same.title
        return same.folder

    add(WITHOUT, "scratch", session.recipe("knowledge/scratch", "scratch", settings=data))
    reading = add(READING, "pretrain", session.recipe("knowledge/pretrain", "pretrain", settings=data))
    start = {"train": {"init": str((session.out / reading).resolve())}}
    # Its model is that of the pretraining, with the changes that were asked of it.
    add(WITH, "finetune", session.recipe("knowledge/finetune", "finetune", settings=data | start, drop=("model",)))
    return titles


def _read_sets(files: KnowledgeFiles) -> dict[str, list[Question]]:
    """Returns the questions of each file; they are read before any training, so that a bad line is found at once."""
    for name in ("train", "dev"):
        if getattr(files, name) is None:
            raise ConfigError(f"data.{name} is missing: a file with `question<TAB>answer` on each line")
    assert files.train is not None and files.dev is not None
    sets = {"train": read_questions(files.train, answers=True), "dev": read_questions(files.dev, answers=True)}
    if files.test is not None:
        sets["test"] = read_questions(files.test)
    return sets


def _find_strangers(
    compare: KnowledgeComparison,
    files: KnowledgeFiles,
    sets: Mapping[str, Sequence[Question]],
    documents: Sequence[str],
) -> Mapping[str, list[Question]]:
    """Returns questions about people that no document names: the world's, the user's, or invented ones."""
    asked = [question for questions in sets.values() for question in questions]
    if files.unwritten is not None:
        return read_world(files.unwritten.parent).unwritten
    if compare.strangers_file:
        return read_strangers(compare.strangers_file, asked, documents)
    return invent_strangers(asked, documents, compare.strangers)
