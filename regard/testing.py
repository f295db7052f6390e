"""The laws of attention for other projects' tests: one line in a file that pytest reads.

def test_my_attention():
    regard.testing.assert_lawful(my_attention, like="softmax")
"""

from __future__ import annotations

from typing import Any

from regard.checking import check

__all__ = ["assert_lawful"]


def assert_lawful(thing: Any, *, like: Any = None, **options: Any) -> None:
    """Raises an AssertionError with a shrunk reproducer if a law is broken, and one if no law could be asked.

    With `like` it raises one also if the two could not be compared: nothing would have been tested. `thing`, `like` and
    the options are those of `regard.check`.
    """
    __tracebackhide__ = True  # pytest then points at the caller's line
    verdicts = check(thing, like=like, **options)
    compared = not any(v.law == "same" and v.status == "could not be asked" for v in verdicts)
    if verdicts.ok and verdicts.asked and compared:
        return
    lines = [str(verdicts)]
    for verdict in verdicts.broken:
        if verdict.reproducer is not None:
            lines.append(f"\nTo see '{verdict.law}' again:\n\n{verdict.reproducer}")
    raise AssertionError("\n".join(lines))
