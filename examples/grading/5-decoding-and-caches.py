"""What judges the exercises of notebook 5 · Decoding and caches."""

import torch

import regard
from regard.generate import Settings, probabilities
from regard.grade import broken_law


def once(draw):
    yield ()


def decodes_as_softmax(step):
    def decoded(q, k, v, causal=True):
        T = q.shape[2]
        read = [t + 1 if causal else T for t in range(T)]
        return torch.stack([step(q[:, :, t], k[:, :, :n], v[:, :, :n]) for t, n in enumerate(read)], 2)

    return broken_law(decoded, like="softmax", only=["same", "looks-ahead", "heads"])


def is_causal_elu(f):
    def causal_elu(q, k, v):
        return regard.attend(q, k, v, "elu", causal=True)

    return broken_law(f, like=causal_elu, only=["looks-ahead", "same"])


def sizes(draw):
    for b in (1, 16):
        for n in (0, 1000):
            for G, V in ((1, 64), (8, 128)):
                yield b, n, 512, 8, G, 64, V


def declared(b, n, D, H, G, K, V):
    return int(regard.cost.decode(b=b, n=n, D=D, H=H, G=G, K=K, V=V).flops)


def one_product(b, n, D, H, G, K, V):
    return 2 * b * D * (H * K + G * K + G * V + H * V) + 2 * b * H * (n + 1)


def distributions(draw):
    for _ in range(20):
        yield (3 * draw.normal(12).double()).softmax(0), 0.8


def top_p(p, most):
    return probabilities(p.log()[None], Settings(top_p=most))[0]


def at_most(p, most):
    falling, which = p.sort(descending=True)
    kept = falling.cumsum(0) <= most
    out = torch.zeros_like(p)
    out[which[kept]] = falling[kept]
    return out / out.sum()
