"""Kinds of files that come with models of others: transformers' folders, GGUF files, image processors, pictures."""

from __future__ import annotations

import contextlib
import io
import json
import struct
from pathlib import Path
from typing import Any

from mutated_kinds import MAKERS, damage_bytes, damage_json, damage_safetensors, kind

FAMILIES = ("bert", "llama", "qwen3_next", "mamba2")
PICTURES = ("png", "jpeg", "webp", "gif", "bmp")
VIT = {"image_size": 16, "patch_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
PREPARED = {"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 16, "width": 16}}
PREPARED |= {"size": {"shortest_edge": 16}, "do_rescale": True, "do_normalize": True}
PREPARED |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.5], "resample": 3, "rescale_factor": 0.004}


def _load(folder: Path) -> None:
    import torch

    import regard

    model = regard.hub.load(folder)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))


def _open(folder: Path) -> None:
    from regard.hub.opening import open_model

    opened = open_model(folder)
    if opened.tokenizer is not None:
        opened.tokenizer("the cat é sat")


def _read_family(family: str) -> Any:
    def read(corpus: Path) -> None:
        _load(corpus / "families" / family)

    return read


def _open_family(family: str) -> Any:
    def read(corpus: Path) -> None:
        _open(corpus / "families" / family)

    return read


for _family in FAMILIES:
    kind(f"{_family} config", f"families/{_family}/config.json", damage_json)(_read_family(_family))
    kind(f"{_family} config, opened", f"families/{_family}/config.json", damage_json)(_open_family(_family))
    kind(f"{_family} weights", f"families/{_family}/model.safetensors", damage_safetensors)(_read_family(_family))


@kind("opened config", "hub/config.json", damage_json)
@kind("opened weights", "hub/model.safetensors", damage_safetensors)
@kind("opened tokenizer", "hub/tokenizer.json", damage_json)
@kind("opened tokenizer config", "hub/tokenizer_config.json", damage_json)
@kind("opened generation config", "hub/generation_config.json", damage_json)
def open_hub(corpus: Path) -> None:
    _open(corpus / "hub")


@kind("random config", "hub/config.json", damage_json)
def open_untrained(corpus: Path) -> None:
    from regard.hub.opening import open_model

    open_model(f"random:{corpus / 'hub'}")


@kind("exported hashes", "hashed/regard-hashes.json", damage_json)
def read_hashes(corpus: Path) -> None:
    import regard

    regard.hub.load(corpus / "hashed")


@kind("gguf", "small.gguf", damage_bytes)
def open_gguf(corpus: Path) -> None:
    from regard.hub.opening import open_model

    open_model(corpus / "small.gguf")


OPENED: dict[str, Any] = {}


def _record_picture(corpus: Path, picture: str) -> None:
    """Gives a picture to a model whose processor may be damaged."""
    from regard.hub.opening import open_model
    from regard.lens.recording.images import image_inputs

    settings = (corpus / "vit" / "preprocessor_config.json").read_bytes()
    if settings not in OPENED:
        OPENED.clear()
        OPENED[settings] = open_model(corpus / "vit")
    opened = OPENED[settings]
    image_inputs(opened.model, opened.images, corpus / picture)
    image_inputs(opened.model, None, corpus / picture)


@kind("image processor", "vit/preprocessor_config.json", damage_json)
def read_processor(corpus: Path) -> None:
    _record_picture(corpus, "picture.png")


def _read_picture(suffix: str) -> Any:
    def read(corpus: Path) -> None:
        _record_picture(corpus, f"picture.{suffix}")

    return read


for _suffix in PICTURES:
    kind(f"picture {_suffix}", f"picture.{_suffix}", damage_bytes)(_read_picture(_suffix))


def make_hub_corpus(folder: Path) -> None:
    """Writes small models of transformers, a GGUF file, and a picture in each format."""
    import shutil

    import numpy as np
    import torch
    import transformers
    from memory_models import mamba, qwen
    from PIL import Image
    from small_models import GROUPED

    import regard

    torch.manual_seed(0)
    # Progress bars and warnings of transformers' own.
    with contextlib.redirect_stderr(io.StringIO()):
        made = {
            "bert": transformers.BertForMaskedLM(
                transformers.BertConfig(
                    vocab_size=40,
                    hidden_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    intermediate_size=8,
                    max_position_embeddings=32,
                )
            ),
            "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
            "qwen3_next": qwen(),
            "mamba2": mamba(),
        }
        for name, model in made.items():
            model.save_pretrained(folder / "families" / name)
        transformers.ViTModel(transformers.ViTConfig(**VIT, intermediate_size=8)).save_pretrained(folder / "vit")
    (folder / "vit" / "preprocessor_config.json").write_text(json.dumps(PREPARED))
    shutil.copytree(folder / "hub", folder / "hashed")
    shutil.rmtree(folder / "hashed")
    model = regard.hub.load(folder / "hub")
    regard.hub.export(model, folder / "hashed")
    (folder / "small.gguf").write_bytes(gguf())
    drawn = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    image = Image.fromarray(drawn)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    for suffix in PICTURES:
        more = {} if suffix in ("bmp", "gif") else {"exif": exif}
        image.save(folder / f"picture.{suffix}", **more)


def gguf() -> bytes:
    """Returns a GGUF file of a kind that transformers reads without `gguf`: a header, and no tensors."""

    def text(x: str) -> bytes:
        return struct.pack("<Q", len(x.encode())) + x.encode()

    sizes = {"block_count": 1, "context_length": 16, "embedding_length": 8, "feed_forward_length": 8}
    sizes |= {"attention.head_count": 2, "vocab_size": 3, "shortconv.l_cache": 3}
    fields = [text("general.architecture") + struct.pack("<I", 8) + text("lfm2")]
    fields += [text(f"lfm2.{name}") + struct.pack("<II", 4, value) for name, value in sizes.items()]
    fields.append(text("lfm2.attention.head_count_kv") + struct.pack("<IIQi", 9, 5, 1, 2))
    fields.append(text("lfm2.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    fields.append(text("lfm2.rope.freq_base") + struct.pack("<If", 6, 1e4))
    fields.append(text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gpt2"))
    for name, entries in (("tokens", ["a", "b", "ab"]), ("merges", ["a b"])):
        texts = b"".join(map(text, entries))
        fields.append(text(f"tokenizer.ggml.{name}") + struct.pack("<IIQ", 9, 8, len(entries)) + texts)
    fields.append(text("tokenizer.ggml.token_type") + struct.pack("<IIQ3i", 9, 5, 3, 1, 1, 1))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields)


MAKERS.append(make_hub_corpus)
