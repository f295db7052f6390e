"""One grading server for all tests: it imports torch once."""

import os

import pytest

from regard.grade import Grader


@pytest.fixture(scope="session")
def grader():
    os.environ["A_KEY_OF_THE_TEACHER"] = "secret"
    try:
        with Grader() as made:
            yield made
    finally:
        del os.environ["A_KEY_OF_THE_TEACHER"]
