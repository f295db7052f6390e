"""Random features: softmax attention by sampling, linear in length.

Performer (FAVOR+).  With x = q·K^(−1/4), y = k·K^(−1/4) and w ~ N(0, I):
    exp(q·k/√K) = E[ exp(w·x − ‖x‖²/2) · exp(w·y − ‖y‖²/2) ]
positive features, so weights are positive too. The w are orthogonal in blocks of K, which lowers the variance; to stay
unbiased each block must be uniform over rotations (QR with its signs fixed) and each row needs the length of a Gaussian
vector, redrawn from χ(K).

Fourier.  With σ² = √K:
    exp(q·k/√K) = e^{‖q‖²/2σ²} · exp(−‖q−k‖²/2σ²) · e^{‖k‖²/2σ²}
and the Gaussian kernel in the middle is E[cos(w·(q−k))], w ~ N(0, σ⁻²I): features [sin(w·x), cos(w·x)]/√F.
The kernel is unbiased, the ratio is not; estimated weights, and even their sum, may be negative. They are shown as they
are. Both want inputs that shrink with K: at unit variance and K ≥ 32 the spread of an entry is hopeless.

Performer: Choromanski et al. 2020, arXiv:2009.14794. Fourier: Rahimi and Recht 2007; in attention, Peng et al. 2021,
arXiv:2103.02143.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import OptionError, ShapeError
from regard.mechanisms.base import register
from regard.mechanisms.linear import Linear


def gaussian(F: int, K: int, seed: int) -> Float[Tensor, "F K"]:
    """Returns independent directions w ~ N(0, I)."""
    return torch.randn(F, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")


def orthogonal(F: int, K: int, seed: int) -> Float[Tensor, "F K"]:
    """Returns directions w that are orthogonal within blocks of K, each of them by itself distributed as N(0, I)."""
    draw = torch.Generator().manual_seed(seed)
    blocks = -(-F // K)
    q, r = torch.linalg.qr(torch.randn(blocks, K, K, generator=draw, dtype=torch.float64, device="cpu"))
    # QR leaves the signs of R's diagonal to chance; only with them positive is Q uniform over rotations.
    q = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[:, None, :]
    lengths = torch.randn(blocks, K, K, generator=draw, dtype=torch.float64, device="cpu").norm(dim=-1)
    directions: Tensor = q.mT * lengths[..., None]
    return directions.reshape(blocks * K, K)[:F]


class RandomFeatures(Linear):
    """Features from random directions w [F,K], drawn from a seed, saved with a model, and redrawn on request.

    Without `width` they are drawn when the first input tells it.
    """

    letters: ClassVar[dict[str, str]] = {"count": "F"}
    maps_each_vector = True
    feature_work = 7  # scale, square, subtract, maximum, subtract, exponential, rescale; or sine, cosine and the like
    pair_work = 6  # the pair's own exponential, too
    w: Tensor | None

    def __init__(self, features: int = 256, width: int | None = None, seed: int = 0, strict: bool = False) -> None:
        super().__init__(strict)
        if features < 1:
            raise OptionError(f"{self.name}: features = {features}, expected at least 1")
        if width is not None and width < 1:
            raise OptionError(f"{self.name}: width = {width}, expected at least 1")
        self.count = features
        self.seed = seed
        self.register_buffer("w", None if width is None else self._draw_directions(width))

    def extra_repr(self) -> str:
        return f"features={self.count}, seed={self.seed}"

    @abstractmethod
    def draw(self, F: int, K: int, seed: int) -> Float[Tensor, "F K"]:
        """Returns directions for width K."""

    @abstractmethod
    def map_projections(self, x: Tensor, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (ψ, c) from x and w·x, both scaled as the formula wants."""

    def redraw(self, seed: int) -> None:
        """Draws new directions."""
        self.seed = seed
        if self.w is not None:
            self.w = self._draw_directions(self.w.shape[1], self.w)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w = self.directions(x)
        x = x * x.shape[-1] ** -0.25  # q·k/√K = x·y, and σ⁻¹ = K^(−1/4)
        return self.map_projections(x, x @ w.to(x).mT)  # [B,N,T,K] @ [K,F]

    def directions(self, x: Tensor) -> Float[Tensor, "F K"]:
        """Returns w for vectors like x, drawn now where no width was given."""
        if self.w is None:
            self.w = self._draw_directions(x.shape[-1], x)
        if self.w.shape[1] != x.shape[-1]:
            raise ShapeError(
                f"{self.name} was built for width K = {self.w.shape[1]}, given q and k of width {x.shape[-1]}"
            )
        return self.w

    def feature_flops(self, K: int) -> int:
        return 2 * K * self.count

    @torch.inference_mode(False)  # a tensor made in inference mode could never be part of a gradient
    def _draw_directions(self, K: int, like: Tensor | None = None) -> Tensor:
        """Returns directions [F,K] with the dtype and the device of `like`."""
        w = self.draw(self.count, K, self.seed).to(torch.get_default_dtype())
        if like is None:
            return w
        return w.to(like)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Directions that are not drawn yet have no buffer to load into.
        saved = state_dict.get(prefix + "w")
        if self.w is None and saved is not None:
            with torch.inference_mode(False):
                self.w = torch.empty_like(saved)
        super()._load_from_state_dict(state_dict, prefix, *args)


@register("performer")
class Performer(RandomFeatures):
    formula = "E[exp(w·x−‖x‖²/2) exp(w·y−‖y‖²/2)]"

    def draw(self, F: int, K: int, seed: int) -> Tensor:
        return orthogonal(F, K, seed)

    def map_projections(self, x: Tensor, projected: Tensor) -> tuple[Tensor, Tensor]:
        b = projected - x.square().sum(-1, keepdim=True) / 2
        peak = b.detach().amax(-1, keepdim=True)  # only a scale, so no gradient need pass through it
        return torch.exp(b - peak), peak[..., 0] - math.log(self.count) / 2

    def feature_count(self, K: int) -> int:
        return self.count


@register("fourier")
class Fourier(RandomFeatures):
    formula = "e^{‖k‖²/2σ²} E[cos w·(q−k)], σ² = √K"
    memory = "G·2F·(V+1)"
    signed = True
    accumulate = torch.float64  # sines and cosines cancel: a similarity can be a tiny sum of large terms

    def draw(self, F: int, K: int, seed: int) -> Tensor:
        return gaussian(F, K, seed)

    def map_projections(self, x: Tensor, projected: Tensor) -> tuple[Tensor, Tensor]:
        psi = torch.cat([projected.sin(), projected.cos()], -1) / math.sqrt(self.count)
        return psi, x.square().sum(-1) / 2

    def feature_count(self, K: int) -> int:
        return 2 * self.count
