"""Every annotated shape is verified at run time: jaxtyping and beartype watch a separate process use all mechanisms."""

from __future__ import annotations

import subprocess
import sys

import regard

HOOK = """
import torch
from jaxtyping import TypeCheckError, install_import_hook

with install_import_hook("regard", "beartype.beartype"):
    import regard
    from regard.mechanisms import Linear, fitted
from regard import Mask, Size

B, H, G, T, K, V = 2, 6, 3, 7, 5, 11
torch.manual_seed(0)
q, k, v = torch.randn(B, H, T, K), torch.randn(B, G, T, K), torch.randn(B, G, T, V)
visible = torch.arange(T) >= torch.tensor([[2], [0]])
documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [4, 4, 4, 4, 3, 3, 3]])


def made(name, **options):
    return fitted(name, Size.of(q, k, v), **({"features": 13} if name in ("performer", "fourier") else {}) | options)
"""

FACES = """
CUTS = [slice(0, 4), slice(4, 5), slice(5, 7)]


def faces(mechanism):
    masks = [Mask(), Mask(causal=True), Mask(visible=visible), Mask(causal=True, visible=visible)]
    masks += [Mask(causal=True, window=3), Mask(causal=True, visible=visible, window=3, documents=documents)]
    masks += [Mask(causal=True, documents=documents)]
    if not isinstance(mechanism, Linear) and mechanism.name != "similarity":
        masks += [Mask(causal=True, visible=visible, bias=torch.randn(H, T, T), slopes=torch.rand(H), softcap=3.0)]
    size = Size.of(q, k, v)
    for use in ("auto", "plain"):
        mechanism.use = use
        for mask in masks:
            assert mechanism(q, k, v, mask).shape == (B, H, T, V)
            assert mechanism.weights(q, k, mask).shape == (B, H, T, T)
            mechanism.unambiguous_rows(q, k, mask)
        assert mechanism(q[:, :, 4:], k, v, Mask(causal=True)).shape == (B, H, 3, V)
        for seen in (None, visible):
            for rules in (Mask(), Mask(window=3)):
                state = mechanism.empty(size, rules)
                for cut in CUTS:
                    new = None if seen is None else seen[:, cut]
                    out, state = mechanism.extend(q[:, :, cut], k[:, :, cut], v[:, :, cut], state, new)
                regard.fork(state)
                regard.fork(state, torch.tensor([1, 0, 1]))
            if mechanism.crosses:
                state = mechanism.write(mechanism.empty(size), k, v, seen)
                assert mechanism.read(q[:, :, :3], state).shape == (B, H, 3, V)
                assert mechanism.read(q, state, positions=torch.arange(T).expand(B, T)).shape == (B, H, T, V)
    for face in ("parallel", "recurrent", "weights"):
        mechanism.cost(size, face)


for name, options in SUBJECTS:
    faces(made(name, **options))
    small = (q / 2, k / 2)  # that random features can follow: a warning is an error here
    assert regard.attend(*small, v, name, True, visible, **options).shape == (B, H, T, V)
    print(name, options)
"""

WRONG = """
from regard.mechanisms import linear


def elu_with_narrow_results():
    kept, linear.concatenate = linear.concatenate, lambda parts: parts[0][..., :-1]
    try:
        return made("elu")(q, k, v)
    finally:
        linear.concatenate = kept


CALLS = {
    "'k'": [lambda: made("softmax")(q, k[:1], v), lambda: made("performer").weights(q[..., :3], k)],
    "'v'": [lambda: made("elu")(q, k, v[:, :, :4])],
    "'visible'": [
        lambda: made("elu").extend(q, k, v, made("elu").empty(Size.of(q, k, v)), visible[:, :4]),
        lambda: regard.attend(q, k, v, visible=visible.float()),
    ],
    "'q'": [lambda: made("softmax")(q.long(), k, v)],
    "'mask'": [lambda: made("softmax").unambiguous_rows(q, k, None)],
    "return": [elu_with_narrow_results],
}
for word, calls in CALLS.items():
    for call in calls:
        try:
            call()
        except TypeCheckError as error:
            assert word in str(error), error
            print("caught")
"""

SUBJECTS = [
    ("softmax", {}),
    ("softmax", {"scale": 1.0}),
    ("argmax", {}),
    ("argmax", {"gradient": "straight_through"}),
    ("elu", {}),
    ("polynomial", {"degree": 3, "offset": 1.0}),
    ("quadratic", {}),
    ("linear", {}),
    ("performer", {}),
    ("fourier", {}),
    ("gaussian", {}),
    ("similarity", {}),
    ("synthesizer", {}),
    ("synthesizer-random", {}),
    ("synthesizer-random", {"rank": 2}),
    ("synthesizer-random", {"learned": False}),
]


def watched(*parts):
    """What a process prints in which every annotation of regard is checked."""
    script = "\n".join([HOOK, *parts])
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"after {done.stdout!r}: {done.stderr[-3000:]}"
    return done.stdout.splitlines()


def test_every_face_keeps_to_its_annotated_shapes():
    both_ways = {name for name, cls in regard.mechanisms().items() if not cls.causal_only}
    assert {name for name, _ in SUBJECTS} == both_ways
    assert watched(f"SUBJECTS = {SUBJECTS!r}", FACES) == [f"{name} {options}" for name, options in SUBJECTS]


def test_wrong_arguments_and_wrong_results_are_caught_there():
    assert watched(WRONG) == 8 * ["caught"]
