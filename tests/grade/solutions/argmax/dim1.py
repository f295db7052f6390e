# slip: over_queries_by_number
import torch

def argmax_attention(q, k, v, causal):
    s = q @ k.transpose(1, 2)
    T, S = s.shape[1:]
    if causal:
        s = s.masked_fill(torch.ones(T, S).triu(1).bool(), float('-inf'))
    return torch.stack([v[b, s[b].argmax(0)] for b in range(len(v))])
