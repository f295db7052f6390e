"""A model that can be recorded: the model, its tokenizer, and the summary (card) that a trace stores about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.data.tokenizers import Bytes
from regard.errors import OptionError
from regard.hub.opening import open_model
from regard.lens.recording.hub_inputs import Places, model_inputs, text_config, token_limit
from regard.lens.recording.hub_models import hub_card
from regard.lens.recording.images import image_inputs
from regard.lens.recording.pairs import joins_pairs
from regard.lens.recording.record import Text, record
from regard.lens.recording.regard_models import regard_card
from regard.lens.trace.tokens import tokens_of, word_indices
from regard.lens.trace.trace import Card, Recording, Trace
from regard.models import Model, Seq2Seq, Stack


@dataclass(frozen=True)
class Sample:
    """One input of a model: a text or token ids, the second text of a pair, and what a decoder is given as target."""

    text: Text
    pair: str | None = None
    target: str | Sequence[int] | None = None


@dataclass(frozen=True)
class RecordableModel:
    """A model of regard or of transformers, with its tokenizer and its card (name, sizes, whether it is trained)."""

    model: Any
    tokenizer: Any
    card: Card
    images: Any = None  # transformers' image processor, if the model reads images

    @property
    def reads_text(self) -> bool:
        """Whether the model's input is tokens, and not, say, an image."""
        return getattr(self.model, "main_input_name", "input_ids") == "input_ids"

    @property
    def reads_images(self) -> bool:
        """Whether the model's input is an image."""
        return getattr(self.model, "main_input_name", None) == "pixel_values"

    @property
    def limit(self) -> int | None:
        """The maximum number of input tokens; None if there is no limit, or if the config states none."""
        if not isinstance(self.model, Model):
            return token_limit(self.model)
        stacks = [m for m in self.model.modules() if isinstance(m, Stack)]
        return min((s.limit for s in stacks if s.limit is not None), default=None)

    @property
    def has_decoder_of_its_own(self) -> bool:
        """Whether the model is an encoder-decoder: it reads a source, and writes a target."""
        return isinstance(self.model, Seq2Seq) or bool(getattr(self.model.config, "is_encoder_decoder", False))

    @property
    def reads_pairs(self) -> bool:
        """Whether the model reads a pair of texts: its tokenizer joins them, or it has a token type for each."""
        return not isinstance(self.model, Model) and self.reads_text and joins_pairs(self.model, self.tokenizer)

    def record(self, text: Text, text_b: Text | None = None, **options: Any) -> Trace:
        """Records the attention of the model while it reads one text, or each of two; `options` are `regard.record`'s.

        For a model that reads images, `text` and `text_b` are names of image files. If the model has random weights and
        no tokenizer, its tokens are the bytes of the text, and are named by the characters that they stand for.
        """
        trace = self._record(text, text_b, **options)
        if self.tokenizer is None and self.reads_text:
            for recording, given in zip(trace.recordings, (text, text_b), strict=False):
                for words in (given, options.get("target")):
                    if isinstance(words, str):
                        self._name_bytes(recording, words)
        return trace

    def _record(self, text: Text, text_b: Text | None = None, **options: Any) -> Trace:
        """Records one text, or each of two; without a tokenizer, tokens are named by their ids."""
        if self.reads_images and isinstance(text, str):
            return self._record_images([text, text_b], options)
        if options.get("pair") is not None and self.tokenizer is None:
            raise OptionError(f"{self.card.name} has no tokenizer, which joins a pair of texts; use one that has")
        inputs = [self._as_input(x) for x in (text, text_b)]
        options["target"] = self._as_input(options.get("target"))
        return record(self.model, *inputs, tokenizer=self.tokenizer, card=self.card, **options)

    def _record_images(self, files: Sequence[Text | None], options: Mapping[str, Any]) -> Trace:
        """Records the attention of the model to one or two images, which the trace holds as the model sees them."""
        if options.get("pair") is not None:
            raise OptionError(f"{self.card.name} reads an image, and a pair is two texts: leave out the pair")
        inputs, pictures = zip(
            *(image_inputs(self.model, self.images, str(file)) for file in files if file is not None), strict=True
        )
        trace = record(self.model, *inputs, tokenizer=self.tokenizer, card=self.card, **options)
        for recording, picture in zip(trace.recordings, pictures, strict=True):
            for tokens in recording.sequences:
                if tokens.grid is not None:
                    tokens.picture = picture
        return trace

    def record_one(self, text: Text | Sample) -> Recording:
        """Returns the recording of one text or sample; without a target an encoder-decoder writes its own."""
        sample = as_sample(text)
        return self._record(sample.text, pair=sample.pair, target=sample.target).recordings[0]

    def inputs(self, sample: Sample) -> tuple[dict[str, Any], Places]:
        """Returns the inputs of a Hugging Face model for a sample, without its target, and where its tokens stand."""
        text = self._as_input(sample.text)
        if isinstance(text, str) and not callable(self.tokenizer):  # a tokenizer of regard's, which knows no pairs
            text = self.ids(text)
        return model_inputs(self.model, text, self.tokenizer, sample.pair)

    def ids(self, text: Text | Sample) -> list[int]:
        """Returns the token ids of a text, or of both texts of a pair."""
        sample = as_sample(text)
        if sample.pair is not None:
            ids: list[int] = self.inputs(sample)[0]["input_ids"][0].tolist()
            return ids
        given: Any = self._as_input(sample.text)
        if isinstance(given, Mapping):
            raise OptionError("expected a text or token ids, not a dict of inputs")
        if isinstance(given, str):
            given = self.tokenizer.encode(given)
        return [int(i) for i in given]

    def _name_bytes(self, recording: Recording, text: str) -> None:
        """Names the tokens that are the bytes of this text, with or without a start token, by its characters."""
        given = self._as_input(text)
        named = tokens_of(Bytes(), Bytes().encode(text))
        for tokens in recording.sequences:
            for first in (0, 1):
                part = slice(first, first + len(named))
                if given and tokens.ids is not None and tokens.ids[part] == given:
                    tokens.tokens[part], tokens.text = named.tokens, text
                    tokens.starts[part], tokens.ends[part] = named.starts, named.ends
                    tokens.words = word_indices(text, tokens.starts, tokens.ends)

    def _as_input(self, text: Any) -> Any:
        """Returns the text, or its UTF-8 bytes as token ids if the model has random weights and no tokenizer.

        Such a model knows no words, so any ids will do: bytes beyond a small vocabulary are counted from 0 again.
        Raises OptionError if there is no tokenizer and the model is trained, or if it is not known whether it is
        (`trained` is None).
        """
        if not isinstance(text, str) or self.tokenizer is not None:
            return text
        if not self.reads_text:
            raise OptionError(f"{self.card.name} reads no text but {self.model.main_input_name}; use regard.record")
        if self.card.trained is not False:
            raise OptionError(f"{self.card.name} has no tokenizer, so it cannot read text; use regard.record with ids")
        vocabulary = getattr(text_config(self.model), "vocab_size", None) or Bytes().size
        return [i % vocabulary for i in Bytes().encode(text)]


def as_sample(text: Text | Sample) -> Sample:
    """Returns a text as a sample; what is one already is returned as it is."""
    return text if isinstance(text, Sample) else Sample(text)


def open_recordable(
    name: str | Path, device: torch.device | str = "cpu", *, seed: int = 0, download: bool = False
) -> RecordableModel:
    """Opens a model by `regard.hub.open_model` and returns it with its tokenizer and its card."""
    opened = open_model(name, device, seed=seed, download=download)
    describe = regard_card if isinstance(opened.model, Model) else hub_card
    card = describe(opened.model, opened.name, opened.trained)
    return RecordableModel(opened.model, opened.tokenizer, card, opened.images)
