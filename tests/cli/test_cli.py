"""The commands over a model folder, as a user types them."""

import json
import subprocess
import sys
import warnings

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard.cli.app import app, main
from regard.data.tokenizers import Characters


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = regard.GPT(vocabulary=9, length=48, width=24, layers=2, attention={"heads": 3})
    model.tokenizer = Characters("abcdefg h")
    model.save(tmp_path / "model")
    return str(tmp_path / "model")


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_generate_writes_what_regard_generate_returns(folder):
    want = regard.generate(regard.load(folder), "abc", max_tokens=12)
    assert run("generate", folder, "abc", "--max", 12).output == f"{want.text}\n"


def test_a_seed_repeats_and_a_stream_is_the_same_text(folder):
    asked = ["generate", folder, "abc", "--max", 20, "--temperature", 0.9, "--top-k", 5, "--top-p", 0.95, "--seed", 3]
    first = run(*asked).output
    assert first == run(*asked).output == run(*asked, "--stream").output
    assert first != run(*asked[:-1], 4).output


def test_every_option_together_and_json(folder):
    sampling = ["--temperature", 0.8, "--top-k", 40, "--top-p", 0.95]
    result = run(
        "generate", folder, "abc", "--max", 200, *sampling, "--beams", 4, "--n", 3, "--seed", 0, "--stream", "--json"
    )
    assert result.exit_code == 0, result.output
    outputs = json.loads(result.output)["outputs"]
    assert len(outputs) == 3 and len({tuple(o["tokens"]) for o in outputs}) == 3
    scores = [o["score"] for o in outputs]
    assert scores == sorted(scores, reverse=True)
    assert all(o["ended"] == "full" for o in outputs)


def test_an_interrupted_command_says_so_in_one_line(folder, monkeypatch, capsys):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.cli.evaluate.read_pieces", interrupt)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # `main` has one of its own
    monkeypatch.setattr(sys, "argv", ["regard", "evaluate", folder, "--text", "a.txt"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
    assert capsys.readouterr() == ("", "error: interrupted\n")


def test_check_takes_a_model_folder(folder, tmp_path):
    result = run("check", folder, "--json")
    verdicts = {v["law"]: v["status"] for v in json.loads(result.output)}
    assert result.exit_code == 0
    asked = dict.fromkeys(["looks-ahead", "cache", "padding", "batch", "prompts", "packed"], "holds")
    assert verdicts == asked | dict.fromkeys(["window", "long"], "does not apply")
    leaky = regard.GPT(
        vocabulary=9, length=48, width=24, layers=1, attention={"heads": 3, "merge": "reweight-sequence"}
    )
    leaky.save(tmp_path / "leaky")
    result = run("check", tmp_path / "leaky", "--only", "looks-ahead", "--json")
    (verdict,) = json.loads(result.output)
    assert result.exit_code == 1 and verdict["status"] == "broken"
    shown = subprocess.run([sys.executable, "-c", verdict["reproducer"]], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("Finding(error=0.")


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["generate", "nowhere", "abc"], "nowhere is no folder"),
        (["generate", "FOLDER", "xyz"], "'x'"),
        (["generate", "FOLDER", ""], "empty"),
        (["generate", "FOLDER", "abc", "--temperature", "0"], "temperature = 0"),
        (["generate", "FOLDER", "abc", "--device", "cuda:9"], "cuda:9"),
        (["check", "FOLDER", "--only", "caches"], "Did you mean 'cache'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder, arguments, fragment):
    words = [folder if a == "FOLDER" else a for a in arguments]
    done = subprocess.run([sys.executable, "-m", "regard", *words], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and fragment in done.stderr


def test_importing_regard_loads_no_extra():
    extras = ("transformers", "tokenizers", "triton", "typer", "scipy")
    code = f"import sys, regard; print([m for m in {extras} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_doctor_finds_nothing_wrong_here_and_says_what_is_absent(monkeypatch, tmp_path):
    from regard.cli import doctor

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        doctor, "_version", lambda name, real=doctor._version: None if name == "anywidget" else real(name)
    )
    answer = run("doctor", "--json")
    assert answer.exit_code == 0
    lines = {line["what"]: line for line in json.loads(answer.stdout)}
    assert {f"{name} on cpu" for name in regard.mechanisms()} <= lines.keys()
    assert all(lines[f"{name} on cpu"]["fine"] for name in regard.mechanisms())
    absent = lines["widgets in notebooks"]
    assert absent["fine"] is None and absent["found"] == "without anywidget"
    assert absent["do"] == 'pip install "regard[notebook]"'


def test_the_doctor_runs_from_a_folder_of_sources(monkeypatch):
    from regard.cli import doctor

    monkeypatch.setattr(doctor.metadata, "requires", lambda name: doctor.metadata.distribution("no-such-package"))
    lines = list(doctor._check_extras())
    assert len(lines) == 1 and lines[0].fine is None and "pip install" in lines[0].do


def test_the_doctor_fails_where_a_mechanism_breaks_its_laws(monkeypatch):
    from regard.cli import doctor
    from regard.laws import Finding

    monkeypatch.setitem(doctor.LAWS, "weights", lambda subject, case: Finding(0.5, 1e-5, "output"))
    answer = run("doctor")
    assert answer.exit_code == 1
    assert "regard check softmax --device cpu" in answer.output


def test_the_doctor_fails_where_it_cannot_write(monkeypatch, tmp_path):
    from regard.cli import doctor

    line = doctor._check_writable(tmp_path / "nowhere")
    assert line.fine is False and "No such file" in line.found and "--out" in line.do


def test_a_check_tells_what_matters_once_and_what_it_did_not_ask_last(tmp_path):
    """Laws that do not apply share a line, reproducers their first lines, and the end is what nobody asked."""
    source = "def f(q, k, v, causal=True):\n    return (q @ k.mT).softmax(-1) @ v.mean(1, keepdim=True)\n"
    (tmp_path / "mine.py").write_text(source)
    result = run("check", "--plugin", tmp_path / "mine.py", "--draws", 3)
    assert result.exit_code == 1 and "\n– weights, recurrent, rows, cross, flops, kernel: " in result.output
    first, second = result.output.split("To see it again")[1:]
    assert "import regard" in first and "import regard" not in second and "LAWS['heads']" in second
    assert "first lines of the one above" in second
    assert result.output.splitlines()[-1].startswith("Not asked of f: which attention it computes.")
