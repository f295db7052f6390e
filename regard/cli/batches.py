"""`regard data show RECIPE`: the first batch of a training, its tensors and its rows."""

from __future__ import annotations

from collections.abc import Sequence

from regard.cli.show import align_right, console, print_text, table
from regard.train.inspection import FirstBatch, TokenRow

SHOWN = 12  # tokens shown from the beginning of the first row; half as many from its end
TEXT = 240  # characters shown of a row
PADDING = "padding"
NO_LOSS = "no loss"


def print_batch(name: str, batch: FirstBatch) -> None:
    """Prints the tensors of a batch, the tokens of its first row beside their targets, and all rows as text."""
    out = console()
    for note in batch.notes:
        console(stderr=True).print(note, style="dim", soft_wrap=True)
    rows = "1 row" if len(batch.x) == 1 else f"{len(batch.x)} rows"
    out.print(f"{name}: the batch of the first step, {rows}\n")
    tensors = table("tensor", "shape", "dtype", "what it holds")
    for tensor, what, shape, dtype in batch.tensors:
        tensors.add_row(tensor, str(shape), dtype, what)
    out.print(tensors)
    reads = "the model reads"
    if batch.source:
        _print_source(batch.source[0])
        reads = "the decoder reads"
    _print_targets(batch.x[0], batch.y[0], reads)
    _print_texts(batch, reads)


def _print_source(row: TokenRow) -> None:
    """Prints the tokens that the encoder reads."""
    _print_title("Row 0, encoder")
    made = table("place", "id", "the encoder reads")
    for place in _chosen_places(row):
        if place is None:
            made.add_row("…")
            continue
        made.add_row(str(place), str(row.ids[place]), _token(row, place, PADDING))
    align_right(made, 0).columns[-1].justify = "left"
    console().print(made)


def _print_targets(x: TokenRow, y: TokenRow, reads: str) -> None:
    """Prints the token at each place beside the target there."""
    _print_title("Row 0, read and target")
    made = table("place", "id", reads, "target id", "target")
    for place in _chosen_places(x):
        if place is None:
            made.add_row("…")
            continue
        cells = [str(x.ids[place]), _token(x, place, PADDING), str(y.ids[place]), _token(y, place, NO_LOSS)]
        made.add_row(str(place), *cells)
    for column in (0, 1, 3):
        made.columns[column].justify = "right"
    console().print(made)


def _print_texts(batch: FirstBatch, reads: str) -> None:
    """Prints each row as text; long rows are cut in the middle."""
    for n, (x, y) in enumerate(zip(batch.x, batch.y, strict=True)):
        _print_title(f"Row {n}")
        if batch.source:
            print_text(f"the encoder reads {_describe(batch.source[n])}: {_cut(batch.source[n].text)}")
        print_text(f"{reads} {_describe(x)}: {_cut(x.text)}")
        print_text(f"targets ({sum(y.counted)}): {_cut(y.text)}")


def _chosen_places(row: TokenRow) -> Sequence[int | None]:
    """Returns the places to show: the first of a row, None for a gap, its last, and one of padding."""
    length = sum(row.counted)
    last = min(len(row.ids), length + 1)
    if last <= SHOWN + SHOWN // 2 + 1:
        return range(last)
    return [*range(SHOWN), None, *range(last - SHOWN // 2, last)]


def _describe(row: TokenRow) -> str:
    """Returns how many tokens a row has, and how much padding."""
    tokens = sum(row.counted)
    return f"({tokens} tokens, {len(row.ids) - tokens} padding)"


def _token(row: TokenRow, place: int, instead: str) -> str:
    """Returns a token in quotation marks, or `instead` for one that does not count."""
    if not row.counted[place]:
        return instead
    return repr(row.tokens[place])


def _cut(text: str) -> str:
    """Returns a text on one line; a long one without its middle."""
    text = text.replace("\n", "↵")
    if len(text) <= TEXT:
        return text
    return f"{text[: 2 * TEXT // 3]} … {text[-TEXT // 3 :]}"


def _print_title(text: str) -> None:
    console().print(f"\n{text}", style="bold")
