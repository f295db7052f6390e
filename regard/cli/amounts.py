"""Large and small amounts as people write them."""

from __future__ import annotations

_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(x: float) -> str:
    """1,234,567 as '1.23 M', so that a unit can follow."""
    for size, prefix in _LARGE:
        if abs(x) >= 0.9995 * size:
            return f"{_three(x / size)} {prefix}"
    return f"{x:g} " if x == int(x) else f"{_three(x)} "


def bytes_of(x: float) -> str:
    """Bytes with their unit."""
    return f"{amount(x)}B"


def seconds(x: float) -> str:
    """A time in seconds, ms, µs or ns."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if x >= 0.9995 * size:
            return f"{_three(x / size)} {unit}"
    return f"{_three(x * 1e9)} ns"


def _three(x: float) -> str:
    """Three digits that count, the whole ones always."""
    return f"{x:.{max(0, 2 - len(str(int(abs(x)))) + 1)}f}" if x < 1000 else f"{x:,.0f}"
