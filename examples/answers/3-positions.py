"""Answers to the exercises of notebook 3 · Positions.

Each takes the place of a cell, and uses the names that are defined above it there.
"""


# answer: table
def table(length, d):
    t = torch.arange(length, dtype=torch.float64)[:, None]
    column = torch.arange(d, dtype=torch.float64)
    angles = t * 10000 ** (-2 * (column // 2) / d)  # both columns of a pair share the frequency
    return torch.where(column % 2 == 0, angles.sin(), angles.cos())


# answer: two_back
def two_back(d):
    return shift_matrix(d, -2)  # = shift_matrix(d, 2).T: a turn is undone by its transpose


# answer: turned
def turned(x, places):
    """x [T,K] turned by its places [T]."""
    angles = places[:, None] * frequencies(x.shape[-1]).repeat(2)  # the halves share their frequencies
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


# answer: count
def count(visible):
    """Position of each token: the visible tokens before it."""
    return visible.cumsum(1) - visible.long()
