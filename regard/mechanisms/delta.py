"""The delta rule: a key is read before it is written, and only the difference is stored.

    S_t = S_{t−1} + b_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ = (I − b_t k_t k_tᵀ) S_{t−1} + b_t k_t v_tᵀ

With ‖k‖ = 1 and b = 1 the old value of a key is replaced: reading k right after gives v. It is one step of gradient
descent on ‖Sᵀk − v‖²/2 with the step size b. Along k the memory is multiplied by 1 − b‖k‖², which must not leave
[−1, 1]. For b up to 1 and ‖k‖ = 1 that is at least 0, and nothing can alternate; with `range=2` it may be −1, a
reflection, and a head can count parity.

Schlag et al. 2021, arXiv:2102.11174; by chunks: Yang et al. 2024, arXiv:2406.06484; b up to 2: Grazzi et al. 2024,
arXiv:2411.12537.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from regard.errors import OptionError
from regard.mechanisms.base import register
from regard.mechanisms.recurrence import Recurrence


@register("delta")
class Delta(Recurrence):
    formula = "S ← (I − b kkᵀ)S + b kvᵀ"
    needs: ClassVar[str] = "qkvb"
    erases = True

    def __init__(self, range: float = 1.0, scale: float | None = None, checks: bool = True) -> None:
        super().__init__(scale, checks)
        if not 0 < range <= 2:
            raise OptionError(
                f"{self.name}: range = {range!r}, expected more than 0 and at most 2: b is from 0 to range"
            )
        self.range = float(range)

    def log_decay(self, v: Tensor) -> Tensor:
        return v.new_zeros(1, 1, 1, 1)
