"""Whoever is right gets all points, whatever they compute in; whoever is wrong is told something to act on."""

import math

import numpy as np
import pytest
import torch

from regard.grade import grade_objects


def float64_with_weights(q, k, v, mask=None):
    scores = torch.einsum("btk,bsk->bts", q.double(), k.double()) * k.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + torch.zeros_like(scores).masked_fill(mask.logical_not(), -math.inf)
    weights = scores.softmax(2)
    return torch.bmm(weights, v.double()), weights


def numpy_attention(q, k, v, mask=None):
    q, k, v = (np.asarray(x) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / k.shape[-1] ** 0.5
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    sizes = np.exp(scores - scores.max(-1, keepdims=True))
    return sizes / sizes.sum(-1, keepdims=True) @ v


def numpy_linear(q, k, v, phi, causal):
    a, b, v = phi(q).numpy(), phi(k).numpy(), v.numpy()
    if not causal:
        return a @ (b.swapaxes(1, 2) @ v) / (a @ b.sum(1)[:, :, None])
    memory = np.cumsum(b[..., None] * v[..., None, :], axis=1)
    return np.einsum("btf,btfv->btv", a, memory) / (a * np.cumsum(b, axis=1)).sum(-1, keepdims=True)


def step_in_float64(x, prev_K, prev_V, *weights):
    P_q, P_k, P_v, P_o = (w.double() for w in weights)
    x = x.double()
    keys = torch.cat([prev_K.double(), (x @ P_k)[:, None]], 1)
    values = torch.cat([prev_V.double(), (x @ P_v)[:, None]], 1)
    weights = torch.einsum("bd,hdk,bmk->bhm", x, P_q, keys).softmax(-1)
    return [torch.einsum("bhm,bmv,hdv->bd", weights, values, P_o), keys, values]


def tensors_for_tokens(step, beams, max_length, stop, alpha):
    lists, totals, ended = [[]], torch.zeros(1), []
    while lists and len(lists[0]) < max_length:
        table = torch.stack([step(tokens) for tokens in lists]) + totals[:, None]
        best, flat = table.flatten().topk(min(beams, table.numel()))
        rows, last = flat // table.shape[1], flat % table.shape[1]
        grown = [(lists[r] + [t], p) for r, t, p in zip(rows, last, best, strict=True)]
        ended += [one for one in grown if one[0][-1] == stop]
        lists = [tokens for tokens, _ in grown if tokens[-1] != stop]
        totals = torch.tensor([float(p) for tokens, p in grown if tokens[-1] != stop])
    ended += zip(lists, totals, strict=True)
    return max(ended, key=lambda one: float(one[1]) / len(one[0]) ** alpha)[0]


def table_of_lists(length, width):
    angles = [[t / 10000 ** (2 * (i // 2) / width) for i in range(width)] for t in range(length)]
    return [[(math.sin, math.cos)[i % 2](angle) for i, angle in enumerate(row)] for row in angles]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("attention", {"attention": float64_with_weights}),
        ("attention", {"attention": numpy_attention}),
        ("kernel", {"kernel_attention_linear": numpy_linear}),
        ("incremental", {"multiquery_attention_incremental": step_in_float64}),
        ("beam", {"beam_search": tensors_for_tokens}),
        ("positions", {"sinusoidal_positions": table_of_lists}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_right_is_right_in_any_numbers(spec, named):
    grade = grade_objects(spec, **named)
    assert grade.full, [(o.item, o.text) for o in grade.outcomes if not o.passed]


def plain_scores(q, k):
    return q @ k.mT / q.shape[-1] ** 0.5


def dropped(q, k, v, mask=None):
    return torch.nn.functional.dropout(plain_scores(q, k).softmax(-1), 0.1) @ v


def asks_a_tensor(q, k, v, mask=None):
    scores = plain_scores(q, k)
    if mask:
        scores = scores.masked_fill(~mask, -1e9)
    return scores.softmax(-1) @ v


def returns_nothing(q, k, v, mask=None):
    plain_scores(q, k)


def one_sum(q, k, v, mask=None):
    sizes = plain_scores(q, k).exp()
    return sizes / sizes.sum() @ v


def never_hidden(q, k, v, phi, causal):
    sizes = phi(q) @ phi(k).mT
    if causal:
        sizes = sizes.masked_fill(torch.ones_like(sizes).triu(1) == 1, -1e9)
    return sizes / sizes.sum(-1, keepdim=True) @ v


def pairs_without_gradients(q, k, v, phi, causal):
    with torch.no_grad():
        sizes = phi(q) @ phi(k).mT
        if causal:
            sizes = sizes.tril()
        return sizes / sizes.sum(-1, keepdim=True) @ v


def no_brackets(length, width):
    table = torch.zeros(length, width)
    for t in range(length):
        for i in range(width // 2):
            table[t, 2 * i] = math.sin(t / 10000 ** 2 * i / width)  # fmt: skip
            table[t, 2 * i + 1] = math.cos(t / 10000 ** 2 * i / width)  # fmt: skip
    return table


def all_compete(step, beams, max_length, stop, alpha):
    alive = [([], 0.0)]
    for _ in range(max_length):
        grown = [one for one in alive if one[0][-1:] == [stop]]
        for tokens, total in alive:
            if tokens[-1:] != [stop]:
                grown += [([*tokens, n], total + float(p)) for n, p in enumerate(step(tokens))]
        alive = sorted(grown, key=lambda one: -one[1])[:beams]
    return max(alive, key=lambda one: one[1] / len(one[0]) ** alpha)[0]


def misread_letters(x, prev_K, prev_V, P_q, P_k, P_v, P_o):
    keys = torch.cat([prev_K, (x @ P_k)[:, None]], 1)
    return torch.einsum("bkh,bmk->bhm", torch.einsum("bd,hdk->bhk", x, P_q), keys), keys, prev_V


@pytest.mark.parametrize(
    ("spec", "named", "slip", "words"),
    [
        ("attention", {"attention": dropped}, None, "Two calls with the same arguments give different outputs"),
        ("attention", {"attention": asks_a_tensor}, None, "if mask is not None"),
        ("attention", {"attention": returns_nothing}, None, "It returns None: is a `return` missing?"),
        ("attention", {"attention": one_sum}, "over_everything", "sum over dim=-1"),
        ("kernel", {"kernel_attention_pairs": never_hidden}, "hidden_by_large_negative", "no exp here"),
        ("kernel", {"kernel_attention_linear": pairs_without_gradients}, "forms_pairs", "quadratic"),
        ("positions", {"sinusoidal_positions": no_brackets}, "unbracketed", "no brackets"),
        ("beam", {"beam_search": all_compete}, "finished_compete", "set aside"),
        ("incremental", {"multiquery_attention_incremental": misread_letters}, None, "one letter has one length"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_is_told_what_to_do(spec, named, slip, words):
    grade = grade_objects(spec, **named)
    assert not grade.full
    assert slip is None or slip in grade.slips
    assert any(words in outcome.text for outcome in grade.outcomes), [o.text for o in grade.outcomes]


def test_spans_at_the_end_are_no_row_of_marks():
    """Of two marks side by side the suffix between them is empty, which is right."""

    class CharCorruptionDataset:
        def __init__(self, data, block_size):
            self.itos = dict(enumerate(["\u25a1", "\u2047", *sorted(set(data))]))
            self.stoi = {c: i for i, c in self.itos.items()}
            self.data = data.split("\n")
            self.block_size = block_size

        def __len__(self):
            return len(self.data)

        def __getitem__(self, idx):
            row = f"{self.data[idx][:20]}\u2047\u2047{self.data[idx][20:30]}".ljust(self.block_size, "\u25a1")
            ids = torch.tensor([self.stoi[c] for c in row])
            return ids[:-1], ids[1:]

    grade = grade_objects("corruption", CharCorruptionDataset)
    passed = {outcome.item: outcome.passed for outcome in grade.outcomes}
    assert passed["marks and padding"] and passed["can be put together again"] and not passed["spans begin anywhere"]


def test_an_output_of_another_shape_is_not_said_to_look_ahead():
    def turned(x):
        return x.norm(dim=-1, keepdim=True).mul(x).mT.flatten(1, 2)

    grade = grade_objects("merging", reweight_heads=turned)
    said = next(outcome for outcome in grade.outcomes if outcome.item == "reweight: never looks ahead")
    assert said.slip is None and "expected [2, 5, 21]" in said.text


def test_a_tuple_of_tokens_and_score_is_no_list():
    grade = grade_objects("beam", beam_search=lambda step, beams, *rest: ([1, 2, 0], -1.5))
    assert grade.slips == ["more_than_a_list"]
    told = {outcome.item: outcome.text for outcome in grade.outcomes}
    assert "has a larger log p" not in told["many beams find the best"]


class ModuleOfAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, q, k, v, mask=None):
        scores = torch.bmm(q, k.mT) / q.shape[2] ** 0.5
        if mask is not None:
            scores = scores + torch.where(mask, 0.0, -math.inf)
        return torch.bmm(self.dropout(scores.softmax(2)), v)


def any_arguments(*arguments, **named):
    return ModuleOfAttention().eval()(*arguments, **named)


@pytest.mark.parametrize("attention", [ModuleOfAttention(), any_arguments], ids=["module", "arguments"])
def test_what_is_called_like_the_function_gets_all_points(attention):
    grade = grade_objects("attention", attention=attention)
    assert grade.full, [(o.item, o.text) for o in grade.outcomes if not o.passed]
