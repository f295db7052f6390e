"""The residual stream of a language model over one text, and the parts that add up to it.

One pass keeps the stream before and after every block, what the heads give to their output projections, and the logits.
Nothing is assumed of a family: blocks are the items of a list that hold one attention each, and the norm before the
logits is the module that turns the last stream into what the language-model head reads. That attention is added to the
stream unscaled is checked: a block's output must be its input, plus the attention, plus the output of another of its
modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import OptionError
from regard.hub.attention import Call, recording_attention
from regard.lens.recording.maps import evaluation_mode
from regard.lens.recording.outputs import OutputProjections, head_matrices
from regard.lens.recording.regard_models import attention_layers
from regard.models import Decoder, Model

PROBE = 1e3  # so large that the ε of a norm does not count
EXACT = 1e-4  # how far, relative to its size, a tensor may be from the sum of its parts in float32


class StreamError(OptionError):
    """The residual stream of a model cannot be taken apart; the message says why."""


@dataclass(frozen=True)
class FrozenNorm:
    """The norm before the logits, with each token's divisor fixed at its value in this text, so that it is affine."""

    gain: Float[Tensor, " D"]
    shift: Float[Tensor, " D"]
    centred: bool  # whether it subtracts the mean, as layer norm does
    scale: Float[Tensor, " T"]  # one over the divisor of each token

    def directions(self, rows: Float[Tensor, "T C D"]) -> Float[Tensor, "T C D"]:
        """Returns directions [T,C,D] with direction · x = row · (norm(x) − shift) for the stream x of each token."""
        turned = rows * self.gain
        if self.centred:
            turned = turned - turned.mean(-1, keepdim=True)
        return turned * self.scale[:, None, None]


@dataclass
class Stream:
    """The stream of one pass over T tokens, in float32 on the CPU: L blocks, width D, a vocabulary of N."""

    attentions: list[str]  # the name of each block's attention
    residuals: list[Float[Tensor, "T D"]]  # before the first block, and after each
    outputs: list[Float[Tensor, "T H V"]]  # of each block's heads, before the projection
    matrices: list[Float[Tensor, "H V D"]]  # the part of each block's projection that multiplies each head
    logits: Float[Tensor, "T N"]
    norm: nn.Module | None
    head: Any  # the language-model head: turns normed vectors into logits
    head_weight: Float[Tensor, "N D"]
    frozen: FrozenNorm | None = None
    why: str = ""  # why heads do not add up to logits in this model, or ""

    @torch.no_grad()
    def read(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T N"]:
        """Returns the logits of a stream as if it were that after the last block: norm, then head."""
        like = self.head_weight
        normed = x.to(like)[None]
        if self.norm is not None:
            normed = self.norm(normed)
        logits: Tensor = self.head(normed.to(like.dtype))
        return logits[0].float().cpu()

    def head_rows(self, words: Int[Tensor, "T C"]) -> tuple[Float[Tensor, "T C D"], Float[Tensor, "T C"]]:
        """Returns the rows of the language-model head that give the logits of some tokens, and their biases."""
        flat = words.long().to(self.head_weight.device)
        bias = getattr(self.head, "bias", None)
        constant = torch.zeros(words.shape) if bias is None else bias[flat].float().cpu()
        return self.head_weight[flat].float().cpu(), constant


@dataclass
class _Watch:
    """Forward hooks of one pass, and the tensors that they keep."""

    blocks: list[nn.Module]
    residuals: list[Tensor] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)  # the input of each output projection
    added: list[Tensor] = field(default_factory=list)  # the output of each output projection
    others: list[Tensor] = field(default_factory=list)  # outputs of the modules of the current block
    # Modules outside of blocks, each with its input and its output.
    around: list[tuple[nn.Module, Tensor, Tensor]] = field(default_factory=list)
    broken: str = ""  # why blocks are no sum of their parts, or ""

    def before_block(self, block: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps the input of the first block; raises StreamError if another input is not the output before it."""
        self.others = []
        given = _first(inputs if inputs else kwargs.get("hidden_states"))
        if not self.residuals:
            self.residuals.append(given)
        elif not torch.equal(given, self.residuals[-1]):
            raise StreamError("something other than the layers with attention adds to the stream between them")

    def after_block(self, block: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        """Keeps the stream, and notes in `broken` if it is not the block's input, the attention and one more part."""
        after = _first(out)
        number = len(self.residuals) - 1
        if len(self.added) == number + 1 and not self.broken:
            rest = after - self.residuals[-1] - self.added[-1]
            if not any(_same(x, rest, after) for x in (*self.others, torch.zeros_like(rest))):
                self.broken = f"block {number} adds its attention to the stream scaled or normed, not as it is"
        self.residuals.append(after)

    def after_part(self, part: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        """Keeps the output of a module inside the current block."""
        if isinstance(out, tuple):
            out = out[0]
        if isinstance(out, Tensor):
            self.others.append(out)

    def after_projection(self, part: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
        """Keeps the input and the output of an output projection."""
        self.given.append(inputs[0])
        self.added.append(out)

    def after_outside(self, part: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        """Keeps a module outside of the blocks with its input and its output, if both have the same shape."""
        if inputs and isinstance(inputs[0], Tensor) and isinstance(out, Tensor) and inputs[0].shape == out.shape:
            self.around.append((part, inputs[0], out))


@torch.no_grad()
def read_stream(model: Any, ids: list[int]) -> Stream:
    """Returns the stream of one pass over token ids; raises StreamError if it cannot be taken apart."""
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    with evaluation_mode(model):
        projections, heads = _projections(model, tokens)
        blocks = [_block_of(model, name) for name in projections]
        if len(set(map(id, blocks))) != len(blocks):
            raise StreamError(
                f"{type(model).__name__}: a block has more than one attention, so the stream after each is not known"
            )
        watch = _Watch(blocks)
        with _watching(model, watch, list(projections.values())):
            if isinstance(model, Model):
                logits = model(tokens)
            else:
                logits = model(input_ids=tokens).logits
    if len(watch.residuals) != len(blocks) + 1 or len(watch.given) != len(blocks):
        raise StreamError(f"{type(model).__name__}: the blocks do not run once each over the whole text")
    head: Any = model.logits if isinstance(model, Decoder) else model.get_output_embeddings()
    stream = Stream(
        list(projections),
        [x[0].float().cpu() for x in watch.residuals],
        [x[0].float().cpu().view(len(ids), H, -1) for x, H in zip(watch.given, heads, strict=True)],
        [head_matrices(x, H) for x, H in zip(projections.values(), heads, strict=True)],
        logits[0].float().cpu(),
        None,
        head,
        model._head_weight if isinstance(model, Decoder) else head.weight,
        why=watch.broken,
    )
    _find_norm(stream, watch)
    return stream


def _projections(model: Any, tokens: Tensor) -> tuple[dict[str, nn.Module], list[int]]:
    """Returns the output projection of each attention module by name, as they run, and their numbers of heads."""
    if isinstance(model, Model):
        layers = [(name, attention) for *_, name, attention in attention_layers(model)]
        return {name: attention.out for name, attention in layers}, [attention.size.H for _, attention in layers]
    finder = _HubFinder()
    with recording_attention(model, finder), finder.projections.watching(model):
        model(input_ids=tokens[:, :2])
    found = finder.projections.found
    if not finder.heads or set(found) != set(finder.heads):
        raise StreamError(f"{type(model).__name__} has attention whose output projection is not known")
    return {name: found[name] for name in finder.heads}, list(finder.heads.values())


class _HubFinder:
    """An `AttentionRecorder` that finds the output projections, and counts heads."""

    def __init__(self) -> None:
        self.heads: dict[str, int] = {}
        self.projections = OutputProjections()

    def begin(self, call: Call) -> None:
        """Counts the heads of a call."""
        self.heads[call.name] = call.q.shape[1]

    def rows(self, call: Call, start: int, weights: Tensor) -> None:
        """Ignores the weights."""

    def end(self, call: Call, out: Tensor) -> Tensor:
        """Returns the output unchanged, after noting it, so that its projection is found."""
        self.projections.expect(call.name, out)
        return out


def _block_of(model: nn.Module, name: str) -> nn.Module:
    """Returns the item of a list of modules that holds the attention module of this name."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(parts[:n])), nn.ModuleList):
            return model.get_submodule(".".join(parts[: n + 1]))
    raise StreamError(f"{name} stands in no list of blocks")


@contextmanager
def _watching(model: nn.Module, watch: _Watch, projections: list[nn.Module]) -> Iterator[None]:
    """Sets the hooks of one pass."""
    inside = {id(part) for block in watch.blocks for part in block.modules()}
    with ExitStack() as removal:
        for block in watch.blocks:
            removal.callback(block.register_forward_pre_hook(watch.before_block, with_kwargs=True).remove)
            for part in block.modules():
                if part is not block:
                    removal.callback(part.register_forward_hook(watch.after_part).remove)
            removal.callback(block.register_forward_hook(watch.after_block).remove)
        for projection in projections:
            removal.callback(projection.register_forward_hook(watch.after_projection).remove)
        for part in model.modules():
            if id(part) not in inside and not any(part.children()):
                removal.callback(part.register_forward_hook(watch.after_outside).remove)
        yield


def _find_norm(stream: Stream, watch: _Watch) -> None:
    """Finds the norm between the last block and the language-model head, and sets `stream.norm` and `stream.frozen`."""
    last = watch.residuals[-1]
    after = [(part, out) for part, x, out in watch.around if x.shape == last.shape and torch.equal(x, last)]
    for part, out in [*after, (None, last)]:
        if _close(stream.head(out)[0].float().cpu(), stream.logits, last.dtype):
            stream.norm = part
            break
    else:
        raise StreamError(
            "the logits are not those of the last stream after norm and head: they are scaled, capped or projected"
        )
    stream.frozen = _freeze(stream.norm, last, stream.residuals[-1])
    if stream.frozen is None and not stream.why:
        stream.why = "the norm before the logits is neither layer norm nor RMS norm"


def _freeze(norm: Any, given: Tensor, last: Float[Tensor, "T D"]) -> FrozenNorm | None:
    """Returns the norm with its divisors for this text; None if it is neither layer norm nor RMS norm.

    Its gain and shift are found from its outputs, because some norms store the gain minus 1.
    """
    T, D = last.shape
    if norm is None:
        return FrozenNorm(torch.ones(D), torch.zeros(D), False, torch.ones(T))
    out = norm(given)[0].float().cpu()
    probe = torch.full((1, 1, D), PROBE, device=given.device, dtype=given.dtype)
    shift = norm(torch.zeros_like(probe))[0, 0].float().cpu()
    signs = torch.ones(D)
    signs[1::2] = -1
    alternating = norm(probe * signs.to(probe))[0, 0].float().cpu()
    gain = (alternating - shift) * signs
    for centred in (True, False):
        x = last - last.mean(-1, keepdim=True) if centred else last
        turned = x * gain
        scale = (turned * (out - shift)).sum(-1) / turned.square().sum(-1).clamp(min=1e-30)
        if _close(turned * scale[:, None] + shift, out, given.dtype):
            return FrozenNorm(gain, shift, centred, scale)
    return None


def _first(x: Any) -> Tensor:
    """Returns the stream in the arguments or the output of a block: a tensor, or the first of a tuple."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, tuple | list) and x and isinstance(x[0], Tensor):
        return x[0]
    raise StreamError("the blocks do not take and return a tensor as their first argument and output")


def _same(part: Tensor, rest: Tensor, whole: Tensor) -> bool:
    """Returns whether two tensors are equal but for shape, up to the rounding error of `whole`."""
    if part.numel() != rest.numel():
        return False
    return bool((part.reshape(rest.shape) - rest).abs().amax() <= _exact(whole.dtype) * whole.abs().amax())


def _close(x: Tensor, y: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether x equals y up to rounding in a dtype, relative to the largest entry of y."""
    return bool((x - y).abs().amax() <= _exact(dtype) * y.abs().amax().clamp(min=1e-6))


def _exact(dtype: torch.dtype) -> float:
    return max(EXACT, 8 * torch.finfo(dtype).eps)
