"""benchmarks/gpu.py runs scripts piece by piece, and goes on where it was stopped."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def gpu(monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def _run(gpu, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, words)])
    gpu.main()


def test_a_piece_that_ended_well_is_not_run_again(gpu, monkeypatch, tmp_path, capsys):
    write = "-c import+pathlib,sys;pathlib.Path(sys.argv[1]).open('a').write('x') {out}"

    def words(piece, out, tiny, peers):
        return [sys.executable, *(word.replace("+", " ").replace("{out}", str(out)) for word in piece.command.split())]

    monkeypatch.setattr(gpu, "command_of", words)
    monkeypatch.setattr(
        gpu,
        "PIECES",
        (gpu.Piece("good", 1, write), gpu.Piece("bad", 1, "-c raise+SystemExit(3)"), gpu.Piece("long", 9, write)),
    )
    for _ in range(2):
        with pytest.raises(SystemExit, match="not done: bad, long"):
            _run(gpu, monkeypatch, tmp_path, "--minutes", 5)
    assert (tmp_path / "good.json").read_text() == "x"
    assert json.loads((tmp_path / "pieces.json").read_text())["bad"]["code"] == 3
    assert not (tmp_path / "long.json").exists()
    assert "done before" in capsys.readouterr().out


def test_a_piece_ends_at_its_limit(gpu, monkeypatch, tmp_path):
    piece = gpu.Piece("slow", 0.02, "")
    monkeypatch.setattr(gpu, "command_of", lambda *_: [sys.executable, "-c", "import time; print(1); time.sleep(60)"])
    assert gpu.run_piece(piece, tmp_path, False, None)["code"] == 124
    assert (tmp_path / "slow.log").read_text() == "1\n"


def test_every_piece_starts_a_script_that_is_there(gpu):
    for piece in gpu.PIECES:
        words = gpu.command_of(piece, Path("out.json"), piece.tiny, Path("peers"))
        files = [word for word in words[1:] if word.endswith(".py")]
        assert files and all((ROOT / file).is_file() for file in files), words


@pytest.mark.slow
def test_the_tiny_form_of_a_script_writes_its_figures(gpu, monkeypatch, tmp_path):
    _run(gpu, monkeypatch, tmp_path, "--tiny", "--only", "memory")
    assert json.loads((tmp_path / "memory.json").read_text())["rows"]
