"""The task `summarize`: an encoder reads an article, a decoder writes its summary."""

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
from regard.data.files import DataError, read_lines
from regard.data.notices import NoticesConfig, notices
from regard.data.pairs import Pair, PairSplit, read_pairs, write_pairs
from regard.data.seeds import generator
from regard.data.splits import add_held_out
from regard.data.tokenizers import TOKENIZERS, Tokenizer, load_tokenizer
from regard.errors import did_you_mean, quote
from regard.models import Model, Seq2Seq, token_loss
from regard.storage import atomic_write, write_text
from regard.train.run import METRICS
from regard.train.tasks.base import Order, Task, task

START = "<start>"
END = "<end>"
COPY = "<copy>"
UNKNOWN = "<unknown>"
GIVEN = 2  # first tokens of a copied passage that carry no loss: they only say which passage it is
AHEAD = 16  # batches made at a time, each of articles of similar length
PART = 16384  # tokens evaluated at a time
MOST = 2000  # dev pairs that are evaluated while training
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class SummarizeData(Section):
    """Files of pairs (.jsonl, .csv, .tsv) with the keys or columns `article` and `summary`; without `train`, generated.

    Without `dev` or `test`, the share `held_out` of train is taken for each. `tokenizer` is bpe (of `vocabulary`
    tokens, learned from train alone), bytes or characters; or an existing one is given as `tokenizer_file`. An article
    is cut after `source` tokens, a summary after `target`. In the share `copies` of training rows, the target is a
    passage of the article, after a start token of its own, because models learn to copy late from summaries alone.
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
        if self.tokenizer not in TOKENIZERS:
            raise ConfigError(f"data.tokenizer = {quote(self.tokenizer)}.{did_you_mean(self.tokenizer, TOKENIZERS)}")
        for name in ("source", "target"):
            if getattr(self, name) < 2:
                raise ConfigError(f"data.{name} = {getattr(self, name)}: expected at least 2 tokens")
        if not 0 <= self.copies < 1:
            raise ConfigError(f"data.copies = {self.copies}: expected at least 0 and less than 1")
        if not 0 < self.held_out < 0.5:
            raise ConfigError(f"data.held_out = {self.held_out}: expected more than 0 and less than 0.5")


def load_pairs(config: SummarizeData, folder: Path) -> PairSplit:
    """Returns the usable pairs of a config; generated ones are written into the folder unless they are there."""
    files = {name: getattr(config, name) for name in ("train", "dev", "test")}
    if not config.train:
        name = next((name for name, path in files.items() if path), None)
        if name is not None:
            raise ConfigError(f"data.{name} is given without data.train: say which pairs to learn from")
        files = _generate_files(config.notices, folder / "data")
    sets = {
        name: _drop_empty(read_pairs(path, config.article, config.summary), path)
        for name, path in files.items()
        if path
    }
    sets = add_held_out(sets, config.held_out, config.train, "pairs")
    return PairSplit(**sets)


def _generate_files(config: NoticesConfig, folder: Path) -> dict[str, str]:
    """Returns the paths of the files of generated pairs, and writes those files unless they exist.

    The file notices.txt holds the settings that they were made with. It is written last: without it, all are written
    again.
    """
    paths = {name: str(folder / f"{name}.jsonl") for name in ("train", "dev", "test")}
    stamp = folder / "notices.txt"
    settings = str(config)
    if not stamp.is_file():
        for name, pairs in notices(config)._asdict().items():
            write_pairs(paths[name], pairs)
        write_text(stamp, settings + "\n")
    elif read_lines(stamp) != [settings]:
        raise ConfigError(f"{folder} holds other pairs than data.notices asks for: choose another --out, or remove it")
    return paths


def _drop_empty(pairs: list[Pair], path: str) -> list[Pair]:
    """Returns the pairs whose article and summary are not empty, and warns how many were left out."""
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
    """Returns the tokenizer of a config: that of its file, or one made from the pairs to learn from."""
    tokenizer = _load_or_train(config, pairs)
    for role in ("start", "end"):
        if tokenizer.role(role) is None:
            raise DataError(
                f"{config.tokenizer_file}: no special token for the {role} of a summary, such as <{role}>; expected "
                "a tokenizer that has both"
            )
    return tokenizer


def _load_or_train(config: SummarizeData, pairs: Sequence[Pair]) -> Tokenizer:
    """Loads the tokenizer of the config's file, or makes one of the kind that it names from the texts of the pairs."""
    if config.tokenizer_file:
        return load_tokenizer(config.tokenizer_file)
    kind = TOKENIZERS[config.tokenizer]
    special = [START, END, COPY]
    if not kind.open_vocabulary:
        special.append(UNKNOWN)
    texts = [text for pair in pairs for text in (pair.article, pair.summary or "")]
    return kind.train(texts, config.vocabulary, special)


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Writes tokenizer.json atomically."""
    with atomic_write(path) as file:
        stage = path.with_name(f".{path.name}.made")
        tokenizer.save(stage)
        file.write(stage.read_bytes())
        stage.unlink()


@dataclass(frozen=True)
class PairRows:
    """Pairs as padded rows of tokens: `source` [N,S] and `target` [N,T]; `sources` and `targets` [N] are their lengths.

    A target ends with <end> unless it was cut. `cut` counts the articles and the summaries that were too long.
    """

    source: Tensor
    sources: Tensor
    target: Tensor
    targets: Tensor
    cut: tuple[int, int]

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device) -> PairRows:
        """Returns a copy of them on a device."""
        return PairRows(
            source=self.source.to(device),
            sources=self.sources.to(device),
            target=self.target.to(device),
            targets=self.targets.to(device),
            cut=self.cut,
        )


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[Pair], source: int, target: int) -> PairRows:
    """Returns pairs as rows; articles are cut after `source` tokens, summaries after `target`."""
    end = tokenizer.role("end")
    assert end is not None
    articles = [tokenizer.encode(pair.article) for pair in pairs]
    summaries = [[*tokenizer.encode(pair.summary or ""), end] for pair in pairs]
    cut = (sum(len(ids) > source for ids in articles), sum(len(ids) > target for ids in summaries))
    return PairRows(*_pad_rows(articles, source), *_pad_rows(summaries, target), cut)


def _pad_rows(rows: Sequence[Sequence[int]], most: int) -> tuple[Tensor, Tensor]:
    """Returns rows of at most `most` ids, padded with 0 [N,L], and their lengths [N]."""
    lengths = torch.tensor([min(len(ids), most) for ids in rows])
    padded = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: min(len(ids), most)] = torch.tensor(ids[:most], dtype=torch.int32)
    return padded, lengths


@task("summarize")
class Summarize(Task):
    """Teacher forcing: the decoder is given <start> and the right summary so far, and predicts the next token."""

    Config = SummarizeData
    metric = "dev/loss"
    highest = False
    files = ("train", "dev", "test", "tokenizer_file")
    generated = ("notices",)

    def __init__(
        self, config: SummarizeData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        pairs = load_pairs(config, folder)
        self.tokenizer = tokenizer or self._run_tokenizer(config, pairs.train, folder)
        start = self.tokenizer.role("start")
        if start is None or self.tokenizer.role("end") is None:
            raise ConfigError("train.init: that model's tokenizer has no <start> and <end>; it never wrote summaries")
        self.start = start
        self.seed = seed
        self.device = device
        self.copies = config.copies
        self.copy = self.tokenizer.id(COPY)
        if self.copies and self.copy is None:
            raise ConfigError(f"data.copies = {self.copies}: the tokenizer has no {COPY}; expected data.copies=0")
        self.train = self._encode(pairs.train, config, "data.train")
        self.dev = self._encode(_take_spaced(pairs.dev, MOST), config, "data.dev")
        self.rows = len(self.train)
        self.length = self.train.target.shape[1]
        self.source = self.train.source.shape[1]
        self.limits = (config.source, config.target)
        self.order = Order(self.rows, seed, device)
        self.period = AHEAD
        self._group: tuple[int, int, Batch] | None = None  # (group, batch size, its AHEAD batches)

    def _run_tokenizer(self, config: SummarizeData, pairs: Sequence[Pair], folder: Path) -> Tokenizer:
        """Returns the tokenizer of the run's folder, which it builds and saves there unless training has begun."""
        path = folder / TOKENIZER
        if not (path.is_file() and (folder / METRICS).is_file()):
            save_tokenizer(build_tokenizer(config, pairs), path)
        return load_tokenizer(path)

    def _encode(self, pairs: Sequence[Pair], config: SummarizeData, name: str) -> PairRows:
        """Returns pairs as rows of ids on the device, and warns if texts are cut."""
        rows = encode_pairs(self.tokenizer, pairs, config.source, config.target)
        for what, key, cut in zip(("articles", "summaries"), ("source", "target"), rows.cut, strict=True):
            if cut:
                warnings.warn(
                    f"{name}: {cut:,} of {len(rows):,} {what} have more than {getattr(config, key)} tokens and are "
                    f"cut there (data.{key})",
                    stacklevel=2,
                )
        return rows.to(self.device)

    @property
    def given(self) -> dict[str, Any]:
        """Returns the settings of a new encoder-decoder that the data decide."""
        source, target = self.limits
        return {
            "vocabulary": self.tokenizer.size,
            "start": self.start,
            "encoder": {"length": source},
            "decoder": {"length": target},
        }

    def lengths(self, model: Model[Any]) -> dict[str, tuple[int | None, int]]:
        """Returns how many tokens encoder and decoder can read, and how many articles and summaries have."""
        if not isinstance(model, Seq2Seq):
            return super().lengths(model)
        return {
            "target": (getattr(model, "limit", None), self.length),
            "source": (model.encoder.limit, self.source or 0),
        }

    def batch(self, step: int, size: int) -> Batch:
        """Returns the batch of a step.

        AHEAD batches are made at once, each of articles of similar length, so that a CPU computes little padding.
        """
        group, place = divmod(step, AHEAD)
        if self._group is None or self._group[:2] != (group, size):
            self._group = (group, size, self._make_group(group, size))
        batch = self._group[2].rows(place * size, (place + 1) * size)
        if self.device.type != "cpu":
            return batch  # a GPU's step is one CUDA graph, which needs one shape
        return trim_padding(batch)

    def _make_group(self, group: int, size: int) -> Batch:
        """Returns AHEAD concatenated batches: rows are sorted by length within the group, then batches are shuffled."""
        chosen = self.order.at(group, size * AHEAD)
        by_length = self.train.sources[chosen].argsort(stable=True).view(AHEAD, size)
        source = generator(self.seed, "mixed", group, device=self.device)
        shuffled = torch.randperm(AHEAD, generator=source, device=self.device)
        batch = make_batch(self.train, chosen[by_length[shuffled].flatten()], self.start)
        if self.copy is None or not self.copies:
            return batch
        return self._add_copies(batch, self.copy, source)

    def _add_copies(self, batch: Batch, first: int, source: torch.Generator) -> Batch:
        """Returns the batch with the summaries of some rows replaced by a passage from a random place of the article.

        In these rows `first` stands in place of <start>.
        """
        assert batch.visible is not None and batch.source is not None and batch.source_visible is not None
        B, T = batch.x.shape
        lengths = batch.source_visible.sum(1)
        which, where = torch.rand(2, B, 1, generator=source, device=self.device)
        starts = (where * (lengths[:, None] - T + 1).clamp(min=1)).long()
        places = starts + torch.arange(T, device=self.device)
        passage = batch.source.gather(1, places.clamp(max=batch.source.shape[1] - 1))
        is_text = places < lengths[:, None]
        x = torch.cat([torch.full_like(passage[:, :1], first), passage[:, :-1]], 1)
        y = passage.masked_fill(~is_text | (places < starts + GIVEN), IGNORE)
        chosen = which < self.copies
        return batch._replace(
            x=torch.where(chosen, x, batch.x),
            y=torch.where(chosen, y, batch.y),
            visible=torch.where(chosen, is_text, batch.visible),
        )

    def logits(self, model: Model[Any], batch: Batch) -> Tensor:
        """Returns the decoder's logits at each place of the summaries [B,T,V]."""
        assert isinstance(model, Seq2Seq) and batch.source is not None
        return model(batch.source, batch.x, batch.source_visible, batch.visible)  # type: ignore[no-any-return]

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """Returns the mean loss of the dev tokens, its exponential, and the share of tokens that are the likeliest."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        hits = 0
        weight = 0
        rows = max(1, PART // (self.dev.source.shape[1] + self.dev.target.shape[1]))
        for chosen in self.dev.sources.argsort(stable=True).split(rows):
            part = trim_padding(make_batch(self.dev, chosen, self.start))
            logits = self.logits(model, part).float()
            total += token_loss(logits, part.y, mean=False)
            hits += int((logits.argmax(-1) == part.y).sum())
            weight += int((part.y != IGNORE).sum())
        loss = float(total) / weight
        # exp of more than 709 overflows.
        return {"dev/loss": loss, "dev/perplexity": exp(min(loss, 700.0)), "dev/token_accuracy": hits / weight}


def make_batch(rows: PairRows, chosen: Tensor, start: int) -> Batch:
    """Returns the chosen pairs as a batch: x is <start> and the summary but its last token, y is the summary.

    Padding is invisible.
    """
    S = rows.source.shape[1]
    T = rows.target.shape[1]
    places = torch.arange(max(S, T), device=rows.source.device)
    y = rows.target[chosen].long()
    visible = places[:T] < rows.targets[chosen, None]
    return Batch(
        x=torch.cat([torch.full_like(y[:, :1], start), y[:, :-1]], 1),
        y=y.masked_fill(~visible, IGNORE),
        visible=visible,
        source=rows.source[chosen].long(),
        source_visible=places[:S] < rows.sources[chosen, None],
    )


def trim_padding(batch: Batch) -> Batch:
    """Returns the batch without columns of nothing but padding."""
    assert batch.visible is not None and batch.source is not None and batch.source_visible is not None
    T = int(batch.visible.sum(1).max())
    S = int(batch.source_visible.sum(1).max())
    return batch.columns(T)._replace(source=batch.source[:, :S], source_visible=batch.source_visible[:, :S])


def _take_spaced(pairs: Sequence[Pair], most: int) -> list[Pair]:
    """Returns all pairs, or `most` of them, evenly spaced."""
    if len(pairs) <= most:
        return list(pairs)
    return [pairs[n * len(pairs) // most] for n in range(most)]
