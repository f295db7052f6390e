"""The page of a design: the query or the proof that there is none, tables, and pictures of the keys.

`design_page(results)` takes a result of `regard.lab.design` as plain data: the `as_dict()` of a `Design`, an `Identity`
or a `Replacement`. Which of them it is shows by its fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from regard.lab.design import hulls
from regard.report.heat import heat
from regard.report.markup import Markup
from regard.report.page import Page, facts, figure, figures, heading, listing, table

_WIDEST = 6  # coordinates that a table shows
_MOST = 40  # keys that a matrix of weights is drawn for
_DRAWN = 200  # keys that a picture shows


def design_page(results: Mapping[str, Any]) -> Page:
    """The page for one result."""
    first, _, rest = str(results["explanation"]).partition("\n")
    build = _identity if "designs" in results else _replacement if "queries" in results else _design
    page = Page("A query by design" if build is not _replacement else "A key by design", first)
    page.add(*build(results))
    page.add(heading("Check it by hand"), listing(results["explanation"] if rest else first))
    return page


def _design(found: Mapping[str, Any]) -> Iterable[Markup]:
    members = found["members"]
    yield facts(_numbers(found), big=True)
    pictures = _pictures(found)
    if pictures:
        yield heading("Seen")
        yield figures(*pictures)
    yield heading("Keys")
    yield _keys(found["keys"], members, found["scores"], found["weights"], "Wanted")
    if found["certificate"]:
        yield heading("Certificate")
        yield _mixes(found["certificate"])


def _numbers(found: Mapping[str, Any]) -> dict[str, object]:
    if not found["feasible"]:
        return {"such a query": "none", "margin": 0}
    total = sum(found["weights"][j] for j in found["members"])
    return {"weight wanted": found["precision"], "weight reached": total} | {
        "margin": found["margin"],
        "length β": found["beta"],
    }


def _pictures(found: Mapping[str, Any]) -> list[Markup]:
    keys, members, q = found["keys"], found["members"], found["q"]
    meet = found["certificate"]["point"] if found["certificate"] else None
    if len(keys) > _DRAWN:
        return []
    made = []
    what = "Wanted keys are discs, the others squares with their hull. "
    if meet is None:
        told = what + "Everything on the query's side of the dashed line scores higher."
    else:
        told = what + "The cross lies in that hull and in what the wanted keys span: no line can part them."
    if len(keys[0]) == 2:
        made.append(figure(hulls.plane(keys, members, q, meet), told))
    if len(keys[0]) == 3:
        made.append(
            figure(
                hulls.space(keys, members, q, meet), told.replace("dashed line", "sheet").replace("no line", "no plane")
            )
        )
    if len(keys[0]) > 2 and q is not None and any(q):
        band = "The same edge-on: a query sees only how far along it a key lies. The band is the margin."
        made.append(figure(hulls.edge_on(keys, members, q), band))
    return made


def _identity(found: Mapping[str, Any]) -> Iterable[Markup]:
    keys, designs = found["keys"], found["designs"]
    refused = [d["members"][0] for d in designs if not d["feasible"]]
    yield facts({"keys": len(keys), "selectable": len(keys) - len(refused), "not selectable": len(refused)}, big=True)
    pictures = []
    names = [str(j) for j in range(len(keys))]
    if found["weights"] and len(keys) <= _MOST:
        pictures.append(figure(heat(found["weights"], names), "Row i: the weights of the query made for key i."))
    if len(keys[0]) == 2 and len(keys) <= _DRAWN:
        told = "Squares can be selected; discs lie in the hull of the others."
        pictures.append(figure(hulls.plane(keys, refused), told))
    if pictures:
        yield heading("Seen")
        yield figures(*pictures)
    yield heading("Queries")
    rows = [
        [j, "yes" if d["feasible"] else "no", d["margin"], d["beta"], _vector(d["q"]) if d["q"] else "–"]
        for j, d in enumerate(designs)
    ]
    yield table(rows, ["key", "selectable", "margin", "length β", "query"], "A query for each key", refused)
    for d in designs:
        if d["certificate"]:
            yield _mixes(d["certificate"])


def _replacement(found: Mapping[str, Any]) -> Iterable[Markup]:
    index, key, keys = found["index"], found["key"], found["keys"]
    if key is None:
        yield facts({"such a key": "none"}, big=True)
        return
    least = min(row[index] for row in found["weights"])
    yield facts({"weight reached": least, "margin": found["margin"], "factor β of the query": found["beta"]}, big=True)
    if len(key) == 2 and len(keys) <= _DRAWN:
        one = found["queries"][0] if len(found["queries"]) == 1 else None
        told = "The star stands in place of the disc. It scores higher than all squares."
        yield heading("Seen")
        yield figure(hulls.plane(keys, [index], one, replaced=(index, key)), told)
    yield heading("Keys")
    new = [*keys[:index], key, *keys[index + 1 :]]
    for n, (scores, weights) in enumerate(zip(found["scores"], found["weights"], strict=True)):
        yield _keys(new, [index], scores, weights, "Replaced", f"Scores and weights of query {n}, with the new key")


def _keys(
    keys: list[list[float]],
    members: list[int],
    scores: list[float] | None,
    weights: list[float] | None,
    word: str,
    caption: str = "Scores and weights of the query",
) -> Markup:
    if scores is None or weights is None:
        return table([[j, _vector(k)] for j, k in enumerate(keys)], ["key", "coordinates"], f"{word}: marked", members)
    # To four digits: equal weights must look equal.
    rows = [[j, _vector(k), _signed(scores[j]), f"{weights[j]:.4f}"] for j, k in enumerate(keys)]
    return table(rows, ["key", "coordinates", "score", "weight"], f"{caption}. {word}: marked", members)


def _mixes(certificate: Mapping[str, Any]) -> Markup:
    """Both mixes of keys, whose sums are the same point."""
    sides = [("wanted", certificate["members"]), ("others", certificate["others"])]
    rows = [[f"key {j}", side, f"{c:.6g}"] for side, mix in sides for j, c in mix]
    point, residual = _vector(certificate["point"]), certificate["residual"]
    caption = f"Both mixes are {point}, to {residual:.1e} (tolerance {certificate['tolerance']:.1e})"
    return table(rows, ["key", "side", "coefficient"], caption)


def _vector(x: list[float]) -> str:
    shown = ", ".join(map(_signed, x[:_WIDEST]))
    return f"({shown}{', …' if len(x) > _WIDEST else ''})"


def _signed(x: float) -> str:
    return f"{'−' if x < 0 else ''}{abs(x):.4g}"
