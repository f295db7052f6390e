"""The losses of logits, which are replaced by their gradient in the same pass.

    ℓ(t) = lse(z) − (1−ε)·z_t − ε·mean(z)        ∂ℓ/∂z = softmax(z) − (1−ε)·[t] − ε/N

The tensors of the Triton program (triton_crossentropy.py):

    name      shape   meaning
    logits    [M,N]   logits z; afterwards their gradient, if asked for; rows are contiguous
    targets   [M]     the token that comes next, or `ignore`
    losses    [M]     ℓ in float32, zero where the target is `ignore`
"""

from regard.kernels.crossentropy.losses import losses_and_gradient

__all__ = ["losses_and_gradient"]
