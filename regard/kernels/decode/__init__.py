"""One more token over a cache: in Triton on a GPU, in place on a CPU.

The tensors of the Triton programs (triton_decode.py), all contiguous in their last dimension:

    name      shape            meaning
    q         [B,H,1,K]        queries of the new token
    k_new     [B,G,1,K]        its key, which is also written into k
    v_new     [B,G,1,V]        its value, which is also written into v
    k         [B,G,room,K]     the cache's keys; a row b has tokens[b] of them, in a ring the last `room`
    v         [B,G,room,V]     the cache's values
    tokens    [B]              tokens of each row before this step
    counted   [B]              tokens of each row after it
    parts     [B,H,splits,V]   Σ exp(score − peak)·value over the keys of one split, float32
    peaks     [B,H,splits]     the largest score of a split, float32
    totals    [B,H,splits]     Σ exp(score − peak) of a split, float32
    out       [B,1,H,V]        the output
"""

from regard.kernels.decode import cpu, gpu, positions

__all__ = ["cpu", "gpu", "positions"]
