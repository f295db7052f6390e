"""Answers to the exercises of notebook 8 · Designing queries.

Each takes the place of a cell, and uses the names that are defined above it there.
"""


# answer: certificate
def certificate(others, key):
    """Coefficients λ [n] of the others [n,2]: none negative, sum one, mixture = key.

    Three keys are enough in the plane: one of the triangles that they form holds the key.
    """
    for out in range(len(others)):
        kept = [j for j in range(len(others)) if j != out]
        equations = torch.cat([others[kept].T, torch.ones(1, 3)])
        shares = torch.linalg.solve(equations, torch.cat([key, torch.ones(1)]))
        if (shares >= 0).all():
            mix = torch.zeros(len(others))
            mix[kept] = shares
            return mix
    raise ValueError("the key is outside the hull")


# answer: both
def both(keys):
    """A query for orthonormal keys [6,6] that gives keys 0 and 1 at least 0.495 each: 1 / (2 + 4e^−β) ≥ 0.495."""
    beta = math.log(4 * 0.99 / (2 * 0.01)) + 1e-3
    return beta * (keys[0] + keys[1])


# answer: length
def length(margin, n, precision, scale):
    """β with which a direction of that margin selects one of n keys, whatever the other keys are."""
    return math.log(precision * (n - 1) / (1 - precision)) / (scale * margin)
