r"""What makes a small model know more from real text: many settings of the knowledge experiment, trained at once.

    python benchmarks/reproductions/knowledge_stacked.py --documents documents.txt --questions questions.tsv \
        --out results.json [--steps 6000] [--held-out 400]

All models of the published size stand in one stack: every weight has a leading dimension of models, every product is a
batch of products, and the corruption of each row is drawn by the settings of its model. A row is a document with a hole
or, once a model has begun to answer, a question with probability `questions`. The people held out are never asked in
training. Printed are right answers of people held out (dev) and of training, and how many of the held-out answers the
model completes where their document has them (recall): whether it has stored what it then does not say.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from regard.data.batch import IGNORE
from regard.data.corruption import longest_cut, widen_to_words, with_hole
from regard.data.questions import (
    MARK,
    PAD,
    pack_documents,
    question_batch,
    read_documents,
    read_questions,
    special_id,
    vocabulary,
)

LAYERS, HEADS, WIDTH = 4, 8, 256
BLOCK, BATCH, AHEAD = 128, 128, 16
# What is varied. `cut`: share of documents cut to a random length. Questions are mixed in from the share `start` of the
# steps on; `tune_lr`: their own cosine from this rate instead of the one that goes on.
BASE = {"cut": 0.0, "low": 1 / 8, "high": 3 / 8, "lr": 3e-3, "dropout": 0.05, "start": 0.6, "questions": 0.3}
LOW = BASE | {"lr": 1.5e-3, "dropout": 0.0}
CASES = {
    "lr 3e-3, dropout .05": BASE,
    "lr 3e-3, dropout 0": BASE | {"dropout": 0.0},
    "lr 1.5e-3, dropout 0": LOW,
    "lr 1.5e-3, dropout .05": LOW | {"dropout": 0.05},
    "lr 1.5e-3, dropout 0, questions alone in the last 3%": LOW | {"start": 0.97, "questions": 1.0, "tune_lr": 2e-4},
    "lr 1.5e-3, dropout 0, cut": LOW | {"cut": 1.0},
    "lr 1.5e-3, dropout 0, a tenth of questions from .3": LOW | {"questions": 0.1, "start": 0.3},
    "lr 8e-4, dropout 0": LOW | {"lr": 8e-4},
    "lr 3e-3, dropout .05, cut": BASE | {"cut": 1.0},
    "lr 3e-3, dropout .1, cut": BASE | {"cut": 1.0, "dropout": 0.1},
    "lr 3e-3, dropout .05, cut, spans to 75%": BASE | {"cut": 1.0, "low": 0.05, "high": 0.75},
}


class Data:
    """Documents and questions on the device; `held` are the people held out."""

    def __init__(self, documents: str, questions: str, held_out: int, device: str) -> None:
        texts = read_documents(documents)
        asked = read_questions(questions, answers=True)
        people = sorted({q.text for q in asked})
        random.Random(0).shuffle(people)
        out = set(people[:held_out])
        self.tokenizer = vocabulary([*texts, *(f"{q.text}{q.answer}" for q in asked)])
        self.mark, self.pad = (special_id(self.tokenizer, token) for token in (MARK, PAD))
        self.space = self.tokenizer.encode(" ")[0]
        rows, lengths = pack_documents(self.tokenizer, texts, longest_cut(BLOCK))
        self.rows, self.lengths = rows.to(device), lengths.to(device)
        self.width = int(lengths.max()) + 1
        self.device = device
        self.train = self._pack([q for q in asked if q.text not in out])
        self.held = self._pack([q for q in asked if q.text in out])
        self.recall = self._recall(texts, [q for q in asked if q.text in out])

    def _pack(self, questions: list) -> tuple[Tensor, Tensor]:
        batch = question_batch(self.tokenizer, questions, BLOCK)
        return batch.x[:, : self.width].to(self.device), batch.y[:, : self.width].to(self.device)

    def _recall(self, texts: list[str], questions: list) -> tuple[Tensor, Tensor]:
        """Returns the documents about these people that hold the answer, with it as the only target."""
        x, y = [], []
        for question in questions:
            name = question.text.removeprefix("Where was ").removesuffix(" born?")
            for text in texts:
                at = text[: self.width].find(question.answer)
                if not text.startswith(f"{name}.") or at < 1:
                    continue
                ids = torch.tensor(self.tokenizer.encode(text)[: self.width])
                row = torch.full((2, self.width), self.pad)
                row[0, : len(ids)] = ids
                row[1] = IGNORE
                stop = min(at + len(question.answer), len(ids))
                row[1, at - 1 : stop - 1] = ids[at:stop]
                x.append(row[0])
                y.append(row[1])
                break
        return torch.stack(x).to(self.device), torch.stack(y).to(self.device)

    def batches(self, cases: list[dict], order: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x and y [n,M,B,T] of documents `order` [n,B]; `shares` [n,M] of the rows are questions."""
        n, B = order.shape
        M = len(cases)

        def column(key: str) -> Tensor:
            values = torch.tensor([case[key] for case in cases], device=self.device)
            return values.view(1, M, 1).expand(n, M, B).reshape(-1)

        chosen = order[:, None].expand(n, M, B).reshape(-1)
        documents, length = self.rows[chosen], self.lengths[chosen]
        u = torch.rand(6, len(chosen), device=self.device)
        cut = (4 + u[0] * (longest_cut(BLOCK) - 3)).long().minimum(length)
        cut = torch.where(u[4] < column("cut"), cut, length)
        low, high = column("low"), column("high")
        middle = cut * (low + high) / 2
        half = torch.minimum(cut * (high - low) / 2, middle - 1).clamp(min=0)
        span = (middle + half * (2 * u[1] - 1) + u[2]).long().clamp(min=1).minimum(cut)
        start = (u[3] * (cut - span + 1)).long()
        span, start = widen_to_words(documents, cut, span, start, self.space)
        holes = with_hole(documents, cut, span, start, BLOCK, self.mark, self.pad)
        asks = (u[5] < shares[:, :, None].expand(n, M, B).reshape(-1))[:, None]
        picked = torch.randint(len(self.train[0]), (len(chosen),), device=self.device)
        x = torch.where(asks, self.train[0][picked], holes.x[:, : self.width])
        y = torch.where(asks, self.train[1][picked], holes.y[:, : self.width])
        return x.view(n, M, B, -1), y.view(n, M, B, -1)


class Stack:
    """M GPTs as regard builds them (pre-norm, rotary, tied), in bfloat16 over float32 weights, with AdamW.

    All weights of a model are one row of `flat` [M,n], so that the optimiser is one kernel.
    """

    def __init__(self, dropout: list[float], vocabulary: int, T: int, device: str) -> None:
        self.M, self.V = len(dropout), vocabulary
        D, K = WIDTH, WIDTH // HEADS
        deep = 0.02 / math.sqrt(2 * LAYERS)
        block = {"ln1.w": (1.0, D), "ln1.b": (0.0, D), "ln2.w": (1.0, D), "ln2.b": (0.0, D)}
        block |= {"qkv.w": (0.02, D, 3 * D), "qkv.b": (0.0, 3 * D), "out.w": (deep, D, D), "out.b": (0.0, D)}
        block |= {"in.w": (0.02, D, 4 * D), "in.b": (0.0, 4 * D), "up.w": (deep, 4 * D, D), "up.b": (0.0, D)}
        self.keys = list(block)
        shapes = {"emb": (0.02, vocabulary, D), "lnf.w": (1.0, D), "lnf.b": (0.0, D)}
        shapes |= {f"{n}.{key}": shape for n in range(LAYERS) for key, shape in block.items()}
        rows, decays = [], []
        for name, (size, *shape) in shapes.items():
            is_matrix = len(shape) == 2
            part = torch.randn(self.M, *shape) * size if is_matrix else torch.full((self.M, *shape), size)
            rows.append(part.flatten(1))
            decays.append(torch.full((rows[-1].shape[1],), 0.1 * (is_matrix and name != "emb")))
        self.flat = torch.cat(rows, 1).to(device)
        self.decay = torch.cat(decays).to(device)
        self.names, self.weights, at = list(shapes), [], 0
        for _, *shape in shapes.values():
            stride = (self.flat.shape[1], *((shape[1], 1) if len(shape) == 2 else (1,)))
            view = torch.as_strided(self.flat, (self.M, *shape), stride, at)
            self.weights.append(view.detach().requires_grad_())
            at += math.prod(shape)
        self.moments = torch.zeros(2, *self.flat.shape, device=device)
        self.count = torch.zeros(self.M, 1, device=device)
        self.lr = torch.zeros(self.M, 1, device=device)
        self.dropout = torch.tensor(dropout, device=device).view(-1, 1, 1)
        angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, K, 2) / K).repeat(2)
        self.cos, self.sin = angles.cos().to(device)[:, None], angles.sin().to(device)[:, None]  # [T,1,K]

    def _drop(self, x: Tensor, dropout: Tensor | None) -> Tensor:
        if dropout is None:
            return x
        return x * (torch.rand_like(x) >= dropout) / (1 - dropout)

    def _embed(self, x: Tensor, embedding: Tensor, dropout: Tensor | None) -> Tensor:
        # A product, as its gradient is one too: adding up rows one by one is slow where few characters are frequent.
        hot = (x.flatten(1)[..., None] == torch.arange(self.V, device=x.device)).bfloat16()
        return self._drop(torch.bmm(hot, embedding.bfloat16()).float(), dropout)

    def _block(self, h: Tensor, B: int, dropout: Tensor | None, *weights: Tensor) -> Tensor:
        p = dict(zip(self.keys, weights, strict=True))
        K, T = WIDTH // HEADS, h.shape[1] // B

        def linear(y: Tensor, name: str) -> Tensor:
            return torch.bmm(y.bfloat16(), p[f"{name}.w"].bfloat16()) + p[f"{name}.b"].bfloat16()[:, None]

        def norm(y: Tensor, name: str) -> Tensor:
            return functional.layer_norm(y, (WIDTH,)) * p[f"{name}.w"][:, None] + p[f"{name}.b"][:, None]

        def rotate(z: Tensor) -> Tensor:
            first, second = z.float().chunk(2, -1)
            turned = z.float() * self.cos[:T] + torch.cat([-second, first], -1) * self.sin[:T]
            return turned.bfloat16().transpose(1, 2)

        q, k, v = linear(norm(h, "ln1"), "qkv").view(self.M * B, T, 3, HEADS, K).unbind(2)
        out = functional.scaled_dot_product_attention(rotate(q), rotate(k), v.transpose(1, 2), is_causal=True)
        out = out.transpose(1, 2).reshape(self.M, B * T, WIDTH)
        h = h + self._drop(linear(out, "out"), dropout)
        hidden = functional.gelu(linear(norm(h, "ln2"), "in"), approximate="tanh")
        return h + self._drop(linear(hidden, "up"), dropout)

    def _adamw(self, gradients: Tensor) -> None:
        norm = gradients.square().sum(1, keepdim=True).sqrt()
        g = gradients * (1 / (norm + 1e-6)).clamp(max=1.0)
        self.count += 1
        self.moments[0].lerp_(g, 0.1)
        self.moments[1].lerp_(g * g, 0.001)
        mean = self.moments[0] / (1 - 0.9**self.count)
        square = self.moments[1] / (1 - 0.999**self.count)
        self.flat.mul_(1 - self.lr * self.decay)
        self.flat.sub_(self.lr * mean / (square.sqrt() + 1e-8))

    def compile(self) -> None:
        """Compiles the parts, one block for all layers."""
        for name in ("_embed", "_block", "_adamw"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False))

    def logits(self, x: Tensor, dropout: Tensor | None) -> Tensor:
        """Returns the logits [M,B·T,V] of tokens x [M,B,T]."""
        p = dict(zip(self.names, self.weights, strict=True))
        h = self._embed(x, p["emb"], dropout)
        for n in range(LAYERS):
            h = self._block(h, x.shape[1], dropout, *(p[f"{n}.{key}"] for key in self.keys))
        h = functional.layer_norm(h, (WIDTH,)) * p["lnf.w"][:, None] + p["lnf.b"][:, None]
        return torch.bmm(h.bfloat16(), p["emb"].bfloat16().mT)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Trains all models by one step and returns their losses [M]."""
        y = y.flatten(1)
        logits = self.logits(x, self.dropout).float()
        each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="none")
        losses = each.view(self.M, -1).sum(1) / (y != IGNORE).sum(1).clamp(min=1)
        gradients = torch.autograd.grad(losses.sum(), self.weights)
        with torch.no_grad():
            self._adamw(torch.cat([g.flatten(1) for g in gradients], 1))
        return losses.detach()

    @torch.no_grad()
    def score(self, rows: tuple[Tensor, Tensor], part: int = BATCH) -> list[float]:
        """Returns the share of rows of which each model gets all targets right, `part` rows at a time."""
        x, y = rows
        right = torch.zeros(self.M, device=x.device)
        for start in range(0, len(x), part):
            at = torch.arange(start, start + part, device=x.device) % len(x)
            got = self.logits(x[at].expand(self.M, -1, -1), 0 * self.dropout).view(self.M, part, x.shape[1], -1)
            good = ((got.argmax(-1) == y[at]) | (y[at] == IGNORE)).all(-1)
            right += good[:, : len(x) - start].sum(1)
        return (right / len(x)).tolist()


def cosine(step: int, steps: int, floor: float = 0.1) -> float:
    """Returns the rate as a share of the highest: a rise over the first fiftieth, then a cosine down to the floor."""
    warmup = max(1, steps // 50)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def plan(case: dict, steps: int) -> tuple[list[float], list[float]]:
    """Returns the rate and the share of questions at each step."""
    start = int(case["start"] * steps)
    rates = [case["lr"] * cosine(step, steps) for step in range(steps)]
    if "tune_lr" in case:
        reading = [case["lr"] * cosine(step, start) for step in range(start)]
        rates = reading + [case["tune_lr"] * cosine(step, steps - start) for step in range(steps - start)]
    return rates, [case["questions"] * (step >= start) for step in range(steps)]


def main(asked: argparse.Namespace) -> None:
    torch.manual_seed(asked.seed)
    data = Data(asked.documents, asked.questions, asked.held_out, asked.device)
    cases = {name: CASES[name] for name in asked.only}
    settings = list(cases.values())
    stack = Stack([case["dropout"] for case in settings], data.tokenizer.size, data.width, asked.device)
    if asked.device == "cuda":
        stack.compile()
    plans = [plan(case, asked.steps) for case in settings]
    rates = torch.tensor([p[0] for p in plans], device=asked.device).T
    shares = torch.tensor([p[1] for p in plans], device=asked.device).T
    began, log, epoch = time.time(), [], torch.empty(0, dtype=torch.long, device=asked.device)
    for step in range(asked.steps):
        place = step % AHEAD
        if place == 0:
            n = min(AHEAD, asked.steps - step)
            while len(epoch) < n * BATCH:
                epoch = torch.cat([epoch, torch.randperm(len(data.rows), device=asked.device)])
            x, y = data.batches(settings, epoch[: n * BATCH].view(n, BATCH), shares[step : step + n])
            epoch = epoch[n * BATCH :]
        for m, case in enumerate(settings):
            if "tune_lr" in case and step == int(case["start"] * asked.steps):
                stack.moments[:, m] = 0  # a training of its own begins with an optimiser of its own
                stack.count[m] = 0
        stack.lr.copy_(rates[step][:, None])
        losses = stack.step(x[place], y[place])
        if (step + 1) % max(1, asked.steps // 10) == 0:
            scores = {
                "dev": stack.score(data.held),
                "train": stack.score(data.train),
                "recall": stack.score(data.recall),
            }
            log.append({"step": step + 1, "seconds": time.time() - began, "loss": losses.tolist(), **scores})
            for m, name in enumerate(cases):
                shown = "  ".join(f"{key} {100 * value[m]:5.1f}" for key, value in scores.items())
                print(f"{step + 1:6d} {time.time() - began:6.1f} s  {shown}  loss {losses[m]:.3f}  {name}", flush=True)
    Path(asked.out).write_text(json.dumps({"cases": cases, "steps": asked.steps, "log": log}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", required=True)
    parser.add_argument("--questions", required=True)
    parser.add_argument("--out", default="knowledge_stacked.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    main(parser.parse_args())
