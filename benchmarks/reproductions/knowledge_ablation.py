r"""What makes a small model know more from reading: changes to the knowledge recipe, each trained with each seed.

    python benchmarks/reproductions/knowledge_ablation.py --out results.jsonl --device cuda --workers 4 \
        [--documents documents.txt --questions questions.tsv] [--only NAME ...] [--seeds 0 1 2] [--minutes 25]

Without documents the models read the invented world on its hardest setting. With documents and questions of one's own,
`--held-out` people are asked about at the end alone, and `--dev` others choose the checkpoint; both are the same people
for every case and seed.

Each line of the result is one training (reading, then answering) with its settings and its accuracies on dev and test.
A training whose line is in the file already is not done again, so that the same command goes on after a stop, with
other cases or with more seeds. `--minutes`: nothing is begun that would not end within them, by the longest training in
the file. In the end every case is shown with the mean and the range over its seeds; `--show` does that alone.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROTARY = ["model.position=rotary", "train.lr=3e-3"]
SPLIT_SEED = 0


def dropout(p: float) -> list[str]:
    """Returns what gives a model this dropout everywhere."""
    return [f"model.dropout={p}", f"model.attention.dropout={p}"]


FINAL = [*ROTARY, *dropout(0.05)]
# name: (changes to both stages or to reading, changes to answering)
CASES: dict[str, tuple[list[str], list[str]]] = {
    "base": ([], []),  # --variant full as it is
    "epochs-600": (["train.epochs=600"], []),
    "epochs-2400": (["train.epochs=2400"], []),
    "average": (["train.average=0.999"], []),
    "average-both": (["train.average=0.999"], ["train.average=0.98"]),
    "average-constant": (["train.average=0.999", "train.schedule=constant"], []),
    "trapezoid": (["train.schedule=trapezoid"], []),
    "decay-to-zero": (["train.schedule.floor=0"], []),
    "adamw": (["train.optimizer=adamw"], []),
    "lr1.5": (["train.lr=1.5e-3"], []),
    "answers-muon": ([], ["train.optimizer=muon"]),
    "dropout-.1": (dropout(0.1), []),
    "dropout-.1-lr4": ([*dropout(0.1), "train.lr=4e-3"], []),
    "spans-wide": (["data.spans=[0.05, 0.75]"], []),
    "spans-short": (["data.spans=[0.05, 0.25]"], []),
    "cut-half": (["data.cut=0.5"], []),
    "mix": ([], ["data.mix=1", "train.lr=3e-4"]),
    "answers-lr1": ([], ["train.lr=1e-4"]),
    "answers-patience": ([], ["train.epochs=30", "train.evaluation.patience=5"]),
    "answers-dropout-.1": ([], dropout(0.1)),
    "rotary": (ROTARY, []),
    "final": (FINAL, []),
    "final-words": ([*FINAL, "data.words=true"], []),
    "final-words-short": ([*FINAL, "data.words=true", "data.spans=[0.05, 0.25]"], []),
    "final-x2": ([*FINAL, "train.epochs=1300"], []),
    "final-lr4": ([*FINAL, "train.lr=4e-3"], []),
    "synthesizer": (["model.mechanism=synthesizer"], []),
    "synthesizer-average": (["model.mechanism=synthesizer", "train.average=0.999"], []),
    "synthesizer-adamw": (["model.mechanism=synthesizer", "train.optimizer=adamw"], []),
    "synthesizer-final": (["model.mechanism=synthesizer", "train.lr=3e-3", *dropout(0.05)], []),
    "synthesizer-words": (["model.mechanism=synthesizer", "train.lr=3e-3", *dropout(0.05), "data.words=true"], []),
    "performer": ([*FINAL, "model.mechanism=performer"], []),
    "elu": ([*FINAL, "model.mechanism=elu"], []),
}


class Training(NamedTuple):
    """One training: its case and seed, the files that it reads ({} for the invented world), and the share of it that is
    done: `scale` of the epochs, or so many `steps`."""

    name: str
    seed: int
    files: dict[str, str]
    scale: float
    steps: int

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the outcome: two trainings that agree in it are the same."""
        reading, answering = CASES[self.name]
        return {
            "seed": self.seed,
            "reading": reading,
            "answering": answering,
            "files": {key: digest(path) for key, path in self.files.items()},
            "scale": self.scale,
            "steps": self.steps,
        }


@cache
def digest(path: str) -> str:
    """Returns what tells a file from others, wherever it lies."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of a result file; the last may be cut off, where a process was killed."""
    rows = []
    if Path(path).exists():
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                print(f"left out: a line of {path} that was cut off", file=sys.stderr)
    return rows


def write_row(path: str | Path, row: dict[str, Any]) -> None:
    """Adds a line to a result file, behind a line that was cut off too."""
    with open(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        start = b""
        if size:
            file.seek(size - 1)
            start = b"" if file.read(1) == b"\n" else b"\n"
        file.write(start + json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def pending(trainings: Iterable[Training], rows: Sequence[dict[str, Any]]) -> list[Training]:
    """Returns the trainings of which no line tells; one that failed is tried again."""
    done = [row.get("settings") for row in rows if "error" not in row]
    return [one for one in trainings if one.settings not in done]


def has_time(rows: Sequence[dict[str, Any]], left: float) -> bool:
    """Returns whether the longest training so far would end in the seconds that are left; the first is always begun."""
    return left > max((row["seconds"] for row in rows if "error" not in row), default=0.0)


def split(questions: str, held_out: int, dev: int, folder: Path) -> dict[str, str]:
    """Writes train.tsv, dev.tsv and test.tsv, with all questions about a person in one of them; returns their paths."""
    from regard.data.questions import read_questions, write_questions

    asked = read_questions(questions, answers=True)
    people = sorted({question.text for question in asked})
    if held_out + dev >= len(people):
        sys.exit(
            f"{questions} asks about {len(people)} people: expected more than {held_out} held out and {dev} of dev"
        )
    random.Random(SPLIT_SEED).shuffle(people)
    place = dict.fromkeys(people, "train") | dict.fromkeys(people[:held_out], "test")
    place |= dict.fromkeys(people[held_out : held_out + dev], "dev")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name in ("train", "dev", "test"):
        paths[name] = str((folder / f"{name}.tsv").resolve())
        write_questions(paths[name], [question for question in asked if place[question.text] == name])
    return paths


def run(asked: tuple[Training, str, str, float]) -> None:
    """Does one training where there is time for it, and writes its line."""
    training, device, out, end = asked
    if not has_time(read_rows(out), end - time.time()):
        print(f"left for another time: {training.name}, seed {training.seed}", flush=True)
        return
    began = time.time()
    row: dict[str, Any] = {"name": training.name, "seed": training.seed, "settings": training.settings}
    with tempfile.TemporaryDirectory(prefix="knowledge-") as folder:
        try:
            row |= train(training, device, Path(folder))
        except Exception as error:
            import traceback

            traceback.print_exc()
            row["error"] = repr(error)
    row["seconds"] = time.time() - began
    write_row(out, row)
    print(json.dumps(row), flush=True)


def train(training: Training, device: str, folder: Path) -> dict[str, Any]:
    """Trains a model to read and then to answer, and returns what it knows."""
    from regard.data.questions import read_questions
    from regard.lab.knowledge.answers import answer, score
    from regard.models import load
    from regard.train import recipe, stage

    reading, answering = CASES[training.name]
    data = [f"data.{key}={json.dumps(path)}" for key, path in training.files.items()]
    if not data:
        data = [f"data.world.seed={training.seed}"]
    common = [f"train.seed={training.seed}", *data, "train.saving.every=0", "train.evaluation.every=0"]
    few = [f"train.steps={training.steps}"] if training.steps else []
    epochs = recipe.load("knowledge/pretrain", reading, "full").train.epochs
    short = [] if training.scale == 1 else [f"train.epochs={epochs * training.scale}"]
    first = stage.train(
        recipe.load("knowledge/pretrain", [*common, *reading, *short, *few], "full"), folder / "read", device
    )
    changes = [f"train.seed={training.seed}", f"train.init={folder / 'read'}", "train.evaluation.every=0.1"]
    second_recipe = recipe.load("knowledge/finetune", [*changes, *few, *answering], "full")
    second_recipe = recipe.resolve(
        second_recipe.name,
        {**second_recipe.as_dict(), "data": {**first.config["data"], **second_recipe.asked.get("data", {})}},
        {key: value for key, value in second_recipe.asked.items() if key != "data"},
    )
    second = stage.train(second_recipe, folder / "answer", device)
    path = training.files.get("test", folder / "answer" / "data" / "test.tsv")
    test = read_questions(path)
    found = score([said.text for said in answer(load(folder / "answer" / "model", device), test)], test)
    assert found is not None, f"{path} lacks answers"
    rows = second.metrics()
    read = [row for row in first.metrics() if "lr" in row]
    return {
        "dev": max(row["dev/accuracy"] for row in rows if "dev/accuracy" in row),
        "test": found["accuracy"],
        "n": found["n"],
        "train": max(row["train/accuracy"] for row in rows if "train/accuracy" in row),
        "last": rows[-1],
        "loss": read[-1]["loss"],
        "read_seconds": read[-1]["seconds"],
        "tokens_per_second": read[-1].get("tokens_per_second"),
        "mfu": read[-1].get("mfu"),
        "steps": read[-1]["step"],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints each case with the mean over its seeds and its range, the best on test first."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "error" not in row:
            cases.setdefault(row["name"], []).append(row)

    def mean(name: str, key: str) -> float:
        return sum(row[key] for row in cases[name]) / len(cases[name])

    print(f"{'case':22} {'seeds':>5}  {'dev':>5}  {'test':>5}  {'from–to':>11}  {'train':>5}  seconds")
    for name in sorted(cases, key=lambda name: -mean(name, "test")):
        tests = [100 * row["test"] for row in cases[name]]
        spread = f"{min(tests):.1f}–{max(tests):.1f}"
        numbers = [100 * mean(name, key) for key in ("dev", "test", "train")]
        print(
            f"{name:22} {len(tests):5d}  {numbers[0]:5.1f}  {numbers[1]:5.1f}  {spread:>11}  {numbers[2]:5.1f}  "
            f"{mean(name, 'seconds'):7.0f}"
        )


def main(asked: argparse.Namespace) -> None:
    """Does what is not done yet, as far as time goes, and shows all of it."""
    files: dict[str, str] = {}
    if asked.documents or asked.questions:
        if not (asked.documents and asked.questions):
            sys.exit("--documents and --questions go together: expected both or none")
        parts = split(asked.questions, asked.held_out, asked.dev, Path(f"{asked.out}.questions"))
        files = {"documents": str(Path(asked.documents).resolve()), **parts}
    trainings = [Training(name, seed, files, asked.scale, asked.steps) for seed in asked.seeds for name in asked.only]
    left = pending(trainings, read_rows(asked.out))
    if not asked.show and left:
        end = time.time() + 60 * asked.minutes
        jobs = [(one, asked.device, asked.out, end) for one in left]
        with multiprocessing.get_context("spawn").Pool(asked.workers, maxtasksperchild=1) as pool:
            pool.map(run, jobs, chunksize=1)
    show(read_rows(asked.out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="knowledge_ablation.jsonl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--documents", help="a document a line; none: an invented world")
    parser.add_argument("--questions", help="question<TAB>answer, one a line")
    parser.add_argument("--held-out", type=int, default=400, help="people who are asked about at the end alone")
    parser.add_argument("--dev", type=int, default=100, help="other people, by whom the checkpoint is chosen")
    parser.add_argument("--scale", type=float, default=1.0, help="so many times the epochs of reading")
    parser.add_argument("--steps", type=int, default=0, help="of each training; 0: as the recipe says")
    parser.add_argument("--minutes", type=float, default=1e6, help="nothing is begun that would not end within them")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--show", action="store_true", help="train nothing, and show what is in the file")
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(parser.parse_args())
