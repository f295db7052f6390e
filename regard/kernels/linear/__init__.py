"""Linear attention in Triton: `elu`, `performer` and `fourier` make their features inside, `linear` takes yours.

    out_i = φ(q_i)ᵀ S_i / φ(q_i)ᵀ Z_i,      S_i = Σ_{j≤i} φ(k_j) v_jᵀ,      Z_i = Σ_{j≤i} φ(k_j)

Letters: B sequences, H query heads, G key heads (GROUP = H / G), T tokens, K and V widths of keys and values, F
features, D directions (F, or F/2 where each gives a sine and a cosine).

**Chunks and segments.** A sequence is cut into segments, so that even one sequence fills the device, and a segment into
chunks of C = 64 tokens. `chunk_sums_kernel` goes through each segment and writes down S and Z before each chunk (from
the beginning of its segment) and of the whole segment; `scan_segments_kernel` makes running totals over the segments.
After that all chunks are independent: `output_kernel` does the keys of the same chunk as pairs [C,C], and all keys
before it through S and Z. Features are made block by block where they are needed and never touch memory. Narrow heads
without stabilisers do all of it in one program, `chained_kernel`.
Backward, `query_grad_kernel` reads the S and Z of forward; `chunk_sums_kernel` sums R = Σ ψ(q) ∂outᵀ/s from the end,
and `key_value_grad_kernel` reads that. One token at a time has a program of its own, `decode_step_kernel`.

**Stabilisers.** φ(k) = 2ᶜ ψ(k) with a whole number c, the stabiliser of the key, and ψ of moderate size (`performer`,
`fourier`; for `elu` and `linear` φ = ψ). All sums are kept relative to 2ᵐ, where the *peak* m is the running maximum of
c: nothing overflows, and no later key can touch an earlier output. Powers of two make rescaling exact. They only scale,
so no gradient passes through them. A query's own factor cancels in the ratio. The *shift* of a vector is the exponent
that its projections lose: log₂ φ_f = p_f − shift. In the gradient −m takes the place of c.
A segment starts from the peak of all before it, so that its sums and those handed over have the same scale unless it
finds a higher one.

**Precision.** Sums, normalisers and peaks are float32. Products are bfloat16 where the inputs are and nothing cancels,
three products of bfloat16 parts for float16 inputs and for few features, three of tf32 parts for float32. Sines and
cosines cancel: a normaliser of `fourier` may be a ten-thousandth of its terms. So S before each chunk is float16 with a
*shared exponent* (block floating point), from a bound for all that came before it: nothing overflows and nothing later
counts. S is kept in the dtype that products take anyway, Z always in float32.

Tensors of the programs (rows = B·G forward, B·H backward; chunks = ⌈T/C⌉; slots = segments + 1, one more for a state
that comes from outside: the first slot forward, the last backward):

    name             shape                 dtype    meaning
    q, k, v          [B,H,T,K] [B,G,T,K]   inputs'  queries, keys, values [B,G,T,V]; features for the map `given`
    w                [W_PARTS·D,K]         k's, f32 random directions, in parts that sum to w; or the identity [K,K]
    visible          [B,T]                 bool     which keys may be attended to
    out              [B,H,T,V]             v's, f32 outputs; float32 where weights may be negative
    inv_norm         [B,H,T]               f32      1 / s_i with the normaliser s_i = ψ(q_i)ᵀ Z_i; 0 where it underflows
    row_peak         [B,G,T]               f32      m_i, the peak of each row
    q_shift          [B,H,T]               f32      shift of each query (`performer`)
    k_shift          [B,G,T]               f32      shift of each key, less c
    stabiliser       [B,G,T]               f32      c of each key
    chunk_max        [rows,chunks]         f32      the largest c of each chunk (backward: the largest −m_i)
    chunk_bound      [rows,chunks]         f32      a bound for what a chunk adds to S, relative to 2^chunk_max
    chunk_S          [rows,chunks,F·V]     product  S before each chunk, from the beginning of its segment (backward: R)
    chunk_stats      [rows,chunks,F+2]     f32      Z before each chunk (backward: ρ); the peak and exponent of chunk_S
    segment_sums     [rows,slots,F·V+F]    f32      S and Z of each segment, then the running totals in their place
    segment_S_cast   [rows,slots,F·V]      product  S of the running totals once more, in the dtype of the products
    segment_stats    [rows,slots,2]        f32      peak and shared exponent of each slot, before and after the scan
    final_sums       [B,G,F,V+1]           f32      the state after the last token: S, and Z as its last column
    final_peak       [B,G]                 f32      its peak, natural exponent as in `regard.mechanisms`
    delta            [blocks,B,H,T]        f32      δ_i = −∂out_i·out_i, by blocks of values; then their sum [B,H,T]
    back_shift       [B,H,T]               f32      shift of each query for sums from the end: q_shift + m_i + log₂|s_i|
    handed_over      [rows,segments−1,·]   f32      chained_kernel: S and Z after each segment
    tickets          [1+rows·segments]     i32      chained_kernel: the next number, and who has handed over

"product" is bfloat16, float16 or float32, as the products take it.
"""

from regard.kernels.linear import register

__all__ = ["register"]
