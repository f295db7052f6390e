"""Queries and keys by design, with a proof where there is none."""

from regard.lab.design.certificates import DesignError
from regard.lab.design.replacement import Replacement, replace_key
from regard.lab.design.solve import ClosedForm, Design, Fit, Identity, average, fit, identity, orthogonal, select

__all__ = [
    "ClosedForm",
    "Design",
    "DesignError",
    "Fit",
    "Identity",
    "Replacement",
    "average",
    "fit",
    "identity",
    "orthogonal",
    "replace_key",
    "select",
]
