"""Experiments side by side: the outcome of each, as a terminal shows it, and the command that gives it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.lab.results import OutcomeTable, ResultsHeader, read_results
from regard.report.markup import count_noun, duration
from regard.report.page import Page, command_listing, facts, heading, paragraph, table


def outcomes_page(documents: Mapping[str, Mapping[str, Any]]) -> Page:
    """Returns a page with the outcomes of experiments, by the names of their folders; like tables become one."""
    kinds = {name: str(document.get("experiment") or document.get("lab")) for name, document in documents.items()}
    told = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    page = Page(f"{count_noun(len(documents), 'experiment')} compared", f"The outcomes of {told}.", heading("Outcomes"))
    tables: dict[tuple[str, ...], list[list[object]]] = {}
    for name, document in documents.items():
        if document.get("outcome") is None:
            page.add(paragraph(f"{name}: its results have no table of what came out.", quiet=True))
            continue
        outcome = read_results(OutcomeTable, document["outcome"])
        rows = tables.setdefault(tuple(outcome.columns), [])
        rows += [[name, *row] for row in outcome.rows]
    for columns, rows in tables.items():
        page.add(table(rows, ["experiment", *columns], "What came out, in the words of each experiment."))
    page.add(heading("How they were made"))
    for name, document in documents.items():
        header = read_results(ResultsHeader, document)
        page.add(paragraph(f"{name}:"), command_listing(header.command or "–"))
        page.add(facts({"device": header.device or "–", "time": duration(header.seconds)}))
    return page
