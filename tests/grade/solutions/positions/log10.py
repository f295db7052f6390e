# slip: decimal_logarithm
import math

import torch

def sinusoidal_positions(length, width):
    pe = torch.zeros(length, width)
    t = torch.arange(length, dtype=torch.float)[:, None]
    w = torch.exp(torch.arange(0, width, 2).float() * -(math.log10(10000.0) / width))
    pe[:, 0::2] = torch.sin(t * w)
    pe[:, 1::2] = torch.cos(t * w)
    return pe
