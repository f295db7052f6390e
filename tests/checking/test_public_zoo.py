"""Attention as students and public repositories write it: right ones are never accused, wrong ones are found."""

import pytest
from public_attention_right import RIGHT
from public_attention_wrong import WRONG

import regard

# In the fast tests: one of each kind that nothing else here asks about.
FEW_RIGHT = ("only bfloat16", "multi-query with a step", "cache in place", "keeps its cache", "linear with a step")
FEW_WRONG = ("step of another scale", "overwrites its cache", "step without normaliser", "weights summed out")


def accuse(name: str, draws: int) -> list[str]:
    """Returns what laws say against a right one."""
    thing, options, like = RIGHT[name]
    told = []
    for reference in {None, like}:
        verdicts = regard.check(thing, like=reference, draws=draws, **options)
        assert verdicts.asked
        told += [str(verdict) for verdict in verdicts.broken]
        if name == "only bfloat16" and reference is not None:
            assert verdicts[-1].status == "holds"  # compared in the dtype that it takes
    return told


@pytest.mark.parametrize("name", FEW_RIGHT)
def test_right_ones_are_not_accused(name):
    assert not accuse(name, draws=4)


@pytest.mark.parametrize("name", FEW_WRONG)
def test_wrong_ones_are_found(name):
    thing, options, laws, _ = WRONG[name]
    verdicts = regard.check(thing, only=sorted(laws), draws=6, **options)
    assert verdicts.broken


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_no_right_one_is_accused(name):
    assert not accuse(name, draws=24)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_one_is_found_by_a_law_that_names_it(name):
    thing, options, laws, like = WRONG[name]
    found = set()
    if laws:
        found |= {verdict.law for verdict in regard.check(thing, **options).broken} & laws
    if like is not None:
        reference, expected = like
        with_reference = {verdict.law for verdict in regard.check(thing, like=reference, **options).broken}
        assert with_reference & expected
        found |= with_reference & expected
    assert found
