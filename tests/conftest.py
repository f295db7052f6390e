"""Flags and profiles shared by all tests."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("regard", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("regard")

NEEDS = {"browser": "chromium", "node": "node"}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-all", action="store_true", help="fail where a browser or node is missing, not skip")


def pytest_configure() -> None:
    # pytest imports readline, which puts 80 columns into the environment of xdist's workers; tables would heed them.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, program in NEEDS.items():
        if item.get_closest_marker(marker) and shutil.which(program) is None:
            if item.config.getoption("--require-all"):
                pytest.fail(f"needs {program}, which is not installed")
            pytest.skip(f"needs {program}, which is not installed")


@pytest.fixture(scope="module")  # longer, and its event loop would be in the way of other tests'
def chromium() -> Iterator[Any]:
    """A browser that asks nobody for anything on its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces of short texts are stored as those of long ones are, with loss."""
    monkeypatch.setattr("regard.lens.trace.precision.SHORT", 0)


@pytest.fixture
def window(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens the page of a trace of the lens."""
    from lens_window import Window

    from regard.lens.pages.page import write_page

    opened: list[Any] = []

    def show(trace: Any, state: str = "", **context: Any) -> Any:
        path = tmp_path / f"{len(opened)}.html"
        write_page(trace, path)
        opened.append(Window(chromium, path, **context))
        return opened[-1].show(state)

    yield show
    for one in opened:
        one.close()
