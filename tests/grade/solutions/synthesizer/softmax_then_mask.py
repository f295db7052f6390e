# slip: dense_hidden_after
import torch

def dense_synthesizer(x, w1, b1, w2, b2, v):

    T = x.shape[2]
    s = torch.relu(x @ w1 + b1) @ w2 + b2
    s = s[..., :T]
    s = s.masked_fill(torch.ones(T, T).tril() == 0, float('-inf'))
    p = torch.where(s == float('-inf'), torch.zeros_like(s), (torch.relu(x @ w1 + b1) @ w2 + b2)[..., :T].softmax(-1))
    return p @ v


def random_synthesizer(R, v):

    T = v.shape[2]
    s = R[:, :T, :T].masked_fill(torch.ones(T, T).tril() == 0, float('-inf'))
    return s.softmax(-1) @ v
