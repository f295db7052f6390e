"""Places that cannot be written to: each writer of a new folder says so in one error, and leaves nothing behind."""

import resource
from contextlib import contextmanager

import pytest
from training import gpt

from regard.errors import RegardError
from regard.hub.exporting import export
from regard.models.eject import eject

WRITERS = {"eject": eject, "export": export}


@pytest.fixture(params=WRITERS)
def write(request):
    return WRITERS[request.param]


@contextmanager
def small_files(most):
    """No file of this process may have more bytes: writing fails as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_holds_something_stays_as_it_is(write, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(RegardError, match=r"out is there already and not empty; nothing was written"):
        write(gpt(), tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file/out", "Not a directory|File exists|is there already"),
        ("x" * 300, "File name too long"),
        ("a\0b", "is no path"),
        ("file", "is there already"),
    ],
    ids=["below a file", "long", "NUL", "a file"],
)
def test_a_place_that_no_folder_can_have_is_told(write, tmp_path, name, said):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RegardError, match=said):
        write(gpt(), tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


@pytest.mark.parametrize("most", [0, 3000])
def test_a_full_disk_is_told_and_leaves_nothing(write, tmp_path, most):
    model = gpt()
    with small_files(most), pytest.raises(RegardError, match=r"out cannot be written: .*; choose another folder"):
        write(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    write(model, tmp_path / "out")  # and once there is room it is written


def test_the_folder_that_one_stands_in_can_be_written_to(write, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(gpt(), ".")
    assert (tmp_path / "here" / "model.safetensors").is_file()
