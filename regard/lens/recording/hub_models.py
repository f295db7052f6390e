"""Recording Hugging Face models: encoders, decoders and both, a whole text, or step by step through generate()."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.data.tokenizers import Pieces
from regard.errors import LengthError, OptionError
from regard.hub.attention import HubError, recording_attention
from regard.hub.fetching import display_name
from regard.lens.recording.capture import Listener, Prober
from regard.lens.recording.losses import (
    is_masked_model,
    maskable,
    masked_losses,
    next_token_labels,
    require_language_head,
    require_mask_token,
    special_tokens,
)
from regard.lens.recording.maps import evaluating
from regard.lens.recording.overview import overview
from regard.lens.recording.projections import record_projections
from regard.lens.recording.regard_models import OWN_TARGET, Gradient
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Attended, Card, Recording
from regard.registry import accepted_options, accepts_any_keyword


def record_foreign(
    model: Any,
    text: str | Sequence[int] | Tensor | Mapping[str, Any],
    *,
    tokenizer: Any = None,
    target: str | Sequence[int] | None = None,
    generate: Mapping[str, Any] | None = None,
    gradient: Gradient = False,
    name: str = "text",
    card: Card | None = None,
) -> Recording:
    """One text, some token ids, or ready-made inputs, through a Hugging Face model; see `record`."""
    inputs, offsets, written = _inputs(model, text, tokenizer)
    most, many = limit(model), inputs["input_ids"].shape[-1] if "input_ids" in inputs else 0
    if most is not None and many > most:
        raise LengthError(f"{many} tokens, but this model was built for {most}: shorten the text")
    if target is not None:
        inputs |= {"decoder_input_ids": _target(model, target, tokenizer)}
    elif generate is None and _lacks_target(model, inputs):
        generate = _own_target(model, inputs)
    prompt: int | None = None  # tokens that were given, where others were generated
    if generate is not None:
        prompt = 1 if _is_encoder_decoder(model) else many
    masked = gradient is True and is_masked_model(model)
    probing = bool(gradient) and not masked  # the masked copies are passes of their own
    listener = Listener(probing)
    with evaluating(model), torch.random.fork_rng(), torch.set_grad_enabled(probing):
        seed = torch.seed()
        if generate is not None and gradient:
            inputs = _with_generated(model, inputs, generate)
            generate = None
        labels = {}
        if masked:
            require_mask_token(tokenizer)
        elif gradient is True:
            labels = {"labels": _labels(model, inputs, prompt or 1)}
        ids, loss = _run(model, inputs | labels, generate, gradient if probing else False, listener)
        if listener.unexplained:  # once more, and this time their weights are kept
            torch.manual_seed(seed)
            listener = Listener(probing, listener.unexplained)
            _run(model, inputs | labels, generate, gradient if probing else False, listener)
        if not listener.heard:
            if gradient or generate is not None:
                raise HubError(
                    _SILENT.format(type(model).__name__) + " Without generate and gradient it may still work."
                )
            sequence = _read(tokenizer, ids[0], written, offsets, "text") if ids else None
            return record_projections(model, inputs, sequence, name, card or described(model))
        if masked:
            loss = _masked_gradient(model, inputs, tokenizer, listener)
    sequences = _sequences(model, listener, inputs, ids, tokenizer, written, offsets, prompt)
    made = Recording(name, card or described(model), sequences, [], loss)
    counts: dict[tuple[str, bool], int] = {}
    for heard in listener.heard.values():
        side, queries, keys = _place(model, heard.name, heard.cross, sequences, heard.queries, heard.keys)
        layer = counts.setdefault((side, heard.cross), 0)
        counts[side, heard.cross] += 1
        attended = heard.attended(layer, side, queries, keys, sequences)
        attended.side = _side(model, attended)
        made.attentions.append(attended)
        overview(made, attended)
    return made


_SILENT = "{} makes its attention itself and not through transformers' interface, so nothing was heard."


def described(model: Any, name: str | None = None, trained: bool | None = None, note: str = "") -> Card:
    """The card of a Hugging Face model."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    heads = int(getattr(config, "num_attention_heads", 0) or getattr(config, "num_heads", 0) or 0)
    width = int(getattr(config, "hidden_size", 0) or getattr(config, "d_model", 0) or 0)
    key_width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or (width // heads if heads else 0)
    return Card(
        name=name or display_name(getattr(config, "_name_or_path", "") or type(model).__name__),
        cls=type(model).__name__,
        home="transformers",
        parameters=sum(p.numel() for p in model.parameters()),
        layers=int(getattr(config, "num_hidden_layers", 0) or getattr(config, "num_layers", 0) or 0),
        heads=heads,
        groups=int(getattr(config, "num_key_value_heads", None) or heads),
        width=width,
        key_width=int(key_width),
        value_width=int(key_width),
        mechanisms=("softmax",),
        trained=trained,
        note=note,
    )


def _inputs(
    model: Any, text: str | Sequence[int] | Tensor | Mapping[str, Any], tokenizer: Any
) -> tuple[dict[str, Any], list[tuple[int, int]] | None, str | None]:
    """What the model is given, the characters of each token, and the text."""
    device = next(model.parameters()).device
    if isinstance(text, Mapping):
        inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in text.items()}
        return inputs, None, None
    if not isinstance(text, str):
        ids = torch.as_tensor(text if isinstance(text, Tensor) else list(text), dtype=torch.long).reshape(1, -1)
        return {"input_ids": ids.to(device)}, None, None
    if tokenizer is None:
        raise OptionError("text needs a tokenizer: give tokenizer=, or token ids instead of text")
    fast = bool(getattr(tokenizer, "is_fast", False))
    found = dict(tokenizer(text, return_tensors="pt", return_offsets_mapping=fast, verbose=False))
    offsets = [(int(a), int(b)) for a, b in found.pop("offset_mapping")[0].tolist()] if fast else None
    if not accepts_any_keyword(model.forward):
        found = accepted_options(model.forward, found)
    return {n: x.to(device) for n, x in found.items()}, offsets, text


def limit(model: Any) -> int | None:
    """The most tokens that a model was built for; None: any number."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if most is None:
        return None
    # These count positions from behind the padding token.
    shifted = config.model_type in ("roberta", "xlm-roberta", "camembert")
    return int(most) - (int(config.pad_token_id or 0) + 1 if shifted else 0)


def _target(model: Any, target: str | Sequence[int], tokenizer: Any) -> Tensor:
    """What the decoder is given: the target behind the token that every target begins with."""
    if not getattr(model.config, "is_encoder_decoder", False):
        raise OptionError(f"a {type(model).__name__} has no target: leave it out, or put it behind the text")
    if isinstance(target, str):
        if tokenizer is None:
            raise OptionError("text needs a tokenizer: give tokenizer=, or token ids as target")
        target = tokenizer(text_target=target)["input_ids"]
    start = getattr(model.config, "decoder_start_token_id", None)
    device = next(model.parameters()).device
    return torch.tensor([[*([] if start is None else [start]), *target]], device=device)


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _lacks_target(model: Any, inputs: dict[str, Any]) -> bool:
    """Returns whether a decoder that reads an encoder has nothing to read of its own."""
    given = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
    return _is_encoder_decoder(model) and not any(name in inputs for name in given)


def _own_target(model: Any, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the settings by which a decoder without a target writes its own, and warns that it does.

    One that cannot generate is given its start token alone.
    """
    settings = getattr(model, "generation_config", None)
    starts = [
        getattr(source, name, None)
        for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        for source in (settings, model.config)
    ]
    start = next((token for token in starts if token is not None), None)
    if start is None:
        raise OptionError(f"{type(model).__name__} has no start token: give what its decoder reads as target")
    if model.can_generate() and any(token is not None for token in starts[:4]):
        warnings.warn(f"no target was given, so the decoder wrote its own, at most {OWN_TARGET} tokens", stacklevel=4)
        return {"max_new_tokens": OWN_TARGET}
    warnings.warn(
        f"no target was given, and {type(model).__name__} has no head to write one with, so the decoder read its start "
        "token alone",
        stacklevel=4,
    )
    inputs["decoder_input_ids"] = torch.tensor([[int(start)]], device=next(model.parameters()).device)
    return None


def _with_generated(model: Any, inputs: dict[str, Any], generate: Mapping[str, Any]) -> dict[str, Any]:
    """Returns inputs with what the model generates behind them, so that one pass reads both."""
    device = next(model.parameters()).device
    known = [inputs["input_ids"][0].tolist()] if "input_ids" in inputs else []
    ids = _generated(model, inputs, generate, known)[-1]
    if _is_encoder_decoder(model):
        given = 1
        made = inputs | {"decoder_input_ids": torch.tensor([ids], device=device)}
    else:
        given = len(known[0])
        made = inputs | {"input_ids": torch.tensor([ids], device=device)}
        for name in ("attention_mask", "token_type_ids"):
            if name in inputs:
                last = inputs[name][:, -1:].expand(-1, len(ids) - given)
                made[name] = torch.cat([inputs[name], last], 1)
    if len(ids) <= given:
        raise OptionError("the model generated nothing that it read, so there is no loss: leave out generate")
    return made


def _run(
    model: Any, inputs: dict[str, Any], generate: Mapping[str, Any] | None, gradient: Gradient, listener: Listener
) -> tuple[list[list[int]], float | None]:
    """Runs the model; the ids of what it read and of what it wrote, and the loss."""
    known = [inputs[n][0].tolist() for n in ("input_ids", "decoder_input_ids") if n in inputs]
    with recording_attention(model, listener):
        if generate is not None:
            return _generated(model, inputs, generate, known), None
        out = model(**inputs)
    if not gradient or not listener.heard:
        return known, None
    loss = gradient(out) if callable(gradient) else out.loss
    probes = [heard.probe for heard in listener.heard.values() if heard.probe is not None]
    grads = torch.autograd.grad(loss, probes, materialize_grads=True)
    for heard, g in zip(listener.heard.values(), grads, strict=True):
        heard.probe = g
    return known, float(loss.detach())


def _labels(model: Any, inputs: dict[str, Any], prompt: int) -> Tensor:
    require_language_head(model)
    if "input_ids" not in inputs and "decoder_input_ids" not in inputs:
        raise OptionError(f"{type(model).__name__} was given no token ids, so it has no loss of its own: gradient=f")
    return next_token_labels(inputs, prompt)


def _masked_gradient(model: Any, inputs: dict[str, Any], tokenizer: Any, listener: Listener) -> float:
    """Keeps the gradient of the masked language model's loss with respect to each output; returns the loss.

    Each masked copy of the text has outputs of its own. What is kept is the gradient of a change that all of them
    share, and the sum over copies is that.
    """
    mask = require_mask_token(tokenizer)
    ids = inputs["input_ids"][0]
    visible = inputs.get("attention_mask")
    seen = None if visible is None else visible[0].tolist()
    places = maskable(ids.tolist(), special_tokens(tokenizer), seen)
    rest = {name: x for name, x in inputs.items() if name != "input_ids"}
    prober = Prober()
    totals: dict[str, Tensor] = {}
    loss = 0.0

    def logits(copies: Tensor) -> Tensor:
        beside = {name: x.expand(len(copies), *x.shape[1:]) for name, x in rest.items()}
        found: Tensor = model(input_ids=copies, **beside).logits
        return found

    with torch.enable_grad(), recording_attention(model, prober):
        for part in masked_losses(logits, ids, places, mask):
            grads = torch.autograd.grad(part, list(prober.probes.values()), materialize_grads=True)
            for name, g in zip(prober.probes, grads, strict=True):
                totals[name] = totals[name] + g if name in totals else g
            loss += float(part.detach())
    for name, heard in listener.heard.items():
        heard.probe = totals[name]
    return loss


def _generated(
    model: Any, inputs: dict[str, Any], settings: Mapping[str, Any], known: list[list[int]]
) -> list[list[int]]:
    """Generates one more token than is kept: the last one is never read."""
    if not model.can_generate():
        raise OptionError(f"a {type(model).__name__} generates nothing; leave out generate")
    asked = dict(settings)
    most = int(asked.pop("max_new_tokens", 20))
    longest = limit(model)
    if longest is not None and known and not _is_encoder_decoder(model):
        most = min(most, longest - len(known[0]))
    if asked.get("num_beams", 1) != 1 or asked.get("num_return_sequences", 1) != 1:
        raise OptionError("one output is recorded, without beams: leave out num_beams and num_return_sequences")
    blank = model.generation_config.pad_token_id
    end = model.generation_config.eos_token_id
    fallback = end[0] if isinstance(end, list) else end
    asked = {"do_sample": False, "pad_token_id": fallback if blank is None else blank} | asked
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=most + 1, num_beams=1, **asked)
    written: list[int] = out[0].tolist()
    if _is_encoder_decoder(model):
        return [*known[:1], written[:-1]]
    return [written[:-1]]


def _sequences(
    model: Any,
    listener: Listener,
    inputs: dict[str, Any],
    ids: list[list[int]],
    tokenizer: Any,
    text: str | None,
    offsets: list[tuple[int, int]] | None,
    prompt: int | None,
) -> list[Tokens]:
    """What was read and written, as far as there are tokens of it; else numbered places, or patches of an image."""
    both = bool(getattr(model.config, "is_encoder_decoder", False))
    found = []
    for n, tokens in enumerate(ids):
        name = ("source", "target")[n] if both else "text"
        own = n == 0 and not (prompt is not None and not both)
        made = _read(tokenizer, tokens, text if own else None, offsets if own else None, name)
        mask = inputs.get("attention_mask" if n == 0 else "decoder_attention_mask")
        if mask is not None and mask.dim() == 2 and mask.shape[1] == len(made) and not bool(mask.bool().all()):
            kept = {key: getattr(made, key) for key in ("tokens", "ids", "starts", "ends", "words", "special")}
            made = Tokens(name, made.text, visible=mask[0].int().tolist(), **kept)
        found.append(made)
    if prompt is not None:
        found[-1].prompt, found[-1].steps = prompt, [prompt] + [1] * (len(found[-1]) - prompt)
    if not found:
        first = next(iter(listener.heard.values()))
        found.append(_patches(model, inputs, first.queries))
    return found


def _read(
    tokenizer: Any, ids: Sequence[int], text: str | None, offsets: list[tuple[int, int]] | None, name: str
) -> Tokens:
    """Tokens with their characters: as the tokenizer says, or by writing them out one by one."""
    ids = list(ids)
    if tokenizer is None:
        return Tokens(name, "", [str(i) for i in ids], ids)
    special = {int(i) for i in tokenizer.all_special_ids} - {tokenizer.unk_token_id}  # an unknown word is text
    names = [str(x) for x in tokenizer.convert_ids_to_tokens(ids)]
    if text is None or offsets is None:
        text, offsets = _written_out(tokenizer, ids, special)
    shown = [
        text[a:b] if b > a and i not in special else token for (a, b), token, i in zip(offsets, names, ids, strict=True)
    ]
    spans = [(a, b) if b > a and i not in special else (-1, -1) for (a, b), i in zip(offsets, ids, strict=True)]
    return Tokens(
        name,
        text,
        shown,
        ids,
        [a for a, _ in spans],
        [b for _, b in spans],
        special=[int(i in special) for i in ids],
    )


class Writer:
    """What `Pieces` needs of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _written_out(tokenizer: Any, ids: list[int], special: set[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of ids without special tokens, and the characters of each."""
    pieces = Pieces(Writer(tokenizer))  # type: ignore[arg-type]
    text, spans, waiting = "", [], 0
    for i in ids:
        if i in special:
            spans += [(len(text), len(text))] * (waiting + 1)
            waiting = 0
            continue
        piece, waiting = pieces.push(i), waiting + 1
        if piece:
            spans += [(len(text), len(text) + len(piece))] * waiting
            text, waiting = text + piece, 0
    rest = pieces.finish()
    return text + rest, spans + [(len(text), len(text) + len(rest))] * waiting


def _patches(model: Any, inputs: dict[str, Any], T: int) -> Tokens:
    image, size = inputs.get("pixel_values"), getattr(model.config, "patch_size", None)
    if image is None or not isinstance(size, int):
        return Tokens("tokens", "", [str(i) for i in range(T)])
    rows, columns = image.shape[-2] // size, image.shape[-1] // size
    before = T - rows * columns
    if before < 0:
        return Tokens("tokens", "", [str(i) for i in range(T)])
    names = ["[CLS]" if n == 0 else f"[{n}]" for n in range(before)]
    names += [f"{r},{c}" for r in range(rows) for c in range(columns)]
    return Tokens("image", "", names, special=[1] * before + [0] * (rows * columns), grid=[rows, columns])


def _place(model: Any, name: str, cross: bool, sequences: list[Tokens], T: int, S: int) -> tuple[str, int, int]:
    """The side of an attention and the sequences that it is between; others than were given get one of their own."""
    parts = name.split(".")
    both = bool(getattr(model.config, "is_encoder_decoder", False))
    side = "encoder" if "encoder" in parts and "decoder" not in parts and not cross else "decoder"
    wanted = 0 if not both or side == "encoder" else len(sequences) - 1
    return side, _sequence(sequences, wanted, T), _sequence(sequences, 0 if cross else wanted, S)


def _sequence(sequences: list[Tokens], wanted: int, length: int) -> int:
    if len(sequences[wanted]) == length:
        return wanted
    for n, tokens in enumerate(sequences):
        if len(tokens) == length:
            return n
    sequences.append(Tokens("tokens", "", [str(i) for i in range(length)]))
    return len(sequences) - 1


def _side(model: Any, attended: Attended) -> str:
    """In a model of one side, attention that may look ahead makes an encoder."""
    if getattr(model.config, "is_encoder_decoder", False) or attended.kind == "cross":
        return attended.side
    rules = attended.rules
    return "decoder" if rules.causal or rules.hidden is not None else "encoder"
