"""Pairs of texts: a model reads two at once, with the token types that it was trained on."""

import json
import warnings

import pytest
import torch
from small_models import FAMILIES, stirred, words
from typer.testing import CliRunner

from regard.cli.app import app
from regard.errors import OptionError
from regard.lens import load, record
from regard.lens.models import open_recordable
from regard.lens.pages.server import SharedModel
from regard.lens.trace.format import decode, encode, to_bytes
from regard.models import Encoder

FIRST = "w1 w2 w3"
SECOND = "w4 w2"
SPECIAL = ("[PAD]", "[MASK]", "[CLS]", "[SEP]")


def bert(name="bert", **changes):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    kind, config, sizes = FAMILIES[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes | changes))
    return stirred(model, 0.6), words(SPECIAL, pairs=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model, tokenizer = bert(max_position_embeddings=256)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def eager(model, inputs):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(**inputs, output_attentions=True).attentions


def test_a_pair_has_the_weights_that_transformers_gives_it():
    model, tokenizer = bert()
    trace = record(model, FIRST, pair=SECOND, tokenizer=tokenizer)
    inputs = tokenizer(FIRST, SECOND, return_tensors="pt", return_token_type_ids=True)
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    maps = eager(model, inputs)
    alone = eager(model, dict(inputs) | {"token_type_ids": torch.zeros_like(inputs["token_type_ids"])})
    for layer in range(2):
        for head in range(4):
            weights = trace.weights(layer, head)
            assert float((weights - maps[layer][0, head]).abs().max()) < 1e-5
            assert float((weights - alone[layer][0, head]).abs().max()) > 1e-3  # the types matter


def test_the_trace_says_which_text_each_token_belongs_to(tmp_path):
    model, tokenizer = bert()
    trace = record(model, FIRST, pair=SECOND, tokenizer=tokenizer)
    trace.save(tmp_path / "a.trace")
    tokens = load(tmp_path / "a.trace").recordings[0].sequences[0]
    assert tokens.segment == [-1, 0, 0, 0, -1, 1, 1, -1]
    assert tokens.text == "w1 w2 w3\nw4 w2"
    shown = [tokens.text[a:b] for a, b in zip(tokens.starts, tokens.ends, strict=True) if a >= 0]
    assert shown == ["w1", "w2", "w3", "w4", "w2"] and len(set(tokens.words)) == 6


def test_one_text_has_no_segments_and_its_trace_is_as_it_was():
    model, tokenizer = bert()
    trace = record(model, FIRST, tokenizer=tokenizer)
    entry = encode(trace).header["recordings"][0]["sequences"][0]
    assert "segment" not in entry
    assert decode(to_bytes(encode(trace))).recordings[0].sequences[0].segment is None


def test_the_gradient_and_padding_keep_the_segments():
    model, tokenizer = bert()
    recording = record(model, FIRST, pair=SECOND, tokenizer=tokenizer, gradient=True).recordings[0]
    assert recording.sequences[0].segment == [-1, 0, 0, 0, -1, 1, 1, -1]
    inputs = dict(tokenizer(FIRST, SECOND, return_tensors="pt", return_token_type_ids=True))
    ids, places = inputs["input_ids"][0], [1, 2, 3, 5, 6]
    copies = ids.repeat(5, 1)
    copies[torch.arange(5), torch.tensor(places)] = tokenizer.mask_token_id
    with torch.no_grad():
        out = model(input_ids=copies, token_type_ids=inputs["token_type_ids"].expand(5, -1)).logits
    loss = torch.nn.functional.cross_entropy(out[torch.arange(5), torch.tensor(places)], ids[places])
    assert recording.loss == pytest.approx(float(loss), rel=1e-5)


def test_a_typed_separator_is_warned_about_and_a_pair_is_not():
    model, tokenizer = bert()
    with pytest.warns(UserWarning, match=r"\[SEP\] is typed in the text.*--pair"):
        record(model, f"{FIRST} [SEP] {SECOND}", tokenizer=tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record(model, FIRST, pair=SECOND, tokenizer=tokenizer)
        record(model, FIRST, tokenizer=tokenizer)


def test_models_that_read_one_text_refuse_a_pair():
    gpt2, plain = bert("gpt2")[0], words()
    with pytest.raises(OptionError, match="GPT2LMHeadModel reads one text"):
        record(gpt2, FIRST, pair=SECOND, tokenizer=plain)
    with pytest.raises(OptionError, match="both as text"):
        record(bert()[0], [5, 6], pair=SECOND, tokenizer=plain)
    with pytest.raises(OptionError, match="Encoder of regard's reads one text"):
        record(Encoder.preset("nano"), [5, 6], pair=SECOND)


def test_every_command_takes_a_pair(folder, tmp_path):
    opened = open_recordable(folder)
    wanted = record(opened.model, FIRST, pair=SECOND, tokenizer=opened.tokenizer)
    out = tmp_path / "page.html"
    result = CliRunner().invoke(
        app, ["view", str(folder), FIRST, "--pair", SECOND, "--no-labels", "-o", str(out)], catch_exceptions=False
    )
    assert result.exit_code == 0 and '"segment":[-1,0,0,0,-1,1,1,-1]' in out.read_text("utf-8")
    shared = SharedModel(open_recordable(folder))
    assert shared.about()["pairs"]
    served = decode(shared.record({"text": FIRST, "pair": SECOND}))
    assert served.recordings[0].sequences[0].segment == [-1, 0, 0, 0, -1, 1, 1, -1]
    assert float((served.weights(1, 2) - wanted.weights(1, 2)).abs().max()) < 2e-3


def test_heads_are_examined_on_pairs(folder, tmp_path):
    (tmp_path / "a").write_text(f"{FIRST}\n\n{SECOND}\n")
    (tmp_path / "b").write_text("w5\n\nw6 w7\n")
    asked = ["heads", str(folder), "--texts", str(tmp_path / "a"), "--pairs", str(tmp_path / "b"), "--ablate", "--json"]
    found = json.loads(CliRunner().invoke(app, asked, catch_exceptions=False).stdout)
    assert found["texts"] == 2 and found["tokens"] == (3 + 1 + 3) + (2 + 2 + 3)
    subject = open_recordable(folder)
    losses = []
    for first, second in ((FIRST, "w5"), (SECOND, "w6 w7")):
        trace = record(subject.model, first, pair=second, tokenizer=subject.tokenizer, gradient=True)
        losses.append(trace.recordings[0].loss)
    assert found["ablation"]["whole"] == pytest.approx(sum(losses) / 2, rel=1e-4)


def test_files_of_pairs_must_fit_the_texts(folder, tmp_path):
    (tmp_path / "a").write_text("w1\nw2\n")
    (tmp_path / "b").write_text("w5\n")
    run = CliRunner().invoke
    short = run(app, ["heads", str(folder), "--texts", str(tmp_path / "a"), "--pairs", str(tmp_path / "b")])
    assert "has 1 lines" in str(short.exception) and "has 2; expected one for each" in str(short.exception)
    assert "belong to the texts of --texts" in str(run(app, ["heads", str(folder), "--targets", "x"]).exception)
