"""Answers to the exercises of notebook 2 · Masks and heads.

Each takes the place of a cell, and uses the names that are defined above it there.
"""


# answer: masked
def masked(q, k, v, causal=True, visible=None):
    if visible is not None:  # what nobody may see must not enter any product: 0 · NaN is NaN
        hidden = ~visible[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    may = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal:
        may = may.tril()
    if visible is not None:
        may = may & visible[:, None, None, :]
    blind = ~may.any(-1, keepdim=True)
    scores = scores.masked_fill(~may, float("-inf"))
    scores = scores.masked_fill(blind, 0)  # so that no row is −inf throughout
    return scores.softmax(-1).masked_fill(blind, 0) @ v


# answer: grouped
def grouped(q, k, v, causal=True):
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    return regard.attend(q, k, v, causal=causal)


# answer: MultiHead
class MultiHead(nn.Module):
    """The numbers of a token lie together: split them into heads, then exchange heads and tokens."""

    def __init__(self, D=12, H=3):
        super().__init__()
        self.H, self.K, self.V = H, D // H, 2 * D // H
        self.to_q, self.to_k = nn.Linear(D, H * self.K), nn.Linear(D, H * self.K)
        self.to_v, self.back = nn.Linear(D, H * self.V), nn.Linear(H * self.V, D)

    def forward(self, x):
        B, T, _ = x.shape
        q = self.to_q(x).view(B, T, self.H, self.K).transpose(1, 2)
        k = self.to_k(x).view(B, T, self.H, self.K).transpose(1, 2)
        v = self.to_v(x).view(B, T, self.H, self.V).transpose(1, 2)
        out = regard.attend(q, k, v, causal=True)
        return self.back(out.transpose(1, 2).reshape(B, T, self.H * self.V))
