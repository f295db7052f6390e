"""What others have published of recall against state, read off pictures, ±0.01."""

from __future__ import annotations

from typing import NamedTuple

SOURCE = (
    "Zoology (arXiv 2312.04927) and Based (arXiv 2402.18668) with the figures that followed them; read off a picture, "
    "±0.01 of accuracy"
)


class PublishedCurve(NamedTuple):
    """A published model, and its points (bytes of state, accuracy)."""

    name: str
    points: tuple[tuple[float, float], ...]


PUBLISHED = (
    PublishedCurve("DeltaNet", ((8_960, 0.79), (34_304, 0.96), (134_144, 0.995))),
    PublishedCurve("Gated DeltaNet", ((17_152, 0.89), (67_072, 0.99))),
    PublishedCurve("GLA", ((4_864, 0.53), (17_920, 0.77), (68_608, 0.95))),
    PublishedCurve("Based", ((12_468, 0.72), (40_548, 0.91))),
    PublishedCurve("Mamba-2", ((8_192, 0.52), (32_768, 0.785), (98_304, 0.845))),
    PublishedCurve("Window attention", ((9_728, 0.08), (67_072, 0.515), (525_824, 0.94))),
    PublishedCurve("Attention", ((525_000, 1.0),)),
)
