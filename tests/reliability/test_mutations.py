"""A sample of the campaign in mutations.py: some mutations of every kind of file and request."""

import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parent / "mutations.py"


@pytest.mark.timeout(300)
def test_a_sample_of_mutations_is_read_or_refused():
    # In a process of its own, whose memory is limited.
    words = [sys.executable, CAMPAIGN, "--count", "5", "--seed", "1", "--jobs", "1"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert done.stdout.count(" 0 kinds of failure") == done.stdout.count(" mutations ") >= 40
