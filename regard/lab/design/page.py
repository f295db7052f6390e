"""The page of a design: the query or the proof that there is none, tables, and pictures of the keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from regard.lab.design import hulls
from regard.lab.design.certificates import Certificate
from regard.lab.design.layer import HeadDesign
from regard.lab.design.replacement import Replacement
from regard.lab.design.result import Vectors
from regard.lab.design.sharing import SharedReplacement
from regard.lab.design.solve import Design, Identity
from regard.report.heat import heat
from regard.report.markup import Markup
from regard.report.page import Page, facts, figure, figures, heading, listing, table

_MOST_COORDINATES = 6  # that a table shows
_MOST_IN_MATRIX = 40  # keys that a matrix of weights is drawn for
_MOST_DRAWN = 200  # keys that a picture shows

Numbers = Sequence[float]


def design_page(result: Design | Identity | Replacement | SharedReplacement | HeadDesign) -> Page:
    """Returns the page of one result."""
    explanation = result.explain()
    lead = explanation.partition("\n")[0]
    if isinstance(result, Replacement):
        page = Page("A key by design", lead, *_replacement_blocks(result))
    elif isinstance(result, SharedReplacement):
        page = Page("A key by design", lead, *_shared_blocks(result))
    elif isinstance(result, HeadDesign):
        page = Page("A head by design", lead, *_head_blocks(result))
    elif isinstance(result, Identity):
        page = Page("A query by design", lead, *_identity_blocks(result))
    else:
        page = Page("A query by design", lead, *_design_blocks(result))
    page.add(heading("Check it by hand"), listing(explanation))
    return page


def _design_blocks(design: Design) -> Iterable[Markup]:
    """Yields the blocks about one query."""
    yield facts(_main_numbers(design), big=True)
    pictures = _pictures(design)
    if pictures:
        yield heading("Seen")
        yield figures(*pictures)
    yield heading("Keys")
    if design.scores is None or design.weights is None:
        rows = [[j, _format_vector(key)] for j, key in enumerate(design.keys.tolist())]
        yield table(rows, ["key", "coordinates"], "Wanted: marked", design.members)
    else:
        caption = "Scores and weights of the query. Wanted: marked"
        yield _score_table(design.keys, design.members, design.scores.tolist(), design.weights.tolist(), caption)
    if design.certificate:
        yield heading("Certificate")
        yield _certificate_table(design.certificate)


def _main_numbers(design: Design) -> dict[str, object]:
    """Returns the few numbers that matter most."""
    if design.weights is None:
        return {"such a query": "none", "margin": 0}
    weights = design.weights.tolist()
    return {
        "weight wanted": design.precision,
        "weight reached": sum(weights[j] for j in design.members),
        "margin": design.margin,
        "length β": design.beta,
    }


def _pictures(design: Design) -> list[Markup]:
    """Returns pictures of the keys: in the plane, in space, and edge-on; none where there are too many."""
    if len(design.keys) > _MOST_DRAWN:
        return []
    keys = design.keys.tolist()
    members = design.members
    width = len(keys[0])
    q = None
    if design.q is not None:
        q = design.q.tolist()
    meet = None
    side = "Everything on the query's side of the dashed line scores higher."
    if design.certificate is not None:
        meet = design.certificate.point
        side = "The cross lies in that hull and in what the wanted keys span: no line can part them."
    caption = f"Wanted keys are discs, the others squares with their hull. {side}"
    pictures = []
    if width == 2:
        pictures.append(figure(hulls.plane(keys, members, q, meet), caption))
    if width == 3:
        caption = caption.replace("dashed line", "sheet").replace("no line", "no plane")
        pictures.append(figure(hulls.space(keys, members, q, meet), caption))
    if width > 2 and q is not None and any(q):
        band = "The same edge-on: a query sees only how far along it a key lies. The band is the margin."
        pictures.append(figure(hulls.edge_on(keys, members, q), band))
    return pictures


def _identity_blocks(result: Identity) -> Iterable[Markup]:
    """Yields the blocks about a query for every key."""
    keys = result.keys.tolist()
    refused = [design.members[0] for design in result.refused]
    yield facts({"keys": len(keys), "selectable": len(keys) - len(refused), "not selectable": len(refused)}, big=True)
    pictures = []
    if result.weights is not None and len(keys) <= _MOST_IN_MATRIX:
        names = [str(j) for j in range(len(keys))]
        svg = heat(result.weights.tolist(), names)
        pictures.append(figure(svg, "Row i: the weights of the query made for key i."))
    if len(keys[0]) == 2 and len(keys) <= _MOST_DRAWN:
        caption = "Squares can be selected; discs lie in the hull of the others."
        pictures.append(figure(hulls.plane(keys, refused), caption))
    if pictures:
        yield heading("Seen")
        yield figures(*pictures)
    yield heading("Queries")
    rows: list[list[object]] = []
    for j, design in enumerate(result.designs):
        if design.q is None:
            rows.append([j, "no", design.margin, design.beta, "–"])
        else:
            rows.append([j, "yes", design.margin, design.beta, _format_vector(design.q.tolist())])
    yield table(rows, ["key", "selectable", "margin", "length β", "query"], "A query for each key", refused)
    for design in result.designs:
        if design.certificate:
            yield _certificate_table(design.certificate)


def _replacement_blocks(result: Replacement) -> Iterable[Markup]:
    """Yields the blocks about a key in place of another."""
    if result.key is None or result.scores is None or result.weights is None:
        yield facts({"such a key": "none"}, big=True)
        return
    index = result.index
    least = float(result.weights[:, index].min())
    numbers = {"weight reached": least, "margin": result.margin, "factor β of the query": result.beta}
    yield facts(numbers, big=True)
    if len(result.key) == 2 and len(result.keys) <= _MOST_DRAWN:
        q = None
        if len(result.queries) == 1:
            q = result.queries[0].tolist()
        svg = hulls.plane(result.keys.tolist(), [index], q, replaced=(index, result.key.tolist()))
        yield heading("Seen")
        yield figure(svg, "The star stands in place of the disc. It scores higher than all squares.")
    yield heading("Keys")
    new_keys = torch.cat([result.keys[:index], result.key[None], result.keys[index + 1 :]])
    for n, (scores, weights) in enumerate(zip(result.scores.tolist(), result.weights.tolist(), strict=True)):
        caption = f"Scores and weights of query {n}, with the new key. Replaced: marked"
        yield _score_table(new_keys, [index], scores, weights, caption)


def _shared_blocks(result: SharedReplacement) -> Iterable[Markup]:
    """Yields the blocks about a key with which a query averages a set."""
    if result.key is None or result.scores is None or result.weights is None:
        yield facts({"such a key": "none"}, big=True)
        return
    total = float(result.weights[list(result.members)].sum())
    numbers = {"weight of the set": total, "at the query as it is": result.unchanged, "factor β": result.beta}
    yield facts(numbers, big=True)
    if len(result.key) == 2 and len(result.keys) <= _MOST_DRAWN:
        replaced = (result.index, result.key.tolist())
        svg = hulls.plane(result.keys.tolist(), result.members, result.query.tolist(), replaced=replaced)
        yield heading("Seen")
        yield figure(svg, "The star stands in place of its disc. It scores as the other discs do.")
    yield heading("Keys")
    new_keys = result.keys.clone()
    new_keys[result.index] = result.key
    caption = "Scores and weights of the query, with the new key. Averaged: marked"
    yield _score_table(new_keys, result.members, result.scores.tolist(), result.weights.tolist(), caption)


def _head_blocks(result: HeadDesign) -> Iterable[Markup]:
    """Yields the blocks about a head: its weights, what the tokens read, and its matrices."""
    if result.weights is None or result.reached is None:
        yield facts({"such a head": "none"}, big=True)
        return
    yield facts({"tokens": len(result.tokens), "asked": len(result.asked), "largest error": result.error}, big=True)
    if len(result.tokens) <= _MOST_IN_MATRIX:
        names = [str(i) for i in range(len(result.tokens))]
        yield heading("Seen")
        yield figure(heat(result.weights.tolist(), names), "Row i: the weights of token i.")
    yield heading("Outputs")
    rows: list[list[object]] = []
    for i, reads in enumerate(result.reached.tolist()):
        wanted = "anything"
        if i in result.asked:
            wanted = _format_vector(result.outputs[i].tolist())
        rows.append([i, _format_vector(result.tokens[i].tolist()), _format_vector(reads), wanted])
    yield table(rows, ["token", "coordinates", "reads", "wanted"], "Asked: marked", result.asked)


def _score_table(keys: Vectors, marked: Sequence[int], scores: Numbers, weights: Numbers, caption: str) -> Markup:
    """Returns the table of the keys with their scores and weights, some rows marked."""
    # Weights to four digits: equal weights must look equal.
    rows = [
        [j, _format_vector(key), _format_number(scores[j]), f"{weights[j]:.4f}"] for j, key in enumerate(keys.tolist())
    ]
    return table(rows, ["key", "coordinates", "score", "weight"], caption, marked)


def _certificate_table(certificate: Certificate) -> Markup:
    """Returns the table of both mixes of keys, whose sums are the same point."""
    sides = [("wanted", certificate.members), ("others", certificate.others)]
    rows = [[f"key {j}", side, f"{c:.6g}"] for side, mix in sides for j, c in mix]
    point = _format_vector(certificate.point)
    caption = f"Both mixes are {point}, to {certificate.residual:.1e} (tolerance {certificate.tolerance:.1e})"
    return table(rows, ["key", "side", "coefficient"], caption)


def _format_vector(x: Numbers) -> str:
    """Formats a vector, cut where a table has no room for more."""
    coordinates = [_format_number(v) for v in x[:_MOST_COORDINATES]]
    if len(x) > _MOST_COORDINATES:
        coordinates.append("…")
    return f"({', '.join(coordinates)})"


def _format_number(x: float) -> str:
    """Formats a number with a minus sign, never as −0."""
    sign = "−" if x < 0 else ""
    return f"{sign}{abs(x):.4g}"
