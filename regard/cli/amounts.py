"""Formatting large and small amounts."""

from __future__ import annotations

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
# A share of a unit from which on a number is written in it: 999.5 is 1.00 k and not 1,000.
_ROUNDS_UP = 0.9995


def format_amount(x: float) -> str:
    """Formats 1,234,567 as '1.23 M', so that a unit can follow."""
    for size, prefix in _PREFIXES:
        if abs(x) >= _ROUNDS_UP * size:
            return f"{_three_digits(x / size)} {prefix}"
    if x == int(x):
        return f"{x:g} "
    return f"{_three_digits(x)} "


def format_bytes(x: float) -> str:
    """Formats bytes with their unit."""
    return f"{format_amount(x)}B"


def format_seconds(x: float) -> str:
    """Formats a time in s, ms, µs or ns."""
    for size, unit in _TIMES:
        if x >= _ROUNDS_UP * size:
            return f"{_three_digits(x / size)} {unit}"
    return f"{_three_digits(x * 1e9)} ns"


def _three_digits(x: float) -> str:
    """Formats a number with three significant digits, or all digits before the point if there are more."""
    if x >= 1000:
        return f"{x:,.0f}"
    whole = len(str(int(abs(x))))
    return f"{x:.{max(0, 3 - whole)}f}"
