"""How likely a model finds a text: against losses by hand, for both kinds of models, and by the command."""

import json
import math

import pytest
import torch
from small_models import GPT2, stirred, words
from typer.testing import CliRunner

from regard.cli.app import app
from regard.data.files import DataError
from regard.data.tokenizers import Characters
from regard.errors import OptionError
from regard.lab.likelihood import _windows, judge_text
from regard.lens.models import RecordableModel, open_recordable
from regard.lens.recording.regard_models import regard_card
from regard.models import GPT, Encoder

TEXT = "ab cab bac abc cab"
LETTERS = sorted(set(TEXT))


def letters(length=64):
    torch.manual_seed(0)
    made = GPT(vocabulary=len(LETTERS), width=16, layers=1, length=length, attention={"heads": 2}).eval()
    for p in made.parameters():
        p.data = torch.randn_like(p) * 0.3
    made.tokenizer = Characters(LETTERS, ())
    return made


def opened(model):
    return RecordableModel(model, model.tokenizer, regard_card(model, "letters", True))


def losses_by_hand(model, ids):
    logits = model(torch.tensor([ids[:-1]]))[0]
    return torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[1:]), reduction="none").tolist()


def test_the_numbers_are_those_of_cross_entropy():
    model = letters()
    found = judge_text(opened(model), TEXT, with_tokens=True)
    by_hand = losses_by_hand(model, model.tokenizer.encode(TEXT))
    assert found.losses == pytest.approx(by_hand, abs=1e-5)
    mean = sum(by_hand) / len(by_hand)
    numbers = found.summary()
    assert numbers["loss"] == pytest.approx(mean) and numbers["perplexity"] == pytest.approx(math.exp(mean))
    assert numbers["bits_per_character"] == pytest.approx(mean / math.log(2)) == numbers["bits_per_byte"]
    assert "".join(token.text for token in found.tokens) == TEXT
    assert all(token.rank == 1 or token.likeliest != token.text for token in found.tokens[1:])


def test_a_long_text_goes_by_windows_that_overlap():
    model = letters(length=8)
    ids = model.tokenizer.encode(TEXT)
    found = judge_text(opened(model), TEXT)
    assert len(found.losses) == len(ids) - 1
    first = losses_by_hand(model, ids[:8])
    second = losses_by_hand(model, ids[4:12])
    assert found.losses[:7] == pytest.approx(first, abs=1e-5)
    assert found.losses[7:11] == pytest.approx(second[3:], abs=1e-5)


@pytest.mark.parametrize(("n", "window"), [(2, 2), (9, 8), (8, 8), (100, 7), (5, 2)])
def test_every_token_but_the_first_is_judged_once(n, window):
    judged = [t for start, first in _windows(n, window) for t in range(first, start + window)]
    assert judged == list(range(1, n))


def test_a_model_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = stirred(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)))
    model.save_pretrained(tmp_path)
    tokenizer = words()
    tokenizer.save_pretrained(tmp_path)
    text = "w1 w7 w3 w3 w9"
    found = judge_text(open_recordable(tmp_path), text)
    ids = torch.tensor([tokenizer.encode(text)])
    assert found.loss == pytest.approx(model(ids, labels=ids).loss.item(), abs=1e-5)


def test_what_has_no_next_token_is_refused():
    model = Encoder(vocabulary=len(LETTERS), width=16, layers=1, length=64, attention={"heads": 2})
    model.tokenizer = Characters(LETTERS, ())
    with pytest.raises(OptionError, match="does not predict the next token"):
        judge_text(opened(model), TEXT)
    with pytest.raises(DataError, match="a text of 1 tokens"):
        judge_text(opened(letters()), "a")


@pytest.fixture
def saved(tmp_path):
    letters().save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("ab cab\nbac abc\n".replace("\n", " "))
    (tmp_path / "lines.txt").write_text("ab cab\n\nbac abc\n")
    return tmp_path


def said(*words, code=0):
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def test_the_command(saved):
    whole = said("evaluate", saved / "model", "--text", saved / "text.txt")
    assert "perplexity" in whole and "a byte" in whole
    each = said("evaluate", saved / "model", "--text", saved / "text.txt", "--tokens")
    assert "likeliest" in each and "'c'" in each
    rows = json.loads(said("evaluate", saved / "model", "--text", saved / "lines.txt", "--lines", "--json"))
    assert [row["text"] for row in rows] == ["ab cab", "bac abc"] and rows[0]["tokens"] == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either --data FILE"),
        (["--text", "text.txt", "--data", "text.txt"], "either --data FILE"),
        (["--text", "text.txt", "--predictions", "p"], "belongs to --data"),
        (["--data", "text.txt", "--tokens"], "belong to --text"),
        (["--text", "nothing.txt"], "cannot be read"),
    ],
)
def test_what_the_command_refuses(saved, monkeypatch, words, message):
    monkeypatch.chdir(saved)
    with pytest.raises((OptionError, DataError), match=message):
        CliRunner().invoke(app, ["evaluate", "model", *words], catch_exceptions=False)
