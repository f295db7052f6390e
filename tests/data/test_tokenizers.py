"""Tokenizers: text survives the round trip, and what cannot be encoded is named."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from regard.config import ConfigError
from regard.data import (
    BPE,
    TOKENIZERS,
    Bytes,
    Characters,
    TextError,
    Tokenizer,
    TokenizerFileError,
    load_tokenizer,
    tokenizer,
    write_tokens,
)
from regard.errors import UnknownNameError
from regard.models import load
from regard.train import recipe, train

TEXT = "Hello, wörld! 日本語 🎉🎉 naïve\n\tcafé\u2028end"


def bpe() -> BPE:
    pytest.importorskip("tokenizers")
    return BPE.train([TEXT, "the cat sat on the mat"] * 3, 300, special=("<end>", "<pad>"))


def made() -> list[Tokenizer]:
    return [Characters.of(TEXT, special=("<end>", "<pad>")), Bytes(("<end>", "<pad>")), bpe()]


@pytest.mark.parametrize("n", range(3))
def test_text_survives_and_special_tokens_are_one_token(n: int) -> None:
    tokenizer = made()[n]
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert all(0 <= i < tokenizer.size for i in ids)
    end = tokenizer.role("end")
    assert end is not None and end == tokenizer.id("<end>")
    assert tokenizer.encode("lo<end>lo").count(end) == 1
    assert tokenizer.decode(tokenizer.encode("lo<end>lo")) == "lo<end>lo"
    assert tokenizer.role("mask") is None and tokenizer.id("H") is None
    with pytest.raises(TextError, match=f"token {tokenizer.size} at position 1: expected 0 to {tokenizer.size - 1}"):
        tokenizer.decode([0, tokenizer.size])


@pytest.mark.parametrize("n", range(3))
def test_saved_and_loaded_is_the_same(n: int, tmp_path: Path) -> None:
    tokenizer = made()[n]
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(again) is type(tokenizer) and again.size == tokenizer.size
    assert again.encode(TEXT + "<pad>") == tokenizer.encode(TEXT + "<pad>")
    assert again.special == tokenizer.special == ("<end>", "<pad>")


@pytest.mark.parametrize("n", range(3))
def test_pieces_join_to_the_text_and_never_split_a_character(n: int) -> None:
    tokenizer = made()[n]
    pieces = tokenizer.pieces()
    parts = [pieces.push(i) for i in tokenizer.encode(TEXT + "<end>" + TEXT)]
    assert "".join([*parts, pieces.finish()]) == TEXT + "<end>" + TEXT
    assert not any("�" in part for part in parts)


@pytest.mark.parametrize("n", [1, 2])
def test_broken_utf8_comes_out_as_replacement_characters(n: int) -> None:
    tokenizer = made()[n]
    ids = tokenizer.encode("a🎉b")
    cut = ids[:2] if n == 1 else tokenizer.encode("a") + [i for i in tokenizer.encode("🎉")[:1]]
    pieces = tokenizer.pieces()
    text = "".join([*(pieces.push(i) for i in cut), pieces.finish()])
    assert text == tokenizer.decode(cut)
    assert text.startswith("a")


@pytest.mark.parametrize("special", ["é", "<é>", "<end>", "⁇", "ÿ"])
def test_a_special_token_of_a_bpe_decodes_to_itself(special: str) -> None:
    """The library writes each byte as a letter, 0xE9 as "é", so that a special token may look like bytes."""
    pytest.importorskip("tokenizers")
    tokenizer = BPE.train(["hello wörld 部 café"] * 3, 300, special=(special,))
    for text in (special, f"a{special}b", f"{special}{special}", f"部{special}部 wörld", f"hello{special}", "部部ö"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        pieces = tokenizer.pieces()
        assert "".join([*(pieces.push(i) for i in ids), pieces.finish()]) == text
    assert tokenizer.id(special) in tokenizer.encode(special)


def test_unknown_characters_are_named_with_their_place() -> None:
    plain = Characters.of("abc", special=("⁇", "□"))
    assert plain.role("pad") == plain.id("□") == 1
    with pytest.raises(TextError, match=r"'é' \(U\+00E9\) at position 3"):
        plain.encode("ab⁇é")
    lenient = Characters.of("abc", special=("<unknown>",))
    assert lenient.decode(lenient.encode("aéb")) == "a<unknown>b"
    with pytest.raises(TextError, match="surrogate"):
        Bytes().encode("ab\ud800")
    assert Bytes().encode("é") == [0xC3, 0xA9]


def test_impossible_vocabularies_are_refused() -> None:
    with pytest.raises(TextError, match="must differ"):
        Bytes(("<end>", "<end>"))
    with pytest.raises(TextError, match="single characters"):
        Characters(["a", "bc"])
    pytest.importorskip("tokenizers")
    with pytest.raises(TextError, match="at least 256"):
        BPE.train(["a"], 10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged"),
        ("[]", "expected an object"),
        ('{"kind": "characters", "format_version": 9}', "format_version 9"),
        ('{"kind": "words", "format_version": 1}', "kind 'words'"),
        ('{"kind": "characters", "format_version": 1}', "characters"),
        ('{"kind": "bytes", "format_version": 1, "special": [1]}', "list of texts"),
        ('{"model": {"type": "nonsense"}}', "tokenizers"),
    ],
)
def test_damaged_and_foreign_files_are_named(content: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(TokenizerFileError, match=message):
        load_tokenizer(path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerFileError, match="does not exist"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_of_ones_own_is_a_class_with_a_decorator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZERS, "_entries", dict(TOKENIZERS._entries))

    @tokenizer("words")
    class Words(Tokenizer):
        """One token a word with the space before it."""

        open_vocabulary = False

        def __init__(self, words: Sequence[str]) -> None:
            self.words = list(words)

        @classmethod
        def train(cls, texts: Iterable[str], size: int, special: Sequence[str] = ()) -> "Words":
            return cls(sorted({word for text in texts for word in re.findall(r"\s*\S+", text)}))

        @classmethod
        def from_json(cls, document: Mapping[str, Any]) -> "Words":
            return cls(document["words"])

        @property
        def size(self) -> int:
            return len(self.words)

        def encode(self, text: str) -> list[int]:
            return [self.words.index(word) for word in re.findall(r"\s*\S+", text)]

        def decode(self, ids: Iterable[int]) -> str:
            return "".join(self.words[i] for i in self.check_ids(ids))

        def id(self, special: str) -> int | None:
            return None

        def as_json(self) -> dict[str, Any]:
            return self.document(words=self.words)

    text = tmp_path / "text.txt"
    text.write_text(" to be or not to be that is the question" * 40)
    tokens, _ = write_tokens(text, tmp_path / "tokens", "words")
    assert isinstance(tokens.tokenizer, Words) and tokens.tokenizer.decode(tokens.tokens[:3]) == " to be or"
    asked = [f"data.text={text}", "data.tokenizer=words", "data.block=8", "model.width=16", "model.attention.heads=2"]
    run = train(recipe.load("lm", [*asked, "train.steps=2"]), tmp_path / "run", device="cpu")
    again = load(run.path)
    assert isinstance(again.tokenizer, Words) and again.tokenizer.words == tokens.tokenizer.words
    with pytest.raises(ConfigError, match="Did you mean 'words'"):
        recipe.load("lm", [f"data.text={text}", "data.tokenizer=word"])
    with pytest.raises(UnknownNameError, match="Did you mean 'words'"):
        write_tokens(text, tmp_path / "tokens", "word")
