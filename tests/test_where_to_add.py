"""docs/architecture.md says where a thing is added: three of its rows, followed to the letter in a copy of regard."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import regard

ROOT = Path(regard.__file__).parent

EXPERIMENT_RUN = '''"""How far a mean of n numbers is from zero."""

from dataclasses import dataclass

import torch

from regard.lab.base import LabConfig, Say, lab
from regard.lab.mean_of_n.page import mean_page


@dataclass(frozen=True, kw_only=True)
class MeanConfig(LabConfig):
    place = "mean-of-n"
    numbers: int = 100


@dataclass(frozen=True)
class MeanResults:
    mean: float


@lab("mean-of-n", MeanConfig, mean_page)
def measure(config: MeanConfig, say: Say) -> MeanResults:
    """How far a mean of n numbers is from zero."""
    draws = torch.randn(config.numbers, generator=torch.Generator().manual_seed(config.seed))
    return MeanResults(float(draws.mean()))
'''

EXPERIMENT_PAGE = '''"""The page of the experiment."""

from regard.report import Page


def mean_page(results):
    return Page("A mean", f"The mean is {results['mean']:.4f}.")
'''

TOKENIZER = '''"""One token a word."""

from regard.data.tokenizers.base import Tokenizer, tokenizer


@tokenizer("words")
class Words(Tokenizer):
    """The words of a text, each with the space before it; what was not seen is the last token."""

    def __init__(self, words):
        self.words = list(words)
        self.ids = {word: i for i, word in enumerate(self.words)}

    @classmethod
    def train(cls, texts, size, special=()):
        return cls(sorted({word for text in texts for word in cls.cut(text)}) + ["?"])

    @classmethod
    def from_json(cls, document):
        return cls(document["words"])

    @staticmethod
    def cut(text):
        import re

        return re.findall(r"\\s*\\S+|\\s+", text)

    @property
    def size(self):
        return len(self.words)

    def encode(self, text):
        return [self.ids.get(word, self.size - 1) for word in self.cut(text)]

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)

    def id(self, special):
        return None

    def as_json(self):
        return self.document(words=self.words)
'''

POSITION = '''

@POSITIONS.add("nearby")
class Nearby(Positions):
    """Adds a learned number to the score of each distance up to eight, as relative positions do."""

    def __init__(self, H: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(H, 9))

    def bias(self, rules: Mask) -> Mask:
        return rules.but(relative=self.look_up)

    def look_up(self, distance: Tensor) -> Tensor:
        return self.table[:, distance.abs().clamp(max=8)].transpose(0, 1)
'''

TEXT = "the cat sat on the mat and the dog sat on the rug while a bird sang in the tree . " * 60
SMALL = ["model.width=32", "model.layers=1", "data.block=16", "model.attention.window=16", "train.steps=12"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, which a test may add to."""
    shutil.copytree(ROOT, tmp_path / "regard", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def run(folder: Path, *words: object) -> str:
    """Runs a command of the copy, and returns what it prints."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "regard", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_experiment_is_a_folder(copy: Path) -> None:
    folder = copy / "regard" / "lab" / "mean_of_n"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""A mean."""\n')
    (folder / "run.py").write_text(EXPERIMENT_RUN)
    (folder / "page.py").write_text(EXPERIMENT_PAGE)
    assert "mean-of-n" in run(copy, "run")
    run(copy, "run", "mean-of-n", "numbers=7", "--out", "out")
    page = (copy / "out" / "report.html").read_text()
    assert "The mean is" in page
    (copy / "out" / "report.html").unlink()
    run(copy, "report", "out")
    assert (copy / "out" / "report.html").read_text() == page


def test_a_tokenizer_is_a_class(copy: Path) -> None:
    package = copy / "regard" / "data" / "tokenizers"
    (package / "words.py").write_text(TOKENIZER)
    with (package / "__init__.py").open("a") as file:
        file.write("\nfrom regard.data.tokenizers import words as words  # noqa: E402\n")
    run(copy, "train", "lm", "data.text=text.txt", "data.tokenizer=words", *SMALL, "--out", "out")
    written = run(copy, "generate", "out", "the cat", "--max", "5")
    assert len(written.split()) >= 2
    run(copy, "check", "out", "--draws", "4")


def test_a_position_that_adds_a_bias_is_a_class(copy: Path) -> None:
    with (copy / "regard" / "nn" / "positions.py").open("a") as file:
        file.write(POSITION)
    run(copy, "train", "lm", "data.text=text.txt", "model.position=nearby", *SMALL, "--out", "out")
    run(copy, "check", "out", "--draws", "4")
    run(copy, "generate", "out", "the cat", "--max", "5")
    run(copy, "view", "out", "the cat sat", "--out", "page.html")
    assert (copy / "page.html").stat().st_size > 10_000
