r"""What makes a small model know more from reading: changes to the knowledge recipe, on the world's hardest setting.

    python benchmarks/reproductions/knowledge_ablation.py --out results.jsonl --device cuda --workers 4 \
        [--only NAME ...] [--seeds 0]

Each line of the result is one training (reading, then answering) with its accuracies on 500 dev and 500 test people.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROTARY = ["model.position=rotary", "train.lr=3e-3"]


def dropout(p: float) -> list[str]:
    return [f"model.dropout={p}", f"model.attention.dropout={p}"]


FINAL = [*ROTARY, *dropout(0.05)]
# name: (changes to both stages or to reading, changes to answering)
CASES = {
    "base": ([], []),
    "rotary": (ROTARY, []),
    "final": (FINAL, []),
    "final-words": ([*FINAL, "data.words=true"], []),
    "final-words-short": ([*FINAL, "data.words=true", "data.spans=[0.05, 0.25]"], []),
    "final-x2": ([*FINAL, "train.epochs=1300"], []),
    "final-lr4": ([*FINAL, "train.lr=4e-3"], []),
    "synthesizer": (["model.mechanism=synthesizer"], []),
    "synthesizer-final": (["model.mechanism=synthesizer", "train.lr=3e-3", *dropout(0.05)], []),
    "synthesizer-words": (["model.mechanism=synthesizer", "train.lr=3e-3", *dropout(0.05), "data.words=true"], []),
    "performer": ([*FINAL, "model.mechanism=performer"], []),
    "elu": ([*FINAL, "model.mechanism=elu"], []),
}


def run(case: tuple[str, int, str, float, int, str]) -> None:
    name, seed, device, scale, steps, out = case
    from regard.train import recipe, stage

    began = time.time()
    reading, answering = CASES[name]
    folder = Path(tempfile.mkdtemp(prefix="knowledge-"))
    common = [f"train.seed={seed}", f"data.world.seed={seed}", "train.saving.every=0", "train.evaluation.every=0"]
    few = [f"train.steps={steps}"] if steps else []
    variant = None if name.startswith("demo") else "full"
    full = recipe.load("knowledge/pretrain", variant=variant).train.epochs
    try:
        short = [] if scale == 1 else [f"train.epochs={full * scale}"]
        one = recipe.load("knowledge/pretrain", [*common, *short, *reading, *few], variant)
        first = stage.train(one, folder / "read", device)
        two = recipe.load(
            "knowledge/finetune",
            [f"train.seed={seed}", f"train.init={folder / 'read'}", "train.evaluation.every=0.1", *few, *answering],
            variant,
        )
        two = recipe.resolve(
            two.name,
            {**two.as_dict(), "data": {**first.config["data"], **two.asked.get("data", {})}},
            {k: v for k, v in two.asked.items() if k != "data"},
        )
        second = stage.train(two, folder / "answer", device)
        from regard.data.questions import read_questions
        from regard.lab.knowledge.answers import answer, score
        from regard.models import load

        model = load(folder / "answer" / "model", device)
        test = read_questions(folder / "answer" / "data" / "test.tsv")
        found = score([a.text for a in answer(model, test)], test)
        rows, read = second.metrics(), first.metrics()
        best = max(row["dev/accuracy"] for row in rows if "dev/accuracy" in row)
        row = {
            "name": name,
            "seed": seed,
            "dev": best,
            "test": found["accuracy"],
            "last": rows[-1],
            "loss": read[-1]["loss"],
            "read_seconds": read[-1]["seconds"],
            "tokens_per_second": read[-2]["tokens_per_second"],
            "mfu": read[-2]["mfu"],
            "steps": read[-1]["step"],
            "seconds": time.time() - began,
        }
    except Exception as error:
        import traceback

        traceback.print_exc()
        row = {"name": name, "seed": seed, "error": repr(error)}
    with open(out, "a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="knowledge_ablation.jsonl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=0, help="of each training; 0: as the recipe says")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    cases = [(n, s, asked.device, asked.scale, asked.steps, asked.out) for s in asked.seeds for n in asked.only]
    with multiprocessing.get_context("spawn").Pool(asked.workers, maxtasksperchild=1) as pool:
        pool.map(run, cases, chunksize=1)
