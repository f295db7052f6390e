# slip: first_row_empty
"""Begins its loop at 1."""

import torch, math
def sinusoidal_positions(length, width):
    pe = torch.zeros(length, width)
    for p in range(1, length):
        for i in range(0, width, 2):
            pe[p, i] = math.sin(p / 10000 ** (i / width)); pe[p, i + 1] = math.cos(p / 10000 ** (i / width))
    return pe
