"""The query of `regard cost`: sizes, a device and a face, and the numbers that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from regard import cost as costs
from regard.cli.amounts import format_amount
from regard.devices import without_values
from regard.mechanisms import Cost, Face, Mechanism, lookup, on_meta
from regard.nn import Attention
from regard.registry import accepted_options
from regard.shapes import Mask, Size


@dataclass(frozen=True)
class CostQuery:
    """The sizes, the device and the face of a table; `layer`: with the projections of a layer."""

    size: Size
    device: costs.Device
    face: Face
    training: bool
    features: int | None
    layer: bool = False

    def build(self, name: str, size: Size | None = None, make: Callable[..., Mechanism] = on_meta) -> Mechanism:
        """Returns a mechanism of these sizes, without memory; to run it, `make` is `fitted`."""
        cls = lookup(name)
        offered = {}
        if self.features is not None:
            offered["features"] = self.features
        return make(cls, size or self.size, **accepted_options(cls, offered))

    def cost(self, name: str) -> Cost:
        """Returns the cost of the mechanism alone, or of a layer as wide as its heads, without biases."""
        mechanism = self.build(name)
        s = self.size
        if not self.layer:
            return costs.of(mechanism, s, self.face, training=self.training)
        # On the meta device a layer of any size has shapes and no memory.
        with without_values():
            layer = Attention(
                s.H * s.K,
                s.H,
                mechanism=mechanism,
                G=s.G,
                K=s.K,
                V=s.V,
                causal=s.causal,
                rules=Mask(window=s.window),
                bias=False,
            ).to(s.dtype)
        cost = layer.cost(s.T, s.S, self.face, s.B)
        if self.training:
            cost = cost + layer.gradient_cost(s.T, s.S, s.B)
        return cost

    def floor(self, cost: Cost) -> float:
        """Returns the least seconds that the device needs."""
        return costs.floor(cost, self.device, self.size.dtype)

    def predicted(self, cost: Cost) -> float:
        """Returns the seconds that the model of the device predicts."""
        return costs.predicted(cost, self.device, self.size.dtype)

    @property
    def title(self) -> str:
        """Returns two lines that say what is counted, and on which device."""
        s = self.size
        tokens = f"{s.S:,} tokens"
        if self.face == "recurrent":
            tokens = f"{s.T:,} new of {s.S:,} tokens"
        what: str = self.face
        if self.training:
            what += ", forward and backward"
        if self.layer:
            what += f", a layer of width D = {s.H * s.K}"
        sizes = f"B = {s.B}, {tokens}, H = {s.H}, G = {s.G}, K = {s.K}, V = {s.V}, {dtype_name(s.dtype)}"
        source = "as its maker states"
        if self.device.measured:
            source = "measured"
        speed = f"{format_amount(self.device.peak(s.dtype))}FLOP/s, {format_amount(self.device.bandwidth)}B/s"
        return f"{what}: {sizes}{sight(s)}\n{self.device.name}: {speed}, {source}\n"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without its module: float32."""
    return str(dtype).removeprefix("torch.")


def sight(size: Size) -> str:
    """Returns the end of a title that says whether attention is causal and has a window."""
    words = ""
    if size.causal:
        words += ", causal"
    if size.window is not None:
        words += f", window {size.window:,}"
    return words
