"""A class MultiHeadAttention(d_model, num_heads) with four Linear layers, called with Q, K, V [B,T,D] and a mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from regard.grade.advice import SubmissionError
from regard.grade.cases import Draw, GradeCase, causal_mask
from regard.grade.judging import take_first

# Names that submissions may give to the four layers; the first of each is that of the template.
NAMES = {
    "W_q": ("W_q", "w_q", "wq", "Wq", "q_proj", "query", "q_linear", "linear_q", "W_Q", "q"),
    "W_k": ("W_k", "w_k", "wk", "Wk", "k_proj", "key", "k_linear", "linear_k", "W_K", "k"),
    "W_v": ("W_v", "w_v", "wv", "Wv", "v_proj", "value", "v_linear", "linear_v", "W_V", "v"),
    "W_o": ("W_o", "w_o", "wo", "Wo", "o_proj", "out_proj", "out", "out_linear", "W_O", "proj", "fc", "o"),
}


class Layers(NamedTuple):
    """The four Linear layers of a submission, [D] → [D] each."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear


def built(draw: Draw) -> Iterator[GradeCase]:
    """Yields self-attention without a mask, of several widths and numbers of heads."""
    for B, T, D, H in ((2, 5, 12, 3), (3, 7, 10, 2), (1, 4, 6, 1)):
        x = draw.normal(B, T, D)
        yield GradeCase((x, x, x), (D, H))


def crossed(draw: Draw) -> Iterator[GradeCase]:
    """Yields cross-attention: fewer queries than keys, and values that are not the keys."""
    for B, T, S, D, H in ((2, 3, 7, 12, 4), (1, 5, 2, 6, 3)):
        arguments = (draw.normal(B, T, D), draw.normal(B, S, D), draw.normal(B, S, D))
        yield GradeCase(arguments, (D, H), "cross-attention")


def masked(draw: Draw) -> Iterator[GradeCase]:
    """Yields self-attention with a causal mask and with random masks [B,1,T,S]."""
    x = draw.normal(2, 7, 12)
    yield GradeCase((x, x, x, causal_mask(7)[None, None]), (12, 3), "with a causal mask")
    arguments = (draw.normal(3, 5, 10), draw.normal(3, 4, 10), draw.normal(3, 4, 10))
    yield GradeCase((*arguments, draw.visible(3, 5, 4)[:, None]), (10, 2), "with a mask of pairs")


def find_layers(module: Any) -> Layers:
    """Returns the four Linear layers of a submission; raises a SubmissionError that names a missing one."""
    found = []
    for name, known in NAMES.items():
        layer = next((getattr(module, n) for n in known if isinstance(getattr(module, n, None), nn.Linear)), None)
        if layer is None:
            raise SubmissionError(
                f"There is no nn.Linear called self.{name} (nor {', '.join(known[1:5])}), whose weights the grader "
                "reads to compute the expected output.",
                advice="Keep the template's four layers, from d_model to d_model each, and split their outputs.",
            )
        found.append(layer)
    return Layers(*found)


def _heads(module: Any) -> int:
    for name in ("num_heads", "n_heads", "h", "heads", "n_head", "H"):
        heads = getattr(module, name, None)
        if isinstance(heads, int):
            return heads
    raise SubmissionError("The number of heads is not kept; write self.num_heads = num_heads.")


def _split(x: Tensor, H: int) -> Tensor:
    B, T, D = x.shape
    return x.reshape(B, T, H, D // H).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def _mixed(module: Any, given: tuple[Any, ...], mix: Mix = _attend) -> Tensor:
    """Returns the outputs of the heads [B,H,T,D/H] with a submission's weights; `mix` is the attention of each head."""
    layers = find_layers(module)
    H = _heads(module)
    parts = [_split(layer(x), H) for layer, x in zip(layers[:3], given[:3], strict=True)]
    return mix(parts[0], parts[1], parts[2], _mask(given))


def _mask(given: tuple[Any, ...]) -> Tensor | None:
    return next(iter(given[3:]), None)


def _project(module: Any, merged: Tensor) -> Tensor:
    out: Tensor = find_layers(module).o(merged)
    return out


def _run(module: Any, given: tuple[Any, ...], mix: Mix = _attend) -> Tensor:
    """Returns multi-head attention with the weights of a submission, [B,T,D]."""
    return _project(module, _merge(_mixed(module, given, mix)))


def multihead(module: Any, *given: Any) -> Tensor:
    """Returns W_o [head 1, …, head H] with heads softmax(q·kᵀ/√(D/H)) v, [B,T,D]."""
    return _run(module, given)


def _scaled_by(factor: Callable[[Tensor], float]) -> Mix:
    return lambda q, k, v, mask: _attend(q * factor(q), k, v, mask)


def unscaled(module: Any, *given: Any) -> Tensor:
    return _run(module, given, _scaled_by(lambda q: math.sqrt(q.shape[-1])))


def scaled_by_model_width(module: Any, *given: Any) -> Tensor:
    return _run(module, given, _scaled_by(lambda q: q.shape[1] ** -0.5))


def divided_by_width(module: Any, *given: Any) -> Tensor:
    return _run(module, given, _scaled_by(lambda q: q.shape[-1] ** -0.5))


def scaled_by_heads(module: Any, *given: Any) -> Tensor:
    return _run(module, given, _scaled_by(lambda q: math.sqrt(q.shape[-1] / q.shape[1])))


def scaled_by_length(module: Any, *given: Any) -> Tensor:
    return _run(module, given, _scaled_by(lambda q: math.sqrt(q.shape[-1] / q.shape[-2])))


def sigmoid_instead(module: Any, *given: Any) -> Tensor:
    def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        return scores.sigmoid() @ v

    return _run(module, given, mix)


def mask_added(module: Any, *given: Any) -> Tensor:
    def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return (q @ k.mT / math.sqrt(q.shape[-1]) + mask).softmax(-1) @ v

    return _run(module, given, mix)


def mask_transposed(module: Any, *given: Any) -> Tensor:
    mask = _mask(given)
    assert mask is not None
    return _run(module, (*given[:3], mask.mT))


def unprojected(module: Any, *given: Any) -> Tensor:
    parts = [_split(x, _heads(module)) for x in given[:3]]
    return _project(module, _merge(_attend(parts[0], parts[1], parts[2], _mask(given))))


def keys_and_values_exchanged(module: Any, *given: Any) -> Tensor:
    return _run(module, (given[0], given[2], given[1], *given[3:]))


def output_projected_twice(module: Any, *given: Any) -> Tensor:
    return _project(module, _run(module, given))


def residual_normed(module: Any, *given: Any) -> Tensor:
    out: Tensor = given[0] + _run(module, given)
    return layer_norm(out, out.shape[-1:])


def heads_averaged(module: Any, *given: Any) -> Tensor:
    heads = _mixed(module, given)
    return _project(module, heads.mean(1).repeat(1, 1, heads.shape[1]))


def over_batch(module: Any, *given: Any) -> Tensor:
    return _run(module, given, _over(0))


def no_softmax(module: Any, *given: Any) -> Tensor:
    return _run(module, given, lambda q, k, v, mask: q @ k.mT / math.sqrt(q.shape[-1]) @ v)


def residual_added(module: Any, *given: Any) -> Tensor:
    out: Tensor = given[0] + _run(module, given)
    return out


def merged_interleaved(module: Any, *given: Any) -> Tensor:
    return _project(module, _mixed(module, given).permute(0, 2, 3, 1).flatten(2))


def no_output_projection(module: Any, *given: Any) -> Tensor:
    return _merge(_mixed(module, given))


def not_transposed_back(module: Any, *given: Any) -> Tensor:
    heads = _mixed(module, given)
    return _project(module, heads.reshape(heads.shape[0], heads.shape[2], -1))


def split_by_view(module: Any, *given: Any) -> Tensor:
    layers = find_layers(module)
    H = _heads(module)
    shapes = [(x.shape[0], H, x.shape[1], x.shape[2] // H) for x in given[:3]]
    parts = [layer(x).reshape(shape) for layer, x, shape in zip(layers[:3], given[:3], shapes, strict=True)]
    return _project(module, _merge(_attend(parts[0], parts[1], parts[2], _mask(given))))


def _interleaved(module: Any, given: tuple[Any, ...]) -> Tensor:
    """Returns the outputs of heads [B,H,T,D/H] if each head takes every H-th column."""
    layers = find_layers(module)
    H = _heads(module)
    parts = [layer(x).unflatten(-1, (-1, H)).permute(0, 3, 1, 2) for layer, x in zip(layers[:3], given, strict=False)]
    return _attend(parts[0], parts[1], parts[2], _mask(given))


def split_interleaved(module: Any, *given: Any) -> Tensor:
    return _project(module, _interleaved(module, given).permute(0, 2, 3, 1).flatten(2))


def split_interleaved_only(module: Any, *given: Any) -> Tensor:
    return _project(module, _merge(_interleaved(module, given)))


def _by_layers(module: Any, given: tuple[Any, ...], order: str) -> Tensor:
    """Returns attention whose queries, keys and values are projected by the layers in `order`, rightly "qkv"."""
    layers = find_layers(module)
    parts = [_split(getattr(layers, name)(x), _heads(module)) for name, x in zip(order, given, strict=False)]
    return _project(module, _merge(_attend(parts[0], parts[1], parts[2], _mask(given))))


def layers_exchanged(module: Any, *given: Any) -> Tensor:
    return _by_layers(module, given, "kqv")


def key_layer_for_values(module: Any, *given: Any) -> Tensor:
    return _by_layers(module, given, "qkk")


def query_layer_for_keys(module: Any, *given: Any) -> Tensor:
    return _by_layers(module, given, "qqv")


def values_unprojected(module: Any, *given: Any) -> Tensor:
    layers = find_layers(module)
    parts = [_split(x, _heads(module)) for x in (layers.q(given[0]), layers.k(given[1]), given[2])]
    return _project(module, _merge(_attend(parts[0], parts[1], parts[2], _mask(given))))


def one_projection(module: Any, *given: Any) -> Tensor:
    return _by_layers(module, given, "qqq")


def all_from_queries(module: Any, *given: Any) -> Tensor:
    return _run(module, (given[0], given[0], given[0], *given[3:]))


def values_from_keys(module: Any, *given: Any) -> Tensor:
    return _run(module, (given[0], given[1], given[1], *given[3:]))


def over_heads(module: Any, *given: Any) -> Tensor:
    return _run(module, given, _over(1))


def over_queries(module: Any, *given: Any) -> Tensor:
    return _run(module, given, _over(2))


def _over(axis: int) -> Mix:
    def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        return scores.softmax(axis) @ v

    return mix


def ignores_mask(module: Any, *given: Any) -> Tensor:
    return _run(module, given[:3])


def inverted_mask(module: Any, *given: Any) -> Tensor:
    def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(mask, -1e9).softmax(-1) @ v

    return _run(module, given, mix)


def masked_after(module: Any, *given: Any) -> Tensor:
    def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return ((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) * mask) @ v

    return _run(module, given, mix)


def masked_by_zero(module: Any, *given: Any) -> Tensor:
    def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, 0.0).softmax(-1) @ v

    return _run(module, given, mix)


def single_head(module: Any, *given: Any) -> Tensor:
    layers = find_layers(module)
    parts = [layer(x)[:, None] for layer, x in zip(layers[:3], given[:3], strict=True)]
    return _project(module, _attend(parts[0], parts[1], parts[2], _mask(given))[:, 0])


def softmax_twice(module: Any, *given: Any) -> Tensor:
    def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        return scores.softmax(-1).softmax(-1) @ v

    return _run(module, given, mix)


def always_causal(module: Any, *given: Any) -> Tensor:
    """Returns attention that is causal if no mask is given."""
    assert _mask(given) is None
    mask = causal_mask(max(given[0].shape[1], given[1].shape[1]))
    return _run(module, (*given[:3], mask[: given[0].shape[1], : given[1].shape[1]]))


def layers_are_known(module: Any, *given: Any) -> Any:
    """Returns what is wrong with the parameters of a submission, in words."""
    find_layers(module)
    if not isinstance(module, nn.Module):
        return "it is no nn.Module, so that no optimiser finds its weights"
    known = {id(p) for layer in find_layers(module) for p in layer.parameters()}
    trained = [n for n, p in module.named_parameters() if id(p) not in known]
    if trained:
        return f"it has parameters beside the four layers: {', '.join(trained[:3])}"
    return None


def gradients_flow(module: Any, *given: Any) -> Any:
    """Returns what is wrong if the gradient of the output does not reach all weights."""
    out = take_first(module(*given), wanted=True)
    if not isinstance(out, Tensor):
        return "the output is no tensor: is a `return` missing?"
    if not out.requires_grad:
        return "no_gradient"
    out.square().sum().backward()
    for name, parameter in module.named_parameters():
        reached = parameter.grad is not None and bool(torch.any(parameter.grad != 0))
        if name.endswith("weight") and not reached:
            return _why_unreached(module, given, name, parameter)
    return None


def _why_unreached(module: Any, given: tuple[Any, ...], name: str, parameter: Tensor) -> str:
    """Returns why weights get no gradient: the slip "no_gradient" if the output depends on them, else their name."""
    before = take_first(module(*given), wanted=True)
    with torch.no_grad():
        parameter.copy_(parameter.flip(0))
    after = take_first(module(*given), wanted=True)
    if torch.allclose(before, after):
        return f"the weights {name} get no gradient: are they used?"
    return "no_gradient"
