# slip: in_degrees
"""Takes the angle for degrees."""

import numpy as np
def sinusoidal_positions(length, width):
    p = np.arange(length)[:, None]; i = np.arange(width)[None]
    ang = np.deg2rad(p / 10000 ** (2 * (i // 2) / width))
    ang[:, 0::2] = np.sin(ang[:, 0::2]); ang[:, 1::2] = np.cos(ang[:, 1::2])
    return ang
