"""A sample of the campaign; `make test-reliability` runs all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).with_name("campaign.py")


def run(*words):
    words = [sys.executable, str(CAMPAIGN), *map(str, words)]
    return subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
    )


@pytest.mark.timeout(300)
def test_a_sample_of_the_campaign(tmp_path):
    only = "damaged-checkpoints,killed-trainings,simultaneous-trainings"
    done = run("--count", 2, "--only", only, "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["kind"] for row in rows] == only.split(",") and all(row["tries"] >= 2 for row in rows)


def test_an_unknown_kind_is_told():
    done = run("--only", "nonsense")
    assert done.returncode == 2 and "no kind nonsense; there is crash-prefixes" in done.stderr
