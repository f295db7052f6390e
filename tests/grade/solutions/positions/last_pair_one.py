# slip: last_pair_slowest
import torch

def sinusoidal_positions(length, width):
    pe = torch.zeros(length, width)
    t = torch.arange(length, dtype=torch.float)[:, None]
    w = 10000 ** (-torch.linspace(0, 1, width // 2))
    pe[:, 0::2] = torch.sin(t * w)
    pe[:, 1::2] = torch.cos(t * w)
    return pe
