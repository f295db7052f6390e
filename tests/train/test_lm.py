"""The language-model task: exact windows, honest measures, tokens written once, and any text however short."""

import html
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.config import ConfigError
from regard.data import DataError, write_tokens
from regard.data.batch import IGNORE
from regard.reporting import write_report
from regard.train import recipe, resume, train
from regard.train.run import Run
from regard.train.tasks import lm
from regard.train.tasks.lm import LanguageModel, LMData

TEXT = "".join(f"Line {n * n} says ünder {n % 7}, over {n % 5}.\n" for n in range(150))
CPU = torch.device("cpu")
TINY = ["model.width=16", "model.layers=1", "model.attention.heads=2", "data.block=16", "train.batch=4"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def built(folder, seed=0, **data):
    folder.mkdir(parents=True, exist_ok=True)
    return LanguageModel(LMData(**{"block": 16, **data}), seed, CPU, folder, None)


def trained(text, out, *changes):
    return train(recipe.load("lm", [f"data.text={text}", *TINY, *changes]), out)


def test_a_batch_is_a_pure_function_of_seed_and_step(text, tmp_path):
    one, two = (built(tmp_path / name, text=str(text)) for name in "ab")
    asked = {step: one.batch(step, 5) for step in (0, 3, 7)}
    for step in (7, 0, 3, 7):
        assert torch.equal(two.batch(step, 5).x, asked[step].x)
    assert not torch.equal(asked[0].x, asked[3].x)
    assert not torch.equal(built(tmp_path / "c", seed=1, text=str(text)).batch(0, 5).x, asked[0].x)


@pytest.mark.parametrize("kind", ["characters", "bytes", "bpe"])
def test_windows_are_pieces_of_the_training_text_and_targets_come_next(kind, text, tmp_path):
    task = built(tmp_path / "run", text=str(text), tokenizer=kind, vocabulary=300)
    whole = task.tokenizer.encode(TEXT)
    assert [*task.train.tokens, *task.dev.tokens] == whole and len(task.train) == round(0.9 * len(whole))
    x, y, *_ = task.batch(0, 40)
    assert torch.equal(x[:, 1:], y[:, :-1])
    pieces = {tuple(whole[n : n + 17]) for n in range(len(task.train) - 16)}
    assert {(*a, b[-1]) for a, b in zip(x.tolist(), y.tolist(), strict=True)} <= pieces
    assert isinstance(task.train.tokens, np.memmap)


@pytest.mark.parametrize("kind", ["characters", "bytes", "bpe"])
def test_measures_are_means_over_every_dev_token(kind, text, tmp_path):
    """Against one window at a time, each token scored once; bits are of a character, or of a byte of the text."""
    task = built(tmp_path / "run", text=str(text), tokenizer=kind, vocabulary=300)
    model = regard.GPT(vocabulary=task.tokenizer.size, length=16, width=16, layers=1, attention={"heads": 2}).eval()
    ids = [int(i) for i in task.dev.tokens]
    total = 0.0
    with torch.no_grad():
        found = task.evaluate(model)
        for start in range(0, len(ids) - 1, 16):
            x, y = ids[start : start + 16], ids[start + 1 : start + 17]
            logs = model(torch.tensor([x[: len(y)]]))[0].log_softmax(-1)
            total -= sum(float(logs[n, i]) for n, i in enumerate(y))
    assert found["dev/loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert found["dev/perplexity"] == pytest.approx(math.exp(found["dev/loss"]))
    read = task.tokenizer.decode(ids[1:])
    size = len(read) if kind == "characters" else len(read.encode())
    unit = "character" if kind == "characters" else "byte"
    assert found[f"dev/bits_per_{unit}"] == pytest.approx(total / math.log(2) / size, rel=1e-5)


def test_of_a_long_dev_file_evenly_spaced_windows_are_measured(text, tmp_path, monkeypatch):
    monkeypatch.setattr(lm, "MOST", 100)
    task = built(tmp_path / "run", text=str(text), share=0.5)
    parts = list(task.dev_windows())
    assert sum(int((p.y != IGNORE).sum()) for p in parts) == 96 and all(p.x.shape[1] == 16 for p in parts)
    rows = torch.cat([p.x for p in parts]).tolist()
    whole = [int(i) for i in task.dev.tokens]
    assert rows[0] == whole[:16] and rows[-1] == whole[-17:-1]


@pytest.mark.parametrize("most", [100, 200_000])
def test_a_byte_is_a_byte_wherever_windows_cut_characters(most, tmp_path, monkeypatch):
    """Half a character decodes to a mark of three bytes; a token of the bytes tokenizer is one byte all the same."""
    path = tmp_path / "a.txt"
    path.write_text("über 東京 — größer \U0001f600 " * 40, encoding="utf-8")
    monkeypatch.setattr(lm, "MOST", most)
    for block in (3, 7, 16):
        task = built(tmp_path / f"run-{block}", text=str(path), tokenizer="bytes", block=block, share=0.5)
        assert task.per_token == 1
        model = regard.GPT(vocabulary=256, length=block, width=16, layers=1, attention={"heads": 2}).eval()
        with torch.no_grad():
            found = task.evaluate(model)
        assert found["dev/bits_per_byte"] == found["dev/loss"] / math.log(2)


def test_an_epoch_has_as_many_rows_as_windows_fit_side_by_side(text, tmp_path):
    run = trained(text, tmp_path / "run", "train.steps=0", "train.epochs=1", "train.batch=64")
    rows = (round(0.9 * len(TEXT)) - 1) // 16
    assert run.metrics()[-1]["step"] == math.ceil(rows / 64)


def test_it_learns_what_can_be_known(tmp_path):
    """After three letters of an alphabet that repeats, the next is certain; before that it cannot be."""
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij" * 200, encoding="utf-8")
    run = trained(path, tmp_path / "run", "train.steps=120", "train.lr=0.01", "data.block=32")
    found = run.metrics()[-1]
    assert found["dev/loss"] < 0.1 and found["dev/bits_per_character"] < 0.15
    assert regard.generate(regard.load(run.path / "model"), "cde", max_tokens=12).text == "fghijabcdefg"


def test_the_best_is_the_lowest_dev_loss(text, tmp_path):
    run = trained(text, tmp_path / "run", "train.steps=20", "train.evaluation.every=1", "train.lr=0.3")
    losses = {row["step"]: row["dev/loss"] for row in run.metrics() if "dev/loss" in row}
    assert run.best == min(losses, key=losses.__getitem__) and len(losses) == 20


def test_a_resumed_run_reads_the_tokens_it_began_with_and_ends_in_the_same_bits(text, tmp_path):
    changes = ["train.steps=12", "train.saving.every=4", "train.saving.keep=9", "model.dropout=0.1"]
    whole = trained(text, tmp_path / "whole", *changes)
    stopped = shutil.copytree(whole.path, tmp_path / "stopped")
    shutil.rmtree(stopped / "model")
    for step in range(5, 13):
        shutil.rmtree(stopped / "checkpoints" / f"step-{step}", ignore_errors=True)
    before = (stopped / "tokens" / "train.npy").stat()
    text.unlink()
    again = resume(stopped)
    after = (stopped / "tokens" / "train.npy").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    want, got = (regard.load(run.path / "model").state_dict() for run in (whole, again))
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert [r["loss"] for r in whole.metrics() if "lr" in r] == [r["loss"] for r in again.metrics() if "lr" in r]


def test_a_start_that_failed_leaves_no_tokens_to_the_next(text, tmp_path):
    with pytest.raises(ConfigError, match="adamx"):
        trained(text, tmp_path / "run", "train.steps=1", "train.optimizer=adamx")
    other = tmp_path / "b.txt"
    other.write_text("another text, with other words\n" * 20, encoding="utf-8")
    left = tmp_path / "run" / ".tokens.01234567.staged"
    left.mkdir(parents=True)
    (left / "train.npy").write_bytes(b"cut off by a kill")
    run = trained(other, tmp_path / "run", "train.steps=1")
    assert set(regard.load(run.path / "model").tokenizer.tokens) == set(other.read_text())
    assert not left.exists()


@given(size=st.integers(4, 40), block=st.integers(1, 50))
def test_texts_however_short_have_batches_and_measures(size, block, tmp_path_factory):
    folder = tmp_path_factory.mktemp("short")
    (folder / "a.txt").write_text(TEXT[:size], encoding="utf-8")
    task = built(folder / "run", text=str(folder / "a.txt"), block=block)
    assert task.rows >= 1 and task.batch(0, 3).x.shape == (3, task.length)
    assert 1 <= task.length <= block
    targets = torch.cat([part.y[part.y != IGNORE] for part in task.dev_windows()])
    assert targets.tolist() == task.dev.tokens[1:].tolist()


def test_a_short_text_trains(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT[:200], encoding="utf-8")
    run = train(
        recipe.load("lm", [f"data.text={tmp_path / 'a.txt'}", "train.steps=2", "model.width=16"]), tmp_path / "r"
    )
    assert run.finished and math.isfinite(run.metrics()[-1]["dev/loss"])


def test_tokens_of_a_folder_are_read_where_they_are(text, tmp_path):
    write_tokens(text, tmp_path / "tokens", "bytes")
    run = train(recipe.load("lm", [f"data.tokens={tmp_path / 'tokens'}", *TINY, "train.steps=1"]), tmp_path / "run")
    assert not (run.path / "tokens").exists()
    assert regard.load(run.path / "model").tokenizer.kind == "bytes"


def test_a_model_to_start_from_reads_text_with_its_own_tokenizer(text, tmp_path):
    first = trained(text, tmp_path / "first", "train.steps=1")
    less = tmp_path / "less.txt"
    less.write_text(TEXT[:400], encoding="utf-8")
    second = trained(less, tmp_path / "second", "train.steps=1", f"train.init={first.path}")
    old, new = (regard.load(r.path / "model").tokenizer.as_json() for r in (first, second))
    assert old == new
    less.write_text("Line ☃\n" * 40, encoding="utf-8")
    with pytest.raises(DataError, match=r"less\.txt: character '☃'"):
        trained(less, tmp_path / "third", "train.steps=1", f"train.init={first.path}")
    write_tokens(less, tmp_path / "tokens")
    asked = [f"data.tokens={tmp_path / 'tokens'}", "data.block=16", "train.steps=1", f"train.init={first.path}"]
    with pytest.raises(ConfigError, match="another tokenizer"):
        train(recipe.load("lm", asked), tmp_path / "fourth")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["data.text=a", "data.tokens=b"], "both are given"),
        (["data.text=a", "data.tokenizer=byte"], "Did you mean 'bytes'"),
        (["data.text=a", "data.block=0"], "data.block = 0"),
        (["data.text=a", "data.share=1"], "data.share = 1"),
        (["data.text=missing.txt"], "missing.txt cannot be read"),
        (["data.tokens=missing"], "train.npy cannot be read"),
        (["data.text=a", "data.text_file=b"], "no key 'text_file' in data"),
    ],
)
def test_what_cannot_be_read_is_said(changes, said, tmp_path):
    with pytest.raises((ConfigError, DataError), match=said):
        train(recipe.load("lm", [*changes, "train.steps=1"]), tmp_path / "run")
    assert not Run(tmp_path / "run").finished


def test_the_full_variant_is_what_its_comment_promises():
    full = recipe.load("lm", ["data.text=a"], variant="full")
    _, config = recipe.resolve_model(full.model)
    assert (config.layers, config.attention.heads, config.width) == (6, 6, 384)
    assert (config.dropout, config.attention.dropout) == (0.2, 0.2)
    assert (full.data.block, full.train.batch, full.train.steps) == (256, 64, 5000)


@pytest.mark.parametrize("variant", [None, "full"])
def test_a_model_looks_back_as_far_as_it_learned_to(variant):
    """Rotary positions mean nothing beyond the windows of training, so a long text is written from one window."""
    found = recipe.load("lm", ["data.text=a"], variant)
    assert recipe.resolve_model(found.model)[1].attention.window == found.data.block


def test_without_a_text_it_reads_the_documentation_of_python(tmp_path):
    run = train(recipe.load("lm", ["train.steps=1", *TINY]), tmp_path / "run")
    prose = (tmp_path / "run" / "prose.txt").read_text()
    assert len(prose) > 100_000 and "statement" in prose
    tokenizer = regard.load(run.path).tokenizer
    assert tokenizer.decode(tokenizer.encode("a statement")) == "a statement"


def test_the_report_of_a_language_model_shows_what_it_writes_and_how_it_was_made(text, tmp_path):
    run = trained(text, tmp_path / "run", "train.steps=1", "train.lr=0.0123")
    page = html.unescape(write_report([run.path]).read_text())
    written = regard.generate(regard.load(run.path), "\n", max_tokens=300, temperature=0.8, seed=0, slide=True)
    assert written.text[-40:] in page
    assert "train.lr" in page and "0.0123" in page and torch.__version__ in page
