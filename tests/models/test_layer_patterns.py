"""Models of layers that differ: patterns of mechanisms, sections by mechanism, and blocks without an MLP."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.checking.models import MODEL_LAWS, ModelSubject
from regard.config import ConfigError
from regard.errors import OptionError
from regard.generate import generate
from regard.generate.fused import refuse_parts
from regard.generate.graph import _copy_state, _fix_shapes, _leaves
from regard.kernels import plain
from regard.laws import DoesNotApply
from regard.models import GPT, Encoder, Seq2Seq, load
from regard.models.eject import eject, write_source

PARTS: dict[str, Any] = {
    "heads": 3,
    "convolution": {"width": 4},
    "qk_norm": "l2",
    "output": {"norm": "rms", "gate": "silu"},
}
HYBRID: dict[str, Any] = {
    "layers": 4,
    "mechanism": ["elu", "softmax"],
    "position": "rotary",
    "position_options": {"share": 0.5},
    "attention": PARTS
    | {"positions": False, "by_mechanism": {"softmax": {"positions": True, "window": 5, "convolution": {"width": 0}}}},
}
MEMORY: dict[str, Any] = HYBRID | {
    "mechanism": ["gated-delta", "gated-delta", "gated-delta", "softmax"],
    "options": {"range": 2, "channels": True},
}
BARE: dict[str, Any] = {"layers": 2, "attention": PARTS, "block": {"mlp": "none"}, "position": "none"}


def built(cls: Any = GPT, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = cls(**{"width": 24, "vocabulary": 37, "length": 150} | changes)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.25 * torch.randn_like(p))
    return model.eval()


@pytest.mark.parametrize(
    ("cls", "changes"),
    [(GPT, HYBRID), (GPT, BARE), (GPT, MEMORY), (Encoder, BARE)],
    ids=["hybrid", "bare", "memory", "encoder"],
)
def test_the_laws_of_models_with_every_part(cls: Any, changes: dict[str, Any]) -> None:
    trial = ModelSubject(built(cls, **changes))
    asked = []
    for name, law in MODEL_LAWS.items():
        try:
            found = law(trial)
        except DoesNotApply:
            continue
        asked.append(name)
        assert found.error <= found.limit, f"{name}: {found.what} {found.error}"
    assert {"padding", "packed", "batch", "long"} <= set(asked)
    assert cls is Encoder or {"cache", "looks-ahead", "prompts"} <= set(asked)


def test_a_convolution_that_leaks_over_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.nn import ShortConvolution

    forward = ShortConvolution.forward
    monkeypatch.setattr(ShortConvolution, "forward", lambda self, x, visible, documents: forward(self, x))
    trial = ModelSubject(built(**BARE))
    for law in ("padding", "packed"):
        found = MODEL_LAWS[law](trial)
        assert found.error > found.limit


def test_a_pattern_is_repeated_to_depth() -> None:
    model = built(**HYBRID)
    assert [b.attention.mechanism.name for b in model.stack.layers] == ["elu", "softmax"] * 2
    assert [b.attention.convolution is None for b in model.stack.layers] == [False, True] * 2
    assert [b.attention.rules.window for b in model.stack.layers] == [None, 5] * 2
    assert [b.attention.positions for b in model.stack.layers] == [False, True] * 2
    with pytest.raises(ConfigError, match="a pattern whose length divides"):
        built(layers=3, mechanism=["elu", "softmax"])
    with pytest.raises(ConfigError, match="no layer has the mechanism 'sotfmax'"):
        built(attention=PARTS | {"by_mechanism": {"sotfmax": {}}})
    with pytest.raises(ConfigError, match=r"no key 'convoluton' in model\.attention"):
        built(attention=PARTS | {"by_mechanism": {"softmax": {"convoluton": {}}}})
    with pytest.raises(ConfigError, match="expected a section of keys"):
        built(attention=PARTS | {"by_mechanism": {"softmax": 4}})
    with pytest.raises(ConfigError, match="set positions = false"):
        built(**HYBRID | {"attention": {"heads": 3, "by_mechanism": {"softmax": {"heads": 2}}}})


def test_a_block_without_an_mlp_is_attention_added_to_its_input() -> None:
    model = built(**BARE)
    block = model.stack.layers[0]
    x = torch.randn(2, 5, 24)
    assert block.mlp is None and block.mlp_norm is None
    torch.testing.assert_close(block(x), x + block.attention(block.attention_norm(x)))
    fresh = GPT(width=512, vocabulary=8, layers=2, attention={"heads": 2}, block={"mlp": "none"})
    spread = float(fresh.stack.layers[0].attention.out.weight.detach().std())
    assert abs(spread - 0.02 / 2**0.5) < 2e-4  # two layers, each of which adds once


@pytest.mark.parametrize("changes", [HYBRID, BARE], ids=["hybrid", "bare"])
def test_folders_keep_every_part(changes: dict[str, Any], tmp_path: Path) -> None:
    model = built(**changes)
    model.save(tmp_path / "model")
    again = load(tmp_path / "model")
    tokens = torch.randint(0, 37, (2, 9))
    assert again.config == model.config and torch.equal(again(tokens), model(tokens))


def test_a_folder_that_knows_no_parts_still_opens(tmp_path: Path) -> None:
    model = built(attention={"heads": 3})
    model.save(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    document = json.loads(path.read_text())
    for name in ("positions", "convolution", "output", "by_mechanism"):
        del document["config"]["attention"][name]
    path.write_text(json.dumps(document))
    (tmp_path / "model" / "manifest.json").unlink()
    tokens = torch.randint(0, 37, (2, 9))
    assert torch.equal(load(tmp_path / "model")(tokens), model(tokens))


@pytest.mark.parametrize("changes", [HYBRID, BARE, MEMORY], ids=["hybrid", "bare", "memory"])
def test_writing_with_a_state_and_with_beams(changes: dict[str, Any]) -> None:
    model = built(**changes)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9]]
    for settings in ({"max_tokens": 6}, {"max_tokens": 6, "beams": 3}):
        for prompt, result in zip(prompts, generate(model, prompts, **settings), strict=True):
            assert generate(model, prompt, **settings).tokens == result.tokens
    tokens = list(prompts[0])
    for _ in range(6):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert generate(model, prompts[0], max_tokens=6).tokens == tokens[len(prompts[0]) :]


def test_a_graph_of_one_step_fixes_and_copies_the_state_of_the_convolution() -> None:
    model = built(**HYBRID)
    tokens = torch.randint(0, 37, (2, 9))
    with torch.no_grad():
        want = model(tokens)[:, -1:]
        _, state = model.prefill(tokens[:, :8], None, 4)
        _, other = model.prefill(tokens[:, 1:8], None, 5)
        fixed, target = _fix_shapes(state, 12), _fix_shapes(other, 12)
        _copy_state(fixed, target)
        shapes = [x.shape for x in _leaves(target) if isinstance(x, torch.Tensor)]
        got, after = model.extend(tokens[:, 8:], target)
    torch.testing.assert_close(got, want)
    assert shapes == [x.shape for x in _leaves(after) if isinstance(x, torch.Tensor)]
    assert refuse_parts(model, state) is not None


@pytest.mark.parametrize("changes", [HYBRID, BARE, MEMORY], ids=["hybrid", "bare", "memory"])
def test_declared_products_are_those_that_are_counted(changes: dict[str, Any]) -> None:
    model = plain(built(**changes))
    tokens = torch.randint(0, 37, (2, 9))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    assert counter.get_total_flops() == model.summary(9, B=2).total.whole.matmul
    kept = 4 * 2 * 3 * 3 * 24  # float32, two rows, three tokens of q, k and v
    with_it, without = (model.summary(9, B=2), built(**_without_convolution(changes)).summary(9, B=2))
    layers = sum(b.attention.convolution is not None for b in model.stack.layers)
    assert with_it.total.state - without.total.state == layers * kept


def _without_convolution(changes: dict[str, Any]) -> dict[str, Any]:
    return changes | {"attention": changes["attention"] | {"convolution": {"width": 0}}}


def test_an_encoder_decoder_has_its_parts_but_no_convolution_across() -> None:
    side = {"width": 24, "layers": 2, "length": 40, "attention": PARTS, "position": "rotary"}
    model = Seq2Seq(vocabulary=37, encoder=side, decoder=side)
    block = model.stack.layers[0]
    assert block.cross is not None and block.cross.convolution is None and block.cross.gate is not None
    trial = ModelSubject(model)
    for name in ("cache", "padding", "batch"):
        found = MODEL_LAWS[name](trial)
        assert found.error <= found.limit


def test_an_ejected_file_has_patterns_parts_of_a_turn_and_no_mlp(tmp_path: Path) -> None:
    attention = {"heads": 3, "qk_norm": "l2"}
    model = plain(built(**HYBRID | {"attention": attention, "block": {"mlp": "none"}}))
    path = eject(model, tmp_path / "plain")
    spec = importlib.util.spec_from_file_location("ejected", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokens = torch.randint(0, 37, (2, 50))
    with torch.no_grad():
        assert torch.equal(module.build(path.parent)(tokens), model(tokens))
    with pytest.raises(OptionError, match=r"model\.attention\.convolution, .*output\.norm, .*output\.gate"):
        write_source(built(**BARE))
    with pytest.raises(OptionError, match="by_mechanism"):
        write_source(built(**HYBRID))
