"""Nothing in a model's files runs: each way to make transformers run or fetch code is tried, and refused by name."""

import ast
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import regard
from regard import hub
from regard.errors import HubError
from regard.hub import gate, safety
from regard.hub.fetching import model_on_meta

transformers = pytest.importorskip("transformers")
hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 20}
TAKES: tuple[Callable[[Path], Any], ...] = (hub.fetch, hub.untrained, model_on_meta)
every_take = pytest.mark.parametrize("take", TAKES, ids=[take.__name__ for take in TAKES])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of transformers, with a Python file beside it that writes a marker when it is run."""
    path = tmp_path / "model"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY)).save_pretrained(path)
    plant(path)
    return path


@pytest.fixture(autouse=True)
def _yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks at the terminal is told "y"."""
    monkeypatch.setattr("builtins.input", lambda _="": "y")


def plant(path: Path) -> None:
    (path / "evil.py").write_text(f"open({str(marker(path))!r}, 'w').close()\nclass Evil: pass\n")


def marker(path: Path) -> Path:
    return path.parent / "marker"


def say(path: Path, **fields: Any) -> None:
    """Adds fields to a file of settings, which need not be there."""
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, **fields}))


def refused(take: Callable[[Any], Any], given: Any, *said: str) -> None:
    with pytest.raises(HubError) as error:
        take(given)
    for words in said:
        assert words in str(error.value)
    assert not list(Path(given).parent.glob("**/marker"))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes as if `kernels` were installed; loading a kernel writes the marker."""

    def get_kernel(*_: Any, **__: Any) -> Any:
        (tmp_path / "marker").touch()
        raise RuntimeError("a kernel was loaded")

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(transformers.modeling_utils, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)


# GGUF


def gguf(path: Path) -> None:
    """Writes the header of a GGUF file, of a kind that transformers reads without `gguf`, with no tensors."""

    def text(x: str) -> bytes:
        return struct.pack("<Q", len(x.encode())) + x.encode()

    fields = [text("general.architecture") + struct.pack("<I", 8) + text("lfm2")]
    fields += [
        text(f"lfm2.{name}") + struct.pack("<II", 4, value)
        for name, value in {
            "block_count": 1,
            "context_length": 16,
            "embedding_length": 8,
            "feed_forward_length": 8,
            "attention.head_count": 2,
            "vocab_size": 3,
            "shortconv.l_cache": 3,
        }.items()
    ]
    fields.append(text("lfm2.attention.head_count_kv") + struct.pack("<IIQi", 9, 5, 1, 2))
    fields.append(text("lfm2.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    fields.append(text("lfm2.rope.freq_base") + struct.pack("<If", 6, 1e4))
    tokens = b"".join(map(text, ["a", "b", "c"]))
    fields.append(text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + tokens)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields))


OPEN = """
import sys
import regard.hub.opening as models
from regard.errors import RegardError
models.find_spec = lambda name: True
try:
    models.open_model(sys.argv[1])
except RegardError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("name", ["", "random:"])
def test_a_gguf_file_runs_no_code_that_lies_beside_it_whatever_the_answer(name: str, tmp_path: Path) -> None:
    path = tmp_path / "files" / "small.gguf"
    path.parent.mkdir()
    gguf(path)
    plant(path.parent)
    settings = path.parent / "tokenizer_config.json"
    say(settings, auto_map={"AutoTokenizer": ["evil.Evil", None]})
    done = subprocess.run(
        [sys.executable, "-c", OPEN, f"{name}{path}"], input="y\n", capture_output=True, text=True, check=False
    )
    assert not marker(path.parent).exists(), done.stdout + done.stderr
    assert f"HubError {settings}: auto_map names code to run (['evil.Evil', None])" in done.stdout, done.stderr
    assert "take the key 'auto_map' out" in done.stdout


def test_a_gguf_file_beside_an_adapter_or_a_kernel_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    gguf(path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(HubError, match=r"adapter_config\.json: an adapter"):
        gate.load_gguf(path, trained=True)
    (tmp_path / "adapter_config.json").unlink()
    say(tmp_path / "config.json", attn_implementation="someone/kernel")
    with pytest.raises(HubError, match=r"config\.json: attn_implementation = 'someone/kernel'"):
        gate.load_gguf(path, trained=True)


# Fields that name code

CODE = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto_map": ("config.json", {"auto_map": CODE}),
    "auto_map in a section": ("config.json", {"text_config": {"auto_map": CODE}}),
    "auto_map in a list": ("config.json", {"layers": [{"auto_map": CODE}]}),
    "auto_map of a tokenizer": ("tokenizer_config.json", {"auto_map": CODE}),
    "auto_map of a processor": ("processor_config.json", {"auto_map": CODE}),
    "auto_map of images": ("preprocessor_config.json", {"auto_map": CODE}),
    "auto_map in another config": ("config.4.0.0.json", {"auto_map": CODE}),
    "custom_pipelines": ("config.json", {"custom_pipelines": {"see": {"impl": "evil.Evil"}}}),
    "custom_generate": ("generation_config.json", {"custom_generate": "someone/else"}),
    "kernel_config": ("config.json", {"kernel_config": {"RMSNorm": "someone/kernel:RMSNorm"}}),
    "trust_remote_code": ("tokenizer_config.json", {"trust_remote_code": True}),
    "use_kernels": ("config.json", {"use_kernels": True}),
    "configuration_files": ("config.json", {"configuration_files": ["config.4.0.0.json"]}),
    "checkpoint_path": ("config.json", {"model_args": {"checkpoint_path": "weights.pt"}}),
    "sudachi_config_path": ("tokenizer_config.json", {"sudachi_kwargs": {"sudachi_config_path": "plugins.json"}}),
    "architecture": ("config.json", {"architecture": "hf-hub:someone/else"}),
    "backbone": ("config.json", {"backbone_config": {"backbone": "local-dir:/somewhere"}}),
}


@every_take
@pytest.mark.parametrize("case", FIELDS)
def test_a_field_that_names_code_or_a_file_is_refused_by_name(case: str, take: Any, folder: Path) -> None:
    name, fields = FIELDS[case]
    say(folder / name, **fields)
    field = case.partition(" ")[0]
    refused(take, folder, f"{folder / name}: {field} names ")


def test_the_loader_of_regard_looks_at_the_same_fields(folder: Path) -> None:
    say(folder / "config.json", _attn_implementation="kernels-community/x")
    refused(hub.load, folder, "_attn_implementation = 'kernels-community/x'")


@every_take
def test_fields_that_name_no_code_are_taken(take: Any, folder: Path) -> None:
    say(
        folder / "config.json",
        auto_map={},
        custom_pipelines=None,
        trust_remote_code=False,
        label2id={"auto_map": 1, "trust_remote_code": 0},
        id2label={"0": "trust_remote_code", "1": "auto_map"},
        _attn_implementation="eager",
        experts_implementation=None,
        backbone="resnet50",
    )
    assert take(folder) is not None


# Kernels

KERNELS: list[dict[str, Any]] = [
    {"_attn_implementation": "kernels-community/x"},
    {"attn_implementation": "kernels-community/x@main:attend"},
    {"_attn_implementation_internal": "someone/kernel"},
    {"_attn_implementation": "paged|someone/kernel"},
    {"_attn_implementation": "flash_attention_2"},
    {"_attn_implementation": {"": "someone/kernel"}},
    {"text_config": {"_attn_implementation": "kernels-community/x"}},
    {"per_layer_config": {"0": {"attn_implementation": "kernels-community/x"}}},
    {"experts_implementation": "sonicmoe"},
    {"_experts_implementation": "deepgemm"},
    {"_experts_implementation_internal": "someone/kernel"},
    {"_attn_implementation": ["someone/kernel"]},
]


@every_take
@pytest.mark.parametrize("fields", KERNELS, ids=[json.dumps(fields) for fields in KERNELS])
def test_a_kernel_from_the_hub_is_refused_by_name(fields: Any, take: Any, folder: Path, kernels: None) -> None:
    say(folder / "config.json", **fields)
    named = next(key for key in re.findall(r"\w+", json.dumps(fields)) if "implementation" in key)
    refused(take, folder, f"{folder / 'config.json'}: {named} = ", f"Take the key '{named}' out")


# Classes that a config names


@every_take
@pytest.mark.parametrize("named", ["pipeline", "AutoModelForCausalLM", "PreTrainedModel", "Trainer", "models", 5])
def test_only_models_of_transformers_can_be_named(named: Any, take: Any, folder: Path) -> None:
    say(folder / "config.json", architectures=[named])
    refused(take, folder, f"architectures names {named}, which is no model of transformers")


def test_a_model_that_transformers_does_not_know_by_name_follows_from_its_kind(folder: Path) -> None:
    say(folder / "config.json", architectures=["SomeoneElsesModel"])
    assert type(model_on_meta(folder)) is transformers.GPT2LMHeadModel


@pytest.mark.parametrize("named", ["AutoTokenizer", "AutoProcessorFast", "RagRetriever", "RagTokenizer", "pipeline"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_only_tokenizers_can_be_named(file: str, named: str, folder: Path) -> None:
    (folder / "vocab.txt").write_text("a")
    say(folder / file, tokenizer_class=named)
    refused(hub.untrained, folder, f"{folder / file}: tokenizer_class names {named.removesuffix('Fast')}")


def nested_code(folder: Path) -> None:
    """Writes a model of two, of which one has a tokenizer with code, in a folder of its own that no gate looks into."""
    part = {"model_type": "vit"}  # of a kind that has no tokenizer of its own, so that transformers asks
    say(folder / "config.json", model_type="rag", architectures=None, question_encoder=part, generator=part)
    (folder / "vocab.txt").write_text("a")
    inner = folder / "question_encoder_tokenizer"
    inner.mkdir()
    say(inner / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]})
    (inner / "evil.py").write_text((folder / "evil.py").read_text())
    say(folder / "tokenizer_config.json", tokenizer_class="RagTokenizer")


def test_code_in_a_folder_within_the_folder_does_not_run(folder: Path) -> None:
    nested_code(folder)
    refused(hub.untrained, folder)


# What holds for fields that nobody knows yet


@pytest.fixture
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the gate blind."""
    for name in ("read_config", "check_settings", "_check_tokenizer_class"):
        monkeypatch.setattr(gate, name, lambda *_: None)


@pytest.mark.usefixtures("_unchecked")
def test_without_any_check_a_loader_still_gets_no_answer(folder: Path) -> None:
    nested_code(folder)
    refused(hub.untrained, folder, "the tokenizer of")


@pytest.mark.usefixtures("_unchecked")
def test_without_any_check_a_loader_still_gets_no_kernel(folder: Path, kernels: None) -> None:
    say(folder / "config.json", _attn_implementation="kernels-community/x")
    with pytest.raises(Exception, match="regard loads no one's code"):
        hub.untrained(folder)
    assert not marker(folder).exists()


def test_afterwards_transformers_is_as_it_was(folder: Path) -> None:
    modules = transformers.dynamic_module_utils
    before = (modules.TIME_OUT_REMOTE_CODE, hub_kernels.get_kernel)
    with gate.no_remote_code():
        assert modules.TIME_OUT_REMOTE_CODE == 0
    hub.fetch(folder)
    say(folder / "config.json", n_embd="wide")
    with pytest.raises(HubError):
        hub.fetch(folder)
    assert (modules.TIME_OUT_REMOTE_CODE, hub_kernels.get_kernel) == before


# Every call of a loader in regard's source

LOADERS = re.compile(
    r"from_(pretrained|config|file|str|buffer|url|gguf)|Auto[A-Z]\w+|GGUFReader|pipeline|cached_file|get_kernel|"
    r"snapshot_download|hf_hub_download|load_(dataset|adapter|state_dict_from_url)"
)
LIBRARIES = re.compile(
    r"transformers|tokenizers|gguf|huggingface_hub|kernels|peft|datasets|timm|sentence_transformers|sentencepiece|"
    r"tiktoken|pickle|dill|joblib|cloudpickle|marshal"
)
# The gate; the download; and the file of the `tokenizers` library, whose JSON has no field for code.
LOADING = {
    ("hub/gate.py", "from_pretrained"),
    ("hub/gate.py", "from_config"),
    ("hub/gate.py", "get_kernel"),  # put out of reach
    ("hub/gate.py", "AutoConfig"),
    ("hub/gate.py", "AutoModelForCausalLM"),
    ("hub/gate.py", "AutoImageProcessor"),
    ("hub/gate.py", "AutoTokenizer"),
    ("hub/gate.py", "getattr of transformers"),
    ("hub/safety.py", "snapshot_download"),
    ("data/tokenizers/bpe.py", "from_str"),
}
# Who imports a library that has loaders: beside those, what writes files, and what talks to attention and caches.
IMPORTING = {
    ("hub/gate.py", "transformers"),
    ("hub/safety.py", "huggingface_hub"),
    ("data/tokenizers/bpe.py", "tokenizers"),
    ("hub/attention.py", "transformers"),
    ("hub/masks.py", "transformers"),
    ("hub/cache.py", "transformers"),
    ("hub/tokenizer_files.py", "tokenizers"),
}


def loaders(tree: ast.AST) -> Iterator[str]:
    """The names of loaders in a program, however they are written: called, imported, or handed on."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.name.rpartition(".")[2] for alias in node.names]
        elif isinstance(node, ast.Constant) and str(node.value).islower():
            names = [str(node.value)]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            whose = ast.unparse(node.args[0])
            if whose in ("library", "transformers", "import_transformers()"):
                yield "getattr of transformers"
        yield from (name for name in names if LOADERS.fullmatch(name))


def libraries(tree: ast.AST) -> Iterator[str]:
    """The libraries with loaders that a program imports, anywhere in it."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        roots = [name.partition(".")[0] for name in names]
        yield from (root for root in roots if LIBRARIES.fullmatch(root))


def walked(look: Callable[[ast.AST], Iterator[str]]) -> set[tuple[str, str]]:
    root = Path(regard.__file__).parent
    found = set()
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {(path.relative_to(root).as_posix(), name) for name in look(tree)}
    return found


def test_every_loader_is_called_in_the_gate() -> None:
    assert walked(loaders) == LOADING


def test_no_loader_is_told_to_trust() -> None:
    """Only the gate says trust_remote_code, to say that it is false."""
    root = Path(regard.__file__).parent
    said = [path for path in root.rglob("*.py") if "trust_remote_code" in path.read_text(encoding="utf-8")]
    assert {path.relative_to(root).as_posix() for path in said} == {"hub/gate.py", "hub/safety.py"}
    assert gate._LOCAL == {"local_files_only": True, "trust_remote_code": False}
    assert "trust_remote_code=True" not in Path(gate.__file__).read_text(encoding="utf-8")


def test_only_these_modules_import_what_has_loaders() -> None:
    assert walked(libraries) == IMPORTING


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("cls.from_pretrained(folder)", "from_pretrained"),
        ("take = transformers.AutoModel", "AutoModel"),
        ("def f():\n    from transformers import AutoProcessor", "AutoProcessor"),
        ("tokenizers.Tokenizer.from_file(path)", "from_file"),
        ("getattr(cls, 'from_pretrained')(folder)", "from_pretrained"),
        ("getattr(library, name)(config)", "getattr of transformers"),
        ("gguf.GGUFReader(path)", "GGUFReader"),
    ],
)
def test_a_new_call_would_be_found(source: str, name: str) -> None:
    assert name in set(loaders(ast.parse(source)))


def test_every_loader_in_the_gate_is_behind_a_check() -> None:
    """In the gate, what calls a loader checks the folder before, and calls it within `no_remote_code`."""
    tree = ast.parse(Path(gate.__file__).read_text(encoding="utf-8"))
    calling = [
        f for f in tree.body if isinstance(f, ast.FunctionDef) and {"from_pretrained", "from_config"} & set(loaders(f))
    ]
    assert len(calling) == 5
    for function in calling:
        assert ast.unparse(function.body[1]).startswith(("read_config(", "check_settings(", "folder = path.parent"))
        inside = [
            node for node in function.body if isinstance(node, ast.With) and "no_remote_code()" in ast.unparse(node)
        ]
        written = ast.unparse(function)
        assert written.count("from_pretrained(") == sum(ast.unparse(node).count("from_pretrained(") for node in inside)


def test_the_settings_that_are_looked_at_are_those_that_transformers_reads() -> None:
    names = {value for name, value in vars(transformers.utils).items() if name.endswith("_NAME") and str(value)}
    known = {str(name) for name in names if str(name).endswith("config.json")} - {"adapter_config.json"}
    assert known <= set(safety.SETTINGS), known - set(safety.SETTINGS)
