"""The cost of an attention layer: its mechanism, its projections, convolution, norm and gates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from regard.mechanisms import Cost, Face
from regard.shapes import Size

if TYPE_CHECKING:
    from regard.nn.attention import Attention

# FLOPs for each number: of a norm; of a gate's activation and product; of a value that is scaled and added.
NORM_FLOPS, GATE_FLOPS, SKIP_FLOPS = 7, 9, 2


def layer_cost(layer: Attention, T: int, S: int, face: Face, B: int) -> Cost:
    """Returns the declared cost of one call; see `Attention.cost`."""
    size = _size_of_call(layer, T, S, B)
    if layer.source is not None and face == "recurrent":
        return _reading_cost(layer, size) + _projection_cost(layer, T, 0, B)
    cost = layer.mechanism.cost(replace(size, causal=size.causal or face == "recurrent"), face)
    if face == "recurrent":  # new keys and values are written, and then read with all others
        cost = replace(cost, bytes=cost.bytes + size.e * B * T * sum(layer.widths["q" in layer.needs :]))
        if layer.convolution is not None:
            kept = size.e * B * (layer.convolution.width - 1) * sum(layer.widths)
            cost += Cost(0, 0, 0, 2 * kept, kept)  # read and written
    return cost + _projection_cost(layer, T, S, B)


def layer_gradient_cost(layer: Attention, T: int, S: int, B: int) -> Cost:
    """Returns the cost of the backward pass over a whole sequence, without that of the forward pass.

    Each projection has two products in the backward pass; the mechanism declares its own.
    """
    own = _projection_cost(layer, T, S, B)
    doubled = Cost(2 * own.matmul, 2 * own.useful, 2 * own.elementwise, 2 * own.bytes, 0)
    return doubled + layer.mechanism.gradient_cost(_size_of_call(layer, T, S, B))


def _size_of_call(layer: Attention, T: int, S: int, B: int) -> Size:
    window = None
    if layer.source is None:
        window = layer.rules.window
    return replace(layer.size, B=B, T=T, S=S, dtype=layer.out.weight.dtype, window=window)


def _reading_cost(layer: Attention, size: Size) -> Cost:
    """Returns the cost of reading a written sequence: cross-attention's less that of writing, its cost at T = 0."""
    cost = layer.mechanism.cost(size, "parallel")
    written = layer.mechanism.cost(replace(size, T=0), "parallel")
    return replace(
        cost,
        matmul=cost.matmul - written.matmul,
        useful=cost.useful - written.useful,
        elementwise=cost.elementwise - written.elementwise,
        bytes=cost.bytes - written.bytes + cost.state,
    )


def _projection_cost(layer: Attention, T: int, S: int, B: int) -> Cost:
    """Returns the cost of projecting T tokens and, for cross-attention, S of the other sequence.

    Bytes are weights and inputs read, and outputs written. Tensors between projections and mechanism are counted with
    the mechanism.
    """
    projections = [(layer.project, T), (layer.out, T)]
    numbers = 2 * T * layer.width
    if layer.project_source is not None and S > 0:
        projections.append((layer.project_source, S))
        numbers += S * layer.project_source.in_features
    made = None if layer.gates is None else layer.gates.project
    for more in (layer.gate, made):
        if more is not None:
            projections.append((more, T))
            numbers += T * more.out_features
    flops = sum(2 * B * tokens * projection.weight.numel() for projection, tokens in projections)
    weights = sum(x.numel() for projection, _ in projections for x in projection.parameters())
    work = 0
    if layer.convolution is not None:
        weights += sum(x.numel() for x in layer.convolution.parameters())
        numbers += T * sum(layer.widths)
        work += layer.convolution.flops(B * T)
    parts = NORM_FLOPS * (layer.head_norm is not None)
    parts += GATE_FLOPS * (layer.gate is not None)
    parts += SKIP_FLOPS * (layer.skip is not None)
    work += B * T * layer.size.H * layer.size.V * parts
    e = layer.out.weight.dtype.itemsize
    return Cost(flops, flops, work, e * (weights + B * numbers), 0)
