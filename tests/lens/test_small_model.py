"""The model that comes with the lens, and the task that taught it: heads that look back, and look up what came next."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from regard.config import ConfigError
from regard.hub import small_model
from regard.lens.heads.examine import examine
from regard.lens.models import open_recordable
from regard.lens.small_model import SUMS, ShippedError, shipped, shipped_text
from regard.train import recipe
from regard.train.tasks.repeats import SHORTEST, Repeats, RepeatsData

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def subject():
    return open_recordable(shipped())


def test_the_folder_is_small_whole_and_says_what_it_is():
    folder = shipped()
    assert {p.name for p in folder.iterdir()} == {"CARD.md", "config.json", "model.safetensors", SUMS, "tokenizer.json"}
    assert sum(p.stat().st_size for p in folder.iterdir()) < 3_000_000
    named = {line.split()[1] for line in (folder / SUMS).read_text().splitlines()}
    assert named == {"config.json", "model.safetensors", "tokenizer.json"}
    assert "regard train lens" in (folder / "CARD.md").read_text("utf-8")


def test_a_changed_or_missing_file_is_told(tmp_path, monkeypatch):
    copy = tmp_path / "small-model"
    shutil.copytree(shipped(), copy)
    monkeypatch.setattr(small_model, "files", lambda package: tmp_path)
    assert shipped() == copy
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (copy / "model.safetensors").write_bytes(raw)
    with pytest.raises(ShippedError, match=r"model\.safetensors is not what came with regard .*regard train lens"):
        shipped()
    (copy / "model.safetensors").unlink()
    with pytest.raises(ShippedError, match="cannot be read"):
        shipped()


def test_it_was_built_as_the_recipe_says(subject):
    asked = recipe.load("lens")
    config = subject.model.config
    assert (config.layers, config.width) == (asked.model["layers"], asked.model["width"])
    assert config.attention.heads == asked.model["attention"]["heads"]
    assert config.attention.window == asked.model["attention"]["window"] == asked.data.block


def test_it_knows_what_comes_again(subject):
    """Random bytes cost ln 256 = 5.5 nats or more the first time; the second time most of that is saved."""
    draw = torch.Generator().manual_seed(1)
    part = 12
    rows = torch.randint(256, (64, part), generator=draw).repeat(1, 2)
    with torch.no_grad():
        chances = subject.model(rows[:, :-1]).log_softmax(-1)
    losses = -chances.gather(2, rows[:, 1:, None])[..., 0]
    assert losses[:, : part - 1].mean() > 5.4
    assert losses[:, part:].mean() < 1.5


def test_its_heads_look_back_and_look_up(subject):
    found, _ = examine(subject)
    labels = {x["label"] for x in found["heads"]} | {name for x in found["heads"] for name in x["also"]}
    assert {"previous", "induction"} <= labels


def test_it_goes_on_with_what_it_has_read_once():
    from regard import generate, load

    assert generate(load(shipped()), "xqzv jkwp xqzv jk", max_tokens=7).text == "wp xqzv"


def test_its_text_fits_into_its_window(subject):
    assert len(subject.ids(shipped_text())) <= subject.model.config.attention.window


@pytest.fixture
def task(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + n * n % 26) for n in range(4000)))

    def made(**changes):
        config = RepeatsData(text=str(text), block=32, tokenizer="bytes", **changes)
        folder = Path(tmp_path / f"run{len(list(tmp_path.iterdir()))}")
        folder.mkdir()
        return Repeats(config, 0, CPU, folder, None)

    return made


def period(row):
    return next(n for n in range(1, len(row)) if (row[n:] == row[:-n]).all())


def whole(batch):
    return torch.cat([batch.x, batch.y[:, -1:]], 1)


def test_rows_repeat_as_often_as_asked(task):
    rows = whole(task(again=1.0, random=0.0).batch(0, 64))
    assert all(SHORTEST <= period(row) <= 16 for row in rows) and rows.min() >= 97
    rows = whole(task(again=0.0, random=1.0).batch(0, 64))
    assert all(SHORTEST <= period(row) <= 2 * SHORTEST for row in rows) and rows.max() > 122
    plain = task(again=0.0, random=0.0)
    text = bytes(plain.train.tokens.tolist())
    assert all(bytes(row.tolist()) in text for row in whole(plain.batch(0, 16)))


def test_the_first_steps_are_random_repeats_alone(task):
    made = task(again=0.0, random=0.0, first=3)
    assert whole(made.batch(2, 32)).max() > 122
    assert whole(made.batch(3, 32)).max() <= 122


def test_a_batch_belongs_to_its_step(task):
    made = task()
    assert torch.equal(made.batch(5, 8).x, made.batch(5, 8).x)
    assert not torch.equal(made.batch(5, 8).x, made.batch(6, 8).x)


@pytest.mark.parametrize(
    "wrong, words", [({"again": 0.7, "random": 0.7}, "together at most 1"), ({"block": 8}, "at least 16")]
)
def test_wrong_shares_are_told(wrong, words):
    with pytest.raises(ConfigError, match=words):
        RepeatsData(text="x", **wrong)


def test_without_a_text_the_documents_of_a_world_are_read(tmp_path):
    world = {"people": 20, "biographies": 1, "places": 5}
    made = Repeats(RepeatsData(block=32).but(world=world), 0, CPU, tmp_path, None)
    first = (tmp_path / "documents.txt").read_text("utf-8")
    assert "born" in first and bytes(made.train.tokens[:40].tolist()).decode() == first[:40]
    measured = made.evaluate(_uniform())
    assert abs(measured["repeats/loss"] - 5.545) < 0.01  # ln 256: nothing known


def _uniform():
    class Model(torch.nn.Module):
        def forward(self, x, visible=None):
            return torch.zeros(*x.shape, 256)

    return Model()
