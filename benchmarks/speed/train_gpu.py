"""Training GPT-2 (124 million parameters) by `regard train lm` with default settings, beside a plain compiled loop.

    python benchmarks/speed/train_gpu.py --out FILE    # on one GPU, about three minutes
    python benchmarks/speed/train_gpu.py --tiny        # tries the script anywhere

regard's own loop runs, and after each line of its metrics the peer (`plain_gpt.py`) trains as many steps on the same
batches with the same rates. So the two alternate on one device, and regard's speed is what it writes into metrics.jsonl
itself. Then 16,384 tokens at a time: `elu` and `performer` beside softmax. Last the step of the knowledge experiment's
model.

MFU counts 6 FLOPs for each parameter that is multiplied and each token, and 6·layers·length·width for causal attention,
of the peak that the maker states for dense bfloat16.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from plain_gpt import PlainTraining, Shape

from regard import cost
from regard.data.seeds import generator
from regard.data.tokenizers import Characters
from regard.data.tokens import TokenFile, random_windows
from regard.storage import atomic_write
from regard.train import recipe, train
from regard.train.optimizer import lr_factor
from regard.train.progress import Progress

STEPS = 5000  # of the training that is cut short: long enough for compiling to pay
LINE = STEPS // 200  # steps of a line of metrics
LR = 6e-4


@dataclass(frozen=True)
class Setting:
    """What is trained, and for how many lines of metrics."""

    shape: Shape = field(default_factory=Shape)
    batch: int = 32
    lines: int = 9
    device: str = "cuda"


TINY = Setting(Shape(vocabulary=300, length=32, layers=2, heads=2, width=32), batch=2, lines=3, device="cpu")


class Enough(BaseException):
    """Ends a training that has been measured."""


class Lines(Progress):
    """Keeps the lines of metrics of a training, calls `between` after each, and ends it after `most` of them."""

    def __init__(self, most: int, between: Callable[[], None] = lambda: None) -> None:
        self.most = most
        self.between = between
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        self.rows.append({"step": step, **values})
        self.between()
        if len(self.rows) == self.most:
            raise Enough

    @property
    def speed(self) -> float:
        """The median tokens a second after the first two lines, in which a step is compiled and captured."""
        return median(row["tokens_per_second"] for row in self.rows[2:])


def write_corpus(folder: Path, vocabulary: int, rows: int = 512, length: int = 8192) -> TokenFile:
    """Writes tokens that can be learned in part: every second one follows from the one before, with four choices; the
    others are drawn by Zipf's law."""
    source = np.random.default_rng(0)
    shares = np.cumsum(1 / np.arange(1, vocabulary + 1))
    drawn = np.searchsorted(shares / shares[-1], source.random((length, rows)))
    followers = source.integers(0, vocabulary, (vocabulary, 4))
    choices = source.integers(0, 4, (length, rows))
    follows = source.random((length, rows)) < 0.5
    tokens = np.empty((length, rows), np.uint16)
    tokens[0] = drawn[0]
    for i in range(1, length):
        tokens[i] = np.where(follows[i], followers[tokens[i - 1], choices[i]], drawn[i])
    folder.mkdir(parents=True)
    ids = tokens.T.reshape(-1)
    np.save(folder / "train.npy", ids[: -ids.size // 10])
    np.save(folder / "dev.npy", ids[-ids.size // 10 :])
    characters = [chr(0x4E00 + n) if n < 20_000 else chr(0x1_0000 + n) for n in range(vocabulary)]
    (folder / "tokenizer.json").write_text(json.dumps(Characters(characters).as_json()))
    return TokenFile.open(folder / "train.npy")


def changes(setting: Setting, corpus: Path, *more: str) -> list[str]:
    """Returns what turns the recipe `lm` into GPT-2. Its window is as long as its text, as the recipe asks."""
    shape = setting.shape
    return [
        f"data.tokens={corpus}",
        f"data.block={shape.length}",
        f"model.layers={shape.layers}",
        f"model.width={shape.width}",
        "model.position=learned",
        f"model.attention={{heads = {shape.heads}, window = {shape.length}}}",
        'model.block={norm = "layer", mlp = "gelu_tanh", bias = true}',
        f"train.batch={setting.batch}",
        f"train.steps={STEPS}",
        f"train.lr={LR}",
        "train.evaluation.every=0",
        "train.saving.every=0",
        *more,
    ]


def run(overrides: list[str], setting: Setting, lines: Lines, name: str = "lm", variant: str | None = None) -> float:
    """Trains by a recipe until the lines are there, and returns the seconds that all of it took."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, suppress(Enough):
        train(recipe.load(name, overrides, variant), Path(folder) / "run", setting.device, lines)
    return time.perf_counter() - started


class Peer:
    """The peer, which trains LINE steps at a time on the batches and with the rates that regard has."""

    def __init__(self, setting: Setting, corpus: TokenFile, overrides: list[str], seed: int = 0) -> None:
        self.setting = setting
        self.corpus = corpus
        self.schedule = recipe.load("lm", overrides).train.schedule
        self.seed = seed
        self.training: PlainTraining | None = None
        self.at = 0
        self.rows: list[dict[str, float]] = []
        self.first_peak = 0  # bytes that regard had at most before the peer was there
        self.peak = 0

    def __call__(self) -> None:
        """Trains the next LINE steps; the first time, after it was built."""
        before = allocated(self.setting)
        if self.training is None:
            self.first_peak = peak_allocated(self.setting)
            self.training = PlainTraining(self.setting.shape, seed=self.seed, device=self.setting.device)
            self.base = before
        reset_peak(self.setting)
        started = time.perf_counter()
        total = 0.0
        losses = []
        for _ in range(LINE):
            source = generator(0, "windows", self.at)
            batch = random_windows(self.corpus.tokens, self.setting.batch, self.setting.shape.length, source)
            x, y = (pinned(part, self.setting) for part in (batch.x, batch.y))
            losses.append(self.training.step(x, y, LR * lr_factor(self.schedule, self.at, STEPS)))
            self.at += 1
            if self.at % 10 == 0:  # as nanoGPT logs
                total += float(torch.stack(losses).sum())
                losses.clear()
        if losses:
            total += float(torch.stack(losses).sum())
        seconds = time.perf_counter() - started
        tokens = LINE * self.setting.batch * self.setting.shape.length
        self.peak = max(self.peak, peak_allocated(self.setting) - self.base)
        self.rows.append({"step": self.at, "loss": total / LINE, "tokens_per_second": tokens / seconds})


def pinned(x: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Returns a tensor in memory from which a GPU copies while the host goes on."""
    x = x.contiguous()
    return x.pin_memory() if setting.device == "cuda" else x


def allocated(setting: Setting) -> int:
    return torch.cuda.memory_allocated() if setting.device == "cuda" else 0


def peak_allocated(setting: Setting) -> int:
    return torch.cuda.max_memory_allocated() if setting.device == "cuda" else 0


def reset_peak(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def flops_per_token(shape: Shape) -> float:
    """Returns the FLOPs of a token in training: products with weights, and causal attention."""
    weights = 12 * shape.layers * shape.width**2 + shape.vocabulary * shape.width
    return 6 * weights + 6 * shape.layers * shape.length * shape.width


def race(setting: Setting, folder: Path, seeds: int) -> dict[str, Any]:
    """Returns how fast regard and the peer train, what memory they take, and their losses at the same steps."""
    corpus = write_corpus(folder / "tokens", setting.shape.vocabulary)
    overrides = changes(setting, folder / "tokens")
    peer = Peer(setting, corpus, overrides)
    lines = Lines(setting.lines, peer)
    reset_peak(setting)
    run(overrides, setting, lines)
    others = [Peer(setting, corpus, overrides, seed) for seed in range(1, seeds)]
    for other in others:
        for _ in range(setting.lines):
            other()
        other.training = None
    name = torch.cuda.get_device_name() if setting.device == "cuda" else "cpu"
    top = cost.peak(name, torch.bfloat16)
    speeds = {"regard": lines.speed, "plain": median(row["tokens_per_second"] for row in peer.rows[1:])}
    found = {
        "tokens_per_second": speeds,
        "ratio": speeds["regard"] / speeds["plain"],
        "mfu": {who: speed * flops_per_token(setting.shape) / top if top else None for who, speed in speeds.items()},
        "peak_flops": top,
        "peak_gb": {"regard": peer.first_peak / 1e9, "plain": peer.peak / 1e9},
        "compiled": lines.notes,
        "seconds_of_first_line": lines.rows[0]["seconds"],
        "lines": {"regard": lines.rows, "plain": peer.rows, "plain, other seeds": [other.rows for other in others]},
    }
    for row, theirs in zip(lines.rows, peer.rows, strict=True):
        spread = [other.rows[theirs["step"] // LINE - 1]["loss"] for other in others]
        print(
            f"step {row['step']}: regard {row['tokens_per_second']:,.0f} tokens/s, loss {row['loss']:.3f}; "
            f"plain {theirs['tokens_per_second']:,.0f}, {theirs['loss']:.3f}, other seeds {np.round(spread, 3)}"
        )
    print(
        f"ratio {found['ratio']:.3f}; MFU {found['mfu']}; peak GB {found['peak_gb']}; "
        f"first line after {found['seconds_of_first_line']} s",
        flush=True,
    )
    return found


def long_texts(setting: Setting, folder: Path, factor: int = 16) -> dict[str, Any]:
    """Returns tokens a second by mechanism, with texts `factor` times as long and as many tokens in a batch."""
    shape = setting.shape
    longer = Setting(
        Shape(shape.vocabulary, factor * shape.length, shape.layers, shape.heads, shape.width),
        max(1, setting.batch // factor),
        lines=4,
        device=setting.device,
    )
    speeds = {}
    for mechanism in ("softmax", "elu", "performer"):
        lines = Lines(longer.lines)
        reset_peak(setting)
        seconds = run(changes(longer, folder / "tokens", f"model.mechanism={mechanism}"), longer, lines)
        speeds[mechanism] = lines.speed
        print(
            f"{longer.shape.length} tokens, {mechanism}: {lines.speed:,.0f} tokens/s, "
            f"{lines.speed / speeds['softmax']:.2f} of softmax, peak {peak_allocated(setting) / 1e9:.1f} GB, "
            f"{seconds:.0f} s in all",
            flush=True,
        )
    return {"shape": asdict(longer.shape), "batch": longer.batch, "tokens_per_second": speeds}


def small_model(setting: Setting) -> dict[str, Any]:
    """Returns the milliseconds of a step of `knowledge/pretrain` at its full size, by default and as a graph alone."""
    found = {}
    variant, modes = "full", ("auto", "graph")
    if setting.device != "cuda":
        variant, modes = None, ("auto", "off")
    for mode in modes:
        lines = Lines(6)
        seconds = run([f"train.compile={mode}"], setting, lines, "knowledge/pretrain", variant)
        tokens = lines.rows[-1]["tokens"] / lines.rows[-1]["step"]
        found[mode] = {
            "step_ms": 1e3 * tokens / lines.speed,
            "seconds_of_first_line": lines.rows[0]["seconds"],
            "steps_of_first_line": lines.rows[0]["step"],
            "compiled": lines.notes,
        }
        print(f"knowledge, {mode}: {found[mode]}, {seconds:.0f} s in all", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--only", default="race,long,small", help="parts with commas")
    parser.add_argument("--seeds", type=int, default=2, help="of the peer, for the spread of its losses")
    parser.add_argument("--lines", type=int, default=9, help="of metrics, each of 25 steps")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")
    options = parser.parse_args()
    setting = TINY if options.tiny else Setting(lines=options.lines)
    document: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": torch.cuda.get_device_name() if setting.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "shape": asdict(setting.shape),
        "batch": setting.batch,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "race": lambda: race(setting, folder, options.seeds),
            "long": lambda: long_texts(setting, folder),
            "small": lambda: small_model(setting),
        }
        for part in options.only.split(","):
            if part == "long" and not (folder / "tokens").exists():
                write_corpus(folder / "tokens", setting.shape.vocabulary)
            document[part] = parts[part]()
            if options.out is not None:  # after each part: what was measured stays
                with atomic_write(options.out) as out:
                    out.write(json.dumps(document, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
