"""What the sections of the page of "knowledge" share: the results' names of models and splits, and their styles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard.report.palette import Style, style

Results = Mapping[str, Any]
SPLITS = {"dev": "development", "test": "test"}


def styles_of(results: Results) -> dict[str, Style]:
    """One style a model everywhere: the last has the first colour."""
    names = [m["name"] for m in results.get("models") or []]
    others = [name for key in ("answers", "calibration", "coverage", "unwritten") for name in results.get(key) or {}]
    others += [s["name"] for s in results.get("stages") or [] if s["name"] != "pretraining"]
    return {name: style(n) for n, name in enumerate(dict.fromkeys([*reversed(names), *others]))}


def main(results: Results, part: Mapping[str, Any]) -> str:
    """The model that the page is about, or else any that this part of the results has."""
    names = [m["name"] for m in results.get("models") or []]
    return next((name for name in reversed(names) if name in part), next(iter(part)))


def scored_split(results: Results) -> str:
    """The split that counts: test where its answers are known."""
    return "test" if any(m.get("test") for m in results.get("models") or []) else "dev"
