"""Quadratic attention in Triton: (q·k + 1)² of each pair, where softmax would take exponentials.

    out_i = Σ_j a_ij v_j / s_i,      a_ij = (q_i·k_j + 1)²,      s_i = Σ_j a_ij

As in flash attention, blocks of pairs are made where they are used and never touch memory: time T·S, memory T + S.
There is no maximum to keep, since squares do not overflow as exponentials do. With p_ij = ∂out_i·v_j and
δ_i = ∂out_i·out_i:

    ∂q_i = 2 Σ_j (q_i·k_j + 1) (p_ij − δ_i) / s_i · k_j,     ∂k_j likewise over i,     ∂v_j = Σ_i a_ij / s_i · ∂out_i

The normaliser s_i may be nearly zero, so outputs are kept in float32 for δ. q·k is one product of half precision, which
is exact but for its sum. Products with similarities take bfloat16 for bfloat16 inputs, and three products of bfloat16
parts for float16. All sums are float32.

Tensors of the programs (B sequences, H query heads, G key heads, T queries, S keys, widths K and V):

    name       shape        dtype     meaning
    q          [B,H,T,K]    inputs'   queries
    k          [B,G,S,K]    inputs'   keys
    v          [B,G,S,V]    inputs'   values
    visible    [B,S]        bool      which keys may be attended to
    out        [B,H,T,V]    inputs'   outputs
    out_f32    [B,H,T,V]    float32   the same, for δ
    inv_norm   [B,H,T]      float32   1 / s_i, or 0 where s_i has underflowed
    d_out      [B,H,T,V]    inputs'   ∂out
    delta      [B,H,T]      float32   δ_i = ∂out_i·out_i
    d_q, d_k, d_v           inputs'   gradients, contiguous, of the shapes of q, k, v
"""

from regard.kernels.quadratic import register

__all__ = ["register"]
