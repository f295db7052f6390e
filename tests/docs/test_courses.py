"""Questions that courses ask: every command in a table can be read, and figures are those that come out."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

from regard.cli.app import app
from regard.lab.design import design_head, replace_key, share_key
from regard.lab.two_heads import weights

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "courses").glob("*.md"))
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)


def vectors(name):
    rows = (ROOT / "examples" / name).read_text().split()
    return torch.tensor([[float(x) for x in row.split(",")] for row in rows], dtype=torch.float64)


def said(name):
    return (ROOT / "docs" / "courses" / f"{name}.md").read_text()


@every_page
def test_commands_in_tables_can_be_read(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    commands = re.findall(r"`(regard [a-z][^`]*)`", prose)
    assert commands
    for command in commands:
        group, words = typer.main.get_command(app), shlex.split(command.replace("…", "x"))[1:]
        while isinstance(group, typer.core.TyperGroup):
            name, *words = words
            group = group.get_command(typer.Context(group), name)
        needed = [p for p in group.params if p.required and p.param_type_name == "argument"]
        given = [w for w in words if not w.startswith("-")]
        if len(given) < len(needed) and not given:  # a command that is only named
            assert not words
            continue
        group.make_context(name, words)


@every_page
def test_questions_have_a_command_an_outcome_and_a_slip(page):
    if page.stem == "index":
        linked = set(re.findall(r"\]\(([a-z-]+\.md)\)", page.read_text()))
        assert linked == {p.name for p in PAGES} - {"index.md"}
        return
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) >= 7
    assert all(len(re.sub(r"`[^`]*`", "", row).split(" | ")) == 4 for row in rows), rows


@every_page
def test_links_into_pages_lead_to_headings(page):
    for file, anchor in re.findall(r"\]\(([^)#]+\.md)#([^)]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.+)$", (page.parent / file).read_text(), re.M)
        slugs = [re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings]
        assert anchor in slugs, f"{file}#{anchor}"


def test_figures_of_designs_are_those_of_the_files():
    keys, query = vectors("keys.csv"), vectors("query.csv")[0]
    single = replace_key(keys, 2, query, unit=True).explain()
    assert "9.334·q" in single and "the weight is 0.463" in single
    assert "9.334·q" in said("by-hand") and ".463 here" in said("by-hand")
    shared = share_key(keys, 2, query, [0, 1, 2]).explain()
    assert "q·k_0 = 2.24 and q·k_1 = 2.28" in shared and "q·k₀ = 2.24, q·k₁ = 2.28" in said("by-hand")


def test_one_head_spreads_more_than_two():
    drawn = 1 + 0.5**0.5 * torch.randn(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, two = weights(drawn, keys=7, beta=30.0)
    above = two[drawn > 0]
    assert [round(x[:, 0].std().item(), 2) for x in (one, two)] == [0.48, 0.14]
    assert above[:, 0].std().item() == pytest.approx(0.045, abs=0.004)
    assert ".48 with one head, .14 with two; .045 where ε > 0" in said("by-hand")


def test_figures_of_the_notebook_are_those_that_it_printed():
    cells = json.loads((ROOT / "examples" / "10-looking-inside.ipynb").read_text())["cells"]
    printed = "".join("".join(o.get("text", "")) for c in cells for o in c.get("outputs", []))
    for line, figures in {
        r"largest difference of a weight: 0(\.44)": [".44"],
        r"play: last layer, same meaning 0(\.68), two meanings 0(\.50)": [".68", ".50"],
        r"bank: last layer, same meaning 0(\.87), two meanings 0(\.84)": [".87", ".84"],
        r"gives the right noun more in (7) of 10": ["7 of 10"],
        r"coins would be right (9) times": ["would be in 9"],
        r"random: largest share of a place above an even spread 0(\.00\d)": ["no head is .01"],
        r"least that a head differs from its transpose 0(\.32)": [],
    }.items():
        assert re.search(line, printed), line
        assert all(figure in said("inside") for figure in figures), figures


def test_the_head_for_the_exercise_on_sums_is_as_near_as_said():
    found = design_head(vectors("tokens.csv"), torch.tensor([[0, 1.0, -1, 0], [0, 1, 0, 0], [float("nan")] * 4]))
    assert "0.00503" in found.explain() and "off by at most .005" in said("by-hand")
