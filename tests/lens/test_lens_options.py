"""Every documented option of `regard view`, `regard heads` and `regard serve`, on one small model of each family.

Each call either does what was asked for or is refused in words; what is refused, and why, stands in `REFUSED`.
"""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from small_models import FAMILIES, stirred, words
from typer.testing import CliRunner

from regard.cli.app import app
from regard.data.tokenizers import Bytes
from regard.errors import RegardError
from regard.lens import load, small_model
from regard.lens.models import open_recordable
from regard.lens.trace.format import decode
from regard.models import GPT, Encoder, Seq2Seq

TEXT = "w1 w2 w3 w1 w2"
HUB = (
    "gpt2",
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "gpt-oss",
    "bert",
    "roberta",
    "modernbert",
    "minilm",
    "t5",
    "bart",
    "vit",
)
MODELS = (*HUB, "GPT", "Encoder", "Seq2Seq")
CROSS = ("t5", "bart", "Seq2Seq")
ENCODERS = ("bert", "roberta", "modernbert", "minilm")
WITHOUT_HEAD = {"minilm": "bert"}  # the encoder of that family alone
VIEWS = {
    "labels": ("--labels",),
    "pair": ("--no-labels", "--pair", "w4 w3"),
    "another text": ("w4 w3",),
    "with": ("--with",),
    "target": ("--target", "w5 w6"),
    "generate": ("--generate", "3"),
    "gradient": ("--gradient",),
    "both": ("--generate", "3", "--gradient"),
    "contributions": ("--contributions",),
    "device, seed and download": ("--device", "cpu", "--seed", "1", "--download"),
}
IMAGES = "reads no text"
REFUSED = {
    ("vit", "pair"): "a pair is two texts",
    ("vit", "generate"): "generates nothing",
    ("vit", "both"): "generates nothing",
    ("vit", "gradient"): "has no loss",
    ("gemma2", "contributions"): "scaled, capped or projected",
    **{(name, "target"): "has no target" for name in MODELS if name not in CROSS},
    **{(name, o): "generate" for name in (*ENCODERS, "Encoder") for o in ("generate", "both")},
    **{(name, "pair"): "reads one text" for name in MODELS if name not in (*ENCODERS, "vit")},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    root, found = tmp_path_factory.mktemp("models"), {}
    own = {"GPT": GPT, "Encoder": Encoder, "Seq2Seq": Seq2Seq}
    for name in MODELS:
        torch.manual_seed(0)
        if name in own:
            model = own[name].preset("nano", vocabulary=260)
            model.tokenizer = Bytes(["<mask>"])
            model.save(root / name)
        else:
            kind, config, sizes = FAMILIES[WITHOUT_HEAD.get(name, name)]
            if name in WITHOUT_HEAD:
                kind = "BertModel"
            if name == "roberta":
                kind = "RobertaForMaskedLM"
            longer = {"max_position_embeddings": 256} if "max_position_embeddings" in sizes else {}
            longer |= {"n_positions": 256} if "n_positions" in sizes else {}
            model = stirred(getattr(transformers, kind)(getattr(transformers, config)(**sizes | longer)), 0.2)
            model.save_pretrained(root / name)
            if name == "vit":
                Image.effect_noise((50, 40), 60).save(root / "noise.png")
            else:
                tokenizer = words(("[PAD]", "[MASK]", "[CLS]", "[SEP]"), pairs=True) if name in ENCODERS else words()
                tokenizer.save_pretrained(root / name)
        found[name] = root / name
    return found


def test_a_pair_needs_a_tokenizer():
    with pytest.raises(RegardError, match="random:bert@tiny has no tokenizer, which joins"):
        raise run("view", "random:bert@tiny", "w1 w2", "--pair", "w3").exception


@pytest.mark.parametrize("option", [("--generate", 3), ("--gradient",)])
def test_a_decoder_whose_config_names_no_start_begins_with_padding(option, tmp_path):
    """As T5's does; its config names none until a checkpoint is loaded."""
    result = run("view", "random:t5@tiny", "The dog ran", *option, "--no-labels", "-o", tmp_path / "page.html")
    assert result.exception is None, result.exception


def test_a_small_vocabulary_reads_any_text(tmp_path):
    result = run("view", "random:gpt2@tiny", "Élan", "--no-labels", "-o", tmp_path / "page.html")
    assert result.exception is None, result.exception


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_bytes_that_a_random_model_reads_are_named_by_their_characters(name):
    """Its ids say nothing to a reader, and the page would show "84 104 101" for "The"."""
    pytest.importorskip("transformers")
    recordable = open_recordable(f"random:{name}@tiny")
    target = {"target": "Ay"} if name == "t5" else {}
    first, *others = recordable.record("Élan", **target).recordings[0].sequences
    assert first.tokens[:5] == ["É", "É", "l", "a", "n"] and first.text == "Élan" and first.words[0] == 0
    assert [tokens.tokens[-2:] for tokens in others] == [["A", "y"]] * (name == "t5")


def run(*arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a decoder without a target says so
        return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize("option", list(VIEWS))
@pytest.mark.parametrize("name", MODELS)
def test_view(name, option, folders, tmp_path, monkeypatch):
    monkeypatch.setattr("regard.lens.heads.examine.default_texts", lambda: [TEXT, "w7 w8 w7"])
    out = tmp_path / "page.html"
    given = VIEWS[option]
    read = TEXT
    if name == "vit":
        read = folders[name].parent / "noise.png"
        given = tuple(read if word == "w4 w3" and option == "another text" else word for word in given)
    if option == "with":
        given = ("--with", f"random:{folders[name]}")
    if "--labels" not in given:
        given = (*given, "--no-labels")
    result = run("view", folders[name], read, *given, "--out", out)
    refusal = REFUSED.get((name, option))
    if refusal is None:
        assert result.exception is None, result.exception
        assert out.stat().st_size > 100_000
    else:
        assert isinstance(result.exception, RegardError) and refusal in str(result.exception), result.exception
        assert not out.exists()


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "jamba"])
def test_models_with_memories(name, tmp_path, monkeypatch):
    """Twins without a tokenizer: nothing joins a pair, and what a memory hands on is not recorded."""
    monkeypatch.setattr("regard.lens.heads.examine.default_texts", lambda: [TEXT, "w7 w8 w7"])
    model = f"random:{name}@tiny"
    refused = {"pair": "no tokenizer", "target": "has no target"}
    if name != "jamba":
        refused["contributions"] = "whose output projection is not known"
    views = VIEWS | {"with": ("--with", model)}
    if name != "jamba":
        del views["labels"]  # seconds of a delta rule in pure PyTorch
    for option, given in views.items():
        out = tmp_path / f"{option}.html"
        result = run("view", model, TEXT, *given, *([] if "--labels" in given else ["--no-labels"]), "--out", out)
        if option in refused:
            assert refused[option] in str(result.exception) and not out.exists(), (option, result.exception)
        else:
            assert result.exception is None and out.stat().st_size > 100_000, (option, result.exception)
    drawn = run("plot", "weights", model, TEXT, "--out", tmp_path / "weights.svg")
    assert drawn.exception is None, drawn.exception


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
def test_heads(name, folders, tmp_path):
    (tmp_path / "texts").write_text(f"{TEXT}\nw7 w8 w7 w9 w8\n")
    rows = [f"{i + 1}\tw{i}\t_\t_\t_\t_\t{i}\tdep\t_\t_" for i in range(8)]
    (tmp_path / "a.conllu").write_text(("\n".join(rows) + "\n\n") * 3)
    mention = {"text": "w1 saw w2 and w3 ran", "clusters": [[[0, 2], [14, 16]], [[7, 9]]]}
    (tmp_path / "a.jsonl").write_text((json.dumps(mention) + "\n") * 12)
    options = ["--texts", tmp_path / "texts", "--syntax", tmp_path / "a.conllu", "--coreference", tmp_path / "a.jsonl"]
    options += ["--ablate", "--save", tmp_path / "x.trace", "--device", "cpu", "--seed", 1, "--download", "--json"]
    (tmp_path / "beside").write_text("w4 w5\nw6\n")
    if name in ENCODERS:
        options += ["--pairs", tmp_path / "beside"]
    if name in CROSS:
        options += ["--targets", tmp_path / "beside"]
    result = run("heads", folders[name], *options)
    assert result.exception is None, result.exception
    found = json.loads(result.stdout)
    assert found["ablation"]["measure"] == ("change" if name in WITHOUT_HEAD else "loss")
    assert (
        len(found["ablation"]["heads"]) == len(found["heads"]) == len(load(tmp_path / "x.trace").recordings[0].labels)
    )
    assert found["syntax"] and found["texts"] == 2


def test_heads_of_a_model_of_images_is_refused(folders):
    assert IMAGES in str(run("heads", folders["vit"]).exception)


@pytest.mark.parametrize("name", MODELS)
def test_plot_weights(name, folders, tmp_path):
    out = tmp_path / "weights.svg"
    read = folders[name].parent / "noise.png" if name == "vit" else TEXT
    options = ("--size", "4x3", "--layer", 1, "--head", 0, "--device", "cpu", "--seed", 1, "--download")
    result = run("plot", "weights", folders[name], read, "--out", out, *options)
    assert result.exception is None, result.exception
    assert all(word in out.read_text("utf-8") for word in ("layer 1", "head 0"))


def test_serving_a_model_of_images_is_refused(folders):
    assert IMAGES in str(run("serve", folders["vit"], "--no-labels").exception)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
def test_serve(name, folders, monkeypatch):
    """The command is run up to the socket; what it would serve then reads a text, a pair and a target."""
    monkeypatch.setattr("regard.lens.heads.examine.default_texts", lambda: [TEXT, "w7 w8 w7"])
    started = []
    monkeypatch.setattr("regard.cli.serve.run", lambda server, port, ready: started.append((server, port)))
    labels = "--labels" if name == "GPT" else "--no-labels"
    result = run("serve", folders[name], "--port", 0, labels, "--device", "cpu", "--seed", 1, "--download")
    assert result.exception is None, result.exception
    [(server, port)] = started
    assert port == 0 and (server.labels is not None) == (name == "GPT")
    request = {"text": TEXT}
    assert server.about()["pairs"] == (name in ENCODERS) and server.about()["target"] == (name in CROSS)
    if name in ENCODERS:
        request["pair"] = "w4"
    if name in CROSS:
        request["target"] = "w4 w5 w6"
    trace = decode(server.record(request))
    if name in CROSS:
        target = trace.recordings[0].sequences[1]
        assert target.text.strip().endswith("w4 w5 w6") and target.ids != trace.recordings[0].sequences[0].ids


@pytest.mark.parametrize("name", CROSS)
def test_without_a_target_the_decoder_writes_its_own_and_does_not_read_the_text(name, folders):
    subject = open_recordable(folders[name])
    with pytest.warns(UserWarning, match="the decoder wrote its own"):
        source, target = subject.record_one(TEXT).sequences
    assert target.steps is not None and target.prompt == 1 and target.ids[1:] != source.ids


def test_every_option_of_the_commands_is_tested():
    """Those of pruning, which takes many passes, and of checkpoints have files of their own."""
    import typer

    from regard.cli import heads, plot, serve, view

    files = ("test_lens_options.py", "test_pruning.py", "test_head_checkpoints.py")
    here = "".join(Path(__file__).with_name(name).read_text("utf-8") for name in files)
    for function in (view.view, heads.heads, serve.serve, plot.weights):
        single = typer.Typer(add_completion=False)
        single.command()(function)
        for parameter in typer.main.get_command(single).params:
            names = [name for name in parameter.opts if name.startswith("--")]
            assert not names or any(f'"{name}"' in here for name in names), (function.__name__, names)


@pytest.mark.parametrize("name", CROSS)
def test_removing_a_head_costs_the_loss_of_the_target_and_not_of_the_source(name, folders, tmp_path):
    (tmp_path / "texts").write_text(TEXT)
    (tmp_path / "targets").write_text("w9 w8 w7")
    asked = ("heads", folders[name], "--texts", tmp_path / "texts", "--targets", tmp_path / "targets", "--ablate")
    found = json.loads(run(*asked, "--json").stdout)["ablation"]
    subject = open_recordable(folders[name])
    recording = subject.record(TEXT, target="w9 w8 w7", gradient=True).recordings[0]
    assert found["whole"] == pytest.approx(recording.loss, rel=1e-4)


@pytest.mark.parametrize("name", ["bert", "Encoder"])
def test_a_head_is_worth_what_masked_tokens_lose_without_it(name, folders, tmp_path):
    (tmp_path / "texts").write_text(TEXT)
    result = run("heads", folders[name], "--texts", tmp_path / "texts", "--ablate", "--json")
    subject = open_recordable(folders[name])
    ids = subject.ids(TEXT)
    places = [n for n, i in enumerate(ids) if i > 3]  # none of the special tokens
    copies = torch.tensor([ids]).repeat(len(places), 1)
    rows, at = torch.arange(len(places)), torch.tensor(places)
    copies[rows, at] = 1 if name == "bert" else 256
    with torch.no_grad():
        out = subject.model(copies)
    logits = (out.logits if name == "bert" else out)[rows, at]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids)[at])
    assert json.loads(result.stdout)["ablation"]["whole"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["The dog ran"], "'The dog ran' was taken for a model but reads like a text: regard view MODEL 'The dog ran'"),
        (["The dog", "ran"], "'The dog' was taken for a model but reads like a text"),
        (["nope"], "'nope' was taken for a model, and there is no text.*regard view nope \"The dog ran\".*MODEL nope"),
        (["nope.trace"], "nope.trace does not exist"),
        (["."], '. was taken for a model, and it needs a text: regard view . "The dog ran"'),
    ],
)
def test_a_single_argument_is_told_what_it_was_taken_for(arguments, message):
    assert re.search(message, str(run("view", *arguments).exception))


def test_the_model_that_comes_with_regard_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("view", "small", "The dog ran", "--no-labels", "-o", "page.html")
    assert result.exception is None, result.exception
    assert Path("page.html").read_text("utf-8").startswith("<!doctype html>")
    assert run("view", "small", "--no-labels", "--with", "random:small", "-o", "twin.html").exception is None
    twin = Path("twin.html").read_text("utf-8")
    assert small_model.TEXT in twin and "random:" in twin  # without a text it reads its own
    Path("small").mkdir()  # what the user has called so comes first
    assert "small" in str(run("view", "small", "The dog ran", "-o", "other.html").exception)
