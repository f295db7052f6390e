"""What the pages of experiments share: parts in order, how they were made, numbers with intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from regard.report.chart import Axis
from regard.report.markup import Markup, duration
from regard.report.page import Page, ReportError, details, facts, heading, listing, paragraph

Found = Mapping[str, Any]
Part = tuple[str, Callable[[Found], Iterable[Markup]]]


def page_of(title: str, lead: Callable[[Found], Markup], parts: Sequence[Part], results: Found) -> Page:
    """The parts in order, then how they were made; results that are not as a part needs them are a ReportError."""
    name = "lead"
    try:
        page = Page(title, lead(results))
        for name, build in [*parts, ("How it was made", _made)]:
            page.add(heading(name), *build(results))
    except (KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
        raise ReportError(
            f"the results lack what the part '{name}' needs ({type(error).__name__}: {error}); expected those of "
            "`regard run`"
        ) from error
    return page


def _made(results: Found) -> Iterable[Markup]:
    yield paragraph("The same seed on the same machine, with as many threads, gives the same numbers:")
    yield listing(results["command"])
    settings = {key: json.dumps(value) for key, value in results["config"].items()}
    yield details("Settings", facts(settings | {"time": duration(results["seconds"]), "threads": results["threads"]}))
    yield details("Versions", facts(results["versions"]))


def signed(x: float, digits: int = 2) -> str:
    """−0.50, with a minus sign and never −0.00."""
    return f"{round(x, digits) + 0.0:.{digits}f}".replace("-", "−")


def within(found: Sequence[float], digits: int = 2) -> str:
    """A value and the ends of its interval: −0.50 (−0.51 to −0.49)."""
    middle, low, high = (signed(x, digits) for x in found)
    return f"{middle} ({low} to {high})"


def of(rows: Iterable[Found], **wanted: object) -> list[Found]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def distinct(rows: Iterable[Found], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def share_axis(name: str) -> Axis:
    """Returns an axis of shares, from 0 to 1."""
    return Axis(name, shares=True, span=(0, 1.03))
