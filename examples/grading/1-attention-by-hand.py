"""What judges the exercises of notebook 1 · Attention by hand."""

# ruff: noqa: F401  (some names are there to be given to submissions)

import math

import torch

from regard.grade import broken_law


def once(draw):
    yield ()


def scores(draw):
    for _ in range(40):
        yield (draw.normal(5),)


def tends_to_the_first(scores):
    return bool(torch.softmax(1e6 * scores.double(), 0)[0] > 0.5)


def exceeds_the_sum(scores):
    return bool(scores[0] > scores[1:].sum())


def is_softmax(f):
    return broken_law(f, like="softmax")


def is_argmax(f):
    return broken_law(f, like="argmax", only=["looks-ahead", "heads", "same"])
