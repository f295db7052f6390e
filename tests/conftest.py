"""Flags and profiles shared by all tests."""

import shutil

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("regard", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("regard")

NEEDS = {"browser": "chromium", "node": "node"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-all", action="store_true", help="fail where a browser or node is missing, not skip")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, program in NEEDS.items():
        if item.get_closest_marker(marker) and shutil.which(program) is None:
            if item.config.getoption("--require-all"):
                pytest.fail(f"needs {program}, which is not installed")
            pytest.skip(f"needs {program}, which is not installed")
