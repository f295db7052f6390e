"""What judges the exercises of notebook 8 · Designing queries."""

import math

import torch


def points(draw):
    square = torch.tensor([[1.0, 0.3], [-0.2, 1.0], [-1.0, -0.4], [0.4, -0.9]])
    yield square, torch.tensor([0.85, 0.2])
    yield square, torch.tensor([0.0, 0.0])


def is_a_certificate(f, others, key):
    mix = f(others, key)
    if float(mix.min()) < -1e-6:
        return f"a coefficient is {float(mix.min()):.3f}: none may be negative, or it proves only an affine hull"
    if abs(float(mix.sum()) - 1) > 1e-5:
        return f"the coefficients sum to {float(mix.sum()):.3f}, expected 1"
    if (mix @ others - key).abs().max() > 1e-5:
        return "the mixture is not the key"
    return None


def turned_keys(draw):
    yield (torch.linalg.qr(draw.normal(6, 6))[0],)


def averages_two(f, keys):
    weights = (keys @ f(keys)).softmax(0)
    if weights[:2].min() < 0.4949:
        return f"keys 0 and 1 get {float(weights[0]):.3f} and {float(weights[1]):.3f}, expected at least 0.495 each"
    return None


def margins(draw):
    for n, K in ((2, 4), (10, 64), (1000, 16)):
        yield 0.3, n, 0.99, K**-0.5


def long_enough(margin, n, precision, scale):
    return math.log(precision * (n - 1) / (1 - precision)) / (scale * margin)


def scale_forgotten(margin, n, precision, scale):
    return math.log(precision * (n - 1) / (1 - precision)) / margin
