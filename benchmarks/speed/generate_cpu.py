"""Generating text on a CPU: against transformers' `generate`, and time a token against the length of the context.

Both sides run the same GPT-2 of char size (4 layers, 8 heads, 256 wide) with the same weights, in turn, in one process,
and must give the same tokens. Figures are medians of the ratio of neighbouring runs, as the machine's speed wanders.

    python benchmarks/speed/generate_cpu.py [--runs 9] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from twins import sharpened, twin

from regard.generate import generate
from regard.models import GPT

PROMPT, NEW = 8, 120  # tokens: together the block of 128


def twins() -> tuple[GPT, Any]:
    """Our GPT and transformers' GPT-2 with the same weights."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=256, n_layer=4, n_head=8, bos_token_id=None, eos_token_id=None
    )
    theirs = sharpened(GPT2LMHeadModel(config))
    return twin(theirs), theirs


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def against_transformers(B: int, runs: int) -> dict[str, Any]:
    """Tokens a second of both, and the median of the ratios of neighbouring runs."""
    ours, theirs = twins()
    prompts = torch.randint(0, 256, (B, PROMPT), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(prompts)

    def mine() -> list[list[int]]:
        return [result.tokens for result in generate(ours, prompts, max_tokens=NEW)]

    def other() -> list[list[int]]:
        out = theirs.generate(prompts, attention_mask=seen, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        return out[:, PROMPT:].tolist()  # type: ignore[no-any-return]

    if mine() != other():
        raise SystemExit("the two sides give different tokens: the comparison would mean nothing")
    times = [(seconds(mine), seconds(other)) for _ in range(runs)]
    rates = [statistics.median(B * NEW / t for t in side) for side in zip(*times, strict=True)]
    ratio = statistics.median(b / a for a, b in times)
    return {"batch": B, "regard": rates[0], "transformers": rates[1], "ratio": ratio}


def against_context(mechanism: str, short: int, long: int, runs: int) -> dict[str, Any]:
    """Time a token with a long context behind it, over that with a short one."""
    torch.manual_seed(0)
    model = GPT.preset("char", position="rotary", mechanism=mechanism).eval()
    prompt = torch.randint(0, 256, (1, long))

    @torch.inference_mode()
    def prepared(n: int) -> Callable[[], Any]:
        state = model.prefill(prompt[:, :n], None, 64)[1]
        token = prompt[:, :1]

        @torch.inference_mode()
        def run() -> None:
            kept = model.fork(state)
            for _ in range(32):
                kept = model.extend(token, kept, last=True)[1]

        return run

    at_short, at_long = prepared(short), prepared(long)
    at_short(), at_long()
    times = [(seconds(at_short), seconds(at_long)) for _ in range(runs)]
    per_token = [statistics.median(side) / 32 * 1e3 for side in zip(*times, strict=True)]
    ratio = statistics.median(b / a for a, b in times)
    return {"mechanism": mechanism, "ms_short": per_token[0], "ms_long": per_token[1], "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9, help="runs of each side")
    parser.add_argument("--short", type=int, default=1024, help="tokens of the short context")
    parser.add_argument("--long", type=int, default=16384, help="tokens of the long context")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    asked = parser.parse_args()
    peers = [against_transformers(B, asked.runs) for B in (1, 32)]
    contexts = [against_context(m, asked.short, asked.long, asked.runs) for m in ("softmax", "elu", "performer")]
    caches = {g: GPT.preset("char", attention={"groups": g}).summary().total.state for g in (8, 1)}
    found = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": peers,
        "context": {"short": asked.short, "long": asked.long, "rows": contexts},
        "cache_bytes": caches,
    }
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['machine']}, torch {torch.__version__}; medians of {asked.runs} runs\n")
    print(f"{'batch':>5}  {'regard tok/s':>12}  {'transformers tok/s':>18}  {'ratio':>6}")
    for row in peers:
        print(f"{row['batch']:>5}  {row['regard']:>12,.0f}  {row['transformers']:>18,.0f}  {row['ratio']:>6.2f}")
    print(f"\n{'mechanism':<10}  {f'ms a token at {asked.short}':>20}  {f'at {asked.long}':>10}  {'ratio':>6}")
    for row in contexts:
        print(f"{row['mechanism']:<10}  {row['ms_short']:>20.3f}  {row['ms_long']:>10.3f}  {row['ratio']:>6.2f}")
    print(f"\ncache, multi-head {caches[8]:,} bytes, multi-query {caches[1]:,}: {caches[8] / caches[1]:.0f} to 1")


if __name__ == "__main__":
    main()
