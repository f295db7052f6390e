"""Retention: linear attention that forgets at a fixed rate, another one for each head.

    S_t = γ S_{t−1} + k_t v_tᵀ,      out_t = scale · S_tᵀ q_t,      γ_h = 1 − 2^{−5−h}

A token i steps back counts γⁱ: the first head halves in 22 tokens, each further one in twice as many. Written as a
matrix it is (Q Kᵀ ⊙ D) V with D_ij = γ^{i−j}, attention without a softmax. Nothing about the decay is learned or
depends on the token; hidden tokens do not count as steps. RetNet and lightning attention are of this kind.

Sun et al. 2023, arXiv:2307.08621.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.mechanisms.base import register
from regard.mechanisms.recurrence import Recurrence


@register("retention")
class Retention(Recurrence):
    formula = "S ← γS + kvᵀ, γ = 1−2⁻⁵⁻ʰ"

    def log_decay(self, v: Tensor) -> Tensor:
        heads = torch.arange(v.shape[1], dtype=torch.float64, device=v.device)
        # log(1 − x), also where 1 − x rounds to 1
        decay: Tensor = torch.log1p(-torch.exp2(-5 - heads))
        return decay[None, :, None, None]
