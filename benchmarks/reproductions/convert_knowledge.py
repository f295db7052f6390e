r"""How much of what a model knows is left when its key/value heads are pooled to one.

    python benchmarks/reproductions/convert_knowledge.py --out results.json [--variant full] \
        [--device cuda] [--seeds 0 1]

For each seed a model reads (knowledge/pretrain) and learns to answer (knowledge/finetune). Then
- the model that has read is converted by `regard convert` for each plan, and fine-tuned as the original was; so is the
  control, which was trained for as many steps without distillation;
- the model that answers is converted itself, reading documents beside questions (data.mix);
- the original goes on reading for as many steps as converting took: what more reading brings without converting.
All are asked about the same people, whose questions none of them has seen.
"""

import argparse
import json
import tempfile
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from regard.convert.results import measure_conversion
from regard.convert.run import start_conversion, train_stages
from regard.convert.settings import ConvertConfig
from regard.data.questions import read_questions
from regard.lab.knowledge.answers import answer, score
from regard.models import GPT, load
from regard.train import recipe, stage
from regard.train.run import Run

# name: (steps of distillation, share of the reading's steps for uptraining)
PLANS = {"a twentieth": (300, 0.05), "a tenth": (300, 0.1), "a fifth": (300, 0.2)}
FILES = {"documents": "documents.txt", "train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}


BEGUN = ("pretraining", "with-pretraining", "data")


class Bench:
    """One seed's models in a folder of their own, and what they know."""

    def __init__(self, seed: int, asked: argparse.Namespace, begun: str | None = None) -> None:
        self.seed, self.asked, self.begun = seed, asked, begun
        self.folder = Path(tempfile.mkdtemp(prefix=f"convert-{seed}-"))
        self.row: dict[str, Any] = {"seed": seed}

    def run(self) -> dict[str, Any]:
        asked = self.asked
        if self.begun:
            self.read, self.answering, self.data = (Path(self.begun) / name for name in BEGUN)
        else:
            self.pretrain()
        read = Run.open(self.read)
        self.steps = max(row["step"] for row in read.metrics())
        self.note("reading", {"steps": self.steps})
        self.note("original", self.right(self.answering) if self.begun else self.known(self.read, "answer"))
        for name in asked.plans:
            self.plan(name)
        if asked.direct:
            self.direct()
        if asked.longer:
            train = {**read.config["train"], "init": str(read.path), "epochs": 0.0, "steps": self.spent}
            train |= {"lr": float(asked.lr)} if asked.lr else {}
            tables = {"task": "corruption", "data": read.config["data"], "model": {}, "train": train}
            longer = stage.train(recipe.resolve("longer", tables), self.folder / "longer", asked.device)
            self.note("longer", {"steps": self.spent, **self.known(longer.path, "answer-longer")})
        return self.row

    def pretrain(self) -> None:
        """Reads, by the recipe."""
        few = [f"train.steps={self.asked.steps}"] if self.asked.steps else []
        few += ["train.evaluation.every=0", "train.saving.every=0", f"data.world.seed={self.seed}"]
        made = recipe.load("knowledge/pretrain", [*few, f"train.seed={self.seed}"], self.asked.variant)
        self.read = stage.train(made, self.folder / "read", self.asked.device).path
        self.answering, self.data = self.folder / "answer", self.read / "data"

    def plan(self, name: str) -> None:
        """Converts the model that has read, and asks what came out after fine-tuning."""
        distil, share = PLANS[name]
        config = ConvertConfig(kv_heads=1, steps=min(distil, self.steps), uptrain=share, seed=self.seed)
        out = self.folder / name.replace(" ", "-")
        rare = ["train.saving.every=0", "train.evaluation.every=0"]
        rare += [f"{part}.train.lr={self.asked.lr}" for part in ("uptrain", "control") if self.asked.lr]
        start_conversion(load(self.read / "model", self.asked.device), self.read, out, config, rare, self.asked.device)
        taught = train_stages(out)
        steps = {"distillation": taught.config.steps, "uptraining": int(taught.config.uptrain or 0)}
        self.spent = sum(steps.values())
        found: dict[str, Any] = {"steps": steps}
        for last in ("uptraining", "control"):
            found[last] = self.known(out / last, f"answer-{out.name}-{last}")
        self.row.setdefault("plans", {})[name] = found
        self.note("plans", self.row["plans"])

    def direct(self) -> None:
        """Converts the model that answers; the results are all that the report of `regard convert` needs."""
        out = self.folder / "direct"
        config = ConvertConfig(kv_heads=1, steps=min(300, self.steps), uptrain=0.1, seed=self.seed)
        changes = ["data.mix=4", "train.batch=64", "train.lr=2e-3", "train.saving.every=0"]
        model = load(self.answering / "model", self.asked.device)
        start_conversion(model, self.answering, out, config, changes, self.asked.device)
        results = measure_conversion(out, train_stages(out))
        path = Path(self.asked.out).with_suffix(f".direct-{self.seed}.json")
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False), encoding="utf-8")
        self.note("direct", {row["name"]: row["answers"] | {"steps": row["steps"]} for row in results["stages"]})

    def known(self, init: Path, name: str) -> dict[str, Any]:
        """Right answers after fine-tuning."""
        changes = [f"train.init={init}", f"train.seed={self.seed}", "train.saving.every=0"]
        changes += [f"data.{key}={self.data / file}" for key, file in FILES.items()]
        made = recipe.load("knowledge/finetune", changes, self.asked.variant)
        done = stage.train(made, self.folder / name, self.asked.device)
        return self.right(done.path)

    def right(self, run: Path) -> dict[str, Any]:
        """Right answers of a run's model."""
        model, found = load(run / "model", self.asked.device), {}
        assert isinstance(model, GPT)
        for key in ("dev", "test"):
            questions = read_questions(self.data / FILES[key], answers=True)
            found[key] = score([a.text for a in answer(model, questions)], questions)
        return found

    def note(self, key: str, value: Any) -> None:
        """Writes down what is known so far."""
        self.row[key] = value
        text = json.dumps(self.row, indent=1, ensure_ascii=False)
        Path(self.asked.out).with_suffix(f".seed-{self.seed}.json").write_text(text, encoding="utf-8")
        print(self.seed, key, json.dumps(value, ensure_ascii=False)[:400], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--variant", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--read", nargs="+", help="finished folders of `regard run knowledge` to start from, one a seed"
    )
    parser.add_argument("--lr", help="of uptraining, control and longer reading; that of the reading unless said")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="steps of reading, for a quick look")
    parser.add_argument("--plans", nargs="*", default=["a tenth"], choices=list(PLANS))
    parser.add_argument("--direct", action="store_true", help="also convert the model that answers")
    parser.add_argument("--longer", action="store_true", help="also let the original read longer")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    rows = [Bench(*one).run() for one in zip(asked.seeds, repeat(asked), asked.read or repeat(None))]
    Path(asked.out).write_text(json.dumps({"rows": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
