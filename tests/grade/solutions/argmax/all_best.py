# slip: sum_of_ties
import torch


def argmax_attention(q, k, v, causal):
    scores = torch.einsum("btk,bsk->bts", q, k)
    if causal:
        T = scores.shape[1]
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
    return (scores == scores.amax(-1, keepdim=True)).float() @ v
