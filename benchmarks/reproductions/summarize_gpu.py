"""Summaries of Debian package descriptions on one GPU: softmax and performer at the size of `--variant full`.

    python benchmarks/reproductions/summarize_gpu.py train FOLDER OUT [NAME …]   # on the GPU: one file a training
    python benchmarks/reproductions/summarize_gpu.py score FOLDER OUT              # anywhere: ROUGE with intervals

FOLDER holds train.jsonl, dev.jsonl and test.jsonl with the keys `article` and `summary`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from regard.data.pairs import read_pairs
from regard.data.rouge import lead
from regard.generate import Settings
from regard.lab.results import to_json
from regard.lab.summarize.summaries import score_summaries, summaries, writer
from regard.models import load
from regard.models.locate import MODEL
from regard.train import recipe, train
from regard.train.run import versions

LEAD = 7  # words of a summary on average
FEATURES = 128
BOTH = ("encoder", "decoder")
PERFORMER = [
    *(f"model.{part}.mechanism=performer" for part in BOTH),
    *(f"model.{part}.options.features={FEATURES}" for part in BOTH),
]
ACROSS = ["model.cross=performer", f"model.cross_options.features={FEATURES}"]
WIDE = [f"model.{part}.attention.heads=4" for part in BOTH]  # keys 64 wide instead of 16
RUNS: dict[str, list[str]] = {
    "softmax": WIDE,
    "softmax-narrow": [],
    "performer": [*PERFORMER, *ACROSS, *WIDE],
    "performer-inside": [*PERFORMER, *WIDE],  # softmax across: the decoder reads the encoder exactly
    "performer-narrow": [*PERFORMER, *ACROSS],
}
DECODING = Settings(beams=4, length_penalty=1.0)


def training(folder: Path, out: Path, names: list[str]) -> None:
    """Trains each and writes what it says about dev and test."""
    for name in names or RUNS:
        began = time.perf_counter()
        asked = [f"data.{key}={folder / key}.jsonl" for key in ("train", "dev", "test")]
        made = train(recipe.load("summarize", [*asked, *RUNS[name]], "full"), Path("/tmp/summarize") / name, "cuda")
        trained = time.perf_counter() - began
        rows = made.metrics()
        measured = [row for row in rows if "lr" not in row]
        best = next(row for row in measured if row["step"] == made.best)
        model = writer(load(made.path / MODEL, "cuda"), name)
        said = {}
        for key in ("dev", "test"):
            articles = [pair.article for pair in read_pairs(folder / f"{key}.jsonl")]
            said[key] = [s.text for s in summaries(model, articles, DECODING)]
        row = {
            "name": name, "asked": RUNS[name], "trained_s": trained, "all_s": time.perf_counter() - began, "best": best,
            "parameters": model.summary().total.parameters, "device": torch.cuda.get_device_name(),
            "versions": versions(), "evaluations": measured, "last": [r for r in rows if "lr" in r][-1],
            "predictions": said,
        }  # fmt: skip
        (out / f"{name}.run.json").write_text(json.dumps(row, indent=1))
        print(name, f"{trained:.0f} s", best, flush=True)


def scoring(folder: Path, out: Path) -> dict[str, Any]:
    """ROUGE of what was written, beside the first words of each article."""
    found: dict[str, Any] = {"runs": [], "scores": {}}
    trained = [json.loads(path.read_text()) for path in sorted(out.glob("*.run.json"), reverse=True)]
    for key in ("dev", "test"):
        pairs = read_pairs(folder / f"{key}.jsonl")
        texts = {f"first {LEAD} words": [lead(pair.article, LEAD) for pair in pairs]}
        texts |= {run["name"]: run["predictions"][key] for run in trained if key in run["predictions"]}
        found["scores"][key] = to_json(score_summaries(pairs, texts))
    found["runs"] = [{k: v for k, v in run.items() if k != "predictions"} for run in trained]
    return found


if __name__ == "__main__":
    what, folder, out, *names = sys.argv[1:]
    if what == "train":
        training(Path(folder), Path(out), names)
    else:
        print(json.dumps(scoring(Path(folder), Path(out)), indent=1))
