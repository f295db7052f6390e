"""Gated linear attention: the tokens themselves say how much of the past to forget.

    S_t = e^{a_t} S_{t−1} + b_t k_t v_tᵀ,      out_t = scale · S_tᵀ q_t

a_t ≤ 0 is an input beside q, k and v: near 0 keeps everything, very negative clears the memory. One number a head is
Mamba-2 (where b_t is the step size Δ_t) and simple GLA; with `channels` each row of S has its own, as in GLA and
RWKV-6. What was written stays in S until it fades, so that two values under one key are read as their sum.

Mamba-2: Dao and Gu 2024, arXiv:2405.21060; GLA: Yang et al. 2023, arXiv:2312.06635.
"""

from __future__ import annotations

from typing import ClassVar

from regard.mechanisms.base import register
from regard.mechanisms.recurrence import Recurrence


@register("gated")
class Gated(Recurrence):
    formula = "S ← eᵃS + kvᵀ"
    needs: ClassVar[str] = "qkva"

    def __init__(self, channels: bool = False, scale: float | None = None, checks: bool = True) -> None:
        super().__init__(scale, checks)
        self.channels = channels
