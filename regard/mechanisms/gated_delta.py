"""The gated delta rule: the memory fades by a, and the delta rule replaces what a key reads.

    S_t = (I − b_t k_t k_tᵀ) e^{a_t} S_{t−1} + b_t k_t v_tᵀ

A decay clears everything at once, the delta rule one key at a time; together they do both. One decay a head is Gated
DeltaNet, which Qwen3-Next runs in three of four layers; with `channels` it is Kimi Delta Attention.

Yang et al. 2024, arXiv:2412.06464; Kimi Linear 2025, arXiv:2510.26692.
"""

from __future__ import annotations

from typing import ClassVar

from regard.mechanisms.base import register
from regard.mechanisms.delta import Delta


@register("gated-delta")
class GatedDelta(Delta):
    formula = "S ← (I − b kkᵀ)eᵃS + b kvᵀ"
    needs: ClassVar[str] = "qkvab"

    def __init__(
        self, channels: bool = False, range: float = 1.0, scale: float | None = None, checks: bool = True
    ) -> None:
        super().__init__(range, scale, checks)
        self.channels = channels
