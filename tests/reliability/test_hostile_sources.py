"""Python files that a user names: plugins and the sources of specs. They are run, and what goes wrong is one error."""

import os

import pytest

import regard
from regard.errors import PluginError
from regard.grade.spec import SpecError, load_spec
from regard.plugins import import_file

SPEC = """title = "T"
file = "t.py"
source = "%s"
[[exports]]
name = "f"
[[items]]
name = "a"
kind = "law"
laws = ["finite"]
"""
FAULTS = {
    "raise SystemExit(0)": r"ends Python \(0\).*__main__",
    "import argparse; argparse.ArgumentParser().parse_args(['--x'])": r"ends Python \(2\)",
    "raise ValueError('x' * 5000)": r"ValueError: x+…$",
    "raise ValueError('\\x1b[31m')": r"u001b",
    "(" * 500: r"SyntaxError",
    "a = 1\0": r"SyntaxError",
}


@pytest.mark.parametrize("text", FAULTS, ids=lambda text: text[:20])
def test_a_file_that_cannot_be_imported_is_one_short_error(tmp_path, text, capsys):
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "spec.toml").write_text(SPEC % "mine.py")
    with pytest.raises(PluginError, match=FAULTS[text]) as raised:
        import_file(tmp_path / "mine.py")
    assert len(str(raised.value)) < len(str(tmp_path)) + 450
    with pytest.raises(SpecError, match=FAULTS[text]):
        load_spec(tmp_path / "spec.toml")


@pytest.mark.parametrize(
    "name", ["x" * 300 + ".py", "a\0b.py", "\ud800.py", "none.py"], ids=["long", "NUL", "half", "none"]
)
def test_a_name_that_no_file_has_is_one_error(tmp_path, name):
    for read in (import_file, regard.plugin):
        with pytest.raises(PluginError):
            read(f"{tmp_path}/{name}")


def test_a_source_with_a_name_that_no_file_has_is_one_error(tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC % ("x" * 300 + ".py"))
    with pytest.raises(SpecError, match="File name too long"):
        load_spec(tmp_path / "spec.toml")


def test_a_file_that_may_not_be_read_is_one_error(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")

    def refuse(path, *given):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)  # root may read every file
    with pytest.raises(PluginError, match=r"mine.py cannot be read: Permission denied"):
        import_file(tmp_path / "mine.py")
