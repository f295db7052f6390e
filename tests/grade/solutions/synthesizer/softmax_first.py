# slip: random_softmax_before_cut
import torch


def dense_synthesizer(x, w1, b1, w2, b2, v):
    T = x.size(2)
    scores = torch.relu(x @ w1 + b1) @ w2 + b2
    scores = scores[:, :, :, :T]
    scores = scores.masked_fill(torch.tril(torch.ones(T, T)) == 0, -1e10)
    return torch.softmax(scores, dim=-1) @ v


def random_synthesizer(R, v):
    T = v.size(2)
    later = torch.triu(torch.ones(T, T), diagonal=1).bool()
    return R.softmax(-1)[:, :T, :T].masked_fill(later, 0.0) @ v
