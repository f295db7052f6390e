"""Decoding: the state changes nothing, chance follows its distribution, and beam search finds the best."""

import itertools
import math
from typing import Any

import pytest
import torch
from scipy import stats

from regard.data import Bytes, Characters
from regard.errors import LengthError, RegardError
from regard.generate import PromptError, Settings, generate, padded, probabilities, stream
from regard.generate.sampler import Sampler
from regard.generate.sampling import penalize_repetition
from regard.generate.text import OutputText
from regard.mechanisms import mechanisms
from regard.models import GPT, ConfigError, Encoder, Seq2Seq

NAMES = sorted(set(mechanisms()) - {"linear"})
TEXT = "abcdefgh"


def stirred(model: Any, size: float = 0.25) -> Any:
    torch.manual_seed(5)
    for name, p in model.named_parameters():
        if p.dim() > 1 and "mechanism" not in name:
            p.data = torch.randn_like(p) * size
    return model.double().eval()


def gpt(mechanism: str = "softmax", vocabulary: int = 11, **changes: Any) -> GPT:
    options = {"features": 16} if mechanism in ("performer", "fourier") else {}
    stack = {"width": 12, "layers": 2, "length": 24, "attention": {"heads": 3}, "options": options}
    return stirred(GPT(vocabulary=vocabulary, mechanism=mechanism, **(stack | changes)))  # type: ignore[no-any-return]


def seq2seq(mechanism: str = "softmax") -> Seq2Seq:
    stack = {"width": 12, "layers": 2, "length": 24, "attention": {"heads": 3}}
    cross = mechanism if mechanisms()[mechanism].crosses else "softmax"
    return stirred(  # type: ignore[no-any-return]
        Seq2Seq(
            vocabulary=13,
            target_vocabulary=11,
            start=2,
            encoder=stack,
            decoder=stack | {"mechanism": mechanism},
            cross=cross,
        )
    )


def by_whole_passes(model: Any, prompt: list[int], n: int) -> tuple[list[int], float]:
    """Greedy decoding without any state."""
    tokens, score = [], 0.0
    for _ in range(n):
        if isinstance(model, Seq2Seq):
            logits = model(torch.tensor([prompt]), torch.tensor([[2, *tokens]]))
        else:
            logits = model(torch.tensor([prompt + tokens]))
        p = logits[0, -1].detach().log_softmax(-1)
        tokens.append(int(p.argmax()))
        score += float(p.max())
    return tokens, score


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [gpt, seq2seq])
def test_greedy_tokens_are_those_of_whole_passes(make: Any, name: str) -> None:
    model, prompt = make(name), [3, 1, 4, 1, 5]
    result = generate(model, prompt, max_tokens=12)
    tokens, score = by_whole_passes(model, prompt, 12)
    assert result.tokens == tokens
    assert result.score == pytest.approx(score, rel=1e-9)
    assert result.choices[0].ended == "max"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [gpt, seq2seq])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 4}, {"beams": 3}])
def test_unequal_prompts_together_give_what_each_gives_alone(make: Any, name: str, settings: dict[str, Any]) -> None:
    model, prompts = make(name), [[3, 1, 4, 1, 5, 9, 2, 6], [5], [8, 9, 7]]
    # A stop token makes rows leave at different times; the longest prompt runs into the end of the model.
    settings = settings | {"max_tokens": 30, "stop_tokens": (7,)}
    for prompt, together in zip(prompts, generate(model, prompts, **settings), strict=True):
        alone = generate(model, prompt, **settings)
        assert [c.tokens for c in alone.choices] == [c.tokens for c in together.choices]
        assert [c.score for c in alone.choices] == pytest.approx([c.score for c in together.choices], rel=1e-9)
        assert [c.ended for c in alone.choices] == [c.ended for c in together.choices]


LOGITS = torch.tensor([2.0, 1.5, 1.5, 0.3, 0.0, -0.5, -1.0, -3.0, 1.0, -2.0])
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("chosen", SETTINGS)
def test_draws_follow_their_distribution(chosen: dict[str, Any]) -> None:
    draws, settings = 20_000, Settings(**chosen, max_tokens=1)
    rows = Sampler(settings, [1] * draws, list(range(draws)), 11, None, frozenset(), None, torch.device("cpu"))
    tokens, _ = rows.step(LOGITS.expand(draws, -1))
    counts = torch.bincount(tokens, minlength=10).double()
    expected = probabilities(LOGITS[None], settings)[0] * draws
    assert bool((counts[expected == 0] == 0).all())
    # Rare tokens are pooled, as chi-square wants at least five expected in each bin.
    rare = (expected < 5) & (expected > 0)
    observed = [*counts[expected >= 5].tolist(), *([float(counts[rare].sum())] if bool(rare.any()) else [])]
    wanted = [*expected[expected >= 5].tolist(), *([float(expected[rare].sum())] if bool(rare.any()) else [])]
    assert float(stats.chisquare(observed, wanted).pvalue) > 1e-3


def test_distributions_are_their_definitions() -> None:
    p = LOGITS.double().softmax(-1)
    ranks = p.argsort(descending=True, stable=True)

    def only(kept: list[int]) -> torch.Tensor:
        q = torch.zeros_like(p)
        q[kept] = p[kept]
        return q / q.sum()

    def of(**chosen: Any) -> torch.Tensor:
        return probabilities(LOGITS[None], Settings(**chosen))[0]

    torch.testing.assert_close(of(temperature=0.5), (LOGITS.double() / 0.5).softmax(-1), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(of(top_k=4), only(ranks[:4].tolist()), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(of(top_k=99), p, rtol=1e-6, atol=1e-9)
    smallest = next(n for n in range(1, 11) if float(p[ranks[:n]].sum()) >= 0.8)
    torch.testing.assert_close(of(top_p=0.8), only(ranks[:smallest].tolist()), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(of(top_p=1.0), p, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(of(top_p=1e-9), only([0]), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(of(min_p=0.2), only((p >= 0.2 * p.max()).nonzero()[:, 0].tolist()), rtol=1e-6, atol=1e-9)
    seen = torch.tensor([[True, False, True]])
    torch.testing.assert_close(
        penalize_repetition(torch.tensor([[2.0, 3.0, -1.0]]), seen, 2.0), torch.tensor([[1.0, 3.0, -2.0]])
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_low_temperature_does_not_overflow_half_precision(dtype: torch.dtype, more: dict[str, Any]) -> None:
    settings = Settings(temperature=1e-4, **more)
    p = probabilities(20 * LOGITS[None].to(dtype), settings)
    assert p.argmax() == 0 and float(p.sum()) == pytest.approx(1)
    want = probabilities(20 * LOGITS[None].to(dtype).float(), settings)
    torch.testing.assert_close(p, want, rtol=0, atol=0)


def test_a_repetition_penalty_avoids_what_was_said() -> None:
    model = gpt()
    told = generate(model, [3, 3, 3], max_tokens=8, repetition_penalty=1e6).tokens
    assert len({3, *told}) == 9
    likely, _ = by_whole_passes(model, [3, 3, 3], 8)
    assert told != likely


def test_the_seed_decides() -> None:
    model = gpt()
    first = generate(model, [1, 2], max_tokens=20, temperature=1.5, seed=1)
    assert first == generate(model, [1, 2], max_tokens=20, temperature=1.5, seed=1)
    assert first.tokens != generate(model, [1, 2], max_tokens=20, temperature=1.5, seed=2).tokens
    twice = generate(model, [[1, 2], [1, 2]], max_tokens=20, temperature=1.5, seed=1)
    assert twice[0].tokens == first.tokens != twice[1].tokens
    torch.manual_seed(0)
    free = [generate(model, [1, 2], max_tokens=20, temperature=1.5).tokens for _ in range(2)]
    torch.manual_seed(0)
    assert free[0] != free[1] and free[0] == generate(model, [1, 2], max_tokens=20, temperature=1.5).tokens


def test_several_outputs_differ() -> None:
    model = gpt(vocabulary=4)
    result = generate(model, [1], max_tokens=2, temperature=1.0, n=8, seed=0)
    assert len({tuple(c.tokens) for c in result.choices}) == len(result.choices) == 8
    assert result.choices[0].tokens == generate(model, [1], max_tokens=2, temperature=1.0, seed=0).tokens
    assert len(generate(model, [1], max_tokens=1, top_k=2, n=5, seed=0).choices) == 2  # there are no more


def every_output(model: GPT, prompt: list[int], limit: int, stop: int | None) -> dict[tuple[int, ...], float]:
    """log p of every output of at most `limit` tokens, by whole passes; a stop token is scored and not kept."""
    found = {}
    for n in range(1, limit + 1):
        for tokens in itertools.product(range(model.config.vocabulary), repeat=n):
            stops = [t == stop for t in tokens]
            if any(stops[:-1]) or (n < limit and not stops[-1]):
                continue
            logits = model(torch.tensor([prompt + list(tokens)])).detach()[0, len(prompt) - 1 : -1].log_softmax(-1)
            score = float(logits.gather(-1, torch.tensor(tokens)[:, None]).sum())
            found[tokens[:-1] if stops[-1] else tokens] = score / 1.0
    return found


@pytest.mark.parametrize("power", [0.0, 1.0])
@pytest.mark.parametrize("stop", [None, 2])
def test_full_width_beam_search_is_brute_force(stop: int | None, power: float) -> None:
    model, prompt, limit = gpt(vocabulary=4), [1, 3], 4
    want = every_output(model, prompt, limit, stop)
    lengths = {ids: len(ids) if len(ids) == limit else len(ids) + 1 for ids in want}
    ranked = sorted(((score / lengths[ids] ** power, ids) for ids, score in want.items()), reverse=True)
    stops = () if stop is None else (stop,)
    result = generate(model, prompt, max_tokens=limit, beams=4**limit, length_penalty=power, stop_tokens=stops)
    assert [tuple(c.tokens) for c in result.choices] == [ids for _, ids in ranked]
    assert [c.score for c in result.choices] == pytest.approx([score for score, _ in ranked], rel=1e-9)
    # A narrow search that keeps everything it could need finds the same best.
    few = generate(model, prompt, max_tokens=limit, beams=16, length_penalty=power, stop_tokens=stops)
    assert len(few.choices) == 16
    assert few.score <= result.score + 1e-9
    for choice in few.choices:
        score = want[tuple(choice.tokens)] / lengths[tuple(choice.tokens)] ** power
        assert choice.score == pytest.approx(score, rel=1e-9)


@pytest.mark.parametrize("power", [-2.0, -1.0, -0.3])
@pytest.mark.parametrize(("vocabulary", "beams"), [(2, 1), (2, 3), (4, 2)])
def test_a_negative_length_penalty_returns_only_what_has_ended(vocabulary: int, beams: int, power: float) -> None:
    model, limit, stop = gpt(vocabulary=vocabulary, layers=1, width=6), 4, 1
    for seed in range(20):
        torch.manual_seed(seed)
        model.embedding.weight.data = 2 * torch.randn_like(model.embedding.weight)
        ranks = {
            ids: score / (len(ids) if len(ids) == limit else len(ids) + 1) ** power
            for ids, score in every_output(model, [0, 0], limit, stop).items()
        }
        asked = {"max_tokens": limit, "beams": beams, "length_penalty": power, "stop_tokens": (stop,)}
        found = {tuple(c.tokens): c.score for c in generate(model, [0, 0], **asked).choices}
        assert found == pytest.approx({ids: ranks[ids] for ids in found}, rel=1e-9)
        if vocabulary == 2:  # one output goes on at a time, so that the search is exhaustive
            assert list(found) == sorted(ranks, key=ranks.__getitem__, reverse=True)[:beams]


def test_one_beam_is_greedy_and_every_beam_is_returned() -> None:
    for model in (gpt(), seq2seq()):
        assert generate(model, [1, 2], max_tokens=9, beams=1).tokens == generate(model, [1, 2], max_tokens=9).tokens
        result = generate(model, [1, 2], max_tokens=9, beams=5)
        scores = [c.score for c in result.choices]
        assert len(scores) == 5 and scores == sorted(scores, reverse=True)
        assert len({tuple(c.tokens) for c in result.choices}) == 5


def with_text(model: Any, **changes: Any) -> Any:
    model.tokenizer = Characters.of(TEXT, **changes)
    return model


def test_stop_texts_end_the_output_before_them() -> None:
    model = with_text(gpt(vocabulary=len(TEXT)))
    whole = generate(model, "abc", max_tokens=15).text
    for stop in (whole[4:7], whole[6]):
        result = generate(model, "abc", max_tokens=15, stop=stop)
        at = whole.find(stop)
        assert result.text == whole[:at] and result.choices[0].ended == "stop"
        assert result.tokens == model.tokenizer.encode(whole[: at + len(stop)])
        assert "".join(stream(model, "abc", max_tokens=15, stop=stop)) == whole[:at]
    beams = generate(model, "abc", max_tokens=5, beams=4, stop="a")
    assert all("a" not in (c.text or "") for c in beams.choices)


def test_the_end_token_ends_and_is_not_shown() -> None:
    model = with_text(gpt(vocabulary=9), special=("<end>",))
    model.embedding.weight.data[0] = 0  # its logit is 0: likely now and then
    results = [generate(model, "ab", max_tokens=20, temperature=2.0, seed=s) for s in range(20)]
    assert any(r.choices[0].ended == "stop" for r in results)
    assert all("<end>" not in r.text and 0 not in r.tokens for r in results)


@pytest.mark.parametrize("stops", [(), ("é", "\n")])
def test_a_stream_is_the_text_in_whole_characters(stops: tuple[str, ...]) -> None:
    model = gpt(vocabulary=256)
    model.tokenizer = Bytes()
    # Bytes of several-byte characters are likely, so that most pieces have to wait.
    model.embedding.weight.data[0x80:0xF0] *= 3
    for seed in range(5):
        chosen: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": seed, "stop": stops}
        pieces = list(stream(model, "añb", **chosen))
        assert "".join(pieces) == generate(model, "añb", **chosen).text
        assert all(pieces)


def test_a_writer_holds_back_what_may_begin_a_stop() -> None:
    writer = OutputText(Characters.of("abcd"), ["abd", "cc"])
    given = []
    for token in [0, 1, 2, 0, 1, 0, 1, 3]:
        writer.push(token)
        given.append(writer.take_new())
    assert given == ["", "", "ab", "c", "", "ab", "", ""]
    assert writer.stopped and writer.text == "abcab" and writer.take_new(final=True) == ""


def test_a_sliding_window_goes_on_for_ever() -> None:
    model = gpt(length=8, vocabulary=7)
    context, want = [1, 2, 3], []
    for _ in range(30):
        want.append(int(model(torch.tensor([context]))[0, -1].argmax()))
        context = context[-3:] + want[-1:] if len(context) == 8 else context + want[-1:]
    result = generate(model, [1, 2, 3], max_tokens=30, slide=True)
    assert result.tokens == want and result.choices[0].ended == "max"
    assert generate(model, [1] * 20, max_tokens=3, slide=True).tokens
    stopped = generate(model, [1, 2, 3], max_tokens=30)
    assert stopped.tokens == want[:6] and stopped.choices[0].ended == "full"


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.2, "seed": 3}, {"temperature": 1.2, "seed": 3, "n": 2}, {"stop_tokens": (2,)}]
)
def test_a_sliding_window_is_the_same_alone_and_in_a_batch(settings: dict[str, Any]) -> None:
    model = gpt(length=8, vocabulary=7)
    prompts = [[1, 2, 3], [5], [6, 4, 1, 0, 3, 3], [5], [3, 1, 1]]
    together = generate(model, prompts, max_tokens=30, slide=True, **settings)
    for n, prompt in enumerate(prompts):
        if prompt not in prompts[:n]:  # where a prompt occurs twice it is drawn anew
            alone = generate(model, prompt, max_tokens=30, slide=True, **settings)
            assert [c.tokens for c in together[n].choices] == [c.tokens for c in alone.choices]


def test_a_prompt_is_read_once_and_the_state_used_ever_after(monkeypatch: pytest.MonkeyPatch) -> None:
    model, encoded, widths = seq2seq(), [], []
    encode, extend = model.encoder.forward, model.stack.extend
    monkeypatch.setattr(model.encoder, "forward", lambda *a, **k: (encoded.append(1), encode(*a, **k))[1])
    monkeypatch.setattr(model.stack, "extend", lambda x, *a, **k: (widths.append(x.shape[:2]), extend(x, *a, **k))[1])
    monkeypatch.setattr(model.stack, "forward", None)
    generate(model, [[1, 2, 3], [4]], max_tokens=6, temperature=1.0, n=2, seed=0)
    assert len(encoded) == 1
    assert widths == [(2, 1)] + [(4, 1)] * 5


def test_generating_leaves_a_training_model_training() -> None:
    model = gpt(dropout=0.5).train()
    assert generate(model, [1], max_tokens=9) == generate(model, [1], max_tokens=9)
    assert model.training
    model.loss(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()


def test_padding_is_on_the_left() -> None:
    tokens, visible = padded([[1, 2, 3], [4]])
    assert tokens.tolist() == [[1, 2, 3], [0, 0, 4]] and visible is not None
    assert visible.tolist() == [[True, True, True], [False, False, True]]
    assert padded([[1, 2], [3, 4]])[1] is None


@pytest.mark.parametrize(
    ("prompt", "chosen", "error", "message"),
    [
        ("", {}, PromptError, "prompt 0 is empty"),
        ([], {}, PromptError, "no prompt"),
        ([[1], []], {}, PromptError, "prompt 1 is empty"),
        ([1, 99], {}, PromptError, "token 99 at position 1"),
        ("abz", {}, RegardError, r"'z' \(U\+007A\) at position 2"),
        ([1] * 25, {}, LengthError, "25 tokens.*built for 24"),
        ([1], {"temperature": 0}, ConfigError, "temperature = 0: expected a positive"),
        ([1], {"temperature": -1.0}, ConfigError, "expected a positive"),
        ([1], {"temperature": math.nan}, ConfigError, "expected a positive"),
        ([1], {"top_p": 0.0}, ConfigError, "top_p = 0.0: expected more than 0 and at most 1"),
        ([1], {"top_p": 1.5}, ConfigError, "at most 1"),
        ([1], {"top_k": 0}, ConfigError, "at least 1"),
        ([1], {"min_p": 2}, ConfigError, "at most 1"),
        ([1], {"max_tokens": 0}, ConfigError, "at least 1"),
        ([1], {"beams": 2, "slide": True}, ConfigError, "leave out"),
        ([1], {"n": 3}, ConfigError, "greedy decoding has one output"),
        ([1], {"n": 3, "beams": 2}, ConfigError, "at most as many"),
        ([1], {"stop": ""}, ConfigError, "empty text"),
        ([1], {"temprature": 1.0}, ConfigError, "Did you mean 'temperature'"),
    ],
)
def test_bad_input_is_one_clear_error(
    prompt: Any, chosen: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = with_text(gpt(vocabulary=len(TEXT)))
    with pytest.raises(error, match=message) as caught:
        generate(model, prompt, **chosen)
    assert isinstance(caught.value, RegardError)


def test_what_cannot_generate_says_so() -> None:
    with pytest.raises(PromptError, match="Encoder does not generate"):
        generate(Encoder.preset("nano"), [1])
    with pytest.raises(PromptError, match="needs a tokenizer"):
        generate(gpt(), "text")
    with pytest.raises(PromptError, match="stop_tokens"):
        generate(gpt(), [1], stop="x")
    with pytest.raises(PromptError, match="cannot forget"):
        generate(seq2seq(), [1], slide=True)
    with pytest.raises(PromptError, match="no beams"):
        stream(with_text(gpt(vocabulary=8)), "a", beams=2)
    with pytest.raises(PromptError, match="one prompt"):
        stream(with_text(gpt(vocabulary=8)), ["a", "b"])  # type: ignore[list-item]


def test_beams_search_the_distribution_that_sampling_draws_from() -> None:
    model = gpt(vocabulary=5)
    asked = {"max_tokens": 3, "temperature": 0.5, "top_k": 2}
    result = generate(model, [1, 3], beams=8, **asked)
    assert len(result.choices) == 8  # two tokens at each of three steps
    assert sum(math.exp(c.score) for c in result.choices) == pytest.approx(1)
    assert [tuple(c.tokens) for c in generate(model, [1, 3], beams=8, max_tokens=3, top_k=1).choices] == [
        tuple(generate(model, [1, 3], max_tokens=3).tokens)
    ]
