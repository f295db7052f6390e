"""Gated and delta attention: by chunks on a CPU (`chunks.py`), and in Triton (`triton_decay.py`, `triton_token.py`).

On a CPU all chunks go at once but for their memories, and gradients are written by hand.

What the reference does chunk by chunk is one product for all chunks wherever no memory is involved; only three small
products a chunk have to wait for the chunk before. The triangular systems are solved once, as inverses of [C,C]; the
gradients read them again. Autograd would keep and revisit every step of that.

Tensors of `chunks.py`, with N = B·G memories, n chunks of C tokens, and R query heads of each memory side by side:

    name       shape         meaning
    q          [N,n,R·C,K]   queries
    k, v       [N,n,C,·]     keys and values
    a          [N,n,C]       logarithms of the decays
    b          [N,n,C,1]     write strengths, or None
    decay      [N,n,C,C]     D, zero above the diagonal
    reading    [N,n,C,1]     e^c: what is left of the memory before the chunk
    keeping    [N,n,C,1]     e^{c_C − c}: what is left of a token at the end of the chunk
    memories   [N,n,K,V]     the memory before each chunk
    inverse    [N,n,C,C]     (I + tril(diag(b)(K Kᵀ ⊙ D), −1))⁻¹
    residual   [N,n,C,V]     V − (K ⊙ e^c) S: what the memory before does not read of each value
    new        [N,n,C,V]     what each token writes

In Triton a whole sequence of one decay a head is one program that goes through the chunks of a segment with the memory
in registers; where there are several segments, it first sums what each adds to the memory. The three gradients are the
same program with other tensors in the roles of q, k and v, two of them from the end. One token is one launch.

`fla.py` calls the functions of flash-linear-attention instead, which are somebody else's Triton.
"""

from regard.kernels.recurrence import register, register_fla, register_gpu

__all__ = ["register", "register_fla", "register_gpu"]
