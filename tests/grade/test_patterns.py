"""What is told of a wrong output that no slip explains: what it has in common with the right one."""

import torch

from regard.grade import grade_objects
from regard.grade.patterns import WrongCall, describe_pattern

Q = torch.linspace(-1, 1, 24).reshape(3, 4, 2).sin()
K = torch.linspace(2, -1, 30).reshape(3, 5, 2).cos()
TOLERANCE = 1e-4


def right(q, k):
    return (q @ k.mT).softmax(-1) @ k


def described(wrong, arguments=(Q, K), reference=right):
    call = WrongCall(wrong, reference, arguments, wrong(*arguments), reference(*arguments))
    return describe_pattern([call], TOLERANCE).words


def test_axes_that_are_exchanged_are_named():
    assert "transpose(0, 1)" in described(lambda q, k: right(q, k).transpose(0, 1))
    assert "permute(2, 0, 1)" in described(lambda q, k: right(q, k).permute(1, 2, 0))


def test_numbers_that_are_off_by_one_factor():
    assert "the right ones times 0.2:" in described(lambda q, k: right(q, k) / 5)
    assert "wrong sign" in described(lambda q, k: -right(q, k))


def test_factors_may_differ_from_call_to_call():
    calls = []
    for n in (2, 5):
        arguments = (Q, K[:, :n])
        calls.append(WrongCall(right, right, arguments, right(*arguments) / n, right(*arguments)))
    assert "differs from call to call" in describe_pattern(calls, TOLERANCE).words


def test_numbers_in_reverse():
    assert "reverse along axis 1" in described(lambda q, k: right(q, k).flip(1))


def test_sequences_that_are_right_alone():
    def summed_over_batch(q, k):
        return torch.einsum("bts,csk->btk", (q @ k.mT).softmax(-1), k)

    def first_sequence_only(q, k):
        return (q @ k.mT).softmax(-1) @ k[:1]

    assert "Each sequence alone" in described(summed_over_batch)
    assert "Each sequence alone" in described(first_sequence_only)


def test_a_weight_as_long_as_the_batch_is_no_batch():
    def project(x, w):
        return x @ w

    x, w = Q[0, :2], K[0, :2]
    assert "Each sequence alone" not in described(lambda x, w: x @ w.flip(0), (x, w), project)


def test_where_it_is_right():
    def later_rows_wrong(q, k):
        out = right(q, k)
        out[:, 1:] += 1
        return out

    def last_row_wrong(q, k):
        out = right(q, k)
        out[:, -1] += 1
        return out

    def odd_columns_wrong(q, k):
        table = right(q, k).repeat(1, 1, 3)
        table[..., 1::2] += 1
        return table

    wide = described(odd_columns_wrong, reference=lambda q, k: right(q, k).repeat(1, 1, 3))
    assert wide == "output[:, :, ::2] is right, and nothing else along that axis"
    assert described(later_rows_wrong) == "output[:, 0] is right, and nothing else along that axis"
    assert described(last_row_wrong) == "output[:, -1] is wrong, and all else along that axis is right"


def test_what_is_nearly_right():
    assert "nearly right" in described(lambda q, k: right(q, k).half().float() + 1e-3 * k.sum())


def test_nothing_is_said_where_nothing_is_common():
    assert described(lambda q, k: (q @ k.mT).softmax(-1) @ k.sin()) == ""
    assert described(lambda q, k: "no tensor") == ""
    assert described(lambda q, k: torch.full_like(right(q, k), torch.nan)) == ""


def test_of_several_outputs_the_wrong_one_is_described():
    def both(q, k):
        return q, right(q, k)

    assert "output[1]" in described(lambda q, k: (q, right(q, k) + torch.eye(4)[-1][:, None]), reference=both)


def summed_over_batch(x, prev_K, prev_V, P_q, P_k, P_v, P_o):
    keys = torch.cat([prev_K, (x @ P_k)[:, None]], 1)
    values = torch.cat([prev_V, (x @ P_v)[:, None]], 1)
    weights = torch.einsum("bd,hdk,bmk->bhm", x, P_q, keys).softmax(-1)
    return torch.einsum("bhm,cmv,hdv->bd", weights, values, P_o), keys, values


def test_a_grade_says_what_is_odd_in_place_of_a_hint_about_what_is_right():
    grade = grade_objects("incremental", multiquery_attention_incremental=summed_over_batch)
    text = next(outcome.text for outcome in grade.outcomes if outcome.item == "multi-query: one step")
    assert text.endswith("or summed over the batch.")


def test_classes_are_asked_with_the_weights_of_each_case():
    from regard.grade.exercises.multihead import multihead

    class MultiHeadAttention(torch.nn.Module):
        def __init__(self, d_model, num_heads):
            super().__init__()
            self.num_heads = num_heads
            for name in ("W_q", "W_k", "W_v", "W_o"):
                setattr(self, name, torch.nn.Linear(d_model, d_model))

        def forward(self, Q, K, V, mask=None):
            return multihead(self, Q, K, V, mask)[:1].expand(len(Q), -1, -1)

    grade = grade_objects("multihead", MultiHeadAttention)
    text = next(outcome.text for outcome in grade.outcomes if outcome.item == "self-attention")
    assert "Each sequence alone" in text


def test_the_hint_stays_where_more_may_be_wrong():
    def right_at_the_first(q, k, v, mask=None):
        out = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        out[:, 1:] = v.sum(1, keepdim=True)
        return out

    grade = grade_objects("attention", attention=right_at_the_first)
    text = next(outcome.text for outcome in grade.outcomes if outcome.item == "values without a mask")
    assert "output[:, 0] is right" in text and "Compute one query by hand" in text


def test_an_item_about_the_shape_says_which_axes_are_exchanged():
    def batch_second(q, k, v, mask=None):
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(0, 1)

    grade = grade_objects("attention", attention=batch_second)
    assert "transpose(0, 1) mends it" in grade.first_fault.text
