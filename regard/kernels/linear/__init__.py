"""Linear attention in Triton. The feature maps of `elu`, `performer` and `fourier` are fused into the kernels; `linear`
(any other map) gets features that PyTorch computed, and the kernels call its map `precomputed`.

    out_i = φ(q_i)ᵀ S_i / φ(q_i)ᵀ Z_i,      S_i = Σ_{j≤i} φ(k_j) v_jᵀ,      Z_i = Σ_{j≤i} φ(k_j)

Letters: B sequences, H query heads, G key heads (GROUP = H / G), T tokens (T_k keys, where their number differs from
that of queries), K and V widths of keys and values, F features. D is the number of random projection vectors, called
*directions* (the rows of w): F for `performer`; F/2 for `fourier`, where each gives a sine and a cosine; D = F for maps
without them. ∂x is the gradient of the loss by x.

A *kernel* is a Triton function that is launched, a *program* is one instance of it in the grid.

**Chunks and segments.** A sequence is cut into segments, so that even one sequence fills the device, and a segment into
chunks of C = 64 tokens. `chunk_sums_kernel` goes through each segment and stores S and Z before each chunk (summed from
the beginning of its segment) and of the whole segment; `scan_segments_kernel` replaces the segments' sums by running
totals. After that all chunks are independent: `output_kernel` computes attention within a chunk from explicit scores
ψ(q)·ψ(k) [C,C], where ψ is φ without its scale (see Stabilisers), and attention to all earlier keys through S and Z.
Features are computed block by block where they are needed and never stored. For causal attention of narrow bfloat16
heads without stabilisers one kernel, `chained_kernel`, does the whole forward pass (`Plan.is_chained` says when).

In the backward pass `query_grad_kernel` reads S and Z of the forward pass. Then `chunk_sums_kernel` sums, from the end
of the sequence, R = Σ ψ(q_i) ∂out_iᵀ / s_i and ρ = Σ ψ(q_i) δ_i / s_i, the counterparts of S and Z, with the normaliser
s_i = ψ(q_i)ᵀ Z_i and δ_i = −∂out_i·out_i; `key_value_grad_kernel` reads those. Decoding one token at a time has a
kernel of its own, `decode_step_kernel`.

**Stabilisers.** φ(k) = 2ᶜ ψ(k) with an integer c, the *stabiliser* of the key, and ψ of moderate magnitude
(`performer`, `fourier`; for `elu` and `precomputed` φ = ψ and c = 0, but a single decoding step stabilises `elu` as the
reference does). All sums are kept relative to 2ᵐ, where the *peak* m is the running maximum of c: nothing overflows,
and no later key can change an earlier output. Scaling by powers of two is exact. Results do not depend on c and m, so
no gradient passes through them. A query's own factor cancels in the ratio.
The *shift* of a vector is what is subtracted in the exponent of its features. Let p_f(x) = (w_f·x) K^(−1/4) log₂e, and
let trig_f(x) be the sine or the cosine of (w_f·x) K^(−1/4). The kernels leave out the factor 1/√D that
`regard.mechanisms` gives to φ, so that here

    performer   φ_f(k) = 2^(p_f(k) − k_shift),  ψ_f(k) = 2^(p_f(k) − k_shift − c),  ψ_f(q) = 2^(p_f(q) − q_shift)
    fourier     φ_f(k) = 2^(−k_shift) trig_f(k),    ψ_f(k) = 2^(−k_shift − c) trig_f(k),   ψ_f(q) = trig_f(q)

For `fourier` the function `feature_map` returns trig_f alone, and the kernels multiply by the power of two afterwards.

In the sums over queries (backward) each term is scaled by 2^(−m_i), so −m_i plays the part of c, and its running
maximum M that of m.

The peak of a segment does not start at −∞ but at the peak of everything before the segment (backward: after it). The
sums of the segment and the running total of all earlier ones are then relative to the same peak and can be added as
they are. Only after the segment has met a higher peak must the running total be scaled down.

**Precision.** Accumulators, normalisers and peaks are float32. The mode of the products (`triton_primitives` lists
them) depends on the dtype of v, the map and F:

    float32                       tf32x3   three products of tf32 parts
    float16                       bf16x3   three products of bfloat16 parts, for the bits and the range of float16
    bfloat16, F < 32              bf16x3   because rounding errors of few features do not average out
    bfloat16, `fourier`           fp16     one product of float16, because sines and cosines cancel: a normaliser may be
                                           a ten-thousandth of its terms; some products need more digits still
    bfloat16, all other maps      bf16     one product of bfloat16

S at chunks and the running totals of S are rounded to the dtype of the products; Z stays float32. In mode fp16 each S
has a *shared exponent* (block floating point) from a bound on the preceding tokens only: it cannot overflow, and later
tokens cannot change it.

Tensors of the kernels. BH counts (sequence, head) pairs: B·G for sums over keys (forward), B·H for sums over
queries (backward). chunks = ⌈T/C⌉. slots = segments + 1: one slot more for the state that is *carried in*, which is the
initial state in the first slot (forward) or the gradient of the final state in the last slot (backward).

    name             shape                 dtype    meaning
    q, k             [B,H,T,K] [B,G,T,K]   as given queries and keys; for the map `precomputed` their features
    v                [B,G,T,V]             as given values
    w                [W_PARTS·D,K]         bf16/f32 directions, in parts that sum to w; or the identity [K,K]
    visible          [B,T]                 bool     which keys may be attended to
    out              [B,H,T,V]             v's, f32 outputs; float32 where weights may be negative
    inv_norm         [B,H,T]               f32      1 / s_i, the inverse normaliser; 0 where s_i underflows
    query_peak       [B,G,T]               f32      m_i, the peak of the keys that query i sees
    q_shift          [B,H,T]               f32      shift of each query (`performer`)
    k_shift          [B,G,T]               f32      shift of each key
    stabiliser       [B,G,T]               f32      c of each key
    chunk_max        [BH,chunks]           f32      the largest c of each chunk (backward: the largest −m_i)
    chunk_bound      [BH,chunks]           f32      a bound for what a chunk adds to S, relative to 2^chunk_max
    chunk_S          [BH,chunks,F·V]       product  S before each chunk, from the beginning of its segment
                                                    (`chained_kernel`: of the sequence)
    chunk_Z_scales   [BH,chunks,F+2]       f32      Z before each chunk (backward: ρ); then peak and exponent of chunk_S
    segment_sums     [BH,slots,F·V+F]      f32      S and Z of each segment, then the running totals in their place
    segment_S_cast   [BH,slots,F·V]        product  S of the running totals once more, in the dtype of the products
    segment_scales   [BH,slots,2]          f32      what the scan reads: the peak of each segment's sums, and the
                                                    shared exponent that S of the running total through this
                                                    segment will get, which is known beforehand from bounds
    running_scales   [BH,slots,2]          f32      after the scan: peak and shared exponent of each running total
    chunk_R, segment_R_cast                product  backward: R in place of chunk_S and segment_S_cast
    final_sums       [B,G,F,V+1]           f32      the state after the last token: S, and Z as its last column
    final_peak       [B,G]                 f32      its peak, to base e as in `regard.mechanisms`
    delta            [blocks,B,H,T]        f32      partial sums of δ_i by block of value columns; then δ [B,H,T]
    back_shift       [B,H,T]               f32      shift of each query for sums from the end: q_shift + m_i + log₂|s_i|
    handed_over      [B·G,segments−1,·]    f32      chained_kernel: S and Z after each segment
    counter_and_flags [1+B·G·segments]     i32      chained_kernel: [0] the counter from which programs draw their
                                                    index; [1:] whether each program has handed its sums over

"product" is bfloat16, float16 or float32, the dtype in which the products take it.
"""

from regard.kernels.linear import register, windows

__all__ = ["register", "windows"]
