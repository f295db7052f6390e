"""Muon: AdamW whose steps on the matrices of layers are orthogonalised momentum instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

# Of the polynomial a·x + b·x³ + c·x⁵ of Jordan et al. (2024), which draws singular values between 0 and 1 towards 1.
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
USUAL_STEP = 0.2  # the root mean square of AdamW's steps, in learning rates, which those of matrices are scaled to
TINY = 1e-7  # keeps a gradient of zero finite


class Muon(AdamW):
    """Muon (Jordan et al., 2024) for the groups that are `matrices`, AdamW for the others, at the same learning rate.

    The step of a matrix is the momentum of its gradients with all singular values drawn to about one, which takes
    `iterations` of a polynomial. It is scaled to the size of AdamW's steps (Liu et al., 2025), so that learning rate
    and weight decay mean the same for both. `betas`, `eps`, `fused` and `capturable` are AdamW's.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        iterations: int = 5,
        matrices: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum = {momentum}: expected 0 or more and less than 1")
        if iterations < 1:
            raise ValueError(f"iterations = {iterations}: expected 1 or more")
        super().__init__(params, lr, betas, eps, weight_decay, capturable=capturable, fused=fused)
        own = {"momentum": momentum, "iterations": iterations, "matrices": matrices}
        self.defaults |= own
        for group in self.param_groups:
            for name, value in own.items():
                group.setdefault(name, value)
        # Else a gradient scaler would leave it to the fused kernel of AdamW to pass over a step, which knows of its own
        # parameters only.
        self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes a state as any optimiser does: AdamW's own way looks in each parameter's for what AdamW keeps."""
        Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves every parameter that has a gradient, and returns what the closure returns."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["matrices"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["matrices"]:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Moves the matrices of a group; those of one shape are orthogonalised together, in one product each."""
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in group["params"]:
            if matrix.grad is not None:
                by_shape.setdefault(matrix.shape, []).append(matrix)
        for shape, alike in by_shape.items():
            steps = orthogonalize(torch.stack(self._momentums(group, alike)), group["iterations"])
            steps *= group["lr"] * (USUAL_STEP * max(shape[-2:]) ** 0.5)
            torch._foreach_mul_(alike, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(alike, steps.unbind())

    def _momentums(self, group: dict[str, Any], matrices: list[Tensor]) -> list[Tensor]:
        """Updates the momentum of matrices by their gradients, and returns it with Nesterov's look-ahead."""
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        return list(torch._foreach_lerp(gradients, buffers, group["momentum"]))


def orthogonalize(matrices: Tensor, iterations: int) -> Tensor:
    """Returns matrices [...,a,b] with their singular vectors, and with singular values of about one.

    The polynomial is applied so many times; five take values above a hundredth of the norm to between 0.65 and 1.25.
    On a GPU the products of float32 matrices are bfloat16.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.flatten(0, -3)
    if is_tall:
        x = x.mT
    if matrices.is_cuda and matrices.dtype is torch.float32:
        x = x.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=TINY)
    a, b, c = POLYNOMIAL
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if is_tall:
        x = x.mT
    return x.to(matrices.dtype).reshape(matrices.shape)
