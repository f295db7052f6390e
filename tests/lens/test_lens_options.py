"""Every documented option of `regard view` and `regard heads`, on one small model of each family.

Each call either does what was asked for or is refused in words; what is refused, and why, stands in `REFUSED`.
"""

import json
import re
import warnings

import pytest
import torch
from small_models import FAMILIES, stirred, words
from typer.testing import CliRunner

from regard.cli.app import app
from regard.data.tokenizers import Bytes
from regard.errors import RegardError
from regard.lens import load
from regard.lens.models import open_recordable
from regard.lens.pages.server import SharedModel
from regard.models import GPT, Encoder, Seq2Seq

TEXT = "w1 w2 w3 w1 w2"
MODELS = ("gpt2", "llama", "bert", "t5", "bart", "vit", "minilm", "GPT", "Encoder", "Seq2Seq")
CROSS = ("t5", "bart", "Seq2Seq")
GENERATES = ("gpt2", "llama", "GPT", *CROSS)
VIEWS = {
    "plain": (),
    "another text": ("w4 w3",),
    "with": ("--with",),
    "target": ("--target", "w5 w6"),
    "generate": ("--generate", "3"),
    "gradient": ("--gradient",),
    "both": ("--generate", "3", "--gradient"),
    "device and seed": ("--device", "cpu", "--seed", "1"),
}
IMAGES = "reads no text"
REFUSED = {
    **{("vit", option): IMAGES for option in VIEWS},
    **{(name, "target"): "has no target" for name in MODELS if name not in (*CROSS, "vit")},
    **{(name, o): "generate" for name in ("bert", "minilm", "Encoder") for o in ("generate", "both")},
    ("minilm", "gradient"): "BertModel has no language model head",
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
            kind, config, sizes = ("BertModel", *FAMILIES["bert"][1:]) if name == "minilm" else FAMILIES[name]
            longer = {"max_position_embeddings": 256} if "max_position_embeddings" in sizes else {}
            longer |= {"n_positions": 256} if "n_positions" in sizes else {}
            model = stirred(getattr(transformers, kind)(getattr(transformers, config)(**sizes | longer)), 0.2)
            model.save_pretrained(root / name)
            if name != "vit":
                words().save_pretrained(root / name)
        found[name] = root / name
    return found


def run(*arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a decoder without a target says so
        return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize("option", list(VIEWS))
@pytest.mark.parametrize("name", MODELS)
def test_view(name, option, folders, tmp_path):
    out = tmp_path / "page.html"
    given = VIEWS[option]
    if option == "with":
        given = ("--with", f"random:{folders[name]}")
    result = run("view", folders[name], TEXT, *given, "--no-labels", "-o", out)
    refusal = REFUSED.get((name, option))
    if refusal is None:
        assert result.exception is None, result.exception
        assert out.stat().st_size > 100_000
    else:
        assert isinstance(result.exception, RegardError) and refusal in str(result.exception), result.exception
        assert not out.exists()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
def test_heads(name, folders, tmp_path):
    (tmp_path / "texts").write_text(f"{TEXT}\nw7 w8 w7 w9 w8\n")
    rows = [f"{i + 1}\tw{i}\t_\t_\t_\t_\t{i}\tdep\t_\t_" for i in range(8)]
    (tmp_path / "a.conllu").write_text(("\n".join(rows) + "\n\n") * 3)
    mention = {"text": "w1 saw w2 and w3 ran", "clusters": [[[0, 2], [14, 16]], [[7, 9]]]}
    (tmp_path / "a.jsonl").write_text((json.dumps(mention) + "\n") * 12)
    options = ["--texts", tmp_path / "texts", "--syntax", tmp_path / "a.conllu", "--coreference", tmp_path / "a.jsonl"]
    options += ["--ablate", "--save", tmp_path / "x.trace", "--device", "cpu", "--seed", 1, "--json"]
    result = run("heads", folders[name], *options)
    assert result.exception is None, result.exception
    found = json.loads(result.stdout)
    assert found["ablation"]["measure"] == ("change" if name == "minilm" else "loss")
    assert (
        len(found["ablation"]["heads"]) == len(found["heads"]) == len(load(tmp_path / "x.trace").recordings[0].labels)
    )
    assert found["syntax"] and found["texts"] == 2


def test_heads_of_a_model_of_images_is_refused(folders):
    assert IMAGES in str(run("heads", folders["vit"]).exception)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
def test_serve_reads_a_text(name, folders):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert SharedModel(open_recordable(folders[name])).record({"text": TEXT}).startswith(b"REGARD")


@pytest.mark.parametrize("name", ["bert", "Encoder"])
def test_a_head_is_worth_what_masked_tokens_lose_without_it(name, folders, tmp_path):
    (tmp_path / "texts").write_text(TEXT)
    result = run("heads", folders[name], "--texts", tmp_path / "texts", "--ablate", "--json")
    subject = open_recordable(folders[name])
    ids = subject.ids(TEXT)
    places = [n for n, i in enumerate(ids) if i > 2]
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
