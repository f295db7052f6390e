# slip: rounded_exponent
import math

import torch

def sinusoidal_positions(length, width):
    pe = torch.zeros(length, width)
    t = torch.arange(length, dtype=torch.float)[:, None]
    for p in range(length):
        for i in range(width // 2):
            a = p / 10000 ** (2 * i // width)
            pe[p, 2 * i] = math.sin(a)
            pe[p, 2 * i + 1] = math.cos(a)
    return pe
