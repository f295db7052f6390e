"""What was recorded of one attention module: for each head q, k and v, and for each query a log-normaliser n.

    weight(i, j) = sign_i · a(i, j) · exp(e(i, j) − n_i)

For softmax attention `e` is the score and `a` is 1; for kernel attention `a` · exp(`e`) is φ(q)·φ(k), and `sign_i` is
the sign of the normaliser. Weights are computed on request, a chunk of rows at a time. One-hot attention stores the
index of the attended key; other attention that has no such form stores the whole T×S matrix (`Dense`).
A memory that fades (gated and delta attention) has neither scores nor normalisers: see `memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor

from regard.lens.trace.formulas import Formula
from regard.lens.trace.rules import MaskRules


@dataclass
class RecordedAttention:
    """What was recorded of one attention module, all heads; the tensors are on the CPU, float32 except `choice`.

    T queries, S keys, H heads, G key/value heads. `queries` and `keys` are indices into `Recording.sequences`. The
    names of the fields are keys of the trace format (docs/trace-format.md), where `formula` is "weights" and `rules` is
    "mask".
    """

    layer: int
    side: str  # "encoder" or "decoder"
    kind: str  # "self" or "cross"
    name: str  # the module's name in the model
    mechanism: str
    queries: int  # index of the sequence that the queries come from
    keys: int  # index of the sequence that the keys come from
    heads: int
    groups: int  # key/value heads
    formula: Formula
    rules: MaskRules = field(default_factory=MaskRules)
    signed: bool = False  # whether weights may be negative
    q: Float[Tensor, "H T K"] | None = None
    k: Float[Tensor, "G S K"] | None = None
    v: Float[Tensor, "G S V"] | None = None
    n: Float[Tensor, "H T"] | None = None  # log of the row's normaliser, −inf if the row is fully masked
    sign: Float[Tensor, "H T"] | None = None  # sign of the normaliser, if weights may be negative
    choice: Int[Tensor, "H T"] | None = None  # one-hot attention: index of the attended key, −1 for none
    w: Float[Tensor, "F K"] | None = None  # projection matrix of the random features
    # If q and k hold features, the features are q·exp(cq) and k·exp(ck).
    cq: Float[Tensor, "H T"] | None = None
    ck: Float[Tensor, "G S"] | None = None
    slopes: Float[Tensor, " H"] | None = None  # ALiBi
    offsets: Float[Tensor, "H N"] | None = None  # relative position bias, for j − i = 1 − T … S − 1
    # A memory: the logarithm of each token's decay, one a head (X = 1) or one a key channel (X = K); how strongly it is
    # written (None: by 1); and what a token gives to its own output beside the memory.
    a: Float[Tensor, "G S X"] | None = None
    b: Float[Tensor, "G S"] | None = None
    skip: Float[Tensor, " H"] | None = None
    g: Float[Tensor, "H T V"] | None = None  # gradient of the loss with respect to the heads' outputs
    vo: Float[Tensor, "H S"] | None = None  # length of each value after the output projection, ‖v · W_o‖
    overview: Float[Tensor, "H r c"] | None = None  # thumbnail of at most 32×32 (`add_overview`)
    figures: dict[str, list[float] | None] = field(default_factory=dict)  # summary statistics, one number per head
    # For each head: largest absolute error of its weights in the stored trace (kernel attention: in a sample of rows).
    error: list[float] = field(default_factory=list)
    # For each head of a memory, measured while recording: see `measure_misses`.
    missed: dict[str, list[float]] = field(default_factory=dict)
