# slip: hidden_by_zero
import torch


def argmax_attention(q, k, v, causal):
    scores = torch.einsum("btk,bsk->bts", q, k)
    if causal:
        T = scores.shape[1]
        scores = torch.tril(scores)
    best = scores.argmax(-1)
    return torch.gather(v, 1, best.unsqueeze(-1).expand(-1, -1, v.shape[-1]))
