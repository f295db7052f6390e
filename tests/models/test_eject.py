"""An ejected model: one file without regard, equal to the bit on the plain path."""

import ast
import importlib.util
import runpy
import subprocess
import sys

import pytest
import torch

import regard
from regard.data.tokenizers import BPE, Bytes, Characters
from regard.errors import OptionError, printable
from regard.kernels import plain
from regard.mechanisms import mechanisms
from regard.models import GPT, Seq2Seq
from regard.models.eject import eject, example_text, write_source

SMALL = {"vocabulary": 31, "width": 24, "layers": 2, "length": 200, "attention": {"heads": 4}}
PLAIN = sorted(mechanisms())
OPTIONS = {"performer": {"features": 16}, "fourier": {"features": 16}, "polynomial": {"degree": 3, "offset": 1.0}}


def small(**changes):
    torch.manual_seed(0)
    attention = {"heads": 4} | changes.pop("attention", {})
    made = GPT(**(SMALL | {"attention": attention} | changes))
    for p in made.parameters():
        p.data = torch.randn_like(p) * 0.2
    return plain(made.eval())


def imported(path):
    spec = importlib.util.spec_from_file_location("ejected", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_equal(model, folder, T=150):
    path = eject(model, folder)
    twin = imported(path).build(folder)
    tokens = torch.randint(0, 31, (2, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(tokens), twin(tokens))
    return path


@pytest.mark.parametrize("name", ['a"""b', "a\\u", "a\\", "a\nb", "a\0b", "a\ud800", 'a"', "\u202ea"])
def test_a_name_stays_in_the_docstring(name):
    first, *others = ast.parse(write_source(small(), name).encode()).body
    assert first.value.value.startswith(f"{printable(name)}: a GPT with softmax attention")
    assert all(isinstance(x, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef | ast.If) for x in others)


def test_all_files_have_the_same_permissions(tmp_path):
    model = small()
    model.tokenizer = Characters("abcdefghij")
    eject(model, tmp_path / "plain")
    assert len({file.stat().st_mode for file in (tmp_path / "plain").iterdir()}) == 1


@pytest.mark.parametrize("name", PLAIN)
def test_every_mechanism_is_equal_to_the_bit(name, tmp_path):
    path = check_equal(small(mechanism=name, options=OPTIONS.get(name, {})), tmp_path / "plain")
    source = path.read_text()
    assert len(source.splitlines()) <= 300
    names = {node.names[0].name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import)}
    names |= {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert not any(str(name).startswith("regard") for name in names)


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "rotary", "position_options": {"factor": 2.0}},
        {"position": "rotary", "position_options": {"factor": 4.0, "original": 64}},
        {"position": "sinusoidal"},
        {"position": "alibi"},
        {"position": "none", "mechanism": "elu"},
        {"mechanism": "argmax", "position": "alibi", "options": {"gradient": "straight_through"}},
        {"attention": {"groups": 2}},
        {"attention": {"groups": 1, "key_width": 10, "value_width": 8, "qk_norm": True}},
        {"attention": {"window": 9}},
        {"attention": {"window": 500}, "position": "rotary"},
        {"attention": {"merge": "shift"}},
        {"attention": {"merge": "reweight"}},
        {"attention": {"merge": "reweight-sequence"}},
        {"block": {"norm": "rms", "mlp": "swiglu", "bias": False}},
        {"block": {"before": False, "mlp": "relu", "embedding_norm": True}},
        {"tied": False, "block": {"mlp": "gelu"}},
        {"mechanism": ("softmax", "elu")},
        {"mechanism": "synthesizer-random", "options": {"rank": 3}},
        {"mechanism": "similarity", "attention": {"groups": 2, "window": 9}},
        {"mechanism": "gated", "options": {"channels": True}, "attention": {"groups": 2}},
        {"mechanism": "gated", "attention": {"decay": "step", "decay_options": {"least": 0.1, "most": 1.0}}},
        {"mechanism": "gated", "attention": {"decay": "logsigmoid"}, "options": {"scale": 0.7}},
        {"mechanism": "gated", "attention": {"decay": "constant"}},
        {"mechanism": "retention", "attention": {"groups": 2, "key_width": 10, "value_width": 8}},
        {"mechanism": "delta", "options": {"range": 2.0}, "position": "rotary"},
        {"mechanism": "delta", "attention": {"key_heads": 2, "qk_norm": True}},
        {"mechanism": "gated-delta", "options": {"channels": True}, "attention": {"key_heads": 2}},
        {"mechanism": ("softmax", "gated-delta")},
    ],
    ids=str,
)
def test_every_part_of_a_model_is_equal_to_the_bit(changes, tmp_path):
    check_equal(small(**changes), tmp_path / "plain")


def test_a_window_of_linear_attention_is_equal_but_for_rounding(tmp_path):
    model = small(attention={"window": 9}, position="rotary", mechanism="elu")
    twin = imported(eject(model, tmp_path / "plain")).build(tmp_path / "plain")
    tokens = torch.randint(0, 31, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(twin(tokens), model(tokens))


def test_gradients_are_those_of_the_model(tmp_path):
    model = small(mechanism="performer", options=OPTIONS["performer"])
    twin = imported(eject(model, tmp_path / "plain")).build(tmp_path / "plain")
    tokens = torch.randint(0, 31, (2, 40), generator=torch.Generator().manual_seed(1))
    for made in (model, twin):
        made(tokens).square().mean().backward()
    grads = dict(twin.named_parameters())
    assert grads.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name].grad, p.grad)


@pytest.mark.parametrize(
    ("tokenizer", "example"),
    [(None, "0"), (Characters("abc de"), "ce  a e"), (Characters("xyz"), "x"), (Bytes(), "Once upon a time")],
    ids=["none", "some", "others", "bytes"],
)
def test_the_file_names_a_text_that_its_model_can_read(tokenizer, example, tmp_path, monkeypatch, capsys):
    model = small(vocabulary=8 if tokenizer is None else tokenizer.size, length=16)
    model.tokenizer = tokenizer
    path = eject(model, tmp_path / "plain")
    assert example_text(model) == example and f'python model.py "{example}"' in path.read_text()
    monkeypatch.setattr("sys.argv", ["model.py"])  # without a text it goes on with its own
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.startswith("[0, " if tokenizer is None else example)


def test_the_file_names_characters_that_its_model_does_not_know(tmp_path, monkeypatch):
    model = small(vocabulary=9, length=16)
    model.tokenizer = Characters("abc de")
    monkeypatch.setattr("sys.argv", ["model.py", "abba!"])
    with pytest.raises(SystemExit, match=r"does not know \['!'\]"):
        runpy.run_path(str(eject(model, tmp_path / "plain")), run_name="__main__")


@pytest.mark.parametrize("tokenizer", [Characters(sorted("abc de"), ()), Bytes(), "bpe", None], ids=str)
def test_the_file_writes_text_where_regard_is_not(tokenizer, tmp_path):
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
        tokenizer = BPE.train(["abc de abc"], 260)
    vocabulary = 8 if tokenizer is None else tokenizer.size
    model = small(vocabulary=vocabulary, length=16)
    model.tokenizer = tokenizer
    path = eject(model, tmp_path / "plain", "letters")
    # A meta path finder that refuses regard stands for a machine without it.
    code = (
        "import sys, runpy\n"
        "class Absent:\n"
        "    def find_spec(self, name, *rest):\n"
        "        assert name.partition('.')[0] != 'regard', name\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.argv = ['model.py', {'1 2 3' if tokenizer is None else 'abc'!r}]\n"
        f"runpy.run_path({str(path)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1, 2, 3" if tokenizer is None else "abc")


def test_what_has_no_plain_twin_is_refused(tmp_path):
    own = small(mechanism="similarity", options={"sim": lambda q, k: (q * k).sum().exp()})
    with pytest.raises(OptionError, match="'similarity' has no plain version"):
        write_source(own)
    with pytest.raises(OptionError, match=r"model\.attention\.convolution"):
        write_source(small(mechanism="gated", attention={"convolution": {"width": 4}}))
    pair = Seq2Seq(
        vocabulary=20,
        encoder={"width": 16, "layers": 1, "attention": {"heads": 2}},
        decoder={"width": 16, "layers": 1, "attention": {"heads": 2}},
    )
    with pytest.raises(OptionError, match="regard export"):
        write_source(pair)
    assert regard.GPT is GPT
