"""Attention that reads one part of a sum: tokens are x = content + label, from orthogonal subspaces that are known.

With P_c and P_l the projections on the two subspaces,

    query = β·P_l        key = P_l        value = P_c

scores compare labels only, whatever the contents, and what is read is the content only, exactly: P_c (c + l) = c.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.lab.design.certificates import TOLERANCE, DesignError
from regard.lab.design.result import check_vectors


@dataclass(frozen=True, eq=False)
class Isolation:
    """Three matrices [D,D], applied to rows: q = x·query, k = x·key, v = x·value."""

    query: Float[Tensor, "D D"]
    key: Float[Tensor, "D D"]
    value: Float[Tensor, "D D"]

    def weights(self, x: Float[Tensor, "T D"], memory: Float[Tensor, "S D"]) -> Float[Tensor, "T S"]:
        """Returns the attention weights softmax(q·kᵀ) [T,S]."""
        return (x @ self.query @ (memory @ self.key).T).softmax(-1)

    def read(self, x: Float[Tensor, "T D"], memory: Float[Tensor, "S D"]) -> Float[Tensor, "T D"]:
        """Returns what each row of x reads from the memory [T,D]: nothing outside the subspace of contents."""
        return self.weights(x, memory) @ memory @ self.value


def isolate(content: Float[Tensor, "R D"], label: Float[Tensor, "S D"], beta: float) -> Isolation:
    """Returns the matrices for the subspaces that the rows of `content` and of `label` span.

    For labels of unit length, a row scores β with a row of its own label l, and β·l·l′ with one of another label l′.
    So β = ln(n·precision/(1−precision)) suffices for n orthogonal labels.
    """
    contents, on_content = _projection(check_vectors(content, "content"))
    labels, on_label = _projection(check_vectors(label, "label"))
    if content.shape[1] != label.shape[1]:
        raise DesignError(f"contents of {content.shape[1]} numbers, labels of {label.shape[1]}; expected as many")
    cosine = float((contents.T @ labels).abs().max())
    if cosine > TOLERANCE:
        raise DesignError(f"the subspaces of content and label share directions (cosine {cosine:.4g}); expected none")
    return Isolation(beta * on_label, on_label, on_content)


def _projection(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an orthonormal basis [D,R] of what the rows [R,D] span, and the projection [D,D] on it."""
    _, sizes, axes = torch.linalg.svd(rows, full_matrices=False)
    if float(sizes.min()) <= TOLERANCE * float(sizes.max()):
        raise DesignError(f"the {len(rows)} rows of a subspace are not independent; leave out those that repeat others")
    return axes.T, axes.T @ axes
