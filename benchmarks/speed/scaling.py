"""An estimate of training on many GPUs, from the cost model and the speeds of links that their makers state.

    python benchmarks/speed/scaling.py            print the table
    python benchmarks/speed/scaling.py --docs     write it into docs/scaling.md

Nothing is measured here. The formulas stand on the page; a test compares the page with this script.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

import regard
from regard import cost

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
GPU = cost.device("H200")
PER_NODE = 8
NVLINK = 450e9  # bytes a second of one GPU in one direction: fourth-generation NVLink has 900 GB/s in both
INFINIBAND = 50e9  # bytes a second of one GPU in one direction: a 400 Gb/s adapter for each
WEIGHT_BYTES = 4  # weights and gradients are float32; products are computed in bfloat16
ADAM_BYTES = 28  # of a weight that a step of AdamW reads and writes: weight, gradient, two moments
STATE_BYTES = 16  # of a weight that lie in memory: weight, gradient, two moments
WORLD_SIZES = (8, 64, 512)


@dataclass(frozen=True)
class Setting:
    """A model, and the rows of a batch that each GPU computes."""

    name: str
    model: regard.GPT
    rows: int
    tokens: int

    @property
    def weights(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def settings() -> list[Setting]:
    """Returns GPT-2 with 124M weights, and a GPT of the size of the smallest Llama, on no device."""
    with torch.device("meta"):
        small = regard.GPT.preset("gpt2").to(torch.bfloat16)
        size = {"width": 4096, "layers": 32, "length": 2048, "attention": {"heads": 32}}
        large = regard.GPT(small.config.but(**size)).to(torch.bfloat16)
    return [Setting("124M", small, 16, 1024), Setting("6.7B", large, 4, 2048)]


def exchange_seconds(volume: float, world_size: int) -> float:
    """Returns the seconds of one reduce-scatter or one all-gather of `volume` bytes: within each machine over NVLink,
    and between machines over InfiniBand, where each GPU carries its share of what its machine has put together."""
    local = min(world_size, PER_NODE)
    nodes = world_size // local
    within = (local - 1) / local * volume / NVLINK
    between = (nodes - 1) / nodes * volume / local / INFINIBAND
    return within + between


def estimate(setting: Setting, world_size: int, sharded: bool) -> dict[str, float]:
    """Returns seconds of computing and of exchanging, efficiencies with all and with none of it hidden, and bytes."""
    row = setting.model.summary(setting.tokens, B=setting.rows).total
    parts = world_size if sharded else 1
    compute = cost.predicted(row.training, GPU, torch.bfloat16)
    compute += ADAM_BYTES * setting.weights / parts / GPU.bandwidth
    passes = 3 if sharded else 2
    exchange = passes * exchange_seconds(WEIGHT_BYTES * setting.weights, world_size)
    return {
        "compute": compute,
        "exchange": exchange,
        "hidden": compute / max(compute, exchange),
        "waiting": compute / (compute + exchange),
        "tokens": world_size * setting.rows * setting.tokens / max(compute, exchange),
        "bytes": STATE_BYTES * setting.weights / parts + row.activations,
    }


def table() -> str:
    head = ["weights", "GPUs", "", "computing, ms", "exchanging, ms", "efficiency", "tokens/s at most", "memory, GB"]
    lines = [head, ["--:", "--:", "---"] + ["--:"] * 5]
    for setting in settings():
        for world_size in WORLD_SIZES:
            for sharded in (False, True):
                found = estimate(setting, world_size, sharded)
                lines.append(
                    [
                        setting.name,
                        str(world_size),
                        "FSDP2" if sharded else "DDP",
                        f"{found['compute'] * 1e3:.0f}",
                        f"{found['exchange'] * 1e3:.1f}",
                        f"{found['waiting']:.0%} to {found['hidden']:.0%}",
                        f"{found['tokens']:.2g}".replace("e+0", "e"),
                        f"{found['bytes'] / 1e9:.0f}",
                    ]
                )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(page: str) -> str:
    """Returns the page with the table as it should be: it stands between `<!-- estimate -->` and `<!-- end -->`."""
    before, mark, rest = page.partition("<!-- estimate -->\n")
    return f"{before}{mark}\n{table()}\n{rest[rest.index('<!-- end -->') :]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", action="store_true", help="write the table of docs/scaling.md")
    if parser.parse_args().docs:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
