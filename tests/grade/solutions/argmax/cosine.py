# slip: unit_keys
import torch
import torch.nn.functional as F

def argmax_attention(q, k, v, causal):
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(1, 2)
    T, S = s.shape[1:]
    if causal:
        s = s.masked_fill(torch.ones(T, S).triu(1).bool(), float('-inf'))
    return torch.stack([v[b, s[b].argmax(-1)] for b in range(len(v))])
