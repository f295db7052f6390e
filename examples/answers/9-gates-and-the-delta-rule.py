"""Answers to the exercises of notebook 9 · Gates and the delta rule.

Each takes the place of a cell, and uses the names that are defined above it there.
"""


# answer: step
def step(S, k, v, a, b):
    """The memory after a token; S [K,V], k [K], v [V], a and b numbers."""
    S = math.exp(a) * S
    new = v - k @ S  # what is new in v is what its key does not read by now
    return S + b * torch.outer(k, new)


# answer: weights
def weights(q, k, a, b):
    """The weights [T,T] of a head of gated-delta; q and k [T,K], a and b [T]."""
    c = a.cumsum(0)
    D = torch.exp((c[:, None] - c).tril())  # the difference first: exponentials of c alone would overflow
    A = (q @ k.T * D).tril() / math.sqrt(q.shape[1])
    M = torch.eye(len(a), dtype=k.dtype) + (b[:, None] * (k @ k.T) * D).tril(-1)
    return torch.linalg.solve_triangular(M, A, upper=False, left=False) * b  # W M = A, then diag(b)


# answer: strength
def strength(bits):
    """b [T] of bits [T], which are 0 or 1, as floats."""
    return 2 * bits.double()  # 1 − b is −1 for a one and 1 for a zero


# answer: kept
def kept(layers, every, G, K, V, T):
    """Bytes that a decoder keeps after T tokens; K and V are the widths of a head's keys and values."""
    softmax = layers // every
    cache = 2 * G * T * (K + V)
    memory = 4 * G * K * V  # float32: in bfloat16 small terms would be lost in a large sum
    return softmax * cache + (layers - softmax) * memory
