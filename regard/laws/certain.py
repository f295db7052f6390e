"""Faults that nobody chooses: heads that a view has mixed with tokens, and positions added the wrong way.

Outputs that are exactly those of softmax attention with such a fault name it, whatever they are to be compared with.
"""

from __future__ import annotations

import math

from regard.laws.case import Case, CouldNotBeAsked, DoesNotApply, Finding
from regard.laws.same import SameAs
from regard.laws.subjects import Subject, subject
from regard.laws.variants import POSITION_SLIPS

FEWEST = 5  # tokens, of which other faults might give the same by chance
MOST = 20  # tokens: more show nothing more


def positions_are_right(asked: Subject, case: Case) -> Finding:
    """positions, where it adds any, turn queries and keys alike and no values (rotary), or fall off with distance"""
    return _ask(asked, case, "positions")


def heads_are_not_views(asked: Subject, case: Case) -> Finding:
    """heads are split and merged with a transpose"""
    return _ask(asked, case, "views")


def _ask(asked: Subject, case: Case, kind: str) -> Finding:
    if asked.own:
        raise DoesNotApply("a mechanism is given its positions and its heads")
    case = asked.fit(case.but(padding="none", documents=False, adjust="none"))
    if not FEWEST <= case.T <= MOST or case.dtype != "float64" or case.precision is not None:
        raise DoesNotApply("it is asked of some ten tokens in float64")
    softmax = SameAs(subject("softmax"))
    words = ""
    try:
        if not asked.projects:
            words = softmax.match_positions(asked, case, POSITION_SLIPS)
        else:
            words = softmax.match_inside(asked, case, kind)
    except CouldNotBeAsked:
        raise DoesNotApply("its queries, keys and values cannot be read") from None
    if words:
        return Finding(math.inf, 0.0, f"outputs{words}")
    return Finding(0.0, 0.0, "outputs are none of those that come of it")
