# slip: scaled_by_heads
import math

import torch
from torch import nn

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.d_model = d_model
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)


    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.h, self.d_k).permute(0, 2, 1, 3)

    def merge(self, x):
        return x.permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)

    def forward(self, Q, K, V, mask=None):
        q, k, v = self.W_q(Q), self.W_k(K), self.W_v(V)
        q, k, v = self.split(q), self.split(k), self.split(v)
        s = torch.einsum('bhtd,bhsd->bhts', q, k) / math.sqrt(self.h)
        if mask is not None:
            s = s.masked_fill(mask == 0, float('-1e9'))
        a = s.softmax(-1)
        o = a @ v
        return self.W_o(self.merge(o)), a
