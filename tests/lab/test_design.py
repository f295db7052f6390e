"""A query that attends as wished, or a proof that none can: always one of the two, and never both."""

import json
import math
import subprocess
import sys
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from regard.cli.design import design as command
from regard.cli.design import read_rows
from regard.errors import OptionError
from regard.lab import base
from regard.lab.design import (
    DesignError,
    average,
    certificates,
    design_head,
    fit,
    hulls,
    identity,
    orthogonal,
    replace_key,
    select,
    share_key,
)
from regard.lab.design.isolate import isolate
from regard.lab.design.page import design_page
from regard.lab.two_heads import run as two_heads

WORKED = torch.tensor(
    [[0.47, 0.65, 0.60], [0.64, 0.50, -0.59], [-0.03, -0.48, -0.88], [0.43, -0.83, 0.35]], dtype=torch.float64
)
# A key inside, four corners.
SQUARE = torch.tensor([[0.2, 0.1], [1.0, 0.0], [-1.0, 1.0], [-0.6, -1.2], [1.3, 0.9]], dtype=torch.float64)


def tensor(rows):
    return torch.tensor(rows, dtype=torch.float64)


def holds(certificate, keys, members):
    """Multiplied out by hand: both mixes are affine, that of the others convex, and they are one point."""
    for mix in (certificate.members, certificate.others):
        assert sum(c for _, c in mix) == pytest.approx(1, abs=1e-12 * len(mix) * max(abs(c) for _, c in mix))
    assert all(c >= 0 for _, c in certificate.others)
    assert {j for j, _ in certificate.members} <= set(members)
    assert not {j for j, _ in certificate.others} & set(members)
    left = sum(c * keys[j] for j, c in certificate.members)
    right = sum(c * keys[j] for j, c in certificate.others)
    size = float(keys.abs().max()) * max(abs(c) for _, c in certificate.members)
    assert float((left - right).abs().max()) <= certificate.tolerance + 1e-12 * size


def answered(keys, members, precision=0.99, scale=1.0):
    """The law: the weights are as promised by softmax itself, or the certificate holds; exactly one."""
    found = average(keys, members, precision, scale)
    assert found.feasible == (found.certificate is None) == (found.q is not None)
    if found.feasible:
        weights = (scale * keys @ found.q).softmax(0)
        inside = weights[list(found.members)]
        assert float(inside.sum()) >= precision - 2e-6
        assert float(inside.max() - inside.min()) <= 2e-6
        assert torch.allclose(weights, found.weights, atol=1e-6)
        others = [j for j in range(len(keys)) if j not in found.members]
        if others:
            gaps = (keys[found.members[0]] - keys[others]) @ found.direction
            assert float(gaps.min()) == pytest.approx(found.margin) and found.margin > 0
            assert float(found.direction.abs().max()) == pytest.approx(1)
            shorter = (scale * 0.99 * keys @ found.q).softmax(0)[list(found.members)]
            assert float(shorter.sum()) < precision
    else:
        holds(found.certificate, keys, found.members)
        # What it proves: no query, not even one drawn at random many times, lets a key or an equal set win.
        if len(found.members) == 1:
            draws = torch.randn(200, keys.shape[1], dtype=keys.dtype, generator=torch.Generator().manual_seed(0))
            assert float((draws @ keys.T).softmax(1)[:, found.members[0]].max()) <= 0.5 + 1e-6
    assert found.explain()
    return found


numbers = st.floats(-10, 10).map(lambda x: round(x, 3))


@st.composite
def wishes(draw, coordinates=numbers):
    n, d = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 5, 17]))
    keys = draw(st.lists(st.lists(coordinates, min_size=d, max_size=d), min_size=n, max_size=n))
    members = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=min(n, 4), unique=True))
    return tensor(keys), members


@given(wishes(), st.sampled_from([0.9, 0.99, 0.999]), st.sampled_from([1.0, 0.35]))
@settings(max_examples=120)
def test_a_query_or_a_proof(wish, precision, scale):
    answered(*wish, precision, scale)


@given(wishes(st.integers(-1, 1).map(float)))
@settings(max_examples=120)
def test_a_query_or_a_proof_among_duplicates_lines_and_corners(wish):
    """Coordinates of −1, 0 and 1 make all the degenerate cases, and exact answers to compare with."""
    keys, members = wish
    found = answered(keys, members)
    if len(members) == 1:
        same = (keys == keys[members[0]]).all(1)
        if int(same.sum()) > 1:
            assert not found.feasible


def test_selectable_in_one_dimension_means_an_end():
    keys = tensor([[3.0], [1.0], [2.0], [-4.0]])
    assert [select(keys, i).feasible for i in range(4)] == [True, False, False, True]
    found = select(keys, 2).certificate
    holds(found, keys, [2])


def test_one_key_two_keys_and_lines():
    assert select(tensor([[1.0, 2.0]]), 0).weights.tolist() == [1.0]
    assert answered(tensor([[1.0, 2.0], [1.0, 2.5]]), [0]).feasible
    assert not answered(tensor([[1.0, 2.0], [1.0, 2.0]]), [0]).feasible
    line = tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]])
    assert [answered(line, [i]).feasible for i in range(3)] == [True, False, True]
    assert not answered(line, [0, 1]).feasible  # the third lies on their line
    everything = answered(line, [0, 1, 2])
    assert everything.q.tolist() == [0, 0] and everything.weights.tolist() == pytest.approx([1 / 3] * 3)


def test_many_keys_in_a_high_dimension():
    keys = torch.randn(60, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert answered(keys, [0]).feasible and answered(keys, [3, 5, 8]).feasible
    keys[0] = keys[1:].mean(0)
    found = answered(keys, [0])
    assert not found.feasible and len(found.certificate.others) <= 41  # as many corners as Carathéodory allows


@pytest.mark.parametrize("off", [1e-3, 1e-5, 1e-6, 1e-8, 1e-12, 0.0, -1e-12, -1e-3])
def test_a_key_near_the_edge_of_a_hull_is_decided_by_the_tolerance(off):
    keys = tensor([[0.0, 1 + off], [-1.0, 1.0], [1.0, 1.0], [0.0, -1.0]])
    found = answered(keys, [0])
    assert found.feasible == (off >= 1e-6)
    if found.feasible and off < 1e-3:
        assert "close call" in found.explain()


@pytest.mark.parametrize("size", [1e-150, 1e-9, 1e9, 1e150])
def test_the_unit_of_the_keys_does_not_matter(size):
    a, b = select(WORKED, 0), select(size * WORKED, 0)
    assert b.margin == pytest.approx(size * a.margin, rel=1e-6) and b.beta == pytest.approx(a.beta / size, rel=1e-6)
    assert not select(size * SQUARE, 0).feasible


def test_one_far_key_does_not_blur_the_others():
    near = tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1e10, -1e10]])
    assert not answered(torch.cat([near, tensor([[-1.0, -1.0]])]), [0]).feasible
    assert answered(tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1e10, 3e10]]), [0]).margin == pytest.approx(1)


def test_the_worked_example():
    """Least squares comes near, and an exact average exists: its margin, with ‖direction‖∞ = 1, is 1.52."""
    near = fit(WORKED, (3, 3, -2, -3))
    assert [round(w, 3) for w in near.weights.tolist()] == [0.549, 0.446, 0.004, 0.001]
    exact = answered(WORKED, [0, 1])
    assert exact.margin == pytest.approx(1.52, abs=0.005)
    assert exact.weights.tolist()[:2] == pytest.approx([0.495, 0.495], abs=1e-6)
    assert answered(WORKED, [0, 1], scale=3**-0.5).beta == pytest.approx(exact.beta * 3**0.5)


@given(wishes())
@settings(max_examples=40)
def test_no_direction_in_the_box_has_a_larger_margin(wish):
    """The weak side of duality: for any mixes, margin ≤ ‖Σ μ k − Σ λ k‖₁; and none drawn at random is better."""
    keys, members = wish
    found = average(keys, members[:1])
    others = [j for j in range(len(keys)) if j != members[0]]
    if not found.feasible or not others:
        return
    draws = 2 * torch.rand(500, keys.shape[1], dtype=keys.dtype, generator=torch.Generator().manual_seed(0)) - 1
    gaps = keys[members[0]] - keys[others]
    assert float((draws @ gaps.T).amin(1).max()) <= found.margin + 1e-9
    assert found.margin <= float(gaps.abs().sum(1).min()) + 1e-9


def largest_margin(keys, i):
    """Returns the margin of key i by its definition, in whole fractions: the best corner of the program's polytope."""
    rows = [[Fraction(float(a)) - Fraction(float(b)) for a, b in zip(keys[i], key, strict=True)] + [Fraction(-1)]
            for j, key in enumerate(keys) if j != i]  # fmt: skip
    bounds = [Fraction(0)] * len(rows)
    width = keys.shape[1]
    for k in range(width):
        for sign in (1, -1):
            rows.append([Fraction(sign * (k == n)) for n in range(width + 1)])
            bounds.append(Fraction(-1))
    best = Fraction(0)
    for chosen in combinations(range(len(rows)), width + 1):
        corner = solve_exactly([[*rows[c], bounds[c]] for c in chosen])
        if corner is not None and corner[-1] > best:
            scores = (sum(a * x for a, x in zip(row, corner, strict=True)) for row in rows)
            if all(score >= bound for score, bound in zip(scores, bounds, strict=True)):
                best = corner[-1]
    return float(best)


def solve_exactly(rows):
    """Returns the solution of as many equations as unknowns, each a row with its right side; None where singular."""
    n = len(rows)
    for i in range(n):
        pivot = next((r for r in range(i, n) if rows[r][i] != 0), None)
        if pivot is None:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(n):
            if r != i and rows[r][i] != 0:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i], strict=True)]
    return [rows[i][n] / rows[i][i] for i in range(n)]


@pytest.mark.parametrize("seed", range(12))
def test_margins_are_the_largest_whatever_the_lengths_of_keys(seed):
    """Lengths from 10⁻⁶ to 10⁶: what a solver lets pass for a far key is more than the margin of a near one."""
    draw = torch.Generator().manual_seed(seed)
    for K in (2, 3):
        lengths = 10 ** (12 * torch.rand(5, 1, generator=draw, dtype=torch.float64) - 6)
        keys = lengths * torch.randn(5, K, generator=draw, dtype=torch.float64)
        found = select(keys, 0)
        if found.feasible:
            assert found.margin == pytest.approx(largest_margin(keys, 0), rel=1e-6)


def test_values_are_read():
    values = tensor([[2.0, 0.0], [0.0, 4.0], [9.0, 9.0], [-9.0, 9.0]])
    read = average(WORKED, [0, 1], 0.9999, values=values).output
    assert read.tolist() == pytest.approx([1.0, 2.0], abs=2e-3)


@pytest.mark.parametrize("beta", [0.5, 2.0, 7.0])
def test_closed_forms_of_orthogonal_keys(beta):
    keys = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    plus, both = orthogonal(keys, [1, 3])
    assert torch.allclose(plus.direction, keys[1] + keys[3])
    assert torch.allclose(both.direction, keys[1] + keys[3] - keys[0] - keys[2] - keys[4])
    for form in (plus, both):
        for lengths in (torch.ones(5, 1), torch.tensor([[1.0], [2], [3], [0.5], [1]])):
            stretched = orthogonal(keys * lengths, [1, 3])[form is both]
            weights = (keys * lengths @ (beta * stretched.direction)).softmax(0).tolist()
            assert weights[1] == pytest.approx(weights[3]) == pytest.approx(form.weight(beta))
            assert weights[0] == pytest.approx(form.other(beta))
    assert both.weight(beta) == pytest.approx(plus.weight(2 * beta))


def test_closed_forms_need_orthogonal_keys():
    with pytest.raises(DesignError, match=r"keys \d and \d have cosine"):
        orthogonal(WORKED, [0])
    with pytest.raises(DesignError, match="key 1 is zero"):
        orthogonal(tensor([[1.0, 0.0], [0.0, 0.0]]), [0])


def test_an_identity_or_the_keys_that_prevent_it():
    found = identity(WORKED)
    assert found.feasible and not found.refused
    weights = (found.q @ WORKED.T).softmax(1)
    assert float(weights.diagonal().min()) >= 0.99 - 1e-9
    found = identity(SQUARE)
    assert [d.members for d in found.refused] == [(0,)] and found.q is None
    holds(found.refused[0].certificate, SQUARE, [0])


@given(wishes(), st.integers(1, 4), st.booleans())
@settings(max_examples=60)
def test_a_replacement_or_a_proof(wish, count, unit):
    keys, (i, *_) = wish
    draw = torch.Generator().manual_seed(len(keys))
    queries = torch.randint(-2, 3, (1 if unit else count, keys.shape[1]), generator=draw).double()
    found = replace_key(keys, i, queries, unit)
    others = [j for j in range(len(keys)) if j != i]
    assert found.feasible == (found.certificate is None) == (found.key is not None) and found.explain()
    if found.feasible:
        new = keys.clone()
        new[i] = found.key
        assert float((found.beta * queries @ new.T).softmax(1)[:, i].min()) >= 0.99 - 1e-7
        assert not unit or float(found.key.norm()) == pytest.approx(1)
    elif unit:
        assert float(queries[0].norm()) <= float((keys[others] @ queries[0]).max()) * (1 + 1e-6) + 1e-12
    else:
        mix = sum(c * queries[t] for t, c in found.certificate.queries)
        assert float(mix.abs().max()) <= found.certificate.tolerance + 1e-12 and found.certificate.needed > 0
        assert all(c >= 0 for _, c in found.certificate.queries)


def test_a_query_of_zeros_selects_nothing_whatever_stands_beside_it():
    queries = tensor([[-1.0, 1.0], [0.0, 0.0], [-2.0, -2.0]])
    found = replace_key(tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 3.0]]), 0, queries)
    assert not found.feasible and found.certificate.queries == ((1, 1.0),)


def test_the_best_unit_key_is_along_the_query():
    """Works exactly where ‖q‖ exceeds the other scores."""
    q = tensor([2.0, 2.0, 0.0])
    found = replace_key(WORKED, 2, q, unit=True)
    assert torch.allclose(found.key, q / q.norm()) and float(q.norm()) > float((WORKED @ q).max())
    refused = replace_key(2 * WORKED, 2, q, unit=True)
    assert not refused.feasible and refused.certificate.length == pytest.approx(8**0.5)
    assert refused.certificate.score == pytest.approx(4.56) and refused.certificate.other == 1


def test_a_replacement_is_the_nearest_there_is():
    q = tensor([1.0, 1.0, 0.0])
    found = replace_key(WORKED, 2, q)
    assert float(found.weights[0, 2]) == pytest.approx(0.99, abs=1e-8)
    moved = found.key - WORKED[2]
    assert torch.allclose(moved, q * (q @ moved) / (q @ q))
    enough = found.keys.clone()
    enough[2] = found.key
    assert torch.equal(replace_key(enough, 2, q, precision=0.9).key, found.key)


def test_one_head_against_two():
    found = two_heads.measure(two_heads.TwoHeads(), lambda text: None)
    one, two = ([row.std for row in found.over(False) if row.heads == heads] for heads in (1, 2))
    assert min(one) > 0.435 and max(one) < 0.495
    assert min(two) > 0.015 and max(two) < 0.145
    # Where the key never points away from its query, two heads read one half of each, whatever the length.
    two = [row for row in found.over(True) if row.heads == 2 and row.beta == 30 and row.key == "a"]
    assert two[0].mean == pytest.approx(0.492, abs=0.004) and two[0].std == pytest.approx(0.046, abs=0.004)


def test_one_head_is_a_sigmoid_of_the_length():
    lengths = torch.linspace(-1, 3, 9, dtype=torch.float64)
    one, two = two_heads.weights(lengths, 7, 30.0)
    seen = lengths > 0.3
    assert torch.allclose(one[seen, 0], (30 * (lengths[seen] - 1)).sigmoid(), atol=1e-3)
    assert torch.allclose(two[seen, :2], torch.full((int(seen.sum()), 2), 0.5, dtype=torch.float64), atol=1e-3)
    assert torch.allclose(two.sum(1), torch.ones(9, dtype=torch.float64))


def test_two_heads_writes_its_page(tmp_path):
    base.run("two-heads", tmp_path / "out", {"draws": 500, "seed": 3})
    assert "One head against two" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("unit", [False, True])
def test_a_key_with_which_the_same_query_averages_more_keys(unit):
    q = average(WORKED, [0, 1]).q
    found = share_key(WORKED, 2, q, [0, 1, 2], unit)
    assert found.feasible and found.beta == 1 and found.unchanged >= 0.99
    new_keys = WORKED.double().clone()
    new_keys[2] = found.key
    weights = (new_keys @ q).softmax(0)
    torch.testing.assert_close(weights[:3], weights[:3].mean().expand(3))
    torch.testing.assert_close(weights, found.weights)
    if unit:
        assert float(found.key.norm()) == pytest.approx(1)
    # Nearest: every other key of that score is farther away.
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        step = torch.randn(3, generator=generator, dtype=torch.float64)
        step -= (step @ q) * q / (q @ q)
        other = found.key + 0.1 * step
        if unit:  # back to the circle of unit keys of that score
            beside = other - (other @ q) * q / (q @ q)
            centre = other - beside
            other = centre + beside * ((1 - centre @ centre).sqrt() / beside.norm())
        assert (other - WORKED[2].double()).norm() >= (found.key - WORKED[2].double()).norm() - 1e-9


def test_a_weak_query_is_made_longer_and_both_weights_are_said():
    q = 0.1 * average(WORKED, [0, 1]).q
    found = share_key(WORKED, 2, q, [0, 1])
    assert found.unchanged < 0.99 <= float(found.weights[:3].sum()) + 1e-9
    assert "as it is: 0.82" in found.explain() and "·q is the shortest multiple" in found.explain()
    unit = replace_key(WORKED, 2, tensor([1.0, 1.0, 0.0]), unit=True)
    assert unit.beta > 1
    new_keys = WORKED.double().clone()
    new_keys[2] = unit.key
    plain = float((new_keys @ tensor([1.0, 1.0, 0.0]).double()).softmax(0)[2])
    assert unit.unchanged == pytest.approx(plain) and f"as it is, the weight is {plain:.6g}" in unit.explain()


@pytest.mark.parametrize(
    ("make", "proof"),
    [
        (lambda: share_key(WORKED, 2, tensor([1.0, 1.0, 0.0]), [0, 1]), "q·k_0 = 1.12 and q·k_1 = 1.14"),
        (lambda: share_key(SQUARE, 0, tensor([0.0, -1.0]), [1, 2]), "whatever the new key is"),
        (lambda: share_key(3 * WORKED, 2, tensor([1.0, 0.0, 0.0]), [0], unit=True), "at most ‖q‖ = 1 in size"),
        (lambda: share_key(torch.eye(3), 0, tensor([0.0, 0.0, 1.0]), [1]), "key 2, none of them, scores 1"),
    ],
)
def test_no_key_makes_that_average(make, proof):
    found = make()
    assert not found.feasible and found.key is None and proof in found.explain()


_A, _B, _C, _D = torch.eye(4, dtype=torch.float64)
_OPEN = torch.full((4,), math.nan, dtype=torch.float64)
EXERCISE = (torch.stack([_D + _B, _A, _C + _B]), torch.stack([_B - _C, _B, _OPEN]))


def read_by(found):
    """What the tokens read with the matrices of a design, by the formula."""
    x = found.tokens
    return (found.scale * (x @ found.q) @ (x @ found.k).T).softmax(-1) @ x @ found.v


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_head_for_independent_tokens(scale):
    found = design_head(*EXERCISE, precision=0.999, scale=scale)
    assert found.feasible and found.proved and found.asked == (0, 1)
    torch.testing.assert_close(read_by(found)[:2], EXERCISE[1][:2], rtol=0, atol=1e-3)


def test_a_head_for_dependent_tokens_is_searched_for():
    found = design_head(torch.stack([_A, _B, _A + _B]), torch.stack([_B, _A, _OPEN]))
    assert found.feasible and not found.proved
    torch.testing.assert_close(read_by(found)[:2], torch.stack([_B, _A]), rtol=0, atol=0.01)


def test_no_head_gives_equal_tokens_unequal_outputs_or_more_directions():
    same = design_head(torch.stack([_A, _A, _B]), torch.stack([_B, _C, _OPEN]))
    assert not same.feasible and same.proved and "tokens 0 and 1 are the same vector" in same.explain()
    more = design_head(torch.stack([_A, _B, _A + _B]), torch.stack([_A, _B, _C]))
    assert not more.feasible and more.proved and "span 2 dimensions" in more.explain()


def test_a_head_that_is_not_found_is_not_called_impossible():
    # The first output is between 1 and 2 times uV, the second too: it cannot be twice the first, which no proof says.
    line = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    found = design_head(line, line)
    assert found.feasible == (found.error <= 0.01)
    assert not found.feasible and not found.proved and "no proof that there is none" in found.explain()


def test_opposite_tokens_have_opposite_outputs():
    pair = torch.stack([_A, -_A])
    impossible = design_head(pair, torch.stack([_C, 2 * _C]))
    assert not impossible.feasible and impossible.proved
    assert "Tokens 0 and 1 are opposite" in impossible.explain()
    assert design_head(pair, torch.stack([_C, -_C])).feasible
    # Nothing is said where one token has no opposite, or an output is not asked for.
    assert design_head(torch.stack([_A, -_A, _B]), torch.stack([_C, 2 * _C, _OPEN])).feasible
    assert design_head(pair, torch.stack([_C, _OPEN])).feasible
    zero = design_head(torch.stack([_A, -_A, 0 * _A]), torch.stack([_OPEN, _OPEN, _C]))
    assert zero.proved and "Token 2 is its own opposite" in zero.explain()
    # In several dimensions, too, and not where outputs miss by no more than is allowed.
    four = torch.stack([_A, -_A, _B, -_B])
    assert design_head(four, torch.stack([_C, _OPEN, _A, _B])).proved
    assert design_head(pair, torch.stack([_C, -1.01 * _C])).certificate is None


def test_every_head_gives_opposite_tokens_opposite_outputs():
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    tokens = torch.cat([half, -half])
    q, k, v = torch.randn(3, 5, 5, generator=generator, dtype=torch.float64)
    outputs = (tokens @ q @ k.T @ tokens.T).softmax(-1) @ tokens @ v
    torch.testing.assert_close(outputs[:3], -outputs[3:])


def test_tokens_of_one_line_have_outputs_in_their_order():
    line = torch.tensor([[1.0, 2.0], [3.0, 6.0], [-1.0, -2.0]], dtype=torch.float64)
    wrong = design_head(line, torch.tensor([[5.0], [1.0], [1.0]], dtype=torch.float64))
    assert not wrong.feasible and wrong.proved and wrong.certificate.tokens[1] == 0
    assert "lie at" in wrong.explain()
    places = line @ torch.tensor([1.0, 2.0], dtype=torch.float64)
    for s in (-2.0, -0.1, 0.3, 1.0):  # what a head can give is not refused
        outputs = ((s * places[:, None] * places).softmax(-1) @ places)[:, None]
        assert design_head(line, outputs).certificate is None


def test_one_part_of_a_sum_is_isolated():
    basis = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    content, label = basis[:3], basis[3:]
    contents = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) @ content
    tokens = contents + label
    made = isolate(content, label, beta=math.log(4 * 0.999 / 0.001))
    # Asked with the label alone, and with any other content beside it: the same content comes back, without its label.
    for asked in (label, label + 5 * contents.flip(0)):
        assert float(made.weights(asked, tokens).diagonal().min()) >= 0.999 - 1e-9
        read = made.read(asked, tokens)
        assert torch.allclose(read, contents, atol=0.02)
        assert float((read @ label.T).abs().max()) < 1e-12
    with pytest.raises(DesignError, match="share directions"):
        isolate(basis[:3], basis[2:4], 1.0)
    with pytest.raises(DesignError, match="not independent"):
        isolate(torch.cat([basis[:1], basis[:1]]), basis[2:4], 1.0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: select(WORKED, 4), "no key 4; expected 0 to 3"),
        (lambda: select(WORKED, -1), "no key -1"),
        (lambda: average(WORKED, []), "no key is wanted"),
        (lambda: select(WORKED, 0, precision=1.0), "precision 1: expected more than 0.5"),
        (lambda: average(WORKED, [0, 1], precision=0.6), "precision 0.6: expected more than 0.6667"),
        (lambda: select(WORKED, 0, scale=0), "scale 0: expected a positive"),
        (lambda: select(WORKED[0], 0), r"keys \(3,\)"),
        (lambda: select(WORKED * float("nan"), 0), "row 0, coordinate 0 is nan"),
        (lambda: select(WORKED, 0, values=WORKED[:2]), "one row a key"),
        (lambda: fit(WORKED, (1, 2)), "one finite number a key"),
        (lambda: replace_key(WORKED, 0, WORKED[:, :2]), "queries of 2 numbers, keys of 3"),
        (lambda: replace_key(WORKED, 0, WORKED, unit=True), "4 queries for a key of unit length"),
        (lambda: select(tensor([[1e308], [-1e308]]), 0), "overflow"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_what_cannot_be_asked(call, said):
    with pytest.raises(DesignError, match=said):
        call()


def test_a_wrong_certificate_is_never_returned():
    """A mutant: coefficients that do not multiply out are an error, not a certificate."""
    with pytest.raises(DesignError, match="too near a tie to decide"):
        certificates._certificate(SQUARE.numpy(), (0,), [(1, 0.5), (2, 0.5)])


def test_a_wrong_solver_is_noticed(monkeypatch):
    """Mutants: least squares that finds nothing, and a linear program that stops anywhere, do no harm."""
    right = select(WORKED, 0)

    def stops_anywhere(cost, **given):
        return type("Solved", (), {"x": -np.ones_like(cost), "message": ""})

    monkeypatch.setattr("scipy.optimize.linprog", stops_anywhere)
    poor = answered(WORKED, [0])
    assert poor.feasible and poor.margin <= right.margin
    monkeypatch.setattr(certificates, "nonnegative_least_squares", lambda a, b: np.ones(a.shape[1]))
    with pytest.raises(DesignError):
        select(tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 1.0], [-1.0, -2.0]]), 0)


def test_importing_does_not_import_scipy():
    code = "import sys, regard.lab.design; sys.exit('scipy' in sys.modules or 'matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_certificate_can_be_checked_in_whole_numbers():
    """Corners of a square and its middle: the coefficients are fractions, and multiply out without rounding."""
    corners = [[0, 0], [4, 0], [0, 4], [4, 4], [1, 3]]
    mix = select(tensor(corners).double(), 4).certificate.others
    parts = {j: Fraction(c).limit_denominator(64) for j, c in mix}
    assert sum(parts.values()) == 1
    assert [sum(c * corners[j][k] for j, c in parts.items()) for k in (0, 1)] == [1, 3]


def test_the_outline_is_the_hull():
    points = np.array([[0.0, 0], [2, 0], [1, 0], [2, 2], [0, 2], [1, 1], [0, 0]])
    assert hulls.outline(points).tolist() == [[0, 0], [2, 0], [2, 2], [0, 2]]
    assert len(hulls.outline(points[:3])) == 2 and len(hulls.outline(points[:1])) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: average(WORKED, [0, 1]),
        lambda: select(SQUARE, 0),
        lambda: average(SQUARE, [0, 1]),
        lambda: select(tensor([[0.0, 0, 0], [1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]), 0),
        lambda: select(SQUARE[:1], 0),
        lambda: select(torch.eye(5), 2),
        lambda: identity(SQUARE),
        lambda: identity(WORKED),
        lambda: replace_key(SQUARE, 0, tensor([1.0, 0.5])),
        lambda: replace_key(WORKED, 0, WORKED[:2]),
        lambda: replace_key(2 * SQUARE, 0, tensor([0.1, 0.1]), unit=True),
        lambda: share_key(SQUARE, 0, tensor([0.0, 1.0]), [1, 2]),
        lambda: share_key(WORKED, 2, average(WORKED, [0, 1]).q, [0, 1]),
        lambda: design_head(*EXERCISE),
        lambda: design_head(EXERCISE[0][[0, 0]], EXERCISE[0][:2]),
    ],
)
def test_every_result_has_its_page(make):
    found = make()
    assert json.dumps(found.as_dict(), allow_nan=False)
    page = design_page(found).html()
    assert "Check it by hand" in page and ">nan<" not in page


app = typer.Typer()
app.command()(command)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "keys.csv").write_text("0.47,0.65,0.60\n0.64, 0.50, -0.59\n\n-0.03,-0.48,-0.88\n0.43,-0.83,0.35\n")
    (tmp_path / "q.csv").write_text("1,1,0\n")
    return tmp_path


def test_the_command(files):
    def said(*words):
        done = CliRunner().invoke(app, ["--keys", str(files / "keys.csv"), *words], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    assert "0.4950" in said("--average", "0,1", "--out", str(files / "page.html"))
    assert "<svg" in (files / "page.html").read_text()
    assert json.loads(said("--select", "1", "--json"))["feasible"] is True
    assert "corner" in said("--identity") and "0.5491" in said("--fit", "3,3,-2,-3")
    assert "In place of key 2" in said("--replace", "2", "--query", str(files / "q.csv"), "--unit")
    assert "reads" in said("--select", "0", "--values", str(files / "keys.csv"))
    matrix = said("--identity", "--values", str(files / "keys.csv"))
    assert "Q, a query a row:" in matrix and "reads:" in matrix
    shared = said("--replace", "2", "--query", str(files / "q.csv"), "--average", "0,2")
    assert "averages keys 0, 2" in shared
    (files / "x.csv").write_text("0,1,0,1\n1,0,0,0\n0,1,1,0\n")
    (files / "c.csv").write_text("0,1,-1,0\n0,1,0,0\n?\n")
    words = ["--tokens", str(files / "x.csv"), "--outputs", str(files / "c.csv"), "--out", str(files / "head.html")]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "anything" in done.output and "V = [" in done.output
    assert "A head by design" in (files / "head.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "got none"),
        (["--select", "0", "--identity"], "--select and --identity"),
        (["--replace", "0"], "needs --query"),
        (["--select", "0", "--unit"], "belong to --replace"),
        (["--fit", "1,2,3,4", "--values", "keys.csv"], "belongs to --select, --average and --identity"),
        (["--outputs", "keys.csv"], "needs --tokens"),
        (["--tokens", "keys.csv"], "belongs to --outputs"),
        (["--average", "0,x"], "'x' is not the number of a key"),
        (["--fit", "1,2,3,4", "--out", "page.html"], "no page for --fit"),
    ],
)
def test_what_the_command_refuses(files, monkeypatch, words, said):
    monkeypatch.chdir(files)
    with pytest.raises((OptionError, DesignError), match=said):
        CliRunner().invoke(app, ["--keys", "keys.csv", *words], catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1,2\n1,x\n", r"keys.csv, line 2: 'x' is not a finite number"),
        ("1,2\n\n1,2,3\n", r"line 3: 3 numbers; expected 2"),
        ("1,inf\n", r"line 1: 'inf'"),
        ("\n", "is empty"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_of_keys_says_which_line_is_wrong(tmp_path, text, said):
    path = tmp_path / "keys.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DesignError, match=said):
        read_rows(path)


def test_a_byte_order_mark_as_spreadsheets_write_it_is_no_number(tmp_path):
    (tmp_path / "keys.csv").write_bytes(b"\xef\xbb\xbf1,2\r\n3,4\r\n")
    assert read_rows(tmp_path / "keys.csv").tolist() == [[1, 2], [3, 4]]


@pytest.mark.timeout(20)
def test_a_device_without_an_end_is_refused():
    with pytest.raises(DesignError, match="/dev/zero, line 1: a NUL byte"):
        read_rows(Path("/dev/zero"))


def test_no_file(tmp_path):
    with pytest.raises(DesignError, match="No such file"):
        read_rows(tmp_path / "none.csv")
