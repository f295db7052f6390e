"""Every mechanism names its papers: in its file, in the README's table, and in the list of references."""

import inspect
import re
import sys
from pathlib import Path

import pytest

import regard

ROOT = Path(__file__).parents[2]
ARXIV = re.compile(r"arXiv:\s*(\d{4}\.\d{5})")
LISTED = (ROOT / "docs" / "references.md").read_text()


@pytest.mark.parametrize("name", list(regard.mechanisms()))
def test_every_mechanism_names_its_papers(name):
    module = sys.modules[regard.mechanisms()[name].__module__]
    cited = ARXIV.findall(inspect.getdoc(module))
    assert cited and all(paper in LISTED for paper in cited)
    assert re.search(rf"^\| .*`{name}`.*\|.*(arXiv|20\d\d)", LISTED, re.M)
    row = re.search(
        rf"^\| `{name}` \|.*arxiv\.org/abs/(\d{{4}}\.\d{{5}})\) \|$", (ROOT / "README.md").read_text(), re.M
    )
    assert row and row[1] in cited, "the README's table names another paper"


def test_links_of_papers_are_those_written():
    for shown, linked in re.findall(r"\[arXiv:([\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)", LISTED):
        assert shown == linked
