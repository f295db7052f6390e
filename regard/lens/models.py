"""Models: a folder of regard's or of Hugging Face's, a name on the hub, a GGUF file, or an untrained twin."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from regard import hub
from regard.data.tokenizers import Bytes
from regard.errors import ExtraMissingError, OptionError, RegardError
from regard.hub.gate import model_from_gguf
from regard.lens.recording.hub_models import described as described_foreign
from regard.lens.recording.hub_models import limit
from regard.lens.recording.record import Text, record
from regard.lens.recording.regard_models import described
from regard.lens.trace.trace import Card, Recording, Trace
from regard.models import Model, Seq2Seq, Stack, load

RANDOM = "random:"
GGUF = ".gguf"


@dataclass(frozen=True)
class RecordableModel:
    """A model to look at, with its tokenizer and its card."""

    model: Any
    tokenizer: Any
    card: Card

    @property
    def reads_text(self) -> bool:
        """Whether a text can be given to it, and not only an image."""
        return getattr(self.model, "main_input_name", "input_ids") == "input_ids"

    @property
    def limit(self) -> int | None:
        """The most tokens that it can take; None: any number."""
        if not isinstance(self.model, Model):
            return limit(self.model)
        stacks = [m for m in self.model.modules() if isinstance(m, Stack)]
        return min((s.limit for s in stacks if s.limit is not None), default=None)

    def record(self, text: Text, text_b: Text | None = None, **asked: Any) -> Trace:
        """What it attends to; see `record`."""
        given = [self._readable(x) for x in (text, text_b)]
        return record(self.model, given[0], given[1], tokenizer=self.tokenizer, card=self.card, **asked)

    def read(self, text: Text) -> Recording:
        """The recording of one text, which an encoder-decoder reads and writes."""
        crossing = isinstance(self.model, Seq2Seq) or getattr(self.model.config, "is_encoder_decoder", False)
        return self.record(text, **({"target": self._readable(text)} if crossing else {})).recordings[0]

    def ids(self, text: Text) -> list[int]:
        """The token ids of a text."""
        text = self._readable(text)
        if isinstance(text, Mapping):
            raise OptionError("expected a text or token ids, not a dict of inputs")
        if not isinstance(text, str):
            return [int(i) for i in text]
        found = self.tokenizer.encode(text)
        return [int(i) for i in found]

    def _readable(self, text: Any) -> Any:
        """Text for an untrained twin without a tokenizer becomes the numbers of its bytes: it knows no words anyway."""
        if not isinstance(text, str) or self.tokenizer is not None:
            return text
        if not self.reads_text:
            raise OptionError(f"{self.card.name} reads no text but {self.model.main_input_name}; use regard.record")
        if self.card.trained is not False:
            raise OptionError(f"{self.card.name} has no tokenizer, so it cannot read text; use regard.record with ids")
        return Bytes().encode(text)


def open_recordable(
    name: str | Path, device: torch.device | str = "cpu", *, seed: int = 0, download: bool = False
) -> RecordableModel:
    """The model of a folder, or by its name on the hub; 'random:' before it makes an untrained twin of it."""
    name = str(name)
    twin = name.startswith(RANDOM)
    name = name.removeprefix(RANDOM)
    if Path(name).is_dir() and not hub.is_hub_folder(name):
        return _own(name, twin, device, seed)
    if name.endswith(GGUF) and Path(name).is_file():
        return _unpacked(Path(name), twin, device, seed)
    if twin:
        found = hub.untrained(name, seed, device, download)
    elif Path(name).is_dir() or not _is_path(name):
        found = hub.fetch(name, device, download)
    else:
        raise OptionError(f"{name} does not exist; expected a model folder, a run, or a name on the hub")
    card = described_foreign(found.model, found.name, found.trained)
    return RecordableModel(found.model, found.tokenizer, card)


def _own(folder: str, twin: bool, device: torch.device | str, seed: int) -> RecordableModel:
    model = load(folder, device)
    name = hub.display_name(folder)
    if twin:
        tokenizer, cls = model.tokenizer, type(model)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = cls(model.config).to(device).eval()
        model.tokenizer = tokenizer
    return RecordableModel(model, model.tokenizer, described(model, f"{RANDOM}{name}" if twin else name, not twin))


def _unpacked(path: Path, twin: bool, device: torch.device | str, seed: int) -> RecordableModel:
    """The language model of a GGUF file, its weights unpacked to float32."""
    missing = [part for part in ("gguf", "accelerate") if find_spec(part) is None]
    if missing:
        raise ExtraMissingError(f"{path} needs `{'` and `'.join(missing)}`: pip install {' '.join(missing)}")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model, tokenizer = model_from_gguf(path, trained=not twin)
    except RegardError:
        raise
    except (ValueError, KeyError, IndexError, OSError, RuntimeError, struct.error) as error:
        raise hub.HubError(f"{path} cannot be read as a language model: {error}") from None
    card = described_foreign(model, f"{RANDOM}{path.stem}" if twin else path.stem, not twin)
    return RecordableModel(model.to(device).eval(), tokenizer, card)


def _is_path(name: str) -> bool:
    """Whether a name can only be meant for a file: names on the hub have one slash at most and no dot before it."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
