"""Argmax attention in Triton: the best key of each query is found block by block, and no score touches memory.

    c_i = argmax_j q_i·k_j over the keys that i may see, the first of equals,      out_i = v_{c_i}

Products of half precision are exact but for their sum, and they are compared as they are: dividing them by √K changes
no order. The gradient of v_j is the sum of ∂out_i over the queries that chose j, as a product of zeros and ones with
∂out, so that its order is fixed. Where gradients are straight-through, those of q and k are softmax's, by its kernels.

Tensors of the programs (B sequences, H query heads, G key heads, T queries, S keys, widths K and V):

    name       shape        dtype     meaning
    q          [B,H,T,K]    inputs'   queries
    k          [B,G,S,K]    inputs'   keys
    v          [B,G,S,V]    inputs'   values
    visible    [B,S]        bool      which keys may be attended to
    out        [B,H,T,V]    inputs'   outputs; NaN where a key that may be seen is not finite
    chosen     [B,H,T]      int32     c_i, or −1 where nothing may be seen
    d_out      [B,H,T,V]    inputs'   ∂out
    d_v        [B,G,S,V]    inputs'   ∂v
"""

from regard.kernels.argmax import register

__all__ = ["register"]
