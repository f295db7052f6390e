# slip: random_transposed
import torch

def dense_synthesizer(x, w1, b1, w2, b2, v):

    T = x.shape[2]
    s = torch.relu(x @ w1 + b1) @ w2 + b2
    s = s[..., :T]
    s = s.masked_fill(torch.ones(T, T).tril() == 0, float('-inf'))
    return s.softmax(-1) @ v


def random_synthesizer(R, v):

    T = v.shape[2]
    s = R[:, :T, :T].transpose(1, 2).masked_fill(torch.ones(T, T).tril() == 0, float('-inf'))
    return s.softmax(-1) @ v
