"""Queries, keys and heads by design, with a proof where there is none."""

from regard.lab.design.certificates import DesignError
from regard.lab.design.layer import HeadDesign, design_head
from regard.lab.design.replacement import Replacement, replace_key
from regard.lab.design.sharing import SharedReplacement, share_key
from regard.lab.design.solve import ClosedForm, Design, Fit, Identity, average, fit, identity, orthogonal, select

__all__ = [
    "ClosedForm",
    "Design",
    "DesignError",
    "Fit",
    "HeadDesign",
    "Identity",
    "Replacement",
    "SharedReplacement",
    "average",
    "design_head",
    "fit",
    "identity",
    "orthogonal",
    "replace_key",
    "select",
    "share_key",
]
