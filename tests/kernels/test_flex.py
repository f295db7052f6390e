"""Rules as FlexAttention gets them, on a CPU: which blocks it visits, and what it computes without being compiled."""

import math

import pytest
import torch
from torch.nn.functional import pad

from regard.kernels import flex, plain
from regard.mechanisms import Softmax, mechanism
from regard.shapes import Mask, Rows

B, H, G, K, V = 2, 4, 2, 16, 24


def _draw(seed):
    """Returns q, k, v and a mask of random rules, some of them together."""
    g = torch.Generator().manual_seed(seed)

    def chance():
        return torch.rand((), generator=g).item()

    def number(low, high):
        return int(torch.randint(low, high, (), generator=g))

    S = number(128, 520)
    causal = chance() < 0.7
    T = number(128, S + 1) if causal and chance() < 0.4 else S
    rules = {"causal": causal}
    if chance() < 0.5:
        rules["visible"] = torch.rand(B, S, generator=g) > 0.3
        rules["visible"][0, : number(0, S)] = False
        rules["visible"][1, : number(0, S)] = True
    if chance() < 0.5:
        rules["window"] = number(1, 300)
    if chance() < 0.4:
        rules["documents"] = (torch.rand(B, S, generator=g) < 0.01).cumsum(1)
    if chance() < 0.3 and "documents" not in rules:
        rules["slopes"] = torch.rand(H, generator=g)
    if chance() < 0.3:
        rules["softcap"] = 2.0
    if chance() < 0.3:
        rules["bias"] = torch.randn(1, H, T, S, generator=g)
    sizes = ((H, T, K), (G, S, K), (G, S, V))
    q, k, v = (torch.randn(B, *size, generator=g) for size in sizes)
    return q, k, v, Mask(**rules)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", range(30))
@torch.no_grad()
def test_it_computes_what_the_reference_computes(seed):
    q, k, v, mask = _draw(seed)
    want = plain(Softmax())(q, k, v, mask)
    got = flex.softmax(Softmax(), q, k, v, mask)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("seed", range(60))
def test_it_visits_every_block_with_a_visible_pair_and_leaves_the_rule_out_only_where_all_are(seed):
    q, k, _, mask = _draw(seed)
    T, S = q.shape[2], k.shape[2]
    blocks = flex.block_mask(mask, T, S, q.device)
    allowed = mask.allowed(T, S, q.device)
    if allowed is None:
        assert blocks is None
        return
    allowed = allowed.expand(B, 1, T, S)
    dense = pad(allowed, (0, -S % 128, 0, -T % 128)).unflatten(3, (-1, 128)).unflatten(2, (-1, 128))
    some = dense.any(5).any(3)
    every = dense.all(5).all(3)

    def listed(count, order):
        chosen = torch.zeros(some.shape, dtype=torch.bool)
        for b, i in ((b, i) for b in range(B) for i in range(some.shape[2])):
            row = b % count.shape[0]
            chosen[b, 0, i, order[row, 0, i, : count[row, 0, i]].long()] = True
        return chosen

    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (partial & full).any()
    assert not (some & ~(partial | full)).any(), "a block with something to see is left out"
    assert not (full & ~every).any(), "a block is taken as full that is not"
    if mask.visible is None and mask.documents is None:
        assert torch.equal(partial | full, some), "a block is visited in vain"


def test_a_block_mask_is_made_once_for_a_batch():
    visible = torch.rand(B, 256) > 0.5
    mask = Mask(causal=True, visible=visible)
    first = flex.find_block_mask(mask, 256, 256, visible.device)
    assert flex.find_block_mask(Mask(causal=True, visible=visible), 256, 256, visible.device) is first
    assert flex.find_block_mask(Mask(visible=visible), 256, 256, visible.device) is not first
    visible[0] = False  # the same tensor with other numbers
    again = flex.find_block_mask(mask, 256, 256, visible.device)
    assert again is not first
    assert again.kv_num_blocks[0].sum() == 0


def test_rules_that_change_nothing_are_left_out():
    assert Mask(causal=True, window=7).without_idle_rules(7, 7).window is None
    assert Mask(causal=True, window=6).without_idle_rules(7, 7).window == 6
    assert Mask(window=7).without_idle_rules(7, 7).window is None
    assert Mask(softcap=math.inf).without_idle_rules(7, 7).softcap is None
    assert Mask(softcap=1e9).without_idle_rules(7, 7).softcap == 1e9
    places = Rows(torch.tensor([[40]]), torch.tensor([[41]]))
    assert Mask(window=9, rows=places).without_idle_rules(1, 7).window == 9  # that query stands far behind the keys


@pytest.mark.parametrize("name", ["softmax", "elu"])
def test_an_idle_window_is_no_window(name):
    x = torch.randn(1, 2, 33, 8)
    m = mechanism(name)
    assert torch.equal(m(x, x, x, Mask(causal=True, window=33)), m(x, x, x, Mask(causal=True)))
    assert not torch.equal(m(x, x, x, Mask(causal=True, window=32)), m(x, x, x, Mask(causal=True)))


def test_a_block_mask_made_in_inference_mode_is_not_kept_for_training():
    mask = Mask(causal=True, window=100)
    with torch.inference_mode():
        made = flex.find_block_mask(mask, 256, 256, torch.device("cpu"))
    assert made.kv_indices.is_inference()
    assert not flex.find_block_mask(mask, 256, 256, torch.device("cpu")).kv_indices.is_inference()
