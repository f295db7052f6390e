"""flash-linear-attention as a kernel: what its functions are given, with stand-ins that have their arguments."""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from regard.errors import KernelError
from regard.kernels import fast, plain
from regard.kernels.recurrence import fla, register_fla
from regard.mechanisms import mechanism
from regard.shapes import Mask, Size

KINDS = [
    ("retention", {}, "simple_gla"),
    ("gated", {}, "simple_gla"),
    ("gated", {"channels": True}, "gla"),
    ("delta", {"range": 2.0}, "delta_rule"),
    ("gated-delta", {}, "gated_delta_rule"),
    ("gated-delta", {"channels": True}, "kda"),
]
kinds = pytest.mark.parametrize(("name", "options", "module"), KINDS, ids=lambda x: str(x))


def recur(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, token):
    """The recurrence over [B,T,H,·] as those functions have it: every tensor as they want it, one head for each v."""
    B, T, H, K = q.shape
    assert k.shape == q.shape and v.shape[:3] == (B, T, H)
    for x in (q, k, v, g, beta, initial_state):
        assert x is None or x.is_contiguous()
    for x in (g, beta, initial_state):
        assert x is None or x.dtype == torch.float32
    assert g is None or g.shape in ((B, T, H), (B, T, H, K))
    assert beta is None or beta.shape == (B, T, H)
    assert not token or T == 1
    bounds = [0, T]
    if cu_seqlens is not None:
        assert B == 1 and cu_seqlens.dtype == torch.long and initial_state is None
        bounds = cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == T
    outs = []
    S = None
    for start, stop in pairwise(bounds):
        S = q.new_zeros(B, H, K, v.shape[3]) if initial_state is None else initial_state
        for t in range(start, stop):
            if g is not None:
                S = g[:, t].reshape(B, H, -1, 1).exp() * S
            new = v[:, t]
            if beta is not None:
                new = beta[:, t, :, None] * (new - (S * k[:, t, :, :, None]).sum(2))
            S = S + k[:, t, :, :, None] * new[:, :, None]
            outs.append(scale * (S * q[:, t, :, :, None]).sum(2))
    return torch.stack(outs, 1), S if output_final_state else None


def stand_ins(calls):
    """The functions of fla 0.6, by module, with the arguments of theirs that regard gives."""
    modules = {}
    chunk = {"simple_gla": "g", "gla": "g", "delta_rule": None, "gated_delta_rule": "g", "kda": "g"}
    for module, decay in chunk.items():
        modules[module] = ModuleType(f"fla.ops.{module}")
        for kind, named in (("chunk", decay), ("fused_recurrent", "gk" if module == "gla" else decay)):

            def function(
                q, k, v, *, scale, initial_state=None, output_final_state=False, cu_seqlens=None,
                module=module, kind=kind, named=named, **given,
            ):  # fmt: skip
                calls.append(f"{kind}_{module}")
                g = given.pop(named) if named else None
                beta = given.pop("beta") if module in ("delta_rule", "gated_delta_rule", "kda") else None
                assert not given, f"{kind}_{module} has no argument {list(given)}"
                token = kind == "fused_recurrent"
                return recur(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, token)

            setattr(modules[module], f"{kind}_{module}", function)
    return modules


@pytest.fixture
def calls(monkeypatch):
    """The names of the functions that were called, with stand-ins in their places and float32 allowed."""
    called = []
    for module, found in stand_ins(called).items():
        monkeypatch.setitem(sys.modules, f"fla.ops.{module}", found)
    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setattr(register_fla, "_runs_fla", lambda x: True)
    monkeypatch.setattr(register_fla, "_DTYPES", (torch.float32,))
    return called


def draw(m, B=2, queries=4, keys=2, G=2, T=21, K=5, V=3):
    torch.manual_seed(0)
    q, k, v = torch.randn(B, queries, T, K), torch.randn(B, keys, T, K), torch.randn(B, G, T, V)
    gates = {}
    if "a" in m.needs:
        gates["a"] = -functional.softplus(2 * torch.randn((B, G, T, K) if m.channels else (B, G, T)))
    if "b" in m.needs or m.name == "gated":
        gates["b"] = m.range * torch.rand(B, G, T)
    inputs = [q, functional.normalize(k, dim=-1), v, *gates.values()]
    return [x.requires_grad_() for x in inputs], list(gates)


@kinds
@pytest.mark.parametrize(
    ("heads", "rule"),
    [((2, 2, 2), "none"), ((6, 2, 2), "visible"), ((1, 1, 3), "documents"), ((4, 2, 4), "visible")],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_the_reference(calls, name, options, module, heads, rule):
    m = mechanism(name, **options)
    inputs, names = draw(m, 2, *heads)
    mask = Mask(causal=True)
    if rule == "visible":
        mask = mask.but(visible=torch.rand(2, 21) > 0.4)
    if rule == "documents":
        ids = torch.tensor([[0] * 4 + [1] * 17, [3] * 1 + [7] * 12 + [3] * 8])
        mask = mask.but(documents=ids, visible=torch.rand(2, 21) > 0.2)
    results = []
    for choose in (plain, lambda m: fast(m, "fla")):
        out = choose(m)(*inputs[:3], mask, **dict(zip(names, inputs[3:], strict=True)))
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        results.append([out, *torch.autograd.grad((out * direction).sum(), inputs)])
    assert calls == [f"chunk_{module}"]
    for want, got in zip(*results, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert (got - want).abs().max() <= 5e-6 * want.abs().max()


@kinds
def test_a_state_goes_on_and_a_hidden_token_leaves_it_as_it_was(calls, name, options, module):
    m = mechanism(name, checks=False, **options)
    inputs, names = draw(m)
    q, k, v = (x.detach() for x in inputs[:3])
    visible = torch.rand(2, 21) > 0.3
    visible[:, 13] = False
    results = []
    for choose in (plain, lambda m: fast(m, "fla")):
        choose(m)
        state = m.empty(Size(B=2, H=4, G=2, K=5, V=3))
        outs = []
        for start, stop in ((0, 12), (12, 13), (13, 14), (14, 21)):
            here = slice(start, stop)
            gates = {n: x.detach()[:, :, here] for n, x in zip(names, inputs[3:], strict=True)}
            before = state.memory
            out, state = m.extend(q[:, :, here], k[:, :, here], v[:, :, here], state, visible[:, here], **gates)
            outs.append(out)
            if start == 13:
                assert torch.equal(state.memory, before)
        results.append([torch.cat(outs, 2), state.memory, state.tokens])
    assert calls == [f"{kind}_{module}" for kind in ("chunk", "fused_recurrent", "fused_recurrent", "chunk")]
    for want, got in zip(*results, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert (got - want).abs().max() <= 5e-6 * want.abs().max()


def test_strong_decays_are_limited_where_sums_are_kept_in_float32(calls, monkeypatch):
    seen = []
    found = sys.modules["fla.ops.simple_gla"].chunk_simple_gla
    watched = lambda **given: (seen.append(given["g"]), found(**given))[1]  # noqa: E731
    monkeypatch.setattr(sys.modules["fla.ops.simple_gla"], "chunk_simple_gla", watched)
    m = fast(mechanism("gated"), "fla")
    q = torch.randn(1, 1, 4, 5)
    a = torch.tensor([[[-1.0, float("-inf"), -1000.0, -2.0]]])
    out = m(q, q, q, Mask(causal=True), a=a)
    assert seen[0].flatten().tolist() == [-1.0, -100.0, -100.0, -2.0]
    torch.testing.assert_close(out, plain(m)(q, q, q, Mask(causal=True), a=a))


def test_it_runs_only_where_it_is_asked_for_and_says_what_it_lacks(monkeypatch):
    q = torch.randn(1, 2, 8, 5)
    a = torch.zeros(1, 2, 8)
    causal = Mask(causal=True)
    with pytest.raises(KernelError, match="needs a CUDA device and flash-linear-attention"):
        fast(mechanism("gated"), "fla")(q, q, q, causal, a=a)
    monkeypatch.setattr(register_fla, "_runs_fla", lambda x: True)
    assert "not been judged" in register_fla._refuses_forward(mechanism("gated"), q, q, q, causal, a, None)
    asked = fast(mechanism("gated"), "fla")
    half, wide = q.bfloat16(), torch.randn(1, 2, 8, 300).bfloat16()
    assert register_fla._refuses_forward(asked, half, half, half, causal, a, None) is None
    for bad, words in (((q, q, q), "bfloat16"), ((half[:, :, :3], half, half), "as many"), ((wide, wide, half), "256")):
        assert words in register_fla._refuses_forward(asked, *bad, causal, a, None)
    token = half[:, :, :1].requires_grad_()
    state = asked.empty(Size(B=1, H=2, G=2, K=5, V=5))
    assert "gradient" in register_fla._refuses_extend(asked, token, token, token, state, None, a[:, :, :1], None)
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(KernelError, match=r"chunk_simple_gla of fla\.ops\.simple_gla"):
        fla._load("simple_gla", "chunk_simple_gla")
