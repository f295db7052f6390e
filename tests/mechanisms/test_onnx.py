"""ONNX's own conformance cases of Attention and LinearAttention: numbers that nobody here wrote.

Attention of ONNX knows more masks than rules have names for (a causal half that begins at the first key, windows of two
widths, caches with padding); what they add up to is handed to `regard.attend` as a bias.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.laws.case import difference
from regard.mechanisms import Memory, Softmax, scores
from regard.shapes import Mask, Size

onnx = pytest.importorskip("onnx", minversion="1.23")

LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# What the operator calls its four rules; without a decay nothing is forgotten.
RULES = {"linear": "gated", "gated": "gated", "delta": "delta", "gated_delta": "gated-delta"}


@cache
def cases(operator: str) -> dict[str, Any]:
    """Returns the cases of an operator by name; those that expand it into other operators have the same numbers.

    Only the module of the operator is collected: all 1,884 cases of ONNX take seconds.
    """
    from onnx.backend.test.case import node
    from onnx.backend.test.case.node import attention, linear_attention  # noqa: F401  # they say what is collected

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = node.collect_testcases(operator)
    return {c.name: c for c in found if c.model.graph.node[0].op_type == operator}


def named(operator: str) -> list[str]:
    return sorted(cases(operator))


def tensor(x: Any) -> Tensor:
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(x))


def unpacked(case: Any) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Returns the attributes, inputs and outputs of a case by the names that the operator's signature gives them."""
    node = case.model.graph.node[0]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    given, wanted = case.data_sets[0]
    schema = onnx.defs.get_schema(node.op_type, case.model.opset_import[0].version)
    sides = []
    for formal, names, values in ((schema.inputs, node.input, given), (schema.outputs, node.output, wanted)):
        used = [f.name for f, name in zip(formal, names, strict=False) if name]
        sides.append(dict(zip(used, (tensor(x) for x in values), strict=True)))
    return attributes, sides[0], sides[1]


def split_heads(x: Tensor, heads: int | None) -> Tensor:
    """Returns [B,H,T,X] from [B,T,H·X]."""
    if x.dim() == 4 or heads is None:
        return x
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def test_there_are_as_many_cases_as_are_counted():
    assert (len(named("Attention")), len(named("LinearAttention"))) == (93, 14)


@pytest.mark.parametrize("name", named("LinearAttention"))
@pytest.mark.parametrize("use", ["auto", "plain", "steps"])
def test_linear_attention(name, use):
    attributes, given, wanted = unpacked(cases("LinearAttention")[name])
    rule = attributes.get("update_rule", b"gated_delta").decode()
    H, G = attributes["q_num_heads"], attributes["kv_num_heads"]
    q = split_heads(given["query"], H)
    k, v = (split_heads(given[n], G) for n in ("key", "value"))
    B, _, T, K = k.shape
    gates = {}
    if rule in ("linear", "gated", "gated_delta"):
        decay = given.get("decay", torch.zeros(B, T, G))
        a = decay.transpose(1, 2)
        if decay.shape[2] == G * K:
            a = split_heads(decay, G)
        gates["a"] = a
    if "beta" in given:
        gates["b"] = given["beta"].transpose(1, 2).expand(B, G, T)
    channels = "a" in gates and gates["a"].dim() == 4
    options = {"channels": True} if channels else {}
    m = regard.mechanism(RULES[rule], scale=attributes.get("scale"), **options)
    if use == "plain":
        m.use = "plain"
    state = m.empty(Size.of(q, k, v))
    if "past_state" in given:
        state = Memory(given["past_state"].to(state.memory.dtype), state.tokens)
    if use == "steps":
        parts = []
        for t in range(T):
            now = slice(t, t + 1)
            one = {n: x[:, :, now] for n, x in gates.items()}
            part, state = m.extend(q[:, :, now], k[:, :, now], v[:, :, now], state, **one)
            parts.append(part)
        out = torch.cat(parts, 2)
    else:
        if "past_state" not in given:
            whole = regard.attend(q, k, v, m, causal=True, **gates)
            assert difference(whole.transpose(1, 2).flatten(2), wanted["output"]) <= LIMIT[q.dtype]
        out, state = m.extend(q, k, v, state, **gates)
    assert difference(out.transpose(1, 2).flatten(2), wanted["output"]) <= LIMIT[q.dtype]
    assert difference(state.memory, wanted["present_state"]) <= LIMIT[q.dtype]


def bias_of(attributes: dict[str, Any], given: dict[str, Tensor], B: int, T: int, S: int) -> Tensor | None:
    """Returns all masks of a case as what they add to scores, [B,·,T,S]."""
    past = given["past_key"].shape[2] if "past_key" in given else 0
    length = given.get("nonpad_kv_seqlen")
    offset = torch.tensor(past).expand(B)
    if length is not None:
        offset = length - T
    behind = torch.arange(T)[:, None] + offset[:, None, None] - torch.arange(S)  # [B,T,S]
    allowed = torch.ones(B, T, S, dtype=torch.bool)
    if attributes.get("is_causal"):
        allowed &= behind >= 0
    if attributes.get("left_window_size", -1) >= 0:
        allowed &= behind <= attributes["left_window_size"]
    if attributes.get("right_window_size", -1) >= 0:
        allowed &= -behind <= attributes["right_window_size"]
    if length is not None:
        allowed &= (torch.arange(S) < length[:, None])[:, None]
    bias = torch.zeros(B, 1, T, S).masked_fill(~allowed[:, None], float("-inf"))
    mask = given.get("attn_mask")
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        short = S - mask.shape[-1]
        bias = bias + torch.nn.functional.pad(mask.float(), (0, short), value=float("-inf"))
    return bias


@pytest.mark.parametrize("name", named("Attention"))
@pytest.mark.parametrize("use", ["auto", "plain"])
def test_attention(name, use):
    attributes, given, wanted = unpacked(cases("Attention")[name])
    q = split_heads(given["Q"], attributes.get("q_num_heads"))
    k, v = (split_heads(given[n], attributes.get("kv_num_heads")) for n in "KV")
    if "past_key" in given:
        k = torch.cat([given["past_key"], k], 2)
        v = torch.cat([given["past_value"], v], 2)
        for made, got in ((k, "present_key"), (v, "present_value")):
            if got in wanted:
                assert torch.equal(made, wanted[got])
    B, _, T, K = q.shape
    S = k.shape[2]
    limit = LIMIT[q.dtype]
    scale = attributes.get("scale")
    softcap = attributes.get("softcap") or None
    bias = bias_of(attributes, given, B, T, S)
    m = Softmax(scale)
    m.use = use
    out = regard.attend(q, k, v, m, bias=bias, softcap=softcap)
    if given["Q"].dim() == 3:
        out = out.transpose(1, 2).flatten(2)
    assert difference(out, wanted["Y"]) <= limit
    if "qk_matmul_output" in wanted:
        raw = scores(q * m.score_scale(K), k, Mask())
        mode = attributes.get("qk_matmul_output_mode", 0)
        mask = Mask(bias=bias, softcap=softcap)
        made = {
            0: raw,
            1: Mask(softcap=softcap).adjusted_scores(raw),
            2: mask.adjusted_scores(raw),
            3: m.weights(q, k, mask),
        }[mode]
        want = wanted["qk_matmul_output"]
        seen = want.isfinite()
        assert torch.equal(made.isfinite(), seen)
        assert difference(made[seen], want[seen]) <= limit
