"""Steps of training with FSDP2 in one process over nccl, against steps of the plain model, as a ratio within one run.

    python benchmarks/speed/fsdp_gpu.py --out FILE

GPT-2 with 124M weights in bfloat16, batch 8 of 1,024 tokens, without CUDA graphs. With one process nothing is sent:
what FSDP2 costs here is its own work. The two take turns, `--steps` each. Exits with 1 where FSDP2 takes more than 1.05
of the plain time. `--tiny` tries the script anywhere, over gloo, and only prints.
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


def build_trainer(folder: Path, shard: bool, tiny: bool, device: torch.device) -> Trainer:
    """Returns a trainer of the model; both start from the same weights."""
    torch.manual_seed(0)
    rows, length = (4, 32) if tiny else (8, 1024)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
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
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            name: build_trainer(Path(folder) / name, name == "FSDP2", options.tiny, device)
            for name in ("plain", "FSDP2")
        }
        for trainer in trainers.values():
            seconds_a_step(trainer, 3)
        times: dict[str, list[float]] = {name: [] for name in trainers}
        for _ in range(options.rounds):
            for name, trainer in trainers.items():
                times[name].append(seconds_a_step(trainer, options.steps))
    dist.destroy_process_group()
    ratio = statistics.median(b / a for a, b in zip(times["plain"], times["FSDP2"], strict=True))
    milliseconds = {name: 1e3 * statistics.median(found) for name, found in times.items()}
    print(f"plain {milliseconds['plain']:.2f} ms, FSDP2 {milliseconds['FSDP2']:.2f} ms, ratio {ratio:.3f}")
    if options.out:
        machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        document = {"date": str(date.today()), "machine": machine, "torch": torch.__version__}
        document |= {"settings": vars(options) | {"out": str(options.out)}, "ms": milliseconds, "ratio": ratio}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(not options.tiny and ratio > TARGET)


if __name__ == "__main__":
    main()
