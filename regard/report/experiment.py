"""Parts that the pages of experiments share: sections, how results were made, and numbers with intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from regard.errors import quote
from regard.report.chart import Axis
from regard.report.markup import Markup, duration
from regard.report.page import Page, ReportError, command_listing, details, facts, heading, paragraph

Row = Mapping[str, Any]
# The title of a section, and the function that builds its blocks from an experiment's results.
SectionBuilder = tuple[str, Callable[[Any], Iterable[Markup]]]


def build_page(
    title: str,
    lead: Callable[[Any], Markup],
    sections: Sequence[SectionBuilder],
    results: Any,
    header: Row | None = None,
) -> Page:
    """Returns the page of an experiment: a lead, its sections in order, and how the results were made.

    `results` is the argument of the builders. `header` has the fields of every experiment's results.json: command,
    config, seconds, threads, versions; if it is None, `results` has them. Results that a section cannot be built from
    raise a ReportError that names the section.
    """
    name = "lead"
    try:
        page = Page(title, lead(results))
        for name, build in sections:
            page.add(heading(name), *build(results))
        name = "How it was made"
        page.add(heading(name), *_describe_run(results if header is None else header))
    except (KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
        raise ReportError(
            f"the results lack what the part '{name}' needs ({type(error).__name__}: {quote(error)}); expected those "
            "of `regard run`"
        ) from error
    return page


def _describe_run(header: Row) -> Iterable[Markup]:
    """Yields the command that gives the same numbers, the settings, and the versions."""
    yield paragraph("The same seed on the same machine, with as many threads, gives the same numbers but for times:")
    yield command_listing(header["command"])
    settings = {key: json.dumps(value) for key, value in header["config"].items()}
    yield details("Settings", facts(settings | {"time": duration(header["seconds"]), "threads": header["threads"]}))
    yield details("Versions", facts(header["versions"]))


def signed_number(x: float, digits: int = 2) -> str:
    """Formats a number with a minus sign and never as −0.00: −0.50."""
    # Adding 0.0 turns −0.0 into 0.0.
    return f"{round(x, digits) + 0.0:.{digits}f}".replace("-", "−")


def with_interval(estimate: Sequence[float], digits: int = 2) -> str:
    """Formats a value and the ends of its interval: −0.50 (−0.51 to −0.49)."""
    middle, low, high = (signed_number(x, digits) for x in estimate)
    return f"{middle} ({low} to {high})"


def select_rows(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """Returns the rows that have all the wanted values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def distinct_values(rows: Iterable[Row], key: str) -> list[Any]:
    """Returns the values of a column, each once, in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def share_axis(name: str) -> Axis:
    """Returns an axis of shares, from 0 to 1."""
    return Axis(name, shares=True, span=(0, 1.03))
