# slip: always_causal
"""Is causal where no mask is given."""

import math, torch
from torch import nn
class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model); self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model); self.W_o = nn.Linear(d_model, d_model)
    def f(self, x):
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.d_k).transpose(1, 2)
    def forward(self, Q, K, V, mask=None):
        q, k, v = self.f(self.W_q(Q)), self.f(self.W_k(K)), self.f(self.W_v(V))
        s = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is None: mask = torch.tril(torch.ones(s.shape[-2:], dtype=torch.bool))
        s = s.masked_fill(~mask, -1e9)
        o = s.softmax(-1) @ v
        return self.W_o(o.transpose(1, 2).reshape(Q.shape[0], -1, self.num_heads * self.d_k))
