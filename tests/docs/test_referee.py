"""docs/referee.md says what was measured, and what it calls broken is shown without regard."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load_script():
    sys.path.insert(0, str(ROOT / "benchmarks" / "reproductions"))  # what it imports lies beside it
    spec = importlib.util.spec_from_file_location("referee", ROOT / "benchmarks" / "reproductions" / "referee.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def referee():
    pytest.importorskip("transformers")
    return load_script()


@pytest.fixture(scope="module")
def document(referee):
    return json.loads(max(referee.RESULTS.glob("referee-[0-9]*.json")).read_text(encoding="utf-8"))


def test_the_page_is_that_of_the_newest_results(referee, document):
    page = referee.PAGE.read_text(encoding="utf-8")
    for part in (
        referee.make_table(document),
        referee.make_programs(document, referee.BROKEN),
        referee.make_programs(document, referee.NOTED),
    ):
        assert part in page


def test_at_least_25_implementations_were_asked(document):
    assert len(document["asked"]) >= 25 and not document["missing"]


def test_what_is_called_broken_has_a_program_without_regard(referee, document):
    shown = {(subject, law) for subject, laws, *_ in referee.BROKEN.values() for law in laws.split(", ")}
    # Two forms of one function share a program.
    alike = {"Attend(flash=True)": "Attend", "FastAttention(causal=True)": "FastAttention"}
    for entry in document["asked"]:
        for law in (x["law"] for x in entry["laws"] if x["status"] == "broken"):
            names = {entry["name"], alike.get(entry["name"], entry["name"])}
            assert any((name, law) in shown for name in names), f"{entry['name']} breaks {law}, and no program shows it"
    for *_, program in (referee.BROKEN | referee.NOTED).values():
        assert len(program.strip().splitlines()) <= 10 and "regard" not in program


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jamba-pieces", "jamba-packed", "qwen3-next-packed", "gpt-oss-packing"])
def test_a_program_shows_it_again(referee, name):
    program = (referee.BROKEN | referee.NOTED)[name][3]
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert float(re.search(r": ([0-9.e-]+)", printed)[1]) > 1e-2
