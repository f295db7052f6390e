"""The knowledge experiment end to end at a toy size, and its data as people have them."""

import json
import math
import re
import shutil

import pytest
import torch
from training import CTRL_C, MODEL, Crash, StopAt, answering, pretraining

import regard
from regard.config import ConfigError
from regard.data.files import DataError
from regard.data.questions import PAD, Question, prompt, read_questions, vocabulary
from regard.errors import LengthError
from regard.lab import experiment
from regard.lab.knowledge.answers import answer, person, score
from regard.lab.knowledge.matrix import sign_test
from regard.reporting import write_report
from regard.train import Interrupted, RunError, recipe, stage
from regard.train.progress import Progress
from regard.train.tasks.corruption import Corruption, KnowledgeData
from regard.train.tasks.questions import Questions

pytest.importorskip("matplotlib")  # reports draw

WORLD = ["data.world.people=30", "data.world.asked=20", "data.world.held_out=5", "data.world.places=3"]
TOY = [*WORLD, *MODEL, "train.batch=16", "train.lr=0.02"]
TOY += ["train.epochs=0", "train.steps=20", "train.saving.every=7", "train.evaluation.every=10"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("knowledge") / "whole"
    return out, experiment.run("knowledge", out, TOY)


def timeless(value, out):
    """Results without times, and with the folder left out of paths."""
    if isinstance(value, dict):
        times = ("seconds", "tokens_per_second", "mfu")
        return {key: timeless(x, out) for key, x in value.items() if key not in times}
    if isinstance(value, list):
        return [timeless(x, out) for x in value]
    return value.replace(str(out), "OUT") if isinstance(value, str) else value


def read(out):
    return timeless(json.loads((out / "results.json").read_text()), out)


# The whole


def test_what_an_experiment_leaves(whole):
    out, results = whole
    assert {p.name for p in out.iterdir()} == {
        ".lock",
        *("experiment.toml", "data", "predictions", "results.json", "report.html"),
        *("without-pretraining", "pretraining", "with-pretraining"),
    }
    assert timeless(json.loads(json.dumps(results)), out) == read(out)
    assert [row["name"] for row in results["models"]] == ["without pretraining", "with pretraining"]
    assert [row["steps"] for row in results["stages"]] == [20, 20, 20]
    assert len(results["baselines"]) == 2 and results["world"]["people"] == 30
    page = (out / "report.html").read_text()
    assert "<html" in page and "http://" not in page.replace("http://www.w3.org", "")
    tuned = regard.load(out / "with-pretraining" / "model")
    assert tuned.tokenizer is not None and tuned.config.width == 16


def test_predictions_are_one_a_line_in_order(whole):
    out, results = whole
    for name in ("without-pretraining", "with-pretraining"):
        model = regard.load(out / name / "model")
        for key in ("dev", "test"):
            questions = read_questions(out / "data" / f"{key}.tsv")
            lines = (out / "predictions" / f"{name}.{key}.txt").read_text().split("\n")[:-1]
            assert lines == [answer(model, [q])[0].text for q in questions]
            row = next(row for row in results["models"] if row["name"].replace(" ", "-") == name)
            assert row[key]["right"] == sum(p == q.answer for p, q in zip(lines, questions, strict=True))


def test_the_data_of_all_stages_are_those_of_the_world(whole):
    out, _ = whole
    for name in ("without-pretraining", "pretraining", "with-pretraining"):
        assert not (out / name / "data").exists()
        data = regard.train.Run(out / name).config["data"]
        assert data["documents"] == str(out / "data/documents.txt")


@pytest.mark.parametrize("stop", [StopAt(9), StopAt(9, CTRL_C)], ids=["killed", "interrupted"])
@pytest.mark.parametrize("where", ["pretraining", "with pretraining"])
def test_an_experiment_goes_on_to_the_same_results(whole, stop, where, tmp_path):
    first, out = whole[0], tmp_path / "again"
    shown = experiment.Shown(progress=lambda name: stop if name == where else Progress())
    with pytest.raises((Crash, Interrupted)):
        experiment.run("knowledge", out, TOY, shown=shown)
    assert not (out / "results.json").exists()
    began = (out / "without-pretraining/metrics.jsonl").stat().st_mtime_ns
    experiment.resume(out)
    assert read(out) == read(first)
    assert (out / "without-pretraining/metrics.jsonl").stat().st_mtime_ns == began  # what had ended stays
    for path in (first / "predictions").iterdir():
        assert (out / "predictions" / path.name).read_bytes() == path.read_bytes()


def test_the_report_again_from_results_and_of_runs(whole, tmp_path):
    out, _ = whole
    page = (out / "report.html").read_bytes()
    assert write_report([out], tmp_path / "one.html").read_bytes() == page
    runs = write_report([out / "pretraining", out / "with-pretraining"], tmp_path / "two.html").read_text()
    assert "with-pretraining" in runs


def test_changes_for_one_stage_and_for_all(tmp_path):
    asked = {"train": {"lr": 1.0}, "finetune": {"train": {"lr": 2.0}}, "model": {"width": 64}}
    made = experiment.Session("knowledge", tmp_path, asked, None, "cpu", experiment.Shown())
    assert made.recipe("knowledge/pretrain", "pretrain", {}).train.lr == 1.0
    assert made.recipe("knowledge/finetune", "finetune", {}, drop=("model",)).train.lr == 2.0
    assert "model" not in made.recipe("knowledge/finetune", "finetune", {}, drop=("model",)).asked


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("knowlege", [], "no experiment 'knowlege'. Did you mean 'knowledge'"),
        ("knowledge", ["trian.lr=3"], "'trian': no such section or stage in knowledge. Did you mean 'train'"),
        ("knowledge", ["finetun.train.lr=3"], "Did you mean 'finetune'"),
        ("knowledge", ["finetune.lr=3"], "finetune.lr = 3: expected a section too"),
        ("knowledge", ["finetune.modle.width=3"], "no section 'modle'.* Did you mean 'model.width'"),
        ("knowledge", ["finetune.train=3"], "finetune.train = 3: expected a section too"),
        ("knowledge", ["data.train=none.tsv"], "data.train is given without data.documents"),
        ("knowledge", ["data.documents=none.txt"], "data.train is missing|none.txt cannot be read"),
        ("knowledge", ["data.world.people=3"], "data.world.people = 3: expected 10 to"),
    ],
)
def test_experiments_that_cannot_begin_leave_the_folder_free(name, changes, words, tmp_path):
    with pytest.raises(regard.RegardError, match=words):
        experiment.run(name, tmp_path / "x", changes)
    assert not (tmp_path / "x" / "experiment.toml").exists()


def test_an_experiment_is_never_written_over(whole, tmp_path):
    with pytest.raises(RunError, match="holds results already"):
        experiment.run("knowledge", whole[0], TOY)
    with pytest.raises(RunError, match="holds runs already"):
        experiment.run("knowledge", whole[0] / "pretraining", TOY)
    shutil.copytree(whole[0] / "pretraining", tmp_path / "old" / "pretraining")
    with pytest.raises(RunError, match="holds runs already"):
        experiment.run("knowledge", tmp_path / "old", TOY)
    with pytest.raises(RunError, match="is no experiment"):
        experiment.resume(tmp_path)


# Answers


@pytest.fixture(scope="module")
def knowing(tmp_path_factory):
    """A run that has learned some of its questions, and its task."""
    out = tmp_path_factory.mktemp("knowing") / "run"
    made = recipe.load("knowledge/scratch", [*TOY, "train.steps=60", "model.width=32", "train.evaluation.every=5"])
    run = stage.train(made, out)
    return run, Questions(made.data, 0, CPU, out, None)


def test_one_pass_over_right_answers_counts_what_greedy_writing_gets_right(knowing):
    run, task = knowing
    seen = set()
    for place in (run.path / "model", *run.checkpoints.iterdir()):
        model = regard.load(place)
        with torch.no_grad():
            measured = task.evaluate(model)
        for key in ("train", "dev"):
            questions = read_questions(run.path / f"data/{key}.tsv")
            found = score([a.text for a in answer(model, questions)], questions)
            assert measured[f"{key}/accuracy"] == found["accuracy"]
            seen.add(found["accuracy"])
    assert any(0 < share < 1 for share in seen)


def test_confidence_is_the_probability_of_the_answer_and_its_mark(knowing):
    run, _ = knowing
    model = regard.load(run.path / "model")
    questions = read_questions(run.path / "data/dev.tsv")
    for question, said in zip(questions, answer(model, questions), strict=True):
        start = model.tokenizer.encode(prompt(question))
        ids = start + model.tokenizer.encode(said.text + "⁇")
        with torch.no_grad():
            logs = model(torch.tensor([ids[:-1]])).log_softmax(-1)[0]
        want = sum(float(logs[n - 1, ids[n]]) for n in range(len(start), len(ids)))
        assert said.confidence == pytest.approx(math.exp(want), rel=1e-4)


def test_what_the_model_cannot_write_it_does_not_get_right(tmp_path):
    """An answer with a character that no document has is wrong in both ways of counting."""
    (tmp_path / "d.txt").write_text("abc def\n" * 3)
    (tmp_path / "t.tsv").write_text("a?\tbc\n" * 4)
    (tmp_path / "v.tsv").write_text("a?\tb汉\n" * 3, encoding="utf-8")
    config = KnowledgeData(documents=str(tmp_path / "d.txt"), train=str(tmp_path / "t.tsv"), block=16)
    config = config.but(dev=str(tmp_path / "v.tsv"))
    with pytest.warns(UserWarning, match=r"v\.tsv: characters that the documents do not have.*'汉'×3"):
        task = Questions(config, 0, CPU, tmp_path, None)
    unknown = task.tokenizer.role("unknown")

    class Sure(torch.nn.Module):
        def forward(self, x):
            y = (task.dev if len(x) == 3 else task.train).y.clamp(min=0)
            return torch.nn.functional.one_hot(y, task.tokenizer.size).float()

    assert (task.dev.y == unknown).any()
    measured = task.evaluate(Sure())
    assert (measured["train/accuracy"], measured["dev/accuracy"]) == (1.0, 0.0)


def test_an_answer_may_fill_the_block():
    tokenizer = vocabulary(["abcdef"])
    model = regard.GPT(vocabulary=tokenizer.size, length=12, width=8, layers=1, attention={"heads": 2}, tied=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.tokenizer = tokenizer
    for n in (1, 5, 11):
        said = answer(model, [Question("a" * (n - 1) or "a")])[0].text
        used = len(tokenizer.encode(prompt("a" * (n - 1) or "a")))
        assert said == PAD * (12 - used + 1)  # all tokens alike, the first is taken; the last need not be read
    with pytest.raises(LengthError, match=r"question 2, 'aaaaaaaaaaaa', has 13 tokens"):
        answer(model, [Question("a"), Question("a" * 12)])


def test_the_person_of_a_question():
    assert person("Where was Ada Kör born?") == "Ada Kör"
    assert person("Where was born?") == "Where was born?"
    assert person("Who?") == "Who?"


# Data as people have them


def _files(folder, **texts):
    for name, text in texts.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return {name: str(folder / name) for name in texts}


def test_odd_bytes_are_read_and_trained_on(tmp_path):
    odd = "\ufeffAda was born in Elm.\r\n\r\nA\r\nBo\r\nx\u2028y was born in Oak.\r\nKör ⁇ in □ Elm".encode()
    named = _files(tmp_path, docs=odd, train="\ufeffWhere was Ada born?\tElm\r\nWhere was Kör born?\tElm\r\n")
    changes = [f"data.documents={named['docs']}", f"data.train={named['train']}", "train.steps=3"]
    run = stage.train(pretraining(*changes), tmp_path / "read")
    model = regard.load(run.path / "model")
    assert "\u2028" in model.tokenizer.tokens and "\ufeff" not in model.tokenizer.tokens
    assert "\r" not in model.tokenizer.tokens
    task = Corruption(pretraining(*changes).data, 0, CPU, tmp_path, None)
    assert task.rows == 5
    assert task.batch(0, 50).x.max() < model.tokenizer.size
    tuned = recipe.load("knowledge/finetune", [f"train.init={run.path}", "train.steps=2", "train.batch=2"])
    done = stage.train(tuned, tmp_path / "answer")
    measured = [row for row in done.metrics() if "lr" not in row]
    assert set(measured[-1]) == {"step", "train/loss", "train/accuracy"}  # there is no dev
    assert done.best == 2


def test_the_smallest_data_there_can_be(tmp_path):
    named = _files(tmp_path, docs="a", train="q\ta")
    changes = [f"data.documents={named['docs']}", f"data.train={named['train']}", "data.block=9", "train.steps=2"]
    assert stage.train(pretraining(*changes), tmp_path / "read").finished
    assert stage.train(answering(*changes), tmp_path / "answer").finished


def test_characters_that_were_never_read(tmp_path):
    named = _files(
        tmp_path, docs="abc was born in def.\n", train="Where was 漢字 born?\tdef\nWhere was abc born?\tdef\n"
    )
    run = stage.train(pretraining(f"data.documents={named['docs']}", "train.steps=2"), tmp_path / "read")
    changes = [f"data.documents={named['docs']}", f"data.train={named['train']}", "train.steps=2", "train.batch=2"]
    tuned = recipe.load("knowledge/finetune", [f"train.init={run.path}", *changes])
    with pytest.warns(UserWarning, match=r"train: characters that the documents do not have are read as unknown: .*漢"):
        assert stage.train(tuned, tmp_path / "answer").finished


@pytest.mark.parametrize(
    "texts, words",
    [
        ({"train": "no tab here\n"}, r"train, line 1: no tab; expected question, tab, answer"),
        ({"train": "a?\tb\nc?\t\n"}, r"train, line 2: "),
        ({"train": "a?\tb\n" + "x" * 200 + "\ty\n"}, r"question 2.*a block has 96"),
        ({"docs": ""}, "docs is empty; expected one document a line"),
        ({"docs": "\n\n"}, "docs holds only blank lines"),
        ({"docs": b"\xff\xfea\0"}, "docs, line 1"),
    ],
)
def test_bad_lines_are_named(texts, words, tmp_path):
    named = _files(tmp_path, **({"docs": "some text\n", "train": "a?\tb\n"} | texts))
    with pytest.raises(DataError, match=words):
        stage.train(answering(f"data.documents={named['docs']}", f"data.train={named['train']}"), tmp_path / "run")


def test_own_files_with_a_test_that_lacks_answers(whole, tmp_path, monkeypatch):
    shutil.copytree(whole[0] / "data", tmp_path / "data")
    (tmp_path / "data" / "world.toml").unlink()
    monkeypatch.chdir(tmp_path)
    named = {"documents": "documents.txt", "train": "train.tsv", "dev": "dev.tsv", "test": "test_inputs.tsv"}
    changes = [*TOY[len(WORLD) :], "train.steps=4", *(f"data.{key}=data/{name}" for key, name in named.items())]
    said = []
    results = experiment.run("knowledge", "out", changes, shown=experiment.Shown(said.append))
    assert all(row["test"] is None and row["dev"]["n"] == 5 for row in results["models"])
    assert results["answers_of"] == "dev" and results["world"]["invented"] is False
    strangers = results["unwritten"]["with pretraining"]
    assert [form["form"] for form in strangers["by_form"]] == [
        *("known names, new pair", "with an initial", "new family name", "new given name", "both names new")
    ]
    assert strangers["n"] == sum(form["n"] for form in strangers["by_form"]) > 100
    assert len((tmp_path / "out/predictions/with-pretraining.test.txt").read_text().split("\n")) == 6
    assert "documents" in said[0] and (tmp_path / "out/report.html").is_file()


def test_an_experiment_without_dev_is_refused(whole, tmp_path):
    data = whole[0] / "data"
    with pytest.raises(ConfigError, match=r"data\.dev is missing: a file with `question<TAB>answer`"):
        experiment.run(
            "knowledge", tmp_path / "x", [f"data.documents={data}/documents.txt", f"data.train={data}/train.tsv"]
        )


# Several mechanisms and settings

SHORT = [*TOY, "train.steps=4", 'compare.mechanisms=["softmax", "elu"]', "compare.settings.slow.finetune.train.lr=1e-4"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("knowledge") / "compared"
    return out, experiment.run("knowledge", out, SHORT)


def test_several_mechanisms_make_one_matrix(compared):
    out, results = compared
    assert [one["name"] for one in results["candidates"]] == ["softmax", "softmax, slow", "elu", "elu, slow"]
    names = [row[0] for row in results["outcome"]["rows"]]
    assert len(names) == 2 + 4 * 2 and names[0].startswith("most frequent place")
    assert names[2:4] == ["softmax, without reading", "softmax, with reading"]
    cells = [cell for row in results["outcome"]["rows"] for cell in row[1:]]
    assert all(re.fullmatch(r" *\S+% +\[\S+\]", cell) for cell in cells), "an interval is one word"
    assert results["outcome"]["columns"] == ["right answers", "dev, n = 5", "test, n = 5"]
    for one in results["candidates"]:
        own = one["results"]
        mechanism = one["name"].partition(",")[0]
        assert own["mechanism"] == mechanism and regard.load(out / one["folder"]).config.mechanism == mechanism
        for row in own["models"]:
            place = out / one["folder"] / "predictions" / f"{row['name'].replace(' ', '-')}.test.txt"
            said = place.read_text().split("\n")[:-1]
            asked = read_questions(out / "data/test.tsv")
            assert row["test"]["right"] == sum(p == q.answer for p, q in zip(said, asked, strict=True))
    assert not (out / "softmax-slow/pretraining").exists()  # what reads alike reads once
    page = (out / "report.html").read_text()
    for one in results["candidates"]:
        for training in one["results"]["stages"]:
            run = (out / one["folder"] / training["run"]).resolve()
            assert (run / "metrics.jsonl").is_file() and f"<code>{run.relative_to(out.resolve())}</code>" in page
    assert regard.load(out) is not None and results["run"].endswith("with-pretraining")


def test_the_matrix_is_on_one_page_and_each_candidate_has_its_own(compared, tmp_path):
    out, _ = compared
    page = (out / "report.html").read_text()
    for words in ("without reading, dev", "with reading, test", "most frequent place", "elu, slow", "Wilson"):
        assert words in page
    assert write_report([out], tmp_path / "again.html").read_text() == page
    assert "What does it know? elu, slow" in (out / "elu-slow/report.html").read_text()


def test_experiments_are_compared_as_candidates_are(compared, whole, tmp_path):
    page = write_report([whole[0], compared[0]], tmp_path / "both.html").read_text()
    for words in ("whole", "compared: softmax", "compared: elu, slow", "without reading, dev", "other questions"):
        assert (words in page) == (words != "other questions")
    assert page.count("regard run knowledge") == 2


def test_other_experiments_are_laid_side_by_side(whole, tmp_path):
    for name, accuracy in (("one", "51%"), ("two", "62%")):
        outcome = {"columns": ["", "right"], "rows": [["adamw", accuracy]]}
        (tmp_path / name).mkdir()
        document = {"experiment": "sentiment", "command": f"regard run sentiment --seed {name}", "outcome": outcome}
        (tmp_path / name / "results.json").write_text(json.dumps(document))
    page = write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "both.html").read_text()
    assert page.count("<table") == 1 and "51%" in page and "62%" in page and "--seed two" in page
    mixed = write_report([tmp_path / "one", whole[0]], tmp_path / "mixed.html").read_text()
    assert mixed.count("<table") == 2 and "What differs" not in mixed
    (tmp_path / "two" / "results.json").write_text('{"experiment": "sentiment", "outcome": {"columns": 3}}')
    with pytest.raises(regard.RegardError, match=r"damaged|not as a report needs"):
        write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "bad.html")


def test_a_candidate_is_what_it_would_be_alone(compared, tmp_path):
    alone = experiment.run("knowledge", tmp_path / "alone", [*TOY, "train.steps=4", "model.mechanism=elu"])
    found = next(one["results"] for one in compared[1]["candidates"] if one["name"] == "elu")
    for key in ("models", "baselines", "answers", "calibration", "coverage", "unwritten", "seed", "world"):
        assert json.loads(json.dumps(alone[key])) == json.loads(json.dumps(found[key])), key


@pytest.mark.slow
def test_a_comparison_goes_on_where_it_was_stopped(compared, tmp_path):
    out = tmp_path / "again"
    shown = experiment.Shown(progress=lambda name: StopAt(3) if name == "elu: pretraining" else Progress())
    with pytest.raises(Crash):
        experiment.run("knowledge", out, SHORT, shown=shown)
    experiment.resume(out)
    assert read(out)["outcome"] == read(compared[0])["outcome"]


@pytest.mark.parametrize("wins, losses, p", [(0, 0, 1.0), (5, 0, 2 / 32), (3, 3, 1.0), (1, 5, 14 / 64)])
def test_the_sign_test_is_exact(wins, losses, p):
    assert sign_test(wins, losses) == pytest.approx(p)
