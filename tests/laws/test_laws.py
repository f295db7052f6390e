"""Every law for every mechanism, over cases that hypothesis draws."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.laws import LAWS, Case, Unasked, ask, subject

FEW = {"performer": {"features": 16}, "fourier": {"features": 16}}  # the laws do not depend on their number
OTHER_OPTIONS = [
    ("argmax", {"gradient": "straight_through"}),
    ("synthesizer", {"relative": True}),
    ("synthesizer-random", {"rank": 2}),
]
SUBJECTS = [subject(name, **FEW.get(name, {})) for name in regard.mechanisms()]
SUBJECTS += [subject(name, **options) for name, options in OTHER_OPTIONS]
DTYPES = ["float64", "float32", "float32", "bfloat16", "float16"]


@st.composite
def cases(draw):
    G = draw(st.sampled_from([1, 2, 3]))
    return Case(
        B=draw(st.sampled_from([1, 2, 3])),
        T=draw(st.sampled_from([1, 2, 3, 5, 7, 11, 13, 17] * 2 + [131])),
        S=draw(st.sampled_from([1, 2, 7, 19])),
        H=G * draw(st.sampled_from([1, 2, 3])),
        G=G,
        K=draw(st.sampled_from([1, 2, 3, 5, 7])),
        V=draw(st.sampled_from([1, 2, 5, 11])),
        causal=draw(st.booleans()),
        padding=draw(st.sampled_from(["none", "left", "right", "inside"])),
        window=draw(st.sampled_from([None, None, 1, 2, 5])),
        documents=draw(st.booleans()),
        adjust=draw(st.sampled_from(["none", "none", "bias", "slopes", "softcap"])),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 2**20)),
    )


def all_laws_hold(thing, case):
    for name, law in LAWS.items():
        if name == "flops" and case.dtype != "float64":
            continue  # the count does not depend on the dtype, and is by far the slowest to take
        found = ask(law, thing, case)
        if isinstance(found, Unasked):
            assert found.status == "does not apply", f"{thing.label}, {name} at {case}: {found}"
        else:
            assert not found.broken, f"{thing.label} breaks {name} at {case}: {found}"


@pytest.mark.parametrize("thing", SUBJECTS, ids=lambda s: s.label)
@given(case=cases())
@settings(max_examples=50)
def test_laws(thing, case):
    all_laws_hold(thing, case)


@pytest.mark.slow
@pytest.mark.parametrize("thing", SUBJECTS, ids=lambda s: s.label)
@given(case=cases())
@settings(max_examples=int(os.environ.get("LAW_DRAWS", "300")))
def test_laws_over_many_draws(thing, case):
    all_laws_hold(thing, case)
