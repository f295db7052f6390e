"""Which models have a fused decoding step, and what greedy decoding takes over from it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from regard.generate.fused import refuse_fused_step, refuse_parts
from regard.generate.greedy import Greedy, pick_likeliest
from regard.generate.sampler import Sampler
from regard.generate.settings import Settings
from regard.kernels import fast, plain
from regard.models import GPT, Seq2Seq
from regard.nn.capture import capture_attention


def gpt(**changes: Any) -> GPT:
    return GPT(**{"width": 24, "layers": 2, "length": 16, "vocabulary": 11, "attention": {"heads": 2}} | changes).eval()


def hooked(model: GPT) -> GPT:
    model.stack.layers[1].mlp.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": "rotary", "block": {"norm": "rms", "mlp": "swiglu", "bias": False}, "tied": False},
        {"position": "alibi", "attention": {"heads": 4, "groups": 2, "window": 5}, "block": {"mlp": "relu"}},
        {
            "position": "sinusoidal",
            "attention": {"heads": 2, "key_width": 6, "value_width": 9},
            "block": {"mlp": "gelu"},
        },
    ],
    ids=str,
)
def test_the_usual_decoders_are_fused(changes: dict[str, Any]) -> None:
    model = gpt(**changes)
    assert refuse_parts(model, model.empty(3, 8)) is None
    copy = deepcopy(model)
    assert refuse_parts(copy, copy.empty(3, 8)) is None


@pytest.mark.parametrize(
    ("changes", "prepare", "reason"),
    [
        ({"mechanism": "elu"}, fast, "softmax attention"),
        ({}, plain, "chooses its own kernel"),
        ({}, hooked, "hook"),
        ({}, lambda model: model.double(), "one dtype"),
        ({"block": {"before": False}}, fast, "norms before"),
        ({"attention": {"heads": 2, "qk_norm": True}}, fast, "without norms of queries"),
        ({"attention": {"heads": 2, "merge": "shift"}}, fast, "concatenated"),
    ],
)
def test_a_decoder_of_other_parts_says_why_not(
    changes: dict[str, Any], prepare: Callable[[GPT], GPT], reason: str
) -> None:
    model = prepare(gpt(**changes))
    found = refuse_parts(model, model.empty(3, 8))
    assert found is not None and reason in found


def test_what_cannot_be_fused_at_this_moment_says_why() -> None:
    model = gpt()
    state = model.empty(3, 8)
    assert "64 rows" in str(refuse_parts(model, model.empty(65, 8)))
    assert "CUDA" in str(refuse_fused_step(model, state))
    with capture_attention(model.stack.layers[0].attention, lambda *_: None, recurrent=True):
        assert "softmax attention" in str(refuse_parts(model, state))
    assert refuse_parts(model, state) is None
    crossing = Seq2Seq.preset("nano").eval()
    _, crossed = crossing.prefill(torch.tensor([[1, 2]]), None, 4)
    assert "blocks of attention and an MLP" in str(refuse_parts(crossing, crossed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sampler_takes_what_the_step_has_found(dtype: torch.dtype) -> None:
    """Its tokens lie in a buffer that the next step writes over, which outputs so far must outlive."""
    torch.manual_seed(0)
    settings = Settings(max_tokens=4)
    streams, device = [0, 0], torch.device("cpu")
    samplers = [Sampler(settings, [4, 4], streams, 0, None, frozenset(), None, device) for _ in range(2)]
    greedy = Greedy(torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.promote_types(dtype, torch.float32)))
    for _ in range(4):
        logits = torch.randn(2, 9).to(dtype)
        pick_likeliest(logits, greedy)
        tokens, _ = samplers[0].step(logits, greedy)
        assert torch.equal(tokens, samplers[1].step(logits)[0])
    assert samplers[0].choices == samplers[1].choices


def test_a_sampler_that_draws_or_penalizes_chooses_itself() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.9]])
    greedy = Greedy(torch.tensor([1]), torch.tensor([-1.0]))
    seen = torch.tensor([[False, True, False]])
    settings = Settings(max_tokens=4, repetition_penalty=2.0)
    sampler = Sampler(settings, [4], [0], 0, None, frozenset(), seen, torch.device("cpu"))
    assert sampler.step(logits, greedy)[0].tolist() == [2]
    drawn = [
        Sampler(Settings(max_tokens=4, temperature=9.0), [4], [n], 0, None, frozenset(), None, torch.device("cpu"))
        for n in range(20)
    ]
    assert {int(sampler.step(logits, greedy)[0]) for sampler in drawn} == {0, 1, 2}
