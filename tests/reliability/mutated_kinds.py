"""Every kind of file and request that regard reads: a good one of each, how it is damaged, and what reads it."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "helpers"))

from hostile import (  # noqa: E402
    Mutate,
    damage_bytes,
    damage_json,
    damage_lines,
    damage_safetensors,
    damage_toml,
    damage_trace,
)

PACKED = HERE.parent / "fixtures" / "v0.1.0.zip"
DRAWN = 0.003  # of all pages: drawing one takes seconds


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it lies in the corpus, how it is damaged, and what reads it (with the corpus's folder)."""

    file: str
    mutate: Mutate
    read: Callable[[Path], Any]
    reset: tuple[str, ...] = ()  # folders that are another after a file was read


KINDS: dict[str, Kind] = {}
MAKERS: list[Callable[[Path], None]] = []  # what other files of kinds add to the corpus


def kind(name: str, file: str, mutate: Mutate, reset: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Decorator: registers what reads a kind of file."""

    def register(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
        KINDS[name] = Kind(file, mutate, read, reset)
        return read

    return register


def use_model(folder: Path) -> None:
    """Loads a model and continues a text with it."""
    import regard

    model = regard.load(folder)
    if model.tokenizer is not None and hasattr(model, "head"):
        regard.generate(model, "ab", max_tokens=2)


@kind("model config", "run/model/config.json", damage_json)
@kind("model weights", "run/model/model.safetensors", damage_safetensors)
@kind("model tokenizer", "run/model/tokenizer.json", damage_json)
def read_model(corpus: Path) -> None:
    use_model(corpus / "run" / "model")


@kind("bpe tokenizer", "bpe.json", damage_json)
def read_bpe(corpus: Path) -> None:
    from regard.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(corpus / "bpe.json")
    tokenizer.decode(tokenizer.encode("the cat é \x00 sat"))
    tokenizer.ends  # noqa: B018
    tokenizer.as_json()


@kind("hub config", "hub/config.json", damage_json)
@kind("hub weights", "hub/model.safetensors", damage_safetensors)
@kind("hub tokenizer", "hub/tokenizer.json", damage_json)
@kind("hub generation config", "hub/generation_config.json", damage_json)
def read_hub(corpus: Path) -> None:
    import regard

    regard.hub.load(corpus / "hub")


@kind("hub index", "sharded/model.safetensors.index.json", damage_json)
def read_index(corpus: Path) -> None:
    import regard

    regard.hub.load(corpus / "sharded")


def resume_training(corpus: Path) -> None:
    """Goes back to the checkpoint, whose manifest is made to match, and trains on."""
    from training import trainer

    from regard.storage import MANIFEST, hash_file

    place = next((corpus / "toy" / "checkpoints").glob("step-*"))
    hashes = {file.name: hash_file(file) for file in place.iterdir() if file.name != MANIFEST}
    (place / MANIFEST).write_text(json.dumps(hashes))
    made = trainer(corpus / "toy", steps=6)
    made.resume()
    made.fit()


TOY = ("toy",)


@kind("checkpoint state", "toy/checkpoints/step-4/state.json", damage_json, TOY)
@kind("checkpoint optimizer", "toy/checkpoints/step-4/optimizer.safetensors", damage_safetensors, TOY)
@kind("checkpoint config", "toy/checkpoints/step-4/config.json", damage_json, TOY)
@kind("checkpoint weights", "toy/checkpoints/step-4/model.safetensors", damage_safetensors, TOY)
def read_checkpoint(corpus: Path) -> None:
    resume_training(corpus)


@kind("manifest", "unfinished/checkpoints/step-3/manifest.json", damage_json)
@kind("best", "unfinished/best", damage_bytes)
def read_run_model(corpus: Path) -> None:
    from regard.models.locate import newest_step

    newest_step(corpus / "unfinished" / "checkpoints")
    use_model(corpus / "unfinished")


@kind("metrics", "run/metrics.jsonl", damage_lines)
@kind("run config", "run/config.toml", damage_toml)
def read_runs(corpus: Path) -> None:
    from regard.lab.runs.page import compare_page
    from regard.lab.runs.summary import summarize_run
    from regard.train.run import find_runs

    rows = [summarize_run(run) for run in find_runs(corpus / "run")]
    if rows and random.random() < DRAWN:
        compare_page([row | {"config_differences": {}} for row in rows])


@kind("unfinished config", "unfinished/config.toml", damage_toml)
def read_unfinished(corpus: Path) -> None:
    from regard.train import recipe as recipes
    from regard.train.run import Run

    tables = dict(Run.open(corpus / "unfinished").config)
    tables.pop("device", None)
    recipe = recipes.resolve(tables.get("recipe", "it"), tables)
    recipe.train.total(rows=100)


@kind("experiment results", "experiment/results.json", damage_json)
def read_experiment_results(corpus: Path) -> None:
    from regard.models.locate import model_folder
    from regard.reporting import _draw_again

    model_folder(corpus / "experiment")
    if random.random() < DRAWN:
        _draw_again(corpus / "experiment")


@kind("conversion results", "converted/results.json", damage_json)
def read_conversion_results(corpus: Path) -> None:
    from regard.models.locate import model_folder
    from regard.reporting import _draw_again

    model_folder(corpus / "converted")
    if random.random() < DRAWN:
        _draw_again(corpus / "converted")


@kind("experiment", "experiment/experiment.toml", damage_toml)
def read_experiment(corpus: Path) -> None:
    from regard.lab import experiment

    with replaced(experiment.TrainingExperiment, "carry_out", experiment.plan_trainings):
        experiment.resume(corpus / "experiment")


@kind("conversion", "converted/convert.json", damage_json)
def read_conversion(corpus: Path) -> None:
    from regard.convert import run
    from regard.train.run import Run

    with replaced(run.Session, "train", lambda *given: Run(corpus / "run")):
        run.train_stages(corpus / "converted")


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@kind("recipe", "recipe.toml", damage_toml)
def read_recipe(corpus: Path) -> None:
    from regard.sweep.settings import check_trainable
    from regard.train import recipe as recipes

    check_trainable(recipes.load(str(corpus / "recipe.toml")))


@kind("overrides", "overrides.txt", damage_bytes)
def read_overrides(corpus: Path) -> None:
    from regard.train import recipe as recipes

    words = (corpus / "overrides.txt").read_bytes().decode("utf-8", "surrogateescape").split("\n")
    recipes.load("lm", words).train.total(rows=100)


STORAGES: dict[str, Any] = {}


@kind("sweep", "sweep/sweep.toml", damage_toml)
def read_sweep(corpus: Path) -> None:
    from regard.sweep import study
    from regard.sweep.run import Sweep
    from regard.sweep.settings import trial_recipe

    # A database takes long to open, and is not what is damaged here.
    open_storage = STORAGES.setdefault("open", functools.cache(study._open_storage))
    with replaced(study, "_open_storage", open_storage):
        sweep = Sweep.open(corpus / "sweep")
    for texts in sweep.config.planned_trials[:2]:
        trial_recipe(sweep.config, texts or {}, sweep.root)


@kind("trace", "recorded.trace", damage_trace)
def read_trace(corpus: Path) -> None:
    read_trace_file(corpus / "recorded.trace")


def read_trace_file(path: Path) -> None:
    """Loads a trace, computes all of its weights, and sometimes encodes it again."""
    import regard
    from regard.lens.trace.format import encode

    trace = regard.lens.load(path)
    for recording in trace.recordings:
        for attended in recording.attentions:
            for rows, _ in recording.chunks(attended):
                recording.head_weights(attended, [0], rows)
    if random.random() < 0.1:
        encode(trace)


@kind("text", "text.txt", damage_bytes)
def read_text(corpus: Path) -> None:
    from regard.data.tokens import write_tokens

    write_tokens(corpus / "text.txt", corpus / "made")


@kind("token file", "run/tokens/train.npy", damage_bytes)
def read_tokens(corpus: Path) -> None:
    from regard.data.tokens import TokenFile

    found = TokenFile.open(corpus / "run" / "tokens" / "train.npy")
    found.tokens[:5].tolist()


@kind("sentences", "sentences.tsv", damage_bytes)
def read_sentences(corpus: Path) -> None:
    from regard.data.sentences import read_sentences as read

    read(corpus / "sentences.tsv")


@kind("questions", "experiment/data/train.tsv", damage_bytes)
def read_questions(corpus: Path) -> None:
    from regard.data.questions import read_questions as read

    read(corpus / "experiment" / "data" / "train.tsv")


@kind("pairs csv", "pairs.csv", damage_bytes)
def read_pairs_csv(corpus: Path) -> None:
    from regard.data.pairs import read_pairs

    read_pairs(corpus / "pairs.csv")


@kind("pairs jsonl", "pairs.jsonl", damage_lines)
def read_pairs_jsonl(corpus: Path) -> None:
    from regard.data.pairs import read_pairs

    read_pairs(corpus / "pairs.jsonl")


@kind("people", "experiment/data/people.jsonl", damage_lines)
@kind("world", "experiment/data/world.toml", damage_toml)
def read_world(corpus: Path) -> None:
    from regard.data.world import read_world as read

    read(corpus / "experiment" / "data")


@kind("mentions", "mentions.jsonl", damage_lines)
def read_mentions(corpus: Path) -> None:
    from regard.lens.heads.annotations import read_mentions as read

    read(corpus / "mentions.jsonl")


@kind("conllu", "parsed.conllu", damage_bytes)
def read_conllu(corpus: Path) -> None:
    from regard.lens.heads.annotations import read_conllu as read

    read(corpus / "parsed.conllu")


@kind("vectors", "keys.csv", damage_bytes)
def read_vectors(corpus: Path) -> None:
    from regard.cli.design import read_rows

    read_rows(corpus / "keys.csv")


APPS: list[Any] = []


@kind("record request", "record.json", damage_json)
def ask_record(corpus: Path) -> None:
    ask("/record", (corpus / "record.json").read_bytes())


@kind("generate request", "generate.json", damage_json)
def ask_generate(corpus: Path) -> None:
    ask("/generate", (corpus / "generate.json").read_bytes())


@kind("request head", "head.txt", damage_bytes)
def ask_head(corpus: Path) -> None:
    lines = (corpus / "head.txt").read_bytes().split(b"\n")
    headers = [tuple(part.strip() for part in line.partition(b":")[::2]) for line in lines[1:]]
    path = lines[0].decode("latin-1")
    ask(path, b'{"text": "abc"}', [(name.lower(), value) for name, value in headers])


def ask(path: str, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Sends a request to the server's app; an answer of 500 or more, or an exception, is a failure."""
    if not APPS:
        APPS.append(_app())
    if headers is None:
        headers = [
            (b"host", b"127.0.0.1:8000"),
            (b"authorization", b"Bearer t"),
            (b"content-type", b"application/json"),
        ]
    path, _, query = path.partition("?")
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": query.encode(), "headers": headers}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "root_path": ""}
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    asyncio.run(APPS[0](scope, receive, send))
    assert statuses and statuses[0] < 500, statuses


def _app() -> Any:
    import torch

    from regard import GPT
    from regard.data.tokenizers import Bytes
    from regard.lens.models import RecordableModel
    from regard.lens.pages.server import SharedModel, create
    from regard.lens.recording.regard_models import regard_card

    torch.manual_seed(0)
    model = GPT.preset("nano", vocabulary=256, length=64, width=16, layers=1, attention={"heads": 2})
    model.tokenizer = Bytes()
    return create(SharedModel(RecordableModel(model, model.tokenizer, regard_card(model, "small"))), 8000, "t")


def make_corpus(folder: Path) -> None:
    """Writes one good file of every kind."""
    import torch
    from training import trainer

    import regard
    from regard.data.tokenizers import BPE

    with zipfile.ZipFile(PACKED) as packed:
        packed.extractall(folder)
    tokenizer = BPE.train(["the cat sat on the mat, the dog ran"] * 3, 300, ["<end>"])
    tokenizer.save(folder / "bpe.json")
    torch.manual_seed(0)
    model = regard.GPT.preset("gpt2", vocabulary=320, length=64, width=16, layers=1, attention={"heads": 2})
    model.tokenizer = tokenizer
    regard.hub.export(model, folder / "hub")
    (folder / "hub" / "regard-hashes.json").unlink()  # else every change would be told by its hash alone
    (folder / "hub" / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    _shard(folder / "hub", folder / "sharded")
    made = trainer(folder / "toy", steps=4)
    made.fit()
    shutil.rmtree(folder / "toy" / "model")
    texts = {
        "recipe.toml": f'task = "lm"\n[data]\ntext = "{folder}/text.txt"\n'
        'block = 16\n[model]\npreset = "nano"\nlayers = 1\n'
        '[model.attention]\nheads = 2\n[train]\nepochs = 1.5\nlr = 1e-3\n[train.schedule]\nname = "cosine"\n'
        '[train.optimizer]\nname = "adamw"\noptions = {betas = [0.9, 0.95]}\n',
        "overrides.txt": "train.lr=1e-3\ndata.block=16\nmodel.attention.heads=2\ntrain.epochs=2\nmodel.layers=1",
        "sentences.tsv": "text\tlabel\na good film\t1\na bad film\t0\n",
        "pairs.csv": 'article,summary\n"a, b",c\nd,"e ""f"""\n',
        "pairs.jsonl": '{"article": "a b c", "summary": "a", "facts": {"x": "y", "z": null}}\n'
        '{"article": "d", "summary": "e"}\n',
        "mentions.jsonl": '{"text": "she saw her", "clusters": [[[0, 3], [8, 11]]]}\n',
        "parsed.conllu": "# text = a b\n1\ta\ta\tX\t_\t_\t2\tdet\t_\t_\n2\tb\tb\tX\t_\t_\t0\troot\t_\t_\n\n",
        "keys.csv": "1,2,3\n4,5.5,-6e3\n",
        "record.json": '{"ids": [1, 2, 3, 4], "prompt": 2, "name": "x", "text": "abc"}',
        "generate.json": '{"text": "abc", "max_tokens": 2, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3}',
        "head.txt": "/record?token=t\nhost: 127.0.0.1:8000\nauthorization: Bearer t\ncontent-type: application/json",
    }
    asked = json.loads((folder / "converted" / "convert.json").read_bytes())
    asked["original"] = str(folder / "run" / "model")
    (folder / "converted" / "convert.json").write_text(json.dumps(asked))
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for make in MAKERS:
        make(folder)


def _shard(whole: Path, sharded: Path) -> None:
    """Writes a copy of a model whose weights have an index."""
    from safetensors import safe_open

    shutil.copytree(whole, sharded)
    (sharded / "model.safetensors").rename(sharded / "model-1.safetensors")
    with safe_open(sharded / "model-1.safetensors", "pt") as file:
        index = {"weight_map": dict.fromkeys(file.keys(), "model-1.safetensors")}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
