"""What judges the exercises of notebook 9 · Gates and the delta rule."""

import math

import torch

import regard


def tokens(draw):
    for K, V in ((3, 5), (4, 4)):
        for a, b in ((-0.7, 0.8), (-0.1, 0.3), (-2.0, 1.0)):
            k = torch.nn.functional.normalize(draw.normal(K).double(), dim=0)
            yield draw.normal(K, V).double(), k, draw.normal(V).double(), a, b


def next_memory(S, k, v, a, b):
    one = regard.mechanism("gated-delta")
    state = one.empty(regard.Size(K=k.shape[0], V=v.shape[0], dtype=torch.float64))
    state = state._replace(memory=S[None, None].clone())
    q, k, v = (x[None, None, None] for x in (k, k, v))
    a, b = (torch.full((1, 1, 1), x, dtype=torch.float64) for x in (a, b))
    return one.extend(q, k, v, state, a=a, b=b)[1].memory[0, 0]


def not_faded(S, k, v, a, b):
    return math.exp(a) * S + b * torch.outer(k, v - k @ S)


def sequences(draw):
    for T, K in ((5, 3), (9, 4)):
        q, k = draw.normal(2, T, K).double()
        k = torch.nn.functional.normalize(k, dim=-1)
        a = torch.nn.functional.logsigmoid(draw.normal(T).double() + 1)
        yield q, k, a, torch.sigmoid(draw.normal(T).double())


def exact_weights(q, k, a, b):
    one = regard.mechanism("gated-delta")
    q, k, a, b = (x[None, None] for x in (q, k, a, b))
    return one.weights(q, k, regard.Mask(causal=True), a=a, b=b)[0, 0]


def nothing_erased(q, k, a, b):
    one = regard.mechanism("gated")
    q, k, a, b = (x[None, None] for x in (q, k, a, b))
    return one.weights(q, k, regard.Mask(causal=True), a=a, b=b)[0, 0]


def texts(draw):
    for T in (6, 20):
        yield ((draw.normal(T) > 0).long(),)


def reflections(bits):
    return 2 * bits.double()


def erased(bits):
    return bits.double()


def decoders(draw):
    for layers, every in ((48, 4), (12, 3), (6, 7)):
        for G, K, V, T in ((2, 128, 128, 4096), (8, 64, 32, 100)):
            yield layers, every, G, K, V, T


def declared(layers, every, G, K, V, T):
    size = regard.Size(S=T, G=G, H=G, K=K, V=V, dtype=torch.bfloat16)
    cache, memory = (regard.cost(name, size).state for name in ("softmax", "gated-delta"))
    softmax = layers // every
    return softmax * cache + (layers - softmax) * memory


def half_memory(layers, every, G, K, V, T):
    softmax = layers // every
    return softmax * 2 * G * T * (K + V) + (layers - softmax) * 2 * G * K * V
