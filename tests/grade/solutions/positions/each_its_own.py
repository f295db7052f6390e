# slip: frequency_each
import math

import torch


def sinusoidal_positions(length, width):
    table = torch.zeros(length, width)
    t = torch.arange(0, length, dtype=torch.float).unsqueeze(1)
    div = torch.exp(torch.arange(width).float() * (-math.log(10000.0) / width))
    table[:, 0::2] = torch.sin(t * div)[:, 0::2]
    table[:, 1::2] = torch.cos(t * div)[:, 1::2]
    return table
