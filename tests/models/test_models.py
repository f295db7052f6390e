"""Whole models: with a state as without, whatever the mechanism, positions and merge; and what they are saved as."""

import json
import os
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.checking.models import MODEL_LAWS, ModelSubject
from regard.data import Bytes, Characters
from regard.errors import LengthError, OptionError, RegardError, UnknownNameError
from regard.kernels import plain
from regard.laws import DoesNotApply, Finding
from regard.laws.case import TOLERANCE, worst
from regard.mechanisms import mechanisms
from regard.models import (
    GPT,
    IGNORE,
    ConfigError,
    Encoder,
    EncoderConfig,
    GPTConfig,
    Model,
    ModelFolderError,
    Seq2Seq,
    Seq2SeqConfig,
    StackConfig,
    load,
    token_loss,
)
from regard.nn import LooksAheadError

NAMES = sorted(mechanisms())
BOTH_WAYS = {name for name, cls in mechanisms().items() if not cls.causal_only}
POSITIONS = ["learned", "sinusoidal", "rotary", "none"]
MERGES = ["concatenate", "shuffle", "shift", "reweight"]  # those that do not look ahead
DTYPES = [torch.float64, torch.float32]


def stirred(model: Any) -> Any:
    """Weights large enough that attention matters."""
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if p.dim() > 1 and "mechanism" not in name:
            p.data = torch.randn_like(p) * 0.2
    return model.eval()


def built(cls: type[Model[Any]], mechanism: str, position: str, merge: str) -> Any:
    stack = {
        "width": 12,
        "layers": 2,
        "length": 17,
        "mechanism": mechanism,
        "options": {"features": 128} if mechanism in ("performer", "fourier") else {},
        "position": position,
        "attention": {"heads": 3, "groups": 3, "key_width": 4, "value_width": 5, "merge": merge},
    }
    if cls is Seq2Seq:
        cross = mechanism if mechanisms()[mechanism].crosses else "softmax"
        source = stack | {"width": 9, "layers": 1, "mechanism": "softmax", "options": {}}
        options = stack["options"] if cross == mechanism else {}
        return stirred(
            Seq2Seq(
                vocabulary=13, target_vocabulary=11, encoder=source, decoder=stack, cross=cross, cross_options=options
            )
        )
    return stirred(cls(vocabulary=11, **stack))


# These models have no window and are too short for a chunk; tests/checking/test_model_edges.py has some that are not.
EDGES = ("packed", "window", "long")


def check(model: Any, seeds: int, dtype: torch.dtype = torch.float64) -> dict[str, Finding | str]:
    """Each law's worst finding over some random inputs, or the reason why it does not apply."""
    found: dict[str, Finding | str] = {}
    for name, law in MODEL_LAWS.items():
        try:
            found[name] = worst(law(ModelSubject(model, seed, dtype)) for seed in range(seeds))
        except DoesNotApply as reason:
            found[name] = str(reason)
    return found


def holds(finding: Finding, dtype: torch.dtype) -> None:
    # Strictly, also where the law itself allows for cancelling weights.
    assert finding.error <= min(finding.limit, TOLERANCE[dtype]), finding


# Every mechanism with every kind of position, the merges in turn; the slow test takes all of the product.
FEW = [(m, p, MERGES[(i + j) % 4]) for (i, m), (j, p) in product(enumerate(NAMES), enumerate(POSITIONS))]


@pytest.mark.parametrize("cls", [GPT, Seq2Seq])
@pytest.mark.parametrize(("mechanism", "position", "merge"), FEW)
def test_with_a_state_as_without(cls: type[Model[Any]], mechanism: str, position: str, merge: str) -> None:
    model = built(cls, mechanism, position, merge)
    for dtype in DTYPES:
        holds(MODEL_LAWS["cache"](ModelSubject(model, 0, dtype, B=2, T=9)), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [GPT, Encoder, Seq2Seq])
@pytest.mark.parametrize("mechanism", NAMES)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("merge", MERGES)
def test_every_law_of_every_model(cls: type[Model[Any]], mechanism: str, position: str, merge: str) -> None:
    if cls is Encoder and mechanism not in BOTH_WAYS:
        pytest.skip("it has no meaning that looks both ways")
    model = built(cls, mechanism, position, merge)
    for dtype in DTYPES:
        for name, finding in check(model, seeds=2, dtype=dtype).items():
            if isinstance(finding, str):
                assert cls is Encoder or name in EDGES
            elif name == "packed" and dtype is torch.float32 and mechanism == "argmax":
                continue  # near ties are chosen otherwise where sums are rounded otherwise; float64 is asked strictly
            elif name == "packed" and dtype is torch.float32 and mechanisms()[mechanism].signed:
                # Of two tokens that a document may have, the estimated weights may cancel to three digits.
                assert not finding.broken, finding
            else:
                holds(finding, dtype)


@pytest.mark.parametrize("cls", [GPT, Encoder, Seq2Seq])
@pytest.mark.parametrize("mechanism", NAMES)
def test_the_laws_of_whole_models(cls: type[Model[Any]], mechanism: str) -> None:
    if cls is Encoder and mechanism not in BOTH_WAYS:
        with pytest.raises(OptionError, match="looks both ways"):
            built(cls, mechanism, "rotary", "reweight")
        return
    for name, finding in check(built(cls, mechanism, "rotary", "reweight"), seeds=1).items():
        if isinstance(finding, str):
            assert name in EDGES or (cls is Encoder and name in ("looks-ahead", "cache", "prompts"))
        else:
            holds(finding, torch.float64)


def test_reweight_sequence_is_found_to_look_ahead_and_has_no_state() -> None:
    model = built(GPT, "softmax", "learned", "reweight-sequence")
    found = check(model, seeds=1)
    ahead = found["looks-ahead"]
    assert isinstance(ahead, Finding) and ahead.broken and ahead.error > 0.01
    assert isinstance(found["cache"], str) and "looks ahead" in found["cache"]
    assert not found["padding"].broken  # type: ignore[union-attr]
    with pytest.raises(LooksAheadError, match="at_inference"):
        model.empty(1, 4)
    off = GPT(model.config.but(attention={"merge_options": {"at_inference": False}})).eval()
    assert not any(isinstance(f, str) or f.broken for name, f in check(off, seeds=1).items() if name not in EDGES)


def test_a_broken_model_is_found_out() -> None:
    """The laws must be able to fail: positions by column instead of by visible tokens."""
    model = built(GPT, "softmax", "learned", "concatenate")
    model.stack._add_positions = lambda x, positions, reach: type(model.stack)._add_positions(
        model.stack, x, torch.arange(x.shape[1])[None], reach
    )
    found = {name: f for name, f in check(model, seeds=1).items() if isinstance(f, Finding)}
    assert found["cache"].broken and found["padding"].broken and not found["batch"].broken


def test_mechanisms_may_differ_by_layer_and_take_their_own_options() -> None:
    model = GPT.preset("nano", vocabulary=7, mechanism=["softmax", "performer", "elu"], options={"features": 9})
    layers = [block.attention.mechanism for block in model.stack.layers]
    assert [m.name for m in layers] == ["softmax", "performer", "elu"]
    assert layers[1].count == 9
    with pytest.raises(OptionError, match="featurs"):
        GPT.preset("nano", vocabulary=7, mechanism="performer", options={"featurs": 9})
    with pytest.raises(ConfigError, match="2 mechanisms for 3 layers"):
        GPT.preset("nano", mechanism=["softmax", "elu"])


def test_too_long_is_an_error_that_says_how_long() -> None:
    for options in ({}, {"position": "rotary", "mechanism": "synthesizer"}):
        model = GPT.preset("nano", vocabulary=7, length=8, **options).eval()
        with pytest.raises(LengthError, match=r"9 visible tokens.*length = 8"):
            model(torch.zeros(1, 9, dtype=torch.long))
        _, state = model.prefill(torch.zeros(1, 8, dtype=torch.long), None, 0)
        with pytest.raises(LengthError, match="9 visible tokens"):
            model.extend(torch.zeros(1, 1, dtype=torch.long), state)
        visible = torch.arange(12)[None] < 8  # padding is not counted
        assert model(torch.zeros(1, 12, dtype=torch.long), visible).shape == (1, 12, 7)
        with pytest.raises(LengthError, match="9 visible tokens"):
            model(torch.zeros(1, 12, dtype=torch.long), torch.arange(12)[None] < 9)
    assert (
        GPT.preset("nano", vocabulary=7, length=8, position="rotary")(torch.zeros(1, 9, dtype=torch.long)).shape[1] == 9
    )


def test_presets_have_the_sizes_they_are_known_for() -> None:
    nano = GPT.preset("nano", vocabulary=65, length=64)
    assert (nano.config.layers, nano.config.attention.heads, nano.config.width) == (3, 3, 48)
    with torch.device("meta"):
        sizes = {n: sum(p.numel() for p in GPT.preset(n).parameters()) for n in GPT.PRESETS if "gpt2" in n}
        assert sum(p.numel() for p in Encoder.preset("bert", head="none").parameters()) == 108_891_648
    assert sizes == {
        "gpt2": 124_439_808,
        "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200,
    }
    for cls in (Encoder, Seq2Seq):
        assert cls.preset("nano").summary().total.parameters == sum(p.numel() for p in cls.preset("nano").parameters())
    with pytest.raises(UnknownNameError, match="Did you mean 'nano'"):
        GPT.preset("nanno")


def test_initialisation_is_gpt2s() -> None:
    torch.manual_seed(0)
    model = GPT.preset("char")
    block = model.stack.layers[1]
    weights = {"in": block.attention.project.weight, "out": block.attention.out.weight, "mlp": block.mlp.out.weight}
    spread = {n: float(x.detach().std()) for n, x in weights.items()}
    added = 0.02 / (2 * 4) ** 0.5
    assert spread == pytest.approx({"in": 0.02, "out": added, "mlp": added}, rel=0.02)
    assert bool((block.attention.out.bias == 0).all())
    loss = model.loss(torch.randint(0, 256, (4, 64)), torch.randint(0, 256, (4, 64)))
    assert float(loss.detach()) == pytest.approx(5.545, abs=0.1)  # ln 256


def test_loss_ignores_what_it_is_told_to() -> None:
    logits, targets = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    targets[0, 2:] = IGNORE
    kept = targets != IGNORE
    want = -logits.log_softmax(-1)[kept].gather(-1, targets[kept][:, None]).mean()
    assert float(token_loss(logits, targets)) == pytest.approx(float(want), rel=1e-5)
    assert float(token_loss(logits, torch.full_like(targets, IGNORE))) == 0


@pytest.mark.parametrize("cls", [GPT, Seq2Seq])
def test_checkpointing_changes_memory_and_not_gradients(cls: type[Model[Any]]) -> None:
    gradients = []
    for checkpoint in (False, True):
        side = {"width": 12, "layers": 2, "length": 9, "attention": {"heads": 3, "merge": "shuffle"}, "dropout": 0.2}
        side |= {"checkpoint": checkpoint}
        torch.manual_seed(0)
        model = cls(vocabulary=11, encoder=side, decoder=side) if cls is Seq2Seq else cls(vocabulary=11, **side)
        tokens = torch.randint(0, 11, (2, 7))
        torch.manual_seed(1)
        inputs = (tokens, tokens) if cls is Seq2Seq else (tokens,)
        model.loss(*inputs, tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_heads_of_an_encoder() -> None:
    tokens = torch.randint(0, 256, (2, 9))
    assert Encoder.preset("nano", head="none")(tokens).shape == (2, 9, 48)
    assert Encoder.preset("nano", head="masked")(tokens).shape == (2, 9, 256)
    classes = stirred(Encoder.preset("nano", head="classes", classes=5))
    assert classes(tokens).shape == (2, 5)
    # The first visible token decides, wherever padding puts it.
    padded, visible = torch.randint(0, 256, (2, 12)), torch.arange(12).expand(2, 12) >= 3
    padded[visible] = tokens.flatten()
    torch.testing.assert_close(classes(padded, visible), classes(tokens))
    assert classes.loss(tokens, torch.tensor([0, 4])).shape == ()
    with pytest.raises(UnknownNameError, match="Did you mean 'classes'"):
        Encoder.preset("nano", head="classs")


def test_configs_refuse_what_cannot_be() -> None:
    for changes, message in (
        ({"widht": 3}, "no key 'widht' in model. Did you mean 'width'"),
        ({"attention": {"head": 3}}, "no key 'head' in model.attention. Did you mean 'heads'"),
        ({"width": "wide"}, "model.width = 'wide': expected a whole number"),
        ({"width": 0}, "model.width = 0: expected 1 to"),
        ({"vocabulary": 10**12}, "expected 1 to"),
        ({"dropout": 1.0}, "less than 1"),
        ({"tied": 1}, "true or false"),
        ({"mechanism": [1, 2]}, "a name or a list"),
    ):
        with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
            GPTConfig().but(**changes)
    with pytest.raises(UnknownNameError, match="Did you mean 'sinusoidal'"):
        GPT.preset("nano", position="sinusiodal")
    with pytest.raises(ConfigError, match="one embedding for both sides"):
        Seq2Seq.preset("nano", decoder={"width": 24})
    for config in (GPTConfig, EncoderConfig, Seq2SeqConfig, StackConfig):
        assert len(fields(config)) <= 16
        assert config().but(**json.loads(json.dumps(config().as_dict()))) == config()


@pytest.mark.parametrize("name", NAMES)
def test_the_summary_counts_what_runs(name: str) -> None:
    model = plain(GPT.preset("nano", vocabulary=13, length=32, mechanism=name)).eval()
    tokens, total = torch.zeros(1, 32, dtype=torch.long), model.summary().total
    with torch.no_grad():
        with FlopCounterMode(display=False) as whole:
            model(tokens)
        _, state = model.prefill(tokens[:, :31], None, 1)
        with FlopCounterMode(display=False) as step:
            model.extend(tokens[:, 31:], state)
    assert whole.get_total_flops() == total.sequence
    assert step.get_total_flops() == total.token
    assert total.parameters == sum(p.numel() for p in model.parameters())
    assert "×3" in str(model.summary())


def test_multi_query_keeps_one_part_in_h_of_the_cache() -> None:
    many = GPT.preset("char").summary().total.state
    one = GPT.preset("char", attention={"groups": 1}).summary().total.state
    assert one * 8 == many
    state = GPT.preset("char", attention={"groups": 1}).empty(1, 128)
    assert sum(2 * b.own.k.nbytes for b in state.layers) == one


@pytest.mark.parametrize("cls", [GPT, Encoder, Seq2Seq])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_is_the_same(cls: type[Model[Any]], dtype: torch.dtype, tmp_path: Path) -> None:
    model = built(cls, "performer", "learned", "shift").to(dtype)
    model.tokenizer = Characters.of("hello world", special=("<end>",))
    model.save(tmp_path / "a" / "b")
    again = load(tmp_path / "a" / "b")
    assert type(again) is cls and again.config == model.config and not again.training
    assert again.tokenizer is not None and again.tokenizer.encode("hello") == model.tokenizer.encode("hello")
    for (name, x), (other, y) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other and x.dtype == y.dtype and torch.equal(x, y)
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_saving_replaces_what_was_there(tmp_path: Path) -> None:
    model = GPT.preset("nano", vocabulary=9, length=8)
    model.tokenizer = Bytes()
    model.save(tmp_path)
    GPT.preset("nano", vocabulary=5, length=8).save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    again = load(tmp_path)
    assert again.config.vocabulary == 5 and again.tokenizer is None
    modes = {oct(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_failed_save_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GPT.preset("nano", vocabulary=9, length=8).save(tmp_path)

    def fail(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        GPT.preset("nano", vocabulary=5, length=8).save(tmp_path)
    assert load(tmp_path).config.vocabulary == 9
    assert len(list(tmp_path.iterdir())) == 3


def _edit(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | changes))
    (folder / "manifest.json").unlink()  # as with a folder of an earlier version, only the content can tell


def _swap_weights(folder: Path) -> None:
    other = folder.parent / "other"
    GPT.preset("nano", vocabulary=9, length=8).save(other)
    (other / "model.safetensors").replace(folder / "model.safetensors")


DAMAGE = {
    "no config.json": lambda f: (f / "config.json").unlink(),
    "config.json is damaged": lambda f: (f / "config.json").write_text("{"),
    "no model saved by regard": lambda f: (f / "config.json").write_text("{}"),
    "a Hugging Face model": lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'),
    "format_version 2, newer": lambda f: _edit(f, format_version=2),
    "format_version 'x'": lambda f: _edit(f, format_version="x"),
    "no model class 'GTP'": lambda f: _edit(f, **{"class": "GTP"}),
    "no section 'config'": lambda f: _edit(f, config=3),
    "Did you mean 'width'": lambda f: _edit(f, config={"widht": 3}),
    "does not fit config.json: embedding.weight": lambda f: _edit(f, config={**_config(f), "vocabulary": 7}),
    "it lacks stack": lambda f: _edit(f, config={**_config(f), "layers": 4}),
    "unknown stack": lambda f: _edit(f, config={**_config(f), "layers": 2}),
    "model.safetensors does not exist": lambda f: (f / "model.safetensors").unlink(),
    "model.safetensors is damaged": lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:-100]
    ),
    "no safetensors file": lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04nonsense"),
    "two different saves": _swap_weights,
    "tokenizer.json is damaged": lambda f: (f / "tokenizer.json").write_text("nonsense"),
}


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["config"]
    return config


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_folder_is_named_and_not_half_loaded(message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = GPT.preset("nano", vocabulary=9, length=8)
    model.tokenizer = Bytes()
    model.save(folder)
    DAMAGE[message](folder)
    with pytest.raises(ModelFolderError, match=message) as caught:
        load(folder)
    assert isinstance(caught.value, RegardError)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="nowhere is no folder"):
        load(tmp_path / "nowhere")
