"""What judges the exercises of notebook 2 · Masks and heads."""

# ruff: noqa: F401  (some names are there to be given to submissions)

import math

import torch
from torch import nn

import regard
from regard.grade import broken_law


def once(draw):
    yield ()


def is_softmax(f):
    return broken_law(f, like="softmax")


def is_softmax_under_masks(f):
    return broken_law(f, like="softmax", blind_zeros=True)


def keeps_the_laws(layer):
    return broken_law(layer)
