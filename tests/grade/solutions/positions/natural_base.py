# slip: natural_base
import math

import torch


def sinusoidal_positions(length, width):
    table = torch.zeros(length, width)
    t = torch.arange(0, length, dtype=torch.float).unsqueeze(1)
    div = torch.exp(torch.arange(0, width, 2).float() * (-math.log(math.e) / width))
    table[:, 0::2] = torch.sin(t * div)
    table[:, 1::2] = torch.cos(t * div)
    return table
