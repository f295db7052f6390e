"""One more token over a cache: in Triton on a GPU, in place on a CPU.

The tensors of the Triton programs (triton_decode.py), all contiguous in their last dimension:

    name      shape            meaning
    q         [B,H,1,K]        queries of the new token
    k_new     [B,G,1,K]        its key, which is also written into k
    v_new     [B,G,1,V]        its value, which is also written into v
    cos, sin  [#B,1,1,K]       how q and k_new are turned, where they are
    slopes    [H]              ALiBi's slopes, where there are any
    k         [B,G,room,K]     the cache's keys; a row b has tokens[b] of them, in a ring the last `room`
    v         [B,G,room,V]     the cache's values
    tokens    [B]              tokens of each row before this step
    counted   [B]              tokens of each row after it
    parts     [B,H,splits,V]   Σ 2^(score − peak)·value over the keys of one split, float32; behind them
                               peaks [B,H,splits], the largest score of each split in units of log 2, and
                               totals [B,H,splits], its Σ 2^(score − peak)
    arrived   [B,G]            how many splits have ended; the last one merges them
    out       [B,1,H,V]        the output

Those of triton_greedy.py, which finds the likeliest token, stand there.
"""

from regard.kernels.decode import cpu, gpu, positions

__all__ = ["cpu", "gpu", "positions"]
