"""Span corruption: a span is taken out of a document and written behind it, where a model learns to predict it.

Each document is cut to a random length, or to the longest that fits; one span of it is taken out, and the sequence is
`prefix ⁇ suffix ⁇ span`, padded with □ to the length of the block. x is all of it but the last token, y all but the
first. All rows of a batch are made at once, on the device of the documents.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.data.batch import IGNORE, Batch
from regard.data.files import DataError

SHORTEST = 4  # tokens that are kept of a document, if it has as many


def longest_cut(block: int) -> int:
    """Returns the most tokens that are kept of a document: ⌊7/8 of the block⌋, which leaves room for the two marks."""
    if block < 9:
        raise DataError(f"a block of {block} tokens: expected at least 9, for a document and two marks")
    return block * 7 // 8


def corrupt(
    documents: Int[Tensor, "N L"],
    lengths: Int[Tensor, "N"],
    block: int,
    mark: int,
    pad: int,
    generator: torch.Generator,
    spans: tuple[float, float] = (1 / 8, 3 / 8),
    ignore_padding: bool = True,
    between: int | None = None,
    cut_share: float = 1.0,
) -> Batch:
    """Returns x [N,block−1] and y [N,block−1] of the documents, each with a newly drawn hole.

    `spans`: the smallest and largest share of a cut that its span may be; their mean is the mean share.
    `ignore_padding=False` puts loss on the padding too, as some published code does. `between`: the token between
    words, if spans are to be widened to whole words. `cut_share`: the share of the documents that are cut to a random
    length; the others keep all that fits.
    """
    N = documents.shape[0]
    draws = torch.rand(4, N, generator=generator, device=documents.device)
    is_whole = None
    if cut_share < 1:
        is_whole = torch.rand(N, generator=generator, device=documents.device) >= cut_share
    cut, span, start = draw_spans(lengths, longest_cut(block), draws, spans, is_whole)
    if between is not None:
        span, start = widen_to_words(documents, cut, span, start, between)
    return with_hole(documents, cut, span, start, block, mark, pad, ignore_padding)


def draw_spans(
    lengths: Int[Tensor, "N"],
    longest: int,
    draws: Float[Tensor, "4 N"],
    spans: tuple[float, float] = (1 / 8, 3 / 8),
    is_whole: Bool[Tensor, "N"] | None = None,
) -> tuple[Int[Tensor, "N"], Int[Tensor, "N"], Int[Tensor, "N"]]:
    """Returns cut, span length and span start of each document, given four uniform numbers in [0, 1) for each.

    cut = min(length, U{4 … longest}), or min(length, longest) for documents with `is_whole`. span = ⌊s + u⌋ with s
    uniform on mean·cut ± w, where w is half the range of `spans`, or less where s would fall below 1: so E[span] =
    mean·cut exactly (a cut below 1/mean has a span of 1). start = U{0 … cut − span}.
    """
    low, high = spans
    if not 0 < low <= high <= 1:
        raise DataError(f"spans = {spans}: expected shares with 0 < smallest <= largest <= 1")
    # A draw next to 1 is rounded up to one more than the longest.
    drawn_cut = (SHORTEST + draws[0] * (longest - SHORTEST + 1)).long().clamp(max=longest)
    if is_whole is not None:
        drawn_cut = drawn_cut.masked_fill(is_whole, longest)
    cut = drawn_cut.minimum(lengths)
    middle = cut * ((low + high) / 2)
    # No wider than keeps the shortest span at 1, so that no draw has to be clamped and the mean stays.
    half = torch.minimum(cut * ((high - low) / 2), middle - 1).clamp(min=0)
    # Adding a uniform number before rounding down keeps the mean of the span exact.
    span = (middle + half * (2 * draws[1] - 1) + draws[2]).long().clamp(min=1).minimum(cut)
    start = (draws[3] * (cut - span + 1)).long()
    return cut, span, start


def widen_to_words(
    documents: Int[Tensor, "N L"],
    cut: Int[Tensor, "N"],
    span: Int[Tensor, "N"],
    start: Int[Tensor, "N"],
    between: int,
) -> tuple[Int[Tensor, "N"], Int[Tensor, "N"]]:
    """Returns span lengths and starts widened to the words that they touch, as far as the cut goes."""
    L = documents.shape[1]
    at = torch.arange(L, device=documents.device)
    is_gap = documents == between
    last = (start + span - 1)[:, None]
    new_start = torch.where(is_gap & (at < start[:, None]), at + 1, 0).amax(1)
    new_end = torch.where(is_gap & (at > last), at, L).amin(1).minimum(cut)
    return new_end - new_start, new_start


def with_hole(
    documents: Int[Tensor, "N L"],
    cut: Int[Tensor, "N"],
    span: Int[Tensor, "N"],
    start: Int[Tensor, "N"],
    block: int,
    mark: int,
    pad: int,
    ignore_padding: bool = True,
) -> Batch:
    """Returns `prefix ⁇ suffix ⁇ span` of each document[:cut], the span being document[start:start+span]."""
    cut = cut[:, None]
    span = span[:, None]
    start = start[:, None]
    at = torch.arange(block, device=documents.device)
    second = cut - span + 1  # where the second mark stands; the first stands at `start`
    # How far from its place in the row a token stands in the document: prefix, then suffix, then span.
    shift = torch.where(at < start, 0, torch.where(at < second, span - 1, start - second - 1))
    source = at + shift
    rows = documents.gather(1, source.clamp(0, documents.shape[1] - 1)).long()
    rows = rows.masked_fill((at == start) | (at == second), mark)
    padding = at > cut + 1
    rows = rows.masked_fill(padding, pad)
    targets = rows
    if ignore_padding:
        targets = rows.masked_fill(padding, IGNORE)
    return Batch(rows[:, :-1], targets[:, 1:])
