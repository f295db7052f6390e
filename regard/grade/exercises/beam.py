"""Beam search over a function step(tokens) that returns the log-probabilities [N] of the token after a list of tokens.

At each length all one-token continuations of the unfinished lists compete, and the `beams` with the largest log p stay.
Those that end with `stop` are finished; the others go on until max_length. The best of the finished and of those that
reached max_length is the one with the largest log p / lengthᵅ, the stop token counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regard.grade.cases import Draw, GradeCase

Step = Callable[[list[int]], Tensor]
Hypothesis = tuple[list[int], float]
Function = Callable[..., Any]
STOP = 0
VOCABULARY = 5
MOST_CASES = 100


class TreeModel:
    """A language model whose log-probabilities are drawn for each list of tokens, from the list and a seed."""

    def __init__(self, seed: int, stop_bias: float) -> None:
        self.seed = seed
        self.stop_bias = stop_bias
        self.__name__ = "step"

    def __call__(self, tokens: Any) -> Tensor:
        number = self.seed
        for token in tokens:
            number = (number * 31 + int(token) + 1) % 1_000_003
        logits = 1.5 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(number))
        logits[STOP] += self.stop_bias
        return logits.log_softmax(-1)


def _search(
    step: Step,
    beams: int,
    max_length: int,
    stop: int,
    rank: Callable[[list[int], float], float],
    *,
    score: Callable[[float, float], float] = lambda total, new: total + new,
    each: bool = False,
    keep_stopped: bool = True,
    keep_cut: bool = True,
    first_stop: bool = False,
    places_taken: bool = False,
    compete: bool = False,
    enough: bool = False,
) -> list[int]:
    """Returns the best list of tokens; the keyword arguments turn the search into one of the slips."""
    alive: list[Hypothesis] = [([], 0.0)]
    finished: list[Hypothesis] = []
    for _ in range(max_length):
        grown = [_grow(step, tokens, total, score) for tokens, total in alive]
        if each:  # each list keeps its own best
            grown = [_best(lists, max(1, beams // len(alive))) for lists in grown]
        places = beams
        if places_taken:
            places = max(1, beams - len(finished))
        if compete:  # finished lists compete again
            grown.append(finished)
            finished = []
        chosen = _best([hypothesis for lists in grown for hypothesis in lists], places)
        ended = [h for h in chosen if h[0][-1] == stop]
        finished += ended
        alive = [h for h in chosen if h[0][-1] != stop]
        if not alive or (first_stop and ended) or (enough and len(finished) >= beams):
            break
    if not keep_stopped and alive:
        finished = []
    if keep_cut or not finished:
        finished += alive
    return max(finished, key=lambda h: rank(h[0], h[1]))[0]


def _grow(step: Step, tokens: list[int], total: float, score: Callable[[float, float], float]) -> list[Hypothesis]:
    return [([*tokens, n], score(total, float(new))) for n, new in enumerate(step(tokens))]


def _best(hypotheses: list[Hypothesis], count: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda h: -h[1])[:count]


def _by_length(alpha: float) -> Callable[[list[int], float], float]:
    return lambda tokens, total: total / len(tokens) ** alpha


def beam_search(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    """Returns the best list of tokens that beam search finds."""
    return _search(step, beams, max_length, stop, _by_length(alpha))


def greedy(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, 1, max_length, stop, _by_length(alpha))


def last_score_only(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, _by_length(alpha), score=lambda total, new: new)


def probabilities_added(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, _by_length(alpha), score=lambda total, new: total + math.exp(new))


def best_of_each(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, _by_length(alpha), each=True)


def finished_lost(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, _by_length(alpha), keep_stopped=False)


def unfinished_lost(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, _by_length(alpha), keep_cut=False)


def stops_at_first(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, _by_length(alpha), first_stop=True, keep_cut=False)


def ignores_alpha(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, _by_length(0.0))


def alpha_times_length(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, lambda tokens, total: total / (alpha * len(tokens)))


def other_penalty(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, lambda tokens, total: total / ((5 + len(tokens)) / 6) ** alpha)


def worst_kept(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    """Returns the result of a search that sorts in rising order, so that the least likely lists stay."""

    def turned(tokens: list[int]) -> Tensor:
        return -step(tokens)

    return _search(turned, beams, max_length, stop, lambda tokens, total: -total / len(tokens) ** alpha)


def places_taken(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, _by_length(alpha), places_taken=True)


def finished_compete(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, _by_length(alpha), compete=True)


def stops_when_enough(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, _by_length(alpha), enough=True, keep_cut=False)


def stops_when_enough_with_others(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    """Returns the result of a search that ends early, and compares unfinished lists, too."""
    return _search(step, beams, max_length, stop, _by_length(alpha), enough=True)


def stop_not_counted(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    def rank(tokens: list[int], total: float) -> float:
        return total / math.pow(max(1, len(tokens) - tokens.count(stop)), alpha)

    return _search(step, beams, max_length, stop, rank)


def one_too_long(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return beam_search(step, beams, max_length + 1, stop, alpha)


def one_too_short(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return beam_search(step, beams, max_length - 1, stop, alpha)


def multiplied_by_length(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, stop, _by_length(-alpha))


def goes_on_after_stop(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    return _search(step, beams, max_length, -1, _by_length(alpha))


def last_token_only(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    """Returns the result of a search that calls `step` with the last token instead of the whole list."""
    return _search(lambda tokens: step(tokens[-1:]), beams, max_length, stop, _by_length(alpha))


def without_stop(step: Step, beams: int, max_length: int, stop: int, alpha: float) -> list[int]:
    """Returns the best list without its stop token."""
    return [token for token in beam_search(step, beams, max_length, stop, alpha) if token != stop]


def well_formed(f: Function, step: Step, beams: int, max_length: int, stop: int, alpha: float) -> Any:
    """Returns what is wrong with the form of a result: at most max_length tokens, and stop only at its end."""
    result = f(step, beams, max_length, stop, alpha)
    if isinstance(result, Tensor):
        result = result.tolist()
    if not _is_tokens(result):
        return _describe_other(result)
    if len(result) == max_length + 1:
        return "one_too_long", f"the list has {len(result)} tokens, expected 1 … {max_length}"
    if not 1 <= len(result) <= max_length:
        return f"the list has {len(result)} tokens, expected 1 … {max_length}"
    if stop in result[:-1]:
        return "goes_on_after_stop"
    return None


def _is_tokens(result: Any) -> bool:
    """Returns whether a result is a list of whole numbers."""
    return isinstance(result, list | tuple) and all(isinstance(token, int) for token in result)


def _describe_other(result: Any) -> Any:
    """Returns what is wrong with a result that is no list of tokens."""
    if isinstance(result, list | tuple) and any(_is_tokens(entry) for entry in result):
        return "more_than_a_list", f"a list of tokens is expected, and a {type(result).__name__} with one in it came"
    return f"a list of tokens (whole numbers) is expected, and a {type(result).__name__} was returned"


def finds_better(f: Function, step: Step, beams: int, max_length: int, stop: int, alpha: float) -> Any:
    """Returns what is wrong if a search with so many beams that it is exhaustive misses the best list."""
    want = _search(step, VOCABULARY**4, 4, stop, _by_length(alpha))
    got = f(step, VOCABULARY**4, 4, stop, alpha)
    if isinstance(got, Tensor):
        got = got.tolist()
    if not _is_tokens(got):
        return _describe_other(got)
    if list(got) == want:
        return None
    return f"with so many beams that none is dropped, {got} is found, and {want} has a larger log p"


# The slips whose results are wrong in each kind of case; in others they may be right.
ANYWHERE = (
    greedy,
    last_score_only,
    probabilities_added,
    best_of_each,
    worst_kept,
    one_too_long,
    one_too_short,
    last_token_only,
)
AT_STOP = (finished_lost, stops_at_first, goes_on_after_stop, without_stop, places_taken)
WHERE_LISTS_END = (*ANYWHERE, *AT_STOP)
RANKED = (ignores_alpha, multiplied_by_length, alpha_times_length, other_penalty)
BY_LENGTH = (*RANKED, stop_not_counted, unfinished_lost)
WHERE_LENGTH_COUNTS = (*WHERE_LISTS_END, *BY_LENGTH)


def one_beam(draw: Draw) -> Iterator[GradeCase]:
    """Yields searches with one beam, which are greedy."""
    yield from _telling_cases(draw, (1, 5, STOP, 0.0), -1.0, "one beam", (goes_on_after_stop, without_stop))


def several_beams(draw: Draw) -> Iterator[GradeCase]:
    """Yields searches in which some lists end early."""
    yield from _telling_cases(draw, (3, 6, STOP, 0.0), 0.0, "three beams", WHERE_LISTS_END)


def never_stops(draw: Draw) -> Iterator[GradeCase]:
    """Yields searches in which the stop token is very unlikely."""
    yield from _telling_cases(draw, (3, 4, STOP, 0.0), -30.0, "no list ends before max_length", ANYWHERE)


def with_length(draw: Draw) -> Iterator[GradeCase]:
    """Yields searches whose results are ranked by log p over length."""
    yield from _telling_cases(draw, (3, 6, STOP, 0.7), 0.5, "alpha .7", WHERE_LENGTH_COUNTS)


def _telling_cases(
    draw: Draw, settings: tuple[int, int, int, float], bias: float, words: str, slips: tuple[Function, ...]
) -> Iterator[GradeCase]:
    """Yields searches until the results of each slip differ from the right ones and from those of the other slips.

    A result is a few tokens, and often right by chance, for example if no list ends early.
    """
    searches = (beam_search, *slips)
    results: list[list[list[int]]] = [[] for _ in searches]
    for _ in range(MOST_CASES):
        arguments = (TreeModel(draw.random.randrange(1_000_000), bias), *settings)
        for found, search in zip(results, searches, strict=True):
            found.append(search(*arguments))
        yield GradeCase(arguments, words=words)
        if len({str(found) for found in results}) == len(searches):
            return
