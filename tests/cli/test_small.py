"""`small`, the model that comes with regard, is known to every command that takes a model."""

from typer.testing import CliRunner

from regard.cli.app import app
from regard.hub.opening import is_shipped


def test_small_is_written_as_any_other_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["eject", "small", "--out", "plain"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "plain" / "model.py").is_file()
    done = CliRunner().invoke(app, ["generate", "small", "Once", "--max", "3"])
    assert done.exit_code == 0, done.output


def test_a_folder_called_small_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_shipped("small") and is_shipped("random:small")
    (tmp_path / "small").mkdir()
    assert not is_shipped("small")
