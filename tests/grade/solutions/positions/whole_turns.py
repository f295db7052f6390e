# slip: whole_turns
"""Multiplies the angle by 2π."""

import torch, math
def sinusoidal_positions(length, width):
    pe = torch.zeros(length, width)
    p = torch.arange(length).unsqueeze(1).float()
    div = 10000 ** (-torch.arange(0, width, 2).float() / width)
    pe[:, 0::2] = torch.sin(2 * math.pi * p * div); pe[:, 1::2] = torch.cos(2 * math.pi * p * div)
    return pe
