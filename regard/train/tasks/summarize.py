"""The task of summarising: an encoder reads an article, a decoder writes its summary."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.config import ConfigError, Section
from regard.data.batch import IGNORE, Batch
from regard.data.files import DataError, read_lines, staged
from regard.data.notices import NoticesConfig, notices
from regard.data.pairs import Pair, Split, read_pairs, write_pairs
from regard.data.seeds import generator
from regard.data.splits import completed
from regard.data.tokenizers import BPE, Bytes, Characters, Tokenizer, load_tokenizer
from regard.data.tokens import KINDS
from regard.errors import did_you_mean
from regard.models import Model, Seq2Seq, token_loss
from regard.train.run import METRICS, write_text
from regard.train.tasks.base import Order, Task, task

START, END, COPY, UNKNOWN = "<start>", "<end>", "<copy>", "<unknown>"
GIVEN = 2  # tokens of a passage to copy that carry no loss: which passage it is cannot be known
AHEAD = 16  # batches made at a time, each of articles of like length
PART = 16384  # tokens evaluated at a time
MOST = 2000  # dev pairs that are evaluated while training
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class SummarizeData(Section):
    """Files of pairs (.jsonl, .csv, .tsv) whose keys or columns are `article` and `summary`; without `train`, generated
    pairs. What of dev and test is not given is cut off from train, `held_out` of it each.

    `tokenizer` is bpe (of `vocabulary` tokens, learned from train alone), bytes or characters, or one that exists, as a
    `tokenizer_file`. An article is cut after `source` tokens, a summary after `target`. `copies`: the share of training
    rows that copy a passage of the article instead, behind a first token of their own: to copy is half of summarising,
    and from summaries alone it is learned late.
    """

    place = "data"

    train: str = ""
    dev: str = ""
    test: str = ""
    article: str = "article"
    summary: str = "summary"
    held_out: float = 0.05
    tokenizer: str = "bpe"
    tokenizer_file: str = ""
    vocabulary: int = 8192
    source: int = 256
    target: int = 48
    copies: float = 0.0
    notices: NoticesConfig = field(default_factory=NoticesConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer not in KINDS:
            raise ConfigError(f"data.tokenizer = {self.tokenizer!r}.{did_you_mean(self.tokenizer, KINDS)}")
        for name in ("source", "target"):
            if getattr(self, name) < 2:
                raise ConfigError(f"data.{name} = {getattr(self, name)}: expected at least 2 tokens")
        if not 0 <= self.copies < 1:
            raise ConfigError(f"data.copies = {self.copies}: expected at least 0 and less than 1")
        if not 0 < self.held_out < 0.5:
            raise ConfigError(f"data.held_out = {self.held_out}: expected more than 0 and less than 0.5")


def load_pairs(config: SummarizeData, folder: Path) -> Split:
    """The pairs of a config that can be used; generated ones are written into the folder unless they are there."""
    given = {name: getattr(config, name) for name in ("train", "dev", "test")}
    if not config.train:
        named = next((name for name, path in given.items() if path), None)
        if named is not None:
            raise ConfigError(f"data.{named} is given without data.train: say which pairs to learn from")
        given = _generated(config.notices, folder / "data")
    sets = {
        name: _usable(read_pairs(path, config.article, config.summary), path) for name, path in given.items() if path
    }
    sets = completed(sets, config.held_out, config.train, "pairs")
    return Split(**sets)


def _generated(config: NoticesConfig, folder: Path) -> dict[str, str]:
    paths = {name: str(folder / f"{name}.jsonl") for name in ("train", "dev", "test")}
    stamp = folder / "notices.txt"
    asked = str(config)
    if not stamp.is_file():
        for name, pairs in notices(config)._asdict().items():
            write_pairs(paths[name], pairs)
        write_text(stamp, asked + "\n")
    elif read_lines(stamp) != [asked]:
        raise ConfigError(f"{folder} holds other pairs than data.notices asks for: choose another --out, or remove it")
    return paths


def _usable(pairs: list[Pair], path: str) -> list[Pair]:
    """Pairs with something to read and something to write; how many were left out is told."""
    kept = [pair for pair in pairs if not pair.empty]
    if not kept:
        raise DataError(f"{path}: no pair with an article and a summary among {len(pairs)}; expected at least one")
    if len(kept) < len(pairs):
        warnings.warn(
            f"{path}: {len(pairs) - len(kept):,} of {len(pairs):,} pairs have an empty article or summary "
            "and are left out",
            stacklevel=2,
        )
    return kept


def build_tokenizer(config: SummarizeData, pairs: Sequence[Pair]) -> Tokenizer:
    """The tokenizer of a config: that of its file, or one made from the pairs to learn from."""
    if config.tokenizer_file:
        made = load_tokenizer(config.tokenizer_file)
    else:
        texts = [text for pair in pairs for text in (pair.article, pair.summary or "")]
        if config.tokenizer == BPE.kind:
            made = BPE.train(texts, config.vocabulary, (START, END, COPY))
        elif config.tokenizer == Bytes.kind:
            made = Bytes((START, END, COPY))
        else:
            made = Characters.of("".join(texts), (START, END, COPY, UNKNOWN))
    absent = next((role for role in ("start", "end") if made.role(role) is None), None)
    if absent is not None:
        raise DataError(
            f"{config.tokenizer_file}: no special token for the {absent} of a summary, such as <{absent}>; expected "
            "a tokenizer that has both"
        )
    return made


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Writes tokenizer.json whole or not at all."""
    with staged(path) as file:
        stage = path.with_name(f".{path.name}.made")
        tokenizer.save(stage)
        file.write(stage.read_bytes())
        stage.unlink()


@dataclass(frozen=True)
class PairRows:
    """Pairs as padded rows of tokens, with their lengths; a target ends with <end> unless it was cut."""

    source: Tensor
    sources: Tensor
    target: Tensor
    targets: Tensor
    cut: tuple[int, int]  # articles and summaries that were too long

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device) -> PairRows:
        """The same on a device."""
        source, sources = self.source.to(device), self.sources.to(device)
        return PairRows(source, sources, self.target.to(device), self.targets.to(device), self.cut)


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[Pair], source: int, target: int) -> PairRows:
    """Pairs as rows, cut after so many tokens."""
    end = tokenizer.role("end")
    assert end is not None
    articles = [tokenizer.encode(pair.article) for pair in pairs]
    summaries = [[*tokenizer.encode(pair.summary or ""), end] for pair in pairs]
    long = sum(len(ids) > source for ids in articles), sum(len(ids) > target for ids in summaries)
    return PairRows(*_packed(articles, source), *_packed(summaries, target), long)


def _packed(rows: Sequence[Sequence[int]], most: int) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([min(len(ids), most) for ids in rows])
    packed = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int32)
    for row, ids in zip(packed, rows, strict=True):
        row[: min(len(ids), most)] = torch.tensor(ids[:most], dtype=torch.int32)
    return packed, lengths


@task("summarize")
class Summarize(Task):
    """Teacher forcing: the decoder sees <start> and the summary so far, and says what comes next."""

    Config = SummarizeData
    metric = "dev/loss"
    highest = False
    files = ("train", "dev", "test", "tokenizer_file")

    def __init__(
        self, config: SummarizeData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        pairs = load_pairs(config, folder)
        self.tokenizer = tokenizer or self._kept(config, pairs.train, folder)
        start = self.tokenizer.role("start")
        if start is None or self.tokenizer.role("end") is None:
            raise ConfigError("train.init: that model's tokenizer has no <start> and <end>; it never wrote summaries")
        self.start, self.seed, self.device = start, seed, device
        self.copies, self.copy = config.copies, self.tokenizer.id(COPY)
        if self.copies and self.copy is None:
            raise ConfigError(f"data.copies = {self.copies}: the tokenizer has no {COPY}; expected data.copies=0")
        self.train = self._rows(pairs.train, config, "data.train")
        self.dev = self._rows(_spread(pairs.dev, MOST), config, "data.dev")
        self.rows = len(self.train)
        self.length, self.source = self.train.target.shape[1], self.train.source.shape[1]
        self.limits = config.source, config.target
        self.order, self.period = Order(self.rows, seed, device), AHEAD
        self._made: tuple[int, int, Batch] | None = None

    def _kept(self, config: SummarizeData, pairs: Sequence[Pair], folder: Path) -> Tokenizer:
        """The run's tokenizer: one that it began with stays."""
        path = folder / TOKENIZER
        if not (path.is_file() and (folder / METRICS).is_file()):
            save_tokenizer(build_tokenizer(config, pairs), path)
        return load_tokenizer(path)

    def _rows(self, pairs: Sequence[Pair], config: SummarizeData, name: str) -> PairRows:
        rows = encode_pairs(self.tokenizer, pairs, config.source, config.target)
        for what, key, cut_off in zip(("articles", "summaries"), ("source", "target"), rows.cut, strict=True):
            if cut_off:
                warnings.warn(
                    f"{name}: {cut_off:,} of {len(rows):,} {what} have more than {getattr(config, key)} tokens and are "
                    f"cut there (data.{key})",
                    stacklevel=2,
                )
        return rows.to(self.device)

    @property
    def given(self) -> dict[str, Any]:
        source, target = self.limits
        return {
            "vocabulary": self.tokenizer.size,
            "start": self.start,
            "encoder": {"length": source},
            "decoder": {"length": target},
        }

    def batch(self, step: int, size: int) -> Batch:
        """Batches of articles of like length. A CPU computes no more columns than there are tokens; a GPU computes all
        alike, as its step is one graph."""
        ahead, place = divmod(step, AHEAD)
        if self._made is None or self._made[:2] != (ahead, size):
            self._made = ahead, size, self._alike(self.order.at(ahead, size * AHEAD), ahead, size)
        batch = self._made[2].rows(place * size, (place + 1) * size)
        return batch if self.device.type != "cpu" else trim_padding(batch)

    def _alike(self, chosen: Tensor, ahead: int, size: int) -> Batch:
        by_length = self.train.sources[chosen].argsort(stable=True).view(AHEAD, size)
        source = generator(self.seed, "mixed", ahead, device=self.device)
        mixed = torch.randperm(AHEAD, generator=source, device=self.device)
        batch = make_batch(self.train, chosen[by_length[mixed].flatten()], self.start)
        return batch if self.copy is None or not self.copies else self._copying(batch, self.copy, source)

    def _copying(self, batch: Batch, first: int, source: torch.Generator) -> Batch:
        """The batch with some rows that go on with a passage of the article, wherever it begins."""
        assert batch.visible is not None and batch.source is not None and batch.source_visible is not None
        (B, T), lengths = batch.x.shape, batch.source_visible.sum(1)
        which, where = torch.rand(2, B, 1, generator=source, device=self.device)
        starts = (where * (lengths[:, None] - T + 1).clamp(min=1)).long()
        places = starts + torch.arange(T, device=self.device)
        passage, there = batch.source.gather(1, places.clamp(max=batch.source.shape[1] - 1)), places < lengths[:, None]
        x = torch.cat([torch.full_like(passage[:, :1], first), passage[:, :-1]], 1)
        y = passage.masked_fill(~there | (places < starts + GIVEN), IGNORE)
        chosen = which < self.copies
        x, y = torch.where(chosen, x, batch.x), torch.where(chosen, y, batch.y)
        return batch._replace(x=x, y=y, visible=torch.where(chosen, there, batch.visible))

    def logits(self, model: Model[Any], batch: Batch) -> Tensor:
        assert isinstance(model, Seq2Seq) and batch.source is not None
        return model(batch.source, batch.x, batch.source_visible, batch.visible)  # type: ignore[no-any-return]

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Mean loss of the dev tokens, its exponential, and the share of tokens that are the likeliest."""
        total, hits, weight = torch.zeros((), dtype=torch.float64, device=self.device), 0, 0
        rows = max(1, PART // (self.dev.source.shape[1] + self.dev.target.shape[1]))
        for chosen in self.dev.sources.argsort(stable=True).split(rows):
            part = trim_padding(make_batch(self.dev, chosen, self.start))
            logits = self.logits(model, part).float()
            total += token_loss(logits, part.y, mean=False)
            hits += int((logits.argmax(-1) == part.y).sum())
            weight += int((part.y != IGNORE).sum())
        loss = float(total) / weight
        return {"dev/loss": loss, "dev/perplexity": exp(min(loss, 700.0)), "dev/token_accuracy": hits / weight}


def make_batch(rows: PairRows, chosen: Tensor, start: int) -> Batch:
    """Some pairs: x is <start> and the summary but its last token, y the summary; what is padded is invisible."""
    S, T = rows.source.shape[1], rows.target.shape[1]
    reach = torch.arange(max(S, T), device=rows.source.device)
    y = rows.target[chosen].long()
    visible, source_visible = reach[:T] < rows.targets[chosen, None], reach[:S] < rows.sources[chosen, None]
    x = torch.cat([torch.full_like(y[:, :1], start), y[:, :-1]], 1)
    return Batch(x, y.masked_fill(~visible, IGNORE), visible, rows.source[chosen].long(), source_visible)


def trim_padding(batch: Batch) -> Batch:
    """The batch without columns of nothing but padding."""
    assert batch.visible is not None and batch.source is not None and batch.source_visible is not None
    T, S = int(batch.visible.sum(1).max()), int(batch.source_visible.sum(1).max())
    return batch.columns(T)._replace(source=batch.source[:, :S], source_visible=batch.source_visible[:, :S])


def _spread(pairs: Sequence[Pair], most: int) -> list[Pair]:
    """All of them, or so many evenly spaced."""
    if len(pairs) <= most:
        return list(pairs)
    return [pairs[n * len(pairs) // most] for n in range(most)]
