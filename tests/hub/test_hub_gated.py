"""Qwen3-Next and Mamba-2 in and out: the numbers, the texts and, bit for bit, the weights of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard import hub
from regard.checking.models import MODEL_LAWS, ModelSubject
from regard.generate import generate
from regard.hub import HubError
from regard.hub.keys import NEED_NOT_BE_TAKEN
from regard.laws import DoesNotApply
from regard.models import GPT

transformers = pytest.importorskip("transformers")

ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MAMBA = {
    **ENDS,
    **{"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 3, "chunk_size": 8},
    **{"num_heads": 6, "head_dim": 8, "n_groups": 2, "state_size": 5},
}
QWEN = {
    **ENDS,
    **{"vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5},
    "mlp_only_layers": [0, 1, 2, 3],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2ForCausalLM", MAMBA),
    "mamba2, tied, a key each, plain convolution": (
        "Mamba2ForCausalLM",
        {**MAMBA, "tie_word_embeddings": True, "n_groups": 6, "use_conv_bias": False},
    ),
    "mamba2, limits": ("Mamba2ForCausalLM", {**MAMBA, "time_step_limit": [0.5, 2.0]}),
    "qwen3_next": ("Qwen3NextForCausalLM", QWEN),
    "qwen3_next, biased, tied, other order": (
        "Qwen3NextForCausalLM",
        {
            **QWEN,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_next, softmax alone": ("Qwen3NextForCausalLM", {**QWEN, "layer_types": ["full_attention"] * 4}),
    "qwen3_next, memories alone": ("Qwen3NextForCausalLM", {**QWEN, "layer_types": ["linear_attention"] * 4}),
}
# Transformers cannot keep a cache of memories alone, and its one-token step of Mamba-2 does not know the limits.
WRITERS = [case for case in CASES if not case.endswith(("alone", "limits"))] + ["qwen3_next, softmax alone"]
T = 17
LEFT = torch.arange(T) >= torch.tensor([[0], [3], [9]])


def made(case: str, seed: int = 1) -> Any:
    """One of transformers' models, drawn as it draws them and stirred, so that every part matters."""
    name, asked = CASES[case]
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    model = cls(cls.config_class(**asked))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each model."""
    found = {}
    for case in CASES:
        found[case] = tmp_path_factory.mktemp("theirs")
        made(case).save_pretrained(found[case])
    return found


def logits(model: Any, tokens: Tensor, visible: Tensor | None = None) -> Tensor:
    mask = torch.ones_like(tokens) if visible is None else visible.long()
    out: Tensor = model(tokens, attention_mask=mask, use_cache=False).logits
    return out


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())


class Precise(TorchFunctionMode):
    """Computes in float64 what a model computes in float32 whatever its dtype."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        if function is Tensor.to:
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {n: torch.float64 if x is torch.float32 else x for n, x in (kwargs or {}).items()}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(case: str, folders: dict[str, Path]) -> None:
    theirs = made(case)
    ours: Any = hub.load(folders[case])
    assert isinstance(ours, GPT)
    tokens = torch.randint(0, 37, (3, T))
    close(ours(tokens), logits(theirs, tokens))
    close(ours(tokens, LEFT)[LEFT], logits(theirs, tokens, LEFT)[LEFT])


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_agree_to_1e_10_in_float64(case: str, folders: dict[str, Path]) -> None:
    theirs = made(case).double()
    if case.startswith("qwen3_next"):
        rotary = theirs.model.rotary_emb
        rope = theirs.config.rope_parameters
        width = int(8 * rope["partial_rotary_factor"])
        rotary.inv_freq = rope["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    ours = hub.load(folders[case], dtype=torch.float64)
    tokens = torch.randint(0, 37, (3, T))
    with Precise():
        want = logits(theirs, tokens, LEFT)
    assert want.dtype == torch.float64
    close(ours(tokens, LEFT)[LEFT], want[LEFT], 1e-10)


@pytest.mark.parametrize("case", WRITERS)
@torch.no_grad()
def test_texts_from_a_cache_are_those_of_transformers(case: str, folders: dict[str, Path]) -> None:
    theirs = made(case)
    ours: Any = hub.load(folders[case])
    tokens = torch.randint(0, 37, (2, 7))
    visible = torch.arange(7) >= torch.tensor([[0], [3]])
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = theirs.generate(tokens, attention_mask=visible.long(), **settings)[:, 7:].tolist()
    prompts = [row[shown].tolist() for row, shown in zip(tokens, visible, strict=True)]
    assert [generate(ours, prompt, max_tokens=12).tokens for prompt in prompts] == want
    # Token by token, over a cache of transformers and a state of regard's.
    state = ours.empty(2, T)
    cache = transformers.DynamicCache(config=theirs.config)
    kept = "cache_params" if case.startswith("mamba2") else "past_key_values"
    for part in torch.randint(0, 37, (2, T)).split([6] + [1] * (T - 6), 1):
        got, state = ours.extend(part, state)
        close(got, theirs(part, use_cache=True, **{kept: cache}).logits)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_export_has_every_bit_and_loads_in_transformers(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    ours = hub.load(folders[case])
    done = hub.export(ours, tmp_path / "out")
    assert done.architecture == CASES[case][0]
    before = load_file(folders[case] / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    cls = getattr(transformers, done.loads_with)
    theirs, info = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = torch.randint(0, 37, (2, T))
    close(logits(theirs.eval(), tokens), logits(made(case), tokens))  # the chunks of Mamba-2 may be others
    again = hub.load(tmp_path / "out")
    assert torch.equal(again(tokens), ours(tokens))


@pytest.mark.parametrize("case", ["mamba2", "qwen3_next"])
def test_loaded_models_keep_the_laws(case: str, folders: dict[str, Path]) -> None:
    trial = ModelSubject(hub.load(folders[case]))
    asked = []
    for name, law in MODEL_LAWS.items():
        try:
            found = law(trial)
        except DoesNotApply:
            continue
        asked.append(name)
        assert found.error <= found.limit, f"{name}: {found.what} {found.error}"
    assert {"padding", "packed", "batch", "cache", "looks-ahead", "prompts"} <= set(asked)


HYBRID: dict[str, Any] = {
    **{"vocabulary": 37, "width": 24, "layers": 3, "length": 32, "tied": False},
    "mechanism": ["gated-delta", "softmax", "gated-delta"],
    "position": "rotary",
    "position_options": {"share": 0.5},
    "attention": {
        **{"heads": 3, "bias": False, "out_bias": False, "positions": False, "convolution": {"width": 3}},
        "output": {"norm": "rms", "gate": "silu"},
        "by_mechanism": {
            "softmax": {
                **{"positions": True, "qk_norm": True, "convolution": {"width": 0}},
                "output": {"norm": False, "gate": "sigmoid"},
            }
        },
    },
    "block": {"norm": "rms_zero_centred", "mlp": "swiglu", "bias": False},
}


@torch.no_grad()
def test_a_hybrid_of_regards_own_becomes_a_qwen3_next(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = GPT(**HYBRID).eval()
    for p in ours.parameters():
        p.add_(0.1 * torch.randn_like(p))
    done = hub.export(ours, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert done.architecture == type(theirs).__name__ == "Qwen3NextForCausalLM"
    tokens = torch.randint(0, 37, (2, T))
    close(logits(theirs, tokens), ours(tokens))


def test_what_no_family_has_place_for_is_named(tmp_path: Path) -> None:
    attention = HYBRID["attention"]
    softmax = attention["by_mechanism"]["softmax"]
    for attention_changes, said in (
        ({"by_mechanism": {"softmax": softmax | {"window": 5}}}, "by_mechanism.softmax.window = 5 (it has None)"),
        ({"decay": "logsigmoid"}, "by_mechanism.gated-delta.decay = 'logsigmoid' (it has 'softplus')"),
        ({"output": {"norm": "rms", "gate": "silu", "skip": True}}, "by_mechanism.gated-delta.output.skip = True"),
    ):
        model = GPT(**HYBRID | {"attention": attention | attention_changes})
        with pytest.raises(hub.NoEquivalentError) as error:
            hub.export(model, tmp_path / "out")
        assert said in str(error.value), str(error.value)
    assert list(tmp_path.iterdir()) == []


KEYS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3_next", "layers 0, 2, 3 are mixtures of experts", {"mlp_only_layers": [1]}),
    ("qwen3_next", "layers 1, 3 are mixtures of experts", {"mlp_only_layers": None, "decoder_sparse_step": 2}),
    ("qwen3_next", "kinds linear_attention, full_attention", {"layer_types": ["sliding_attention"] * 4}),
    ("qwen3_next", "expected 4 names", {"layer_types": ["full_attention"] * 3}),
    ("qwen3_next", "hidden_act", {"hidden_act": "gelu"}),
    ("qwen3_next", "yarn", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    ("qwen3_next", "must be even", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}),
    ("qwen3_next", "key_heads = 3", {"linear_num_key_heads": 3}),
    ("mamba2", "use_bias", {"use_bias": True}),
    ("mamba2", "hidden_act", {"hidden_act": "gelu"}),
    ("mamba2", "num_heads · head_dim = 48", {"expand": 3}),
    ("mamba2", "the larger one last", {"time_step_limit": [0.5, 0.5]}),
    ("mamba2", "key_heads = 4", {"n_groups": 4}),
    ("mamba2", "conv1d.weight is [68, 1, 4], expected [68, 1, 3]", {"conv_kernel": 3}),
]


@pytest.mark.parametrize(("case", "said", "keys"), KEYS, ids=[said for _, said, _ in KEYS])
def test_a_key_that_cannot_be_honoured_is_refused_by_name(
    case: str, said: str, keys: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders[case] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    (tmp_path / "model.safetensors").hardlink_to(folders[case] / "model.safetensors")
    with pytest.raises(HubError) as error:
        hub.load(tmp_path)
    assert said in str(error.value) and str(tmp_path) in str(error.value), str(error.value)


JUNK: tuple[Any, ...] = ("x", 2.5, [{}])
SLOW_JUNK: tuple[Any, ...] = (None, -1, 0, 10**30, float("inf"), True, [], ["x", "x"], {}, {"x": None})


@pytest.mark.parametrize("junk", [JUNK, pytest.param(SLOW_JUNK, marks=pytest.mark.slow)], ids=["some", "more"])
@pytest.mark.parametrize("case", ["mamba2", "qwen3_next"])
def test_junk_in_a_config_is_an_error_that_names_the_file_or_changes_nothing(
    case: str, junk: tuple[Any, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    good = json.loads((folders[case] / "config.json").read_text())
    (tmp_path / "model.safetensors").hardlink_to(folders[case] / "model.safetensors")
    sizes = {name: x.shape for name, x in hub.load(folders[case]).state_dict().items()}
    for key in sorted(set(good) - NEED_NOT_BE_TAKEN):
        for value in junk:
            (tmp_path / "config.json").write_text(json.dumps({**good, key: value}))
            try:
                found = hub.load(tmp_path)
            except HubError as error:
                assert str(tmp_path) in str(error)
            else:
                assert sizes == {name: x.shape for name, x in found.state_dict().items()}
