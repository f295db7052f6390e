"""Recording regard's own models: every mechanism, a whole sequence or step by step from a state.

Each layer's mechanism is listened to while the model runs. Step by step, the queries, keys and values of all steps are
laid side by side: since keys are in the order of the tokens, that is the one matrix that the steps are rows of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.tokenizers import Tokenizer
from regard.errors import OptionError
from regard.generate import Settings
from regard.generate import generate as continued
from regard.lens.recording.losses import TOO_SHORT, maskable, masked_losses, require_mask_token, special_tokens
from regard.lens.recording.maps import evaluating
from regard.lens.recording.overview import overview
from regard.lens.trace.arrays import packed
from regard.lens.trace.formulas import Dense, Feature, Formula, OneHot, Softmax
from regard.lens.trace.rules import Rules
from regard.lens.trace.tokens import read
from regard.lens.trace.trace import CELLS, Attended, Card, Recording
from regard.mechanisms import Mechanism
from regard.mechanisms.argmax import Argmax
from regard.mechanisms.base import without_autocast
from regard.mechanisms.features import Elu, Quadratic
from regard.mechanisms.linear import Linear
from regard.mechanisms.random_features import Fourier, Performer, RandomFeatures
from regard.mechanisms.softmax import Softmax as SoftmaxAttention
from regard.mechanisms.synthesizer import RandomSynthesizer, Synthesizer
from regard.models import Decoder, Encoder, Model, Seq2Seq, Stack, token_loss
from regard.models.encoder import MaskedHead
from regard.nn import Attention
from regard.nn.merges import LooksAheadError
from regard.shapes import Mask, Rows

Gradient = bool | Callable[[Any], Tensor]
_MAPS: dict[type[Mechanism], str] = {
    Elu: "elu",
    Quadratic: "quadratic",
    Performer: "performer",
    Fourier: "fourier",
}
OWN_TARGET = 20  # tokens that a decoder writes at most where it was given none to read
_TILE = 64  # rows of dense weights that are packed together


class _Ear:
    """What one attention layer was given and gave, of the first row of the batch."""

    def __init__(self, layer: int, side: str, kind: str, name: str, attention: Attention) -> None:
        self.layer, self.side, self.kind, self.name, self.attention = layer, side, kind, name, attention
        self.parts: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
        self.mask = Mask()
        self.probe: Tensor | None = None

    def hear(self, mask: Mask | None, **given: Tensor | None) -> None:
        for name, x in given.items():
            if x is not None:
                self.parts[name].append(x[:1].detach())
        self.mask = self.mask if mask is None else mask

    def whole(self, name: str) -> Tensor | None:
        """All tokens, [1,heads,tokens,width]."""
        parts = self.parts[name]
        return torch.cat(parts, 2) if parts else None


def record_regard(
    model: Model[Any],
    ids: Sequence[int],
    *,
    tokenizer: Tokenizer | None = None,
    text: str | None = None,
    target: Sequence[int] | None = None,
    generate: Settings | None = None,
    gradient: Gradient = False,
    name: str = "text",
    card: Card | None = None,
) -> Recording:
    """One sequence of token ids through one of regard's models; see `record`."""
    tokens = torch.tensor([list(ids)], dtype=torch.long, device=model.device)
    if tokens.shape[1] == 0:
        raise OptionError("nothing to record: the text has no tokens")
    if target is None and generate is None and isinstance(model, Seq2Seq):
        generate = _own_target(model)
        target = None if generate is not None else []
    ears = [_Ear(*found) for found in attentions(model)]
    crossing = isinstance(model, Seq2Seq)
    prompt = 1 if crossing else len(ids)
    loss = None
    with evaluating(model), torch.set_grad_enabled(bool(gradient)):
        if generate is None:
            written = _targets(model, target)
            loss = _whole(model, tokens, written, ears, gradient, tokenizer)
        else:
            written = _generated(model, tokens, generate)
            new = written[1:] if crossing else written
            if gradient and not new:
                raise OptionError("the model generated nothing that it read, so there is no loss: leave out generate")
            if not gradient:
                _step_by_step(model, tokens, new, ears)
            elif crossing:
                loss = _whole(model, tokens, written, ears, gradient, tokenizer)
            else:
                whole = torch.cat([tokens, tokens.new_tensor([new])], 1)
                loss = _whole(model, whole, [], ears, gradient, tokenizer, prompt)
    sequences = [read(tokenizer, ids, text, "source" if crossing else "text")]
    if crossing:
        sequences.append(read(tokenizer, written, None, "target"))
    elif generate is not None:
        sequences = [read(tokenizer, [*ids, *written])]
    if generate is not None:
        shown = sequences[-1]
        shown.prompt = prompt
        shown.steps = [prompt] + [1] * (len(shown) - prompt)
    made = Recording(name, card or described(model), sequences, [], loss)
    for ear in ears:
        attended = _attended(ear, made)
        made.attentions.append(attended)
        overview(made, attended)
    return made


def described(model: Model[Any], name: str | None = None, trained: bool | None = None, note: str = "") -> Card:
    """The card of one of regard's models."""
    stack = model.stack
    assert isinstance(stack, Stack)
    size = stack.layers[0].attention.size
    parts = [block.attention.mechanism for block in stack.layers]
    parts += [block.cross.mechanism for block in stack.layers if block.cross is not None]
    return Card(
        name=name or type(model).__name__,
        cls=type(model).__name__,
        home="regard",
        parameters=sum(p.numel() for p in model.parameters()),
        layers=len(stack.layers),
        heads=size.H,
        groups=size.G,
        width=stack.config.width,
        key_width=size.K,
        value_width=size.V,
        mechanisms=tuple(dict.fromkeys(part.name for part in parts)),
        signed=any(part.signed for part in parts),
        trained=trained,
        note=note,
    )


def attentions(model: Model[Any]) -> Iterator[tuple[int, str, str, str, Attention]]:
    """Layer, side, kind, name and module of each attention, in the order in which they run."""
    stacks: list[tuple[str, Any]] = [("encoder", model.encoder)] if isinstance(model, Seq2Seq) else []
    stacks += [("encoder" if isinstance(model, Encoder) else "decoder", model.stack)]
    names = {module: name for name, module in model.named_modules()}
    for side, stack in stacks:
        assert isinstance(stack, Stack)
        for layer, block in enumerate(stack.layers):
            for kind, attention in (("self", block.attention), ("cross", block.cross)):
                if attention is not None:
                    yield layer, side, kind, names[attention], attention


def _targets(model: Model[Any], target: Sequence[int] | None) -> list[int]:
    if not isinstance(model, Seq2Seq):
        if target is not None:
            raise OptionError(f"a {type(model).__name__} has no target: leave it out, or put it behind the text")
        return []
    return [model.config.start, *(int(i) for i in target or ())]


def _own_target(model: Seq2Seq) -> Settings | None:
    """Returns how a decoder without a target writes its own, and warns; None where it can only read its start token."""
    try:
        model.empty(1, 1)
    except LooksAheadError:
        warnings.warn(
            "no target was given, and this model looks ahead and cannot write one, so the decoder read its start token "
            "alone",
            stacklevel=5,
        )
        return None
    warnings.warn(f"no target was given, so the decoder wrote its own, at most {OWN_TARGET} tokens", stacklevel=5)
    return Settings(max_tokens=OWN_TARGET)


def _whole(
    model: Model[Any],
    tokens: Tensor,
    written: list[int],
    ears: list[_Ear],
    gradient: Gradient,
    tokenizer: Tokenizer | None,
    prompt: int = 1,
) -> float | None:
    """Runs the model over a whole text; where a gradient is asked for, keeps it and returns the loss.

    The loss of the next token counts those behind the first `prompt`.
    """
    target = torch.tensor([written], dtype=torch.long, device=model.device)
    masked = gradient is True and isinstance(model, Encoder) and isinstance(model.head, MaskedHead)
    if masked:
        require_mask_token(tokenizer)
    with ExitStack() as hooks:
        for ear in ears:
            mechanism = ear.attention.mechanism
            hooks.callback(mechanism.register_forward_pre_hook(_listening(ear)).remove)
            if gradient:
                hooks.callback(mechanism.register_forward_hook(_probing(ear)).remove)
        out = model(tokens, target) if isinstance(model, Seq2Seq) else model(tokens)
    if not gradient:
        return None
    if masked:
        return _masked_gradient(model, tokens[0], ears, tokenizer)
    loss = gradient(out) if callable(gradient) else _loss(model, out, target if written else tokens, prompt)
    probes = [ear.probe for ear in ears if ear.probe is not None]
    for ear, g in zip(ears, torch.autograd.grad(loss, probes, materialize_grads=True), strict=True):
        ear.probe = g
    return float(loss.detach())


def _masked_gradient(model: Model[Any], ids: Tensor, ears: list[_Ear], tokenizer: Tokenizer | None) -> float:
    """Keeps the gradient of the masked language model's loss with respect to each output; returns the loss.

    Each masked copy of the text has outputs of its own. What is kept is the gradient of a change that all of them
    share, and the sum over copies is that.
    """
    places = maskable(ids.tolist(), special_tokens(tokenizer))
    totals: list[Tensor] = []
    loss = 0.0
    with ExitStack() as hooks:
        for ear in ears:
            hooks.callback(ear.attention.mechanism.register_forward_hook(_probing(ear)).remove)
        for part in masked_losses(model, ids, places, require_mask_token(tokenizer)):
            grads = torch.autograd.grad(part, [ear.probe for ear in ears if ear.probe is not None])
            totals = [a + b for a, b in zip(totals, grads, strict=True)] if totals else list(grads)
            loss += float(part.detach())
    for ear, g in zip(ears, totals, strict=True):
        ear.probe = g
    return loss


def _listening(ear: _Ear) -> Callable[..., None]:
    def listen(mechanism: nn.Module, given: tuple[Any, ...]) -> None:
        q, k, v, mask = given
        ear.hear(mask, q=q, k=k, v=v)

    return listen


def _probing(ear: _Ear) -> Callable[..., Tensor]:
    def probe(mechanism: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
        # The gradient of a zero that is added is the gradient of the output, also where nothing else needs one.
        ear.probe = torch.zeros_like(out[:1], requires_grad=True)
        return out + ear.probe

    return probe


def _loss(model: Model[Any], out: Tensor, tokens: Tensor, prompt: int) -> Tensor:
    """Returns the mean loss of the next token over those behind the first `prompt`."""
    if isinstance(model, Decoder):
        if tokens.shape[1] < 2:
            raise OptionError(TOO_SHORT)
        return token_loss(out[:, prompt - 1 : -1], tokens[:, prompt:])
    raise OptionError("this model has no loss of its own: give gradient=f, with f(output) the number to differentiate")


def _generated(model: Model[Any], tokens: Tensor, settings: Settings) -> list[int]:
    """Returns what the model generates, a start token first where it is a Seq2Seq.

    One more token is generated than kept: the last one is never read.
    """
    if not isinstance(model, Decoder):
        raise OptionError(f"a {type(model).__name__} generates nothing; leave out generate")
    if settings.beams is not None or settings.n > 1 or settings.slide:
        raise OptionError("one output is recorded, without beams and without slide")
    with torch.no_grad():
        result = continued(model, tokens[0].tolist(), settings.but(max_tokens=settings.max_tokens + 1))
    kept = result.tokens[: settings.max_tokens]
    return [model.config.start, *kept] if isinstance(model, Seq2Seq) else kept


def _step_by_step(model: Model[Any], tokens: Tensor, new: list[int], ears: list[_Ear]) -> None:
    """Reads the prompt and then each new token, as generating does."""
    assert isinstance(model, Decoder)
    with torch.no_grad(), ExitStack() as taps:
        for ear in ears:
            if ear.side == "encoder":
                taps.callback(ear.attention.mechanism.register_forward_pre_hook(_listening(ear)).remove)
            else:
                taps.enter_context(_tapped(ear))
        _, state = model.prefill(tokens, None, len(new) + 1)
        for token in new:
            _, state = model.extend(tokens.new_tensor([[token]]), state, last=True)


@contextmanager
def _tapped(ear: _Ear) -> Iterator[None]:
    """Listens to the recurrent face for a while."""
    mechanism = ear.attention.mechanism
    whole = {name: getattr(mechanism, name) for name in ("extend", "write", "read")}

    def extend(q: Any, k: Any, v: Tensor, state: Any, visible: Any = None) -> Any:
        ear.hear(ear.attention.rules.but(causal=True), q=q, k=k, v=v)
        return whole["extend"](q, k, v, state, visible)

    def write(state: Any, k: Any, v: Tensor, visible: Any = None) -> Any:
        ear.hear(ear.attention.rules, k=k, v=v)
        return whole["write"](state, k, v, visible)

    def reading(q: Tensor, state: Any, *more: Any, **named: Any) -> Any:
        ear.hear(None, q=q)
        return whole["read"](q, state, *more, **named)

    taps = {"extend": extend} if ear.kind == "self" else {"write": write, "read": reading}
    try:
        for name, tap in taps.items():
            setattr(mechanism, name, tap)
        yield
    finally:
        for name in taps:
            if name in vars(mechanism):
                delattr(mechanism, name)


def _attended(ear: _Ear, recording: Recording) -> Attended:
    mechanism, size = ear.attention.mechanism, ear.attention.size
    q, k, v = (ear.whole(name) for name in "qkv")
    assert v is not None
    crossing = ear.kind == "cross"
    last = len(recording.sequences) - 1
    asking = last if ear.side == "decoder" else 0
    asked = 0 if crossing else asking
    mask = ear.mask
    made = Attended(
        ear.layer,
        ear.side,
        ear.kind,
        ear.name,
        mechanism.name,
        asking,
        asked,
        size.H,
        size.G,
        OneHot(),
        Rules(causal=mask.causal, window=mask.window),
        mechanism.signed,
        v=_plain(v),
    )
    if ear.probe is not None:
        made.g = _plain(ear.probe)
    mask = mask.but(visible=None, size_override=(len(recording.sequences[asking]), v.shape[2]))
    with torch.no_grad(), without_autocast(v):
        made.formula = _formula(made, mechanism, q, k, v, mask, crossing)
    return made


def _formula(
    made: Attended, mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor, mask: Mask, crossing: bool
) -> Formula:
    """How weights follow from what is kept; fills that in."""
    cls = type(mechanism)
    made.q, made.k = _plain(q), _plain(k)
    if mask.documents is not None or mask.bias is not None or mask.relative is not None:
        return _dense(made, mechanism, q, k, v, mask, crossing)
    if isinstance(mechanism, SoftmaxAttention) and cls is SoftmaxAttention:
        assert q is not None
        made.slopes = None if mask.slopes is None else mask.slopes.detach().float().cpu()
        return Softmax(mechanism.score_scale(q.shape[-1]), mask.softcap)
    if isinstance(mechanism, Synthesizer) and cls is Synthesizer and not mask.adjusts_scores:
        assert q is not None
        made.q, made.k = map(_plain, mechanism.as_softmax(q, mask))
        return Softmax(1.0)
    if isinstance(mechanism, RandomSynthesizer) and cls is RandomSynthesizer and mechanism.right is not None:
        made.q, made.k = map(_plain, mechanism.factors(mask))
        return Softmax(1.0)
    if isinstance(mechanism, Argmax) and cls is Argmax:
        made.choice = _choices(mechanism, q, k, v, mask, crossing)
        return OneHot()
    if isinstance(mechanism, Linear) and q is not None and k is not None:
        if cls in _MAPS:
            if isinstance(mechanism, RandomFeatures):
                assert mechanism.w is not None
                made.w = mechanism.w.detach().float().cpu()
            return Feature(_MAPS[cls])
        (left, cq), (right, ck) = (mechanism.features(x.float()) for x in (q, k))
        made.q, made.k = _plain(left), _plain(right)
        made.cq, made.ck = (None if c is None else c[0].detach().float().cpu() for c in (cq, ck))
        return Feature("stored")
    return _dense(made, mechanism, q, k, v, mask, crossing)


def _tiles(
    mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor, mask: Mask, crossing: bool, step: int
) -> Iterator[Tensor]:
    """The explicit weights, [H,rows,S], some rows at a time."""
    assert mask.size_override is not None
    T, S = mask.size_override
    standing = None if crossing else mask.query_positions(T, S, v.device)
    for start in range(0, T, step):
        stop = min(T, start + step)
        rows = None if standing is None else Rows(*(x[:, start:stop] for x in standing))
        bias = mask.bias
        if bias is not None and bias.dim() > 1 and bias.shape[-2] == T > 1:
            bias = bias[..., start:stop, :]
        part = mask.but(rows=rows, size_override=(stop - start, S), bias=bias)
        weights = mechanism.weights(None if q is None else q[:, :, start:stop], k, part)
        yield weights[0].detach().float().cpu()


def _choices(mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor, mask: Mask, crossing: bool) -> Tensor:
    assert q is not None
    step = max(1, CELLS // max(1, q.shape[1] * v.shape[2]))
    best = (x.max(-1) for x in _tiles(mechanism, q, k, v, mask, crossing, step))
    return torch.cat([torch.where(x.values > 0.5, x.indices, -1) for x in best], 1)


def _dense(
    made: Attended, mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor, mask: Mask, crossing: bool
) -> Dense:
    tiles: list[list[bytes]] = [[] for _ in range(made.heads)]
    error = torch.zeros(made.heads)
    for weights in _tiles(mechanism, q, k, v, mask, crossing, _TILE):
        error = torch.maximum(error, (weights - weights.half().float()).abs().amax((1, 2)))
        for head, rows in zip(tiles, weights, strict=True):
            head.append(packed(rows, "f16"))
    made.error = error.tolist()
    return Dense(_TILE, tiles)


def _plain(x: Tensor | None) -> Any:
    """The first row of a batch as float32 on the CPU, for itself."""
    return None if x is None else x[0].detach().float().cpu().contiguous()
