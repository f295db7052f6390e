# slip: ignores_causal
import torch


def argmax_attention(q, k, v, causal):
    scores = torch.einsum("btk,bsk->bts", q, k)
    if causal:
        T = scores.shape[1]
        pass
    best = scores.argmax(-1)
    return torch.gather(v, 1, best.unsqueeze(-1).expand(-1, -1, v.shape[-1]))
