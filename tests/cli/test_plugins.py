"""--plugin: a mechanism of one's own in every command that names one; what needs it says which file that is."""

import hashlib
import json
import sys
import warnings
from pathlib import Path

import pytest

import regard
from regard import plugins
from regard.cli import app
from regard.cli.commands import COMMANDS
from regard.cli.plugins import again, import_plugins
from regard.errors import PluginError
from regard.mechanisms.base import MECHANISMS
from regard.models.folder import load
from regard.sweep.run import Sweep
from regard.train.run import Run

FILE = '''from regard.mechanisms import Linear, register


@register("plugged")
class Plugged(Linear):
    """φ(q)·φ(k) with φ(x) = exp(x) + 1"""

    formula = "φ(q)·φ(k), φ(x) = exp(x) + 1"

    def features(self, x):
        return x.clamp(max=5).exp() + 1, None

    def feature_count(self, K):
        return K
'''
SMALL = ["model.width=8", "model.layers=1", "model.attention.heads=1", "data.block=8", "train.batch=2"]
LM = ["lm", "data.text=a.txt", "train.steps=2", "model.mechanism=plugged", *SMALL]
PLUGIN = ["--plugin", "mine.py"]


@pytest.fixture
def regard_(tmp_path, monkeypatch, capfd):
    """Types a command in a folder with a text and a plugin; its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(plugins, "_IMPORTED", {})
    Path("a.txt").write_text("to be, or not to be: that is the question. " * 9, encoding="utf-8")
    Path("mine.py").write_text(FILE, encoding="utf-8")

    def typed(*words):
        forget()  # a command is a process of its own
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, words)])
        capfd.readouterr()
        with warnings.catch_warnings(), pytest.raises(SystemExit) as left:
            warnings.simplefilter("always")
            app.main()
        return left.value.code, *capfd.readouterr()

    yield typed
    forget()


def forget():
    MECHANISMS.pop("plugged", None)
    sys.modules.pop("regard_plugin_mine", None)
    plugins._IMPORTED.clear()


def test_a_mechanism_of_a_plugin_is_trained_and_its_model_says_what_it_needs(regard_):
    code, _, err = regard_("train", *LM, "--out", "r", *PLUGIN)
    assert code == 0, err
    digest = hashlib.sha256(FILE.encode()).hexdigest()
    recorded = {"plugged": {"file": "mine.py", "sha256": digest}}
    assert Run("r").config["plugins"] == recorded
    assert json.loads(Path("r/model/config.json").read_text())["plugins"] == recorded
    assert FILE.splitlines()[4] not in Path("r/config.toml").read_text()  # never its code
    for words in (
        ["generate", "r", "to", "--max", "3"],
        ["evaluate", "r", "--text", "a.txt"],
        ["view", "r", "to be", "--no-labels"],
        ["export", "r", "--to", "e"],
        ["eject", "r", "--out", "e"],
        ["convert", "r", "--kv-heads", "1", "--steps", "1"],
        ["heads", "r"],
        ["summarize", "r", "a.txt"],
        ["plot", "weights", "r", "to be"],
        ["cost", "--model", "r"],
        ["check", "r", "--only", "cache"],
        ["train", "lm", "train.init=r", "train.steps=1", "--out", "further"],
    ):
        code, _, err = regard_(*words)
        assert code == 2 and f"needs the mechanism 'plugged' of mine.py (SHA-256 {digest[:12]}" in err, (words, err)
        assert "--plugin mine.py" in err.replace("\n", " ")
    for words in (["generate", "r", "to", "--max", "3"], ["evaluate", "r", "--text", "a.txt"], ["check", "r"]):
        code, out, err = regard_(*words, *PLUGIN)
        assert code == 0 and out and "warning" not in err, (words, err)
    code, _, err = regard_("eject", "r", "--out", "e", *PLUGIN)
    message = err.replace("\n", " ")
    assert code == 2 and "'plugged' has no plain version" in message and "it is your own" in message
    code, _, err = regard_("view", "r", "to be", "--no-labels", "-o", "p.html", *PLUGIN)
    assert code == 0 and Path("p.html").is_file(), err
    # Another file of that name works, and says that it is another.
    Path("mine.py").write_text(FILE + "\n", encoding="utf-8")
    code, _, err = regard_("generate", "r", "to", "--max", "3", *PLUGIN)
    assert code == 0 and f"warning: r/model was made with another mine.py: 'plugged' had SHA-256 {digest[:12]}" in err


def test_a_stopped_run_goes_on_with_its_plugin_only(regard_):
    assert regard_("train", *LM, "--out", "r", *PLUGIN)[0] == 0
    whole = Path("r/metrics.jsonl").read_text()
    for path in ("r/model/config.json", "r/model/model.safetensors", "r/model/manifest.json"):
        Path(path).unlink()
    code, _, err = regard_("train", "--resume", "r")
    assert code == 2 and "r needs the mechanism 'plugged' of mine.py" in err
    code, _, err = regard_("train", "--resume", "r", *PLUGIN)
    assert code == 0 and Run("r").finished, err
    assert len(Path("r/metrics.jsonl").read_text().splitlines()) == len(whole.splitlines())


def test_workers_of_a_sweep_know_the_plugin_and_so_does_who_goes_on(regard_):
    words = [*LM, "--grid", "train.lr=1e-3,2e-3", "--workers", "2", "--out", "s"]
    code, _, err = regard_("sweep", *words, *PLUGIN)
    assert code == 0, err
    forget()
    assert Sweep.open("s").again == "regard sweep s"  # nothing to say where the mechanism is not known
    results = json.loads(Path("s/results.json").read_text())
    assert results["again"] == "regard sweep s --plugin mine.py" and results["command"].endswith(" --plugin mine.py")
    code, _, err = regard_("sweep", "s")
    assert code == 2 and "s needs the mechanism 'plugged' of mine.py" in err
    assert regard_("sweep", "s", *PLUGIN)[0] == 0


def test_an_experiment_names_the_plugin_in_its_command(regard_):
    size = ["data.world.people=30", "data.world.biographies=1", "data.block=96", *SMALL[:3], "train.batch=16"]
    words = ["run", "knowledge", *size, "train.epochs=1", "model.mechanism=plugged", "--out", "k"]
    code, _, err = regard_(*words, *PLUGIN)
    assert code == 0, err
    assert json.loads(Path("k/results.json").read_text())["command"].endswith(" --plugin mine.py")
    code, _, err = regard_("run", "--resume", "k")
    assert code == 2 and "k needs the mechanism 'plugged' of mine.py" in err
    assert regard_("run", "--resume", "k", *PLUGIN)[0] == 0


def test_every_command_that_names_mechanisms_has_the_option(regard_):
    named = {"train", "run", "sweep", "generate", "evaluate", "predict", "summarize", "view", "serve", "heads", "cost"}
    named |= {"convert", "export", "eject", "check", "bench", "mechanisms", "report"}
    for name in (*named, "plot weights"):
        code, out, _ = regard_(*name.split(), "-h")
        assert code == 0 and "--plugin" in out, name
    assert named <= set(COMMANDS)
    code, out, _ = regard_("mechanisms", "--json", *PLUGIN)
    assert code == 0 and "plugged" in [row["name"] for row in json.loads(out)]
    for words, told in {
        ("--plugin", "none.py"): "no file 'none.py'",
        ("--plugin", "a.txt"): "is not a Python file",
    }.items():
        code, _, err = regard_("mechanisms", *words)
        assert code == 2 and told in err


def test_a_damaged_record_is_told_and_a_config_never_runs_a_file(regard_):
    assert regard_("train", *LM, "--out", "r", *PLUGIN)[0] == 0
    config = Path("r/model/config.json")
    Path("r/model/manifest.json").unlink()
    document = json.loads(config.read_text())
    Path("evil.py").write_text("raise SystemExit('it ran')")
    for records in ("mine.py", {"plugged": "mine.py"}, {"plugged": {"file": 3, "sha256": "x"}}):
        config.write_text(json.dumps(document | {"plugins": records}))
        with pytest.raises(PluginError, match="expected a file and a sha256"):
            load("r")
    forget()
    config.write_text(json.dumps(document | {"plugins": {"plugged": {"file": "evil.py", "sha256": "0"}}}))
    with pytest.raises(PluginError, match=r"say --plugin evil\.py"):
        load("r")


def test_models_of_regards_own_mechanisms_record_nothing(tmp_path):
    regard.GPT.preset("nano", vocabulary=5, mechanism="elu").save(tmp_path / "m")
    assert "plugins" not in json.loads((tmp_path / "m/config.json").read_text())


def test_a_command_goes_on_with_the_files_that_were_named_to_it_alone(regard_):
    import_plugins(["mine.py"])
    assert again("regard run --resume k") == "regard run --resume k --plugin mine.py"
    import_plugins(None)  # the next command of this process, which knows the mechanism without naming its file
    assert again("regard run --resume k") == "regard run --resume k"


def test_a_file_that_fails_is_not_imported_again_by_other_processes(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("raise ValueError('half done')\n")
    gone = tmp_path / "gone.py"
    gone.write_text("")
    with pytest.raises(PluginError, match="half done"):
        plugins.import_file(bad)
    plugins.import_file(gone)
    assert str(gone) in plugins.imported_paths() and str(bad) not in plugins.imported_paths()
    gone.unlink()
    assert str(gone) not in plugins.imported_paths()
