"""Bad input: each is refused by a RegardError that names the shapes or values and says what to do."""

from __future__ import annotations

import re

import pytest
import torch

import regard
from regard import Mask, RegardError, Size, kernels
from regard.errors import (
    KernelError,
    LengthError,
    MaskError,
    NegativeSimilarityError,
    OptionError,
    ShapeError,
    UnknownNameError,
    ZeroRowError,
)
from regard.mechanisms import fitted
from regard.mechanisms.base import MECHANISMS
from regard.registry import accepted_options, accepts, accepts_any_keyword

PAIRWISE = ["softmax", "argmax"]
LINEAR = ["elu", "quadratic", "linear", "performer", "fourier"]
POSITIONAL = ["synthesizer", "synthesizer-random"]
CROSSING = [*PAIRWISE, *LINEAR]
ALL = [*CROSSING, *POSITIONAL]

B, H, G, T, K, V = 2, 6, 3, 7, 5, 11
SIZE = Size(B, T, T, H, G, K, V)
Q, KEYS, VALUES = torch.ones(B, H, T, K), torch.ones(B, G, T, K), torch.ones(B, G, T, V)


def made(name, **options):
    return fitted(name, SIZE, **({"features": 13} if name in ("performer", "fourier") else {}) | options)


def refused(kind, *fragments):
    """Expects an error of this kind whose message holds every fragment."""
    pattern = "".join(f"(?=.*{re.escape(f)})" for f in fragments)
    assert issubclass(kind, RegardError)
    return pytest.raises(kind, match=f"(?s)^{pattern}")


def written(mechanism):
    return mechanism.write(mechanism.empty(SIZE), KEYS, VALUES)


# Shapes


@pytest.mark.parametrize("name", ALL)
def test_inputs_need_four_dimensions(name):
    mechanism = made(name)
    for q, k, v, which, want, shown in (
        (Q[0], KEYS, VALUES, "q has 3", "[B,H,T,K]", "q [6, 7, 5]"),
        (Q, KEYS[0], VALUES, "k has 3", "[B,G,S,K]", "k [3, 7, 5]"),
        (Q, KEYS, VALUES[0], "v has 3", "[B,G,S,V]", "v [3, 7, 11]"),
        (Q[None], KEYS, VALUES, "q has 5", "[B,H,T,K]", "q [1, 2, 6, 7, 5]"),
    ):
        with refused(ShapeError, which, "expected 4", want, shown):
            mechanism(q, k, v)
        with refused(ShapeError, which, "expected 4", want, shown):
            mechanism.extend(q, k, v, mechanism.empty(SIZE))


@pytest.mark.parametrize("name", ALL)
def test_batches_heads_lengths_and_widths_must_agree(name):
    mechanism = made(name)
    for q, k, v, *shown in (
        (Q[:1], KEYS, VALUES, "must agree", "q [1, 6, 7, 5]", "v [2, 3, 7, 11]"),
        (Q, KEYS[:1], VALUES, "must agree", "k [1, 3, 7, 5]"),
        (Q, KEYS, VALUES[:, :1], "must agree", "v [2, 1, 7, 11]"),
        (Q, KEYS[:, :, :4], VALUES, "must agree", "k [2, 3, 4, 5]"),
        (Q[..., :3], KEYS, VALUES, "same width K", "q [2, 6, 7, 3]", "k [2, 3, 7, 5]"),
        (Q[:, :4], KEYS, VALUES, "G = 3", "do not divide H = 4", "q [2, 4, 7, 5]"),
    ):
        with refused(ShapeError, *shown):
            mechanism(q, k, v)
        with refused(ShapeError, *shown):
            mechanism.extend(q, k, v, mechanism.empty(SIZE))
    with refused(ShapeError, "do not divide H = 4"):
        regard.attend(Q[:, :4], KEYS, VALUES, "softmax")


@pytest.mark.parametrize("name", CROSSING)
def test_the_weights_refuse_what_the_other_faces_refuse(name):
    mechanism = made(name)
    for q, k, mask, *shown in (
        (Q[0], KEYS, Mask(), "q", "[6, 7, 5]"),
        (Q[:1], KEYS, Mask(), "[1, 6, 7, 5]", "[2, 3, 7, 5]"),
        (Q[..., :3], KEYS, Mask(), "width", "[2, 6, 7, 3]"),
        (Q[:, :4], KEYS, Mask(), "G = 3", "H = 4"),
        (Q, KEYS, Mask(visible=torch.ones(B, 6, dtype=torch.bool)), "visible", "[2, 6]", "[2, 7]"),
    ):
        with refused(ShapeError, *shown):
            mechanism.weights(q, k, mask)


@pytest.mark.parametrize("name", CROSSING)
def test_reading_a_state_needs_queries_that_fit_it(name):
    mechanism = made(name)
    for q, *shown in (
        (Q[0], "q", "[6, 7, 5]"),
        (Q[:1], "[1, 6, 7, 5]"),
        (Q[:, :4], "[2, 4, 7, 5]"),
        (Q[..., :3], "width"),
    ):
        with refused(ShapeError, *shown):
            mechanism.read(q, written(mechanism))


@pytest.mark.parametrize("name", ALL)
def test_a_state_takes_only_tokens_of_its_own_sizes(name):
    mechanism = made(name)
    for q, k, v, given, kept in (
        (Q[:1], KEYS[:1], VALUES[:1], "[1, 3, 7, 11]", "2"),  # would be written to both rows
        (Q, KEYS[:, :1], VALUES[:, :1], "[2, 1, 7, 11]", "3"),  # would be written to all heads
        (Q, KEYS, VALUES[..., :4], "[2, 3, 7, 4]", "11"),
    ):
        with refused(ShapeError, "state", given, kept):
            mechanism.extend(q, k, v, mechanism.empty(SIZE))
        if mechanism.crosses:
            with refused(ShapeError, "state", given, kept):
                mechanism.write(mechanism.empty(SIZE), k, v)


@pytest.mark.parametrize("name", [*PAIRWISE, "elu", "performer"])
def test_a_state_takes_only_keys_of_its_own_width(name):
    mechanism = made(name)
    with refused(ShapeError, "width", "3", "5"):
        mechanism.extend(Q[..., :3], KEYS[..., :3], VALUES, mechanism.empty(SIZE))


@pytest.mark.parametrize("name", ["performer", "fourier", "synthesizer"])
def test_a_mechanism_built_for_one_width_refuses_another(name):
    with refused(ShapeError, name, "width", "5", "3"):
        made(name)(Q[..., :3], KEYS[..., :3], VALUES)


@pytest.mark.parametrize("name", POSITIONAL)
def test_a_synthesizer_refuses_another_number_of_heads(name):
    with refused(ShapeError, name, "6", "3"):
        made(name)(Q[:, :3], KEYS, VALUES)


@pytest.mark.parametrize("name", ALL)
def test_extending_takes_as_many_queries_as_keys(name):
    mechanism = made(name)
    with refused(ShapeError, "T = S", "use read", "q [2, 6, 3, 5]", "k [2, 3, 7, 5]"):
        mechanism.extend(Q[:, :, :3], KEYS, VALUES, mechanism.empty(SIZE))


def test_random_synthesizer_weights_without_q_and_k_need_a_size():
    with refused(ShapeError, "Mask(size_override=(T, S))"):
        made("synthesizer-random").weights()


# Masks


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("rules", "kind", "fragments"),
    [
        ({"visible": torch.ones(B, T)}, ShapeError, ["visible", "torch.float32", "expected bool", "visible.bool()"]),
        ({"visible": torch.ones(B, T, dtype=torch.long)}, ShapeError, ["visible", "torch.int64", "expected bool"]),
        ({"visible": torch.ones(T, dtype=torch.bool)}, ShapeError, ["visible", "[7]", "[B,S] = [2, 7]"]),
        ({"visible": torch.ones(B, 6, dtype=torch.bool)}, ShapeError, ["visible", "[2, 6]", "[B,S] = [2, 7]"]),
        ({"documents": torch.zeros(B, 6, dtype=torch.long)}, ShapeError, ["documents", "[2, 6]", "[2, 7]"]),
        ({"window": 0}, MaskError, ["window = 0", "at least 1"]),
        ({"softcap": -1.0}, MaskError, ["softcap = -1.0", "positive"]),
        ({"softcap": 0.0}, MaskError, ["softcap = 0.0", "positive"]),
        ({"slopes": torch.ones(G)}, ShapeError, ["slopes", "[3]", "[6]"]),
        ({"bias": torch.ones(B, H, T, 6)}, ShapeError, ["bias", "[2, 6, 7, 6]", "[2, 6, 7, 7]"]),
        ({"bias": torch.ones(1, 1, 1, T, T)}, ShapeError, ["bias", "[1, 1, 1, 7, 7]", "[B,H,T,S]"]),
    ],
    ids=lambda x: (
        "-".join(f"{n}{list(getattr(v, 'shape', ''))}" for n, v in x.items()) if isinstance(x, dict) else None
    ),
)
def test_a_mask_must_fit(name, rules, kind, fragments):
    with refused(kind, *fragments):
        made(name)(Q, KEYS, VALUES, Mask(causal=True, **rules))


@pytest.mark.parametrize("name", ALL)
def test_visible_must_fit_when_extending_too(name):
    mechanism = made(name)
    with refused(ShapeError, "visible", "[2, 6]", "[2, 7]"):
        mechanism.extend(Q, KEYS, VALUES, mechanism.empty(SIZE), torch.ones(B, 6, dtype=torch.bool))
    with refused(ShapeError, "visible", "expected bool"):
        mechanism.extend(Q, KEYS, VALUES, mechanism.empty(SIZE), torch.ones(B, T))


@pytest.mark.parametrize("name", ALL)
def test_causal_queries_are_the_last_keys_so_there_are_no_more_of_them(name):
    with refused(ShapeError, "T = 7", "S = 3", "T ≤ S"):
        made(name)(Q, KEYS[:, :, :3], VALUES[:, :, :3], Mask(causal=True))


@pytest.mark.parametrize("name", CROSSING)
def test_a_window_over_another_sequence_needs_places(name):
    with refused(MaskError, "3 queries over 7 keys", "Mask(rows=Rows(position, limit))"):
        made(name)(Q[:, :, :3], KEYS, VALUES, Mask(window=2))


@pytest.mark.parametrize("name", CROSSING)
def test_reading_with_a_window_needs_places(name):
    mechanism = made(name)
    state = mechanism.write(mechanism.empty(SIZE, Mask(window=2)), KEYS, VALUES)
    with refused(MaskError, "window", "read(q, state, positions=[B,T])"):
        mechanism.read(Q, state)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_mechanisms_have_no_score_to_shape(name):
    mechanism = made(name)
    for field, x in (("bias", torch.ones(T, T)), ("slopes", torch.ones(H)), ("softcap", 2.0)):
        mask = Mask(**{field: x})
        for run in (
            lambda mask=mask: mechanism(Q, KEYS, VALUES, mask),
            lambda mask=mask: mechanism.weights(Q, KEYS, mask),
            lambda mask=mask: mechanism.empty(SIZE, mask),
        ):
            with refused(MaskError, f"{name} cannot honour '{field}'", "products of features", "use 'softmax'"):
                run()
    with refused(MaskError, f"{name} cannot honour 'bias'"):
        mechanism.read(Q, written(mechanism), bias=torch.ones(T, T))


@pytest.mark.parametrize("name", ALL)
def test_a_state_holds_one_document(name):
    with refused(MaskError, "'documents'", "a state holds one document"):
        made(name).empty(SIZE, Mask(documents=torch.zeros(B, T, dtype=torch.long)))


@pytest.mark.parametrize("name", PAIRWISE)
def test_what_belongs_to_single_calls_is_refused_in_a_state_for_that_reason(name):
    for field, x, place in (
        ("visible", torch.ones(B, T, dtype=torch.bool), "extend"),
        ("bias", torch.ones(T, T), "read"),
    ):
        with refused(MaskError, f"'{field}'", place) as caught:
            made(name).empty(SIZE, Mask(**{field: x}))
        assert "no score" not in str(caught.value) and "use 'softmax'" not in str(caught.value)


@pytest.mark.parametrize("name", ALL)
def test_the_rules_of_a_state_are_checked_when_it_is_made(name):
    with refused(MaskError, "window = 0", "at least 1"):
        made(name).empty(SIZE, Mask(window=0))
    if name in LINEAR:
        return
    with refused(MaskError, "softcap = -2.0", "positive"):
        made(name).empty(SIZE, Mask(softcap=-2.0))
    with refused(ShapeError, "slopes", "[3]", "[6]"):
        made(name).empty(SIZE, Mask(slopes=torch.ones(G)))


# Synthesizers


@pytest.mark.parametrize("name", POSITIONAL)
def test_synthesizers_have_no_cross_attention(name):
    mechanism = made(name)
    for run in (
        lambda: mechanism(Q[:, :, :3], KEYS, VALUES),
        lambda: mechanism.write(mechanism.empty(SIZE), KEYS, VALUES),
        lambda: mechanism.read(Q, mechanism.empty(SIZE)),
    ):
        with refused(MaskError, f"{name} has no cross-attention", "positions of one sequence", "Use 'softmax'"):
            run()


@pytest.mark.parametrize("name", POSITIONAL)
def test_synthesizers_refuse_more_visible_tokens_than_they_were_built_for(name):
    mechanism = made(name)
    q, k, v = (torch.cat([x, x[:, :, :2]], 2) for x in (Q, KEYS, VALUES))
    seen = torch.ones(B, 9, dtype=torch.bool)
    for mask in (Mask(), Mask(causal=True), Mask(visible=seen), Mask(causal=True, visible=seen)):
        with refused(LengthError, name, "9 visible tokens", "length = 7", "length ≥ 9"):
            mechanism(q, k, v, mask)
    for visible in (None, seen):
        state = mechanism.empty(SIZE)
        _, state = mechanism.extend(Q, KEYS, VALUES, state, None if visible is None else visible[:, :7])
        step = [x[:, :, 7:8] for x in (q, k, v)]
        with refused(LengthError, name, "8 visible tokens", "length = 7", "length ≥ 8"):
            mechanism.extend(*step, state, None if visible is None else visible[:, 7:8])


# Names and options


@pytest.mark.parametrize(
    ("name", "meant"), [("sofmax", "softmax"), ("performr", "performer"), ("synthesiser", "synthesizer")]
)
def test_an_unknown_mechanism_is_answered_with_the_nearest(name, meant):
    for run in (lambda: regard.mechanism(name), lambda: regard.attend(Q, KEYS, VALUES, name)):
        with refused(UnknownNameError, f"'{name}'", f"Did you mean '{meant}'?", "Known: argmax, delta, elu"):
            run()


def test_a_name_like_no_other_is_answered_with_the_list():
    with refused(UnknownNameError, "'xyzzy'", "Known: ") as caught:
        regard.mechanism("xyzzy")
    assert "Did you mean" not in str(caught.value)


def test_an_unknown_option_is_named_with_those_that_exist():
    with refused(OptionError, "'performer'", "'feature'", "features, width, seed, strict"):
        regard.mechanism("performer", feature=3)
    with refused(OptionError, "'softmax'", "'features'", "scale"):
        regard.attend(Q, KEYS, VALUES, "softmax", features=3)
    with refused(OptionError, "'elu'", "'scale'", "strict"):
        regard.mechanism("elu", scale=3)


def test_a_missing_option_is_named():
    with refused(OptionError, "'synthesizer'", "'width'", "heads, width, length"):
        regard.mechanism("synthesizer", heads=2, length=3)


def test_options_beside_a_built_mechanism_are_not_silently_dropped():
    with refused(OptionError, "features", "built"):
        regard.attend(Q, KEYS, VALUES, regard.mechanism("elu"), features=3)


@pytest.mark.parametrize(
    ("name", "options", "fragments"),
    [
        ("performer", {"features": 0}, ["features = 0", "at least 1"]),
        ("fourier", {"features": -2}, ["features = -2", "at least 1"]),
        ("performer", {"width": 0}, ["width = 0", "at least 1"]),
        ("argmax", {"gradient": "soft"}, ["gradient = 'soft'", "'none'", "'straight_through'"]),
        ("synthesizer", {"heads": 2, "width": 5, "length": 0}, ["length = 0", "at least 1"]),
        ("synthesizer", {"heads": 0, "width": 5, "length": 3}, ["heads = 0", "at least 1"]),
        ("synthesizer", {"heads": 2, "width": 0, "length": 3}, ["width = 0", "at least 1"]),
        ("synthesizer-random", {"heads": 2, "length": 3, "rank": 0}, ["rank = 0", "at least 1"]),
    ],
)
def test_options_out_of_range_are_refused(name, options, fragments):
    with refused(OptionError, *fragments):
        regard.mechanism(name, **options)


# Row sums of zero


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_sum_of_zero_is_an_error_under_strict(causal):
    strict = regard.mechanism("linear", phi=torch.relu, strict=True)
    with refused(ZeroRowError, "linear", "sum to zero", "positive", "strict=False"):
        strict(-Q, KEYS, VALUES, Mask(causal=causal))


# Kernels


def test_an_unknown_kernel_is_named_with_those_that_exist():
    with refused(KernelError, "softmax has no kernel called 'spda'", "Did you mean 'sdpa'?", "Known: auto, flex, sdpa"):
        kernels.fast(regard.mechanism("softmax"), "spda")
    with refused(KernelError, "elu has no kernel called 'sdpa'", "Known: "):
        kernels.fast(regard.mechanism("elu"), "sdpa")


@pytest.mark.parametrize("name", ["softmax", *POSITIONAL])
def test_a_kernel_asked_for_by_name_says_why_it_cannot_run(name):
    mechanism = kernels.fast(made(name), "sdpa")
    with refused(KernelError, f"kernel 'sdpa' of {name}", "no softcap", "fast(model)"):
        mechanism(Q, KEYS, VALUES, Mask(softcap=2.0))
    kernels.fast(mechanism)(Q, KEYS, VALUES, Mask(softcap=2.0))


def test_a_mechanism_told_to_use_no_kernel_that_exists_says_so():
    softmax = regard.mechanism("softmax")
    softmax.use = "flash"
    with refused(KernelError, "'flash'"):
        softmax(Q, KEYS, VALUES)


# One family


def test_all_errors_are_of_one_family_and_of_the_kind_python_expects():
    for kind, like in (
        (ShapeError, ValueError),
        (MaskError, ValueError),
        (LengthError, ValueError),
        (ZeroRowError, ArithmeticError),
        (NegativeSimilarityError, ArithmeticError),
        (KernelError, RuntimeError),
        (UnknownNameError, LookupError),
        (OptionError, TypeError),
    ):
        assert issubclass(kind, RegardError) and issubclass(kind, like)


# Signatures


def test_options_are_filtered_by_the_parameters_that_a_function_names():
    def takes(a, b=2): ...

    def takes_all(a, **more): ...

    assert accepts(takes, "b") and not accepts(takes, "c") and not accepts(takes_all, "c")
    assert accepts_any_keyword(takes_all) and not accepts_any_keyword(takes)
    assert accepted_options(takes, {"c": 3, "b": 4}) == {"b": 4}


@pytest.mark.parametrize(
    ("name", "ours"),
    [("flash", "softmax"), ("GQA", "softmax"), ("retnet", "retention"), ("gated_deltanet", "gated-delta")],
)
def test_a_mechanism_of_another_name_gets_ours(name, ours):
    with refused(UnknownNameError, f"no mechanism is called '{name}'. Here it is '{ours}'. Known: argmax"):
        regard.attend(Q, KEYS, VALUES, name)


def test_every_name_that_is_ours_for_another_is_one_and_no_other():
    for theirs, ours in MECHANISMS.elsewhere.items():
        assert ours in MECHANISMS and theirs not in MECHANISMS and theirs == theirs.lower().replace("_", "-")
