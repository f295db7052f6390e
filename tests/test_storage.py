"""Files that are whole or not there: after a crash at any moment, with several writers, and with leftovers."""

import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from crashes import Recorder
from writers import KINDS, crash, model_of, saved_number, write_checkpoint

import regard
from regard import storage
from regard.errors import DataError
from regard.locks import LockState, lock_file
from regard.models import ModelFolderError
from regard.models.folder import ModelSaveError
from regard.storage import atomic_write, read_files, remove_leftovers, replace_files, write_text


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_at_any_moment_leaves_the_old_or_the_new(kind, tmp_path):
    assert crash(kind, tmp_path) > 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_crash_in_a_new_folder_leaves_nothing_or_the_new(kind, tmp_path):
    assert crash(kind, tmp_path, ()) > 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forgotten", ["files", "folders"])
def test_a_missing_fsync_is_found(kind, forgotten, tmp_path, monkeypatch):
    """What the tests above would say of a writer that does not force files, or their names, to disk."""
    real = os.fsync

    def forget(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}") == (forgotten == "folders"):
            return
        os.fsync(handle)

    class Careless:
        fsync = staticmethod(forget)

        def __getattr__(self, name):
            return getattr(os, name)

    monkeypatch.setattr(storage, "os", Careless())
    with pytest.raises((AssertionError, regard.errors.RegardError, ValueError)):
        crash(kind, tmp_path)
    assert os.fsync is real


def test_after_a_crash_the_next_save_is_whole_too(tmp_path):
    """A set that was committed and not moved does not come back over a later one."""
    folder = tmp_path / "folder"
    folder.mkdir()
    model_of(1).save(folder)
    with Recorder(folder) as recorder:
        model_of(2).save(folder)

    def check(world, finished):
        model_of(3).save(world)
        assert saved_number(world) == 3
        assert sorted(os.listdir(world)) == ["config.json", "manifest.json", "model.safetensors", "tokenizer.json"]

    recorder.play(tmp_path / "world", check)


def test_a_folder_that_cannot_be_written_is_read_as_it_was_committed(tmp_path, monkeypatch):
    model_of(1).save(tmp_path)

    def read_only(folder):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch, pytest.raises(ModelSaveError):
        patch.setattr(
            storage, "_move_committed", lambda folder: read_only(folder) if (folder / ".commit").exists() else None
        )
        model_of(2).save(tmp_path)
    monkeypatch.setattr(storage, "_move_committed", read_only)
    assert (tmp_path / ".commit").exists() and saved_number(tmp_path) == 2
    monkeypatch.undo()
    assert saved_number(tmp_path) == 2 and not (tmp_path / ".commit").exists()


def test_a_commit_that_names_files_elsewhere_is_refused(tmp_path):
    model_of(1).save(tmp_path / "model")
    (tmp_path / "precious").write_text("")
    for moves in ({"../precious": ".a.01234567.staged"}, {"config.json": "../precious"}):
        (tmp_path / "model/.commit").write_text(json.dumps(moves))
        with pytest.raises(DataError, match="expected files of this folder"):
            regard.load(tmp_path / "model")
    (tmp_path / "model/.commit").write_text("[")
    with pytest.raises(DataError, match=r"\.commit is damaged.*remove it"):
        regard.load(tmp_path / "model")
    assert (tmp_path / "precious").exists()


def test_who_reads_while_another_saves_gets_one_of_the_models(tmp_path):
    model_of(1).save(tmp_path)
    ended = threading.Event()

    def save():
        for n in range(2, 14):
            model_of(n).save(tmp_path)
        ended.set()

    writer = threading.Thread(target=save)
    writer.start()
    seen = set()
    while not ended.is_set():
        seen.add(saved_number(tmp_path))
    writer.join()
    assert saved_number(tmp_path) == 13 and None not in seen


# Leftovers


def test_what_a_killed_writer_left_goes_and_what_is_being_written_stays(tmp_path):
    write_text(tmp_path / "a", "1")
    for name in (".a.01234567.staged", ".b.01234567.staged", "a.01234567.staged", ".a.staged", ".a.0123.staged"):
        (tmp_path / name).write_text("")
    (tmp_path / ".c.01234567.staged").mkdir()
    with atomic_write(tmp_path / "a") as file:
        file.write(b"2")
        assert not (tmp_path / ".a.01234567.staged").exists() and (tmp_path / ".b.01234567.staged").exists()
        remove_leftovers(tmp_path)
        write_text(tmp_path / "a", "3")  # another writer of the same file
    assert (tmp_path / "a").read_text() == "2"
    assert sorted(os.listdir(tmp_path)) == [".a.0123.staged", ".a.staged", "a", "a.01234567.staged"]


def test_a_folder_that_is_being_filled_is_no_leftover(tmp_path):
    with replace_files(tmp_path) as stage:
        (stage / "x").write_text("1")
        remove_leftovers(tmp_path)
        assert (stage / "x").exists()
    with read_files(tmp_path) as locate:
        assert locate("x").read_text() == "1"


def test_a_writer_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    model_of(1).save(tmp_path)
    real = os.fsync
    for n in range(1, 40):
        calls = []

        def fail(handle, n=n, calls=calls):
            calls.append(handle)
            if len(calls) == n:
                raise OSError(28, "No space left on device")
            real(handle)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            try:
                model_of(2).save(tmp_path)
            except (OSError, DataError):
                assert saved_number(tmp_path) in (1, 2)
            else:
                break
        model_of(1).save(tmp_path)
    assert n > 8 and saved_number(tmp_path) == 2
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


# Damage


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_flipped_bit_is_told_with_the_file(name, tmp_path):
    model_of(1).save(tmp_path)
    raw = bytearray((tmp_path / name).read_bytes())
    at = raw.index(b'"dropout": 0.0') + 13 if name == "config.json" else len(raw) - 3
    raw[at] ^= 1
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ModelFolderError, match=rf"{name} (does not match its hash|is damaged|is no)"):
        regard.load(tmp_path)
    if name == "model.safetensors":
        (tmp_path / "manifest.json").unlink()  # as of an earlier version
        assert regard.load(tmp_path).tokenizer is not None


def test_weights_that_are_no_numbers_are_told(tmp_path):
    model = model_of(1)
    with torch.no_grad():
        model.stack.blocks[0].attention.out.weight[0, 0] = float("nan")
    with pytest.warns(UserWarning, match=r"attention\.out\.weight has weights that are not finite"):
        model.save(tmp_path)
    with pytest.warns(UserWarning, match=r"model\.safetensors: .*attention\.out\.weight has weights"):
        assert regard.load(tmp_path).stack.blocks[0].attention.out.weight.isnan().any()


# Locks


def test_a_lock_on_a_file_that_was_removed_does_not_count(tmp_path, monkeypatch):
    """Between opening and locking another process may remove the file, and a third make and lock a new one."""
    path = tmp_path / "lock"
    real = storage.lock_handle
    opened = []

    def removed_meanwhile(handle, *rest):
        opened.append(handle)
        if len(opened) == 1:
            path.unlink()
        return real(handle, *rest)

    monkeypatch.setattr("regard.locks.lock_handle", removed_meanwhile)
    with lock_file(path) as state:
        assert state is LockState.OURS and len(opened) == 2
        monkeypatch.undo()
        with lock_file(path) as other:
            assert other is LockState.TAKEN


def test_a_lock_goes_with_its_process(tmp_path):
    code = "import sys; from pathlib import Path; from regard.locks import lock_file\n"
    code += "with lock_file(Path(sys.argv[1])) as state: print(state.name, flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, tmp_path / "lock"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "OURS\n"
        with lock_file(tmp_path / "lock") as state:
            assert state is LockState.TAKEN
        other.kill()
        other.wait()
    with lock_file(tmp_path / "lock") as state:
        assert state is LockState.OURS


def test_permissions_are_those_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_checkpoint(tmp_path, 1)
    finally:
        os.umask(before)
    modes = {oct(p.stat().st_mode & 0o777) for p in tmp_path.rglob("*") if p.is_file()}
    assert modes == {"0o640"}
    shutil.rmtree(tmp_path)
