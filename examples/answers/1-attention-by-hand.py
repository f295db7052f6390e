"""Answers to the exercises of notebook 1 · Attention by hand.

Each takes the place of a cell, and uses the names that are defined above it there.
"""


# answer: copies
def copies(scores):
    """True where softmax(β·scores) tends to (1, 0, 0, …): the first exceeds each other one."""
    return bool(scores[0] > scores[1:].max())


# answer: attention
def attention(q, k, v, causal=True):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


# answer: hard
def hard(q, k, v, causal=True):
    scores = q @ k.mT
    if causal:  # not zero: a visible score may be negative
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    best = scores.argmax(-1)
    return torch.nn.functional.one_hot(best, k.shape[2]).to(v) @ v
