"""Steps of training with FSDP2 in one process over nccl, against steps of the plain model, as a ratio within one run.

    python benchmarks/speed/fsdp_gpu.py --out FILE

GPT-2 with 124M weights in bfloat16, `--rows` of 1,024 tokens, without CUDA graphs. With one process nothing is sent:
what FSDP2 costs here is its own work, on the host for the most part: it shows where a batch is so small that the GPU
waits for the host. The two take turns, `--steps` each. Exits with 1 where FSDP2 takes more than 1.05 of the plain time
with the most rows. `--tiny` tries the script anywhere, over gloo, and only prints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import regard
from regard.data.batch import Batch
from regard.data.tokenizers import Bytes
from regard.train import Run, Task, TrainConfig, Trainer
from regard.train.progress import Progress

TARGET = 1.05


class RandomTokens(Task):
    """Rows of random tokens, the same for every step."""

    def __init__(self, rows: int, length: int, vocabulary: int, device: torch.device) -> None:
        self.tokenizer = Bytes()
        self.rows = rows
        self.length = length
        source = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (rows, length + 1), generator=source).to(device)
        self.fixed = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def batch(self, step: int, size: int) -> Batch:
        return self.fixed


def build_trainer(folder: Path, shard: bool, rows: int, tiny: bool, device: torch.device) -> Trainer:
    """Returns a trainer of the model; both start from the same weights."""
    torch.manual_seed(0)
    length = 32 if tiny else 1024
    model = regard.GPT.preset("nano" if tiny else "gpt2").to(device)
    task = RandomTokens(rows, length, model.config.vocabulary, device)
    settings = {"steps": 1000, "batch": rows, "compile": "off", "precision": "auto", "shard": shard}
    config = TrainConfig().but(**settings)
    run = Run.create(folder, {"train": config.as_dict()})
    return Trainer(model, task, config, run, Progress())


def seconds_a_step(trainer: Trainer, steps: int) -> float:
    """Returns the mean time of some steps, the host included."""
    start = time.perf_counter()
    for _ in range(steps):
        trainer._step()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def compare(rows: int, rounds: int, steps: int, tiny: bool, device: torch.device) -> dict[str, Any]:
    """Returns the milliseconds of a step, plain and with FSDP2, the median of the rounds, and that of their ratios."""
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            name: build_trainer(Path(folder) / name, name == "FSDP2", rows, tiny, device) for name in ("plain", "FSDP2")
        }
        for trainer in trainers.values():
            seconds_a_step(trainer, 3)
        times: dict[str, list[float]] = {name: [] for name in trainers}
        for _ in range(rounds):
            for name, trainer in trainers.items():
                times[name].append(seconds_a_step(trainer, steps))
    ratio = statistics.median(b / a for a, b in zip(times["plain"], times["FSDP2"], strict=True))
    milliseconds = {name: 1e3 * statistics.median(found) for name, found in times.items()}
    print(f"{rows} rows: plain {milliseconds['plain']:.2f} ms, FSDP2 {milliseconds['FSDP2']:.2f} ms, ratio {ratio:.3f}")
    return {"rows": rows, "ms": milliseconds, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32], help="of a batch, the most last")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda:0")
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    results = [compare(rows, options.rounds, options.steps, options.tiny, device) for rows in options.rows]
    dist.destroy_process_group()
    if options.out:
        machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        document = {"date": str(date.today()), "machine": machine, "torch": torch.__version__}
        document |= {"settings": vars(options) | {"out": options.out.name}, "results": results}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(not options.tiny and results[-1]["ratio"] > TARGET)


if __name__ == "__main__":
    main()
