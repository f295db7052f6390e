"""Training speed on a CPU against a plain GPT of PyTorch's own parts, as ratios within one run.

    python benchmarks/speed/train_cpu.py [--save]

Both models start from the same weights and take turns, one step each: forward, backward, optimiser. Two threads,
float32, the preset "char" (4 layers, 8 heads, 256 wide, 128 tokens) at batch 64. Before the race both are trained
without dropout on the same batches, and their losses must agree. Exits with 1 where a ratio misses its target.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.kernels.dropout import dropout
from regard.mechanisms import Softmax
from regard.shapes import Mask

L, H, D, T, B, N = 4, 8, 256, 128, 64, 128
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95)}


class PlainBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.drop = p, nn.Dropout(p)
        self.norm1, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm2, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(*y.shape[:2], H, D // H).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(D, -1))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p)
        x = x + self.drop(self.out(heads.transpose(1, 2).reshape(x.shape)))
        hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.drop(self.down(hidden))


class PlainGPT(nn.Module):
    """GPT-2 as most people write it; always training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.tokens, self.places, self.drop = nn.Embedding(N, D), nn.Embedding(T, D), nn.Dropout(p)
        self.blocks = nn.Sequential(*(PlainBlock(p) for _ in range(L)))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, N, bias=False)
        self.head.weight = self.tokens.weight

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])))
        return functional.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def take(self, other: regard.GPT) -> None:
        """The weights of the other model."""
        pairs = [(self.tokens, other.embedding), (self.norm, other.stack.final_norm)]
        for mine, theirs in zip(self.blocks, other.stack.layers, strict=True):
            attention, mlp = theirs.attention, theirs.mlp
            pairs += [(mine.norm1, theirs.attention_norm), (mine.qkv, attention.project), (mine.out, attention.out)]
            pairs += [(mine.norm2, theirs.mlp_norm), (mine.up, mlp.into), (mine.down, mlp.out)]
        for mine, theirs in pairs:
            mine.load_state_dict(theirs.state_dict())
        self.places.weight.copy_(next(other.stack.positions.parameters()))


def models(p: float) -> tuple[regard.GPT, PlainGPT]:
    """Ours and the peer with the same weights."""
    torch.manual_seed(0)
    ours = regard.GPT.preset("char", vocabulary=N, dropout=p, attention={"dropout": p})
    peer = PlainGPT(p)
    peer.take(ours)
    return ours, peer


def optimiser(model: nn.Module, fused: bool) -> torch.optim.AdamW:
    """Only matrices decay. PyTorch fuses AdamW on a CPU only when asked."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **SETTINGS, **({"fused": True} if fused else {}))


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(N, (B, T + 1))
    return tokens[:, :-1], tokens[:, 1:]


def stepper(model: nn.Module, fused: bool) -> Callable[[tuple[Tensor, Tensor]], float]:
    """One training step on a batch, as a function that returns its loss."""
    steps, loss_of = optimiser(model, fused), model.loss

    def step(data: tuple[Tensor, Tensor]) -> float:
        loss = loss_of(*data)
        steps.zero_grad(set_to_none=True)
        loss.backward()
        steps.step()
        return loss.item()

    return step


def check_fair(count: int = 4) -> float:
    """The largest difference of the losses over some steps without dropout; more than 1e-4 ends the race."""
    steps = [stepper(model, fused) for model, fused in zip(models(0.0), (True, False), strict=True)]
    batches = [batch() for _ in range(count)]
    ours, theirs = ([step(data) for data in batches] for step in steps)
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if worst > 1e-4:
        raise SystemExit(f"the models are not the same: their losses differ by {worst:.1e} without dropout")
    return worst


def race(runs: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each, taken in turn after two warm-ups, in a direction that changes each round."""
    times: list[list[float]] = [[] for _ in runs]
    for round_ in range(-2, rounds):
        for i in range(len(runs))[:: 1 if round_ % 2 else -1]:
            start = time.perf_counter()
            runs[i]()
            if round_ >= 0:
                times[i].append(time.perf_counter() - start)
    return times


def row(what: str, ours: list[float], peer: list[float], target: float | None = None) -> dict[str, object]:
    """The median of the ratios of single rounds, and how far its quarters lie apart."""
    quarters = statistics.quantiles((b / a for a, b in zip(ours, peer, strict=True)), n=4)
    low, ratio, high = (round(x, 2) for x in quarters)
    return {
        "what": what,
        "ours_ms": round(1000 * statistics.median(ours), 1),
        "peer_ms": round(1000 * statistics.median(peer), 1),
        "ratio": ratio,
        "quarters": [low, high],
        "target": target,
        "reached": target is None or ratio >= target,
    }


def steps(p: float, target: float, rounds: int) -> list[dict[str, object]]:
    """Whole training steps, with the fused AdamW that regard's trainer uses and without it."""
    ours, peer = models(p)
    data = batch()
    entrants = [(ours, True), (models(p)[0], False), (peer, False)]
    fused, same, theirs = race([partial(stepper(*e), data) for e in entrants], rounds)
    name = f"a step, dropout {p}"
    return [row(name, fused, theirs, target), row(f"{name}, both with plain AdamW", same, theirs)]


def parts(p: float, rounds: int) -> list[dict[str, object]]:
    """What differs, measured alone, as much of it as a step has: attention of all layers, and all other dropout."""
    mechanism, peer_drop = Softmax(), nn.Dropout(p)
    mechanism.dropout = p
    qkv, x = torch.randn(B, T, 3 * D, requires_grad=True), torch.randn(B, T, D, requires_grad=True)
    d = torch.randn(B, T, D)

    def attention(attend: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(L):
                q, k, v = (y.view(B, T, H, D // H).transpose(1, 2) for y in qkv.split(D, -1))
                attend(q, k, v).transpose(1, 2).reshape(B, T, D).backward(d)

        return run

    def other(drop: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        return lambda: [drop(x).backward(d) for _ in range(2 * L + 1)] and None

    runs = [
        attention(lambda q, k, v: mechanism(q, k, v, Mask(causal=True))),
        attention(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)),
    ]
    runs += [other(lambda x: dropout(x, p)), other(peer_drop)] if p else []
    times = race(runs, rounds)
    rows = [row(f"of it attention, dropout {p}", *times[:2])]
    return rows + ([row("of it the other dropout", *times[2:])] if p else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/train-cpu-DATE.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    difference = check_fair()
    rows = []
    for p, target in ((0.1, 1.2), (0.0, 1.0)):
        rows += steps(p, target, options.rounds) + parts(p, options.rounds)
    result = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/speed/train_cpu.py",
        "versions": {"regard": regard.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "threads": options.threads},
        "model": {"layers": L, "heads": H, "width": D, "tokens": T, "batch": B, "vocabulary": N},
        "rounds": options.rounds,
        "largest_difference_of_losses": difference,
        "rows": rows,
    }
    if options.save:
        folder = Path(__file__).parents[1] / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"train-cpu-{result['date']}.json").write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{'what':44} {'ours ms':>9} {'peer ms':>9} {'ratio':>7} {'middle half':>13} {'target':>7}")
        for r in rows:
            low, high = r["quarters"]
            target = "" if r["target"] is None else f"{r['target']:.2f}"
            mark = "" if r["reached"] else "  missed"
            print(
                f"{r['what']:44} {r['ours_ms']:>9} {r['peer_ms']:>9} {r['ratio']:>7} {f'{low}–{high}':>13} "
                f"{target:>7}{mark}"
            )
    sys.exit(0 if all(r["reached"] for r in rows) else 1)


if __name__ == "__main__":
    main()
