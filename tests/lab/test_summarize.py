"""Summarising: pairs as people have them, what is counted, batches, the experiment at a toy size, and the command."""

import io
import json
import re
import sys
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import NOTICES, SUMMARIES, Crash, StopAt, bits

import regard
from regard.cli import main
from regard.config import ConfigError
from regard.data.batch import IGNORE
from regard.data.files import DataError
from regard.data.notices import NoticesConfig, judge, notice, notices, parse_notice
from regard.data.pairs import Pair, read_articles, read_pairs, write_pairs
from regard.data.rouge import bootstrap, copied_share, lead, rouge
from regard.data.splits import split_by_hash
from regard.data.tokenizers import BPE
from regard.generate import Settings
from regard.lab import experiment
from regard.lab.summarize.page import summarize_page
from regard.lab.summarize.summaries import count_facts, score_summaries, summaries
from regard.lens import attention_maps
from regard.models import token_loss
from regard.report.masks import hidden_reasons
from regard.reporting import write_report
from regard.train import recipe, stage
from regard.train.progress import Progress
from regard.train.tasks.summarize import (
    AHEAD,
    COPY,
    GIVEN,
    Summarize,
    SummarizeData,
    encode_pairs,
    make_batch,
    trim_padding,
)

pytest.importorskip("matplotlib")  # reports draw
pytest.importorskip("tokenizers")
pytest.importorskip("rouge_score")

CPU = torch.device("cpu")
TOY = [*SUMMARIES, "compare.rates=[1e-2]", "compare.features=[8]", "compare.examples=2"]


# Pairs in files

TEXTS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=30)


def quoted(text):
    return '"' + text.replace('"', '""') + '"'


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5))
def test_the_same_pairs_from_every_format(tmp_path_factory, rows):
    here = tmp_path_factory.mktemp("pairs")
    (here / "a.jsonl").write_text("".join(json.dumps({"summary": s, "article": a}) + "\n" for a, s in rows))
    for name, mark in {"a.csv": ",", "a.tsv": "\t"}.items():
        lines = [f"article{mark}id{mark}summary", *(f"{quoted(a)}{mark}7{mark}{quoted(s)}" for a, s in rows)]
        (here / name).write_bytes("\r\n".join(lines).encode())
    expected = [Pair(" ".join(a.split()), " ".join(s.split())) for a, s in rows]
    for name in ("a.jsonl", "a.csv", "a.tsv"):
        assert read_pairs(here / name) == expected, name
        assert read_articles(here / name) == [pair.article for pair in expected]


def test_a_quote_a_delimiter_and_a_line_break_in_a_field(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfsummary,article\n"a ""b"", c","one\r\ntwo, three"\n\nplain,it\'s\n')
    assert read_pairs(path) == [Pair("one two, three", 'a "b", c'), Pair("it's", "plain")]


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.jsonl", '{"article": "x", "summary": "y"}\n{"article": "x"}\n', "line 2: no 'summary'"),
        ("a.jsonl", '{"artcle": "x", "summary": "y"}\n', "line 1: no 'article'. Did you mean 'artcle'"),
        ("a.jsonl", '\n{"article": 3, "summary": "y"}\n', "line 2: 'article' is 3, expected a text"),
        ("a.jsonl", '{"article": "x", "summary": "y"}\n[1]\n', "line 2: list, expected an object"),
        ("a.jsonl", '{"article": "x"\n', "line 1 is damaged or no JSON"),
        ("a.jsonl", '{"article": "\\ud800", "summary": "y"}\n', "line 1: .*surrogate"),
        ("a.jsonl", '{"article": "x", "summary": "y", "truth": [1]}\n', "line 1: 'truth' is"),
        ("a.jsonl", "", "is empty"),
        ("a.csv", "", "is empty"),
        ("a.csv", "article,summary\na,b\nc\n", "line 3: 1 fields, expected 2"),
        ("a.csv", 'article,summary\na,b\n"c\nd,e\n', "line 3: the record that begins here"),
        ("a.csv", 'article,summary\n"a"b,c\n', "line 2: the record that begins here"),
        ("a.csv", "article,article\na,b\n", "line 1: two columns are called 'article'"),
        ("a.tsv", "article\tsumary\na\tb\n", "no 'summary'. Did you mean 'sumary'"),
        ("a.txt", "x", "expected pairs in a file that ends in .jsonl, .csv, .tsv"),
    ],
)
def test_files_that_are_refused(name, text, words, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words):
        read_pairs(tmp_path / name)


def test_a_long_field_is_read_and_the_process_is_left_as_it_was(tmp_path):
    import csv

    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text("article,summary\n" + "x" * 300_000 + ",y\n")
    assert len(read_pairs(tmp_path / "a.csv")[0].article) == 300_000
    assert csv.field_size_limit() == before


def test_cutting_depends_on_the_article_alone():
    pairs = [Pair(f"article {n % 500}", str(n)) for n in range(1000)]
    made = split_by_hash(pairs, 0.1, ["dev", "test"])
    sides = {name: {pair.article for pair in part} for name, part in made.items()}
    assert not sides["train"] & sides["dev"] and not sides["train"] & sides["test"] and not sides["dev"] & sides["test"]
    assert sorted(p for part in made.values() for p in part) == sorted(pairs)
    assert 60 < len(made["dev"]) < 140 and 60 < len(made["test"]) < 140
    again = split_by_hash(pairs[::-1], 0.1, ["dev", "test"])
    assert {name: set(part) for name, part in again.items()} == {name: set(part) for name, part in made.items()}


# Generated pairs


def test_generated_pairs_are_true_and_always_the_same():
    config = NoticesConfig(people=200, held_out=20, told=0.5)
    made = notices(config)
    assert made == notices(config) and made != notices(NoticesConfig(people=200, held_out=20, told=0.5, seed=1))
    assert [len(part) for part in made] == [160, 20, 20]
    untold = 0
    for pair in (p for part in made for p in part):
        facts = dict(pair.truth)
        assert pair.summary == notice(facts) and parse_notice(pair.summary) == facts
        assert all(value is None or value in pair.article for value in facts.values())
        assert judge(pair.summary, pair.article, facts) == (sum(v is not None for v in facts.values()), 0, 0, 0)
        untold += facts["place"] is None
    assert 60 < untold < 140


def test_facts_are_judged_by_where_they_stand():
    facts = {"name": "Ada Bell", "born": "1901", "died": "1950", "job": "poet", "place": None}
    article = "Ada Bell, a poet, lives in Oakport. Born 1901, died 1950."
    assert notice(facts) == "Ada Bell (1901–1950), poet"
    assert judge("Ada Bell (1901–1950), poet from Oakport", article, facts) == (4, 1, 0, 0)
    assert judge("Ada Bell (1950–1901), poet from Oak", article, facts) == (2, 2, 1, 0)
    assert judge("Ada Bell (born 1901), poet", article, facts) == (3, 0, 0, 1)
    assert judge("Ada Bell was a poet", article, facts) is None
    pair = Pair(article, notice(facts), facts)
    found = count_facts([pair, pair], {"m": ["Ada Bell (1901–1950), poet from Oakport", "no"]})["m"]
    assert (found.confused, found.odd, found.untold, found.claimed, found.perfect) == (1, 1, 2, 1, 0)
    assert count_facts([Pair("a", "b")], {"m": ["b"]}) == {}


# Scores


def test_rouge_of_known_texts():
    found = rouge(["the cat", "dogs running", ""], ["the cat sat", "dog runs", "x"])
    assert found["rouge1"] == pytest.approx([0.8, 1.0, 0.0])  # stems are compared
    assert found["rouge2"] == pytest.approx([2 / 3, 1.0, 0.0])
    with pytest.raises(DataError, match="1 summaries for 2 references"):
        rouge(["a"], ["a", "b"])


def test_the_bootstrap_covers_and_narrows():
    torch.manual_seed(0)
    misses = 0
    for seed in range(100):
        low, high = bootstrap(torch.randn(50).tolist(), seed, 300)[1:]
        misses += not low < 0 < high
    assert misses <= 13  # 5 expected, of a percentile interval a few more
    wide, narrow = (bootstrap(torch.randn(n).tolist()) for n in (20, 2000))
    assert wide.high - wide.low > 5 * (narrow.high - narrow.low)
    same = [0.25] * 10
    assert bootstrap(same) == (0.25, 0.25, 0.25)


def test_copying_counts_every_occurrence():
    assert copied_share(["a b a"], ["b a c"], 1) == 1.0
    assert copied_share(["a b a"], ["b a c"], 2) == 0.5
    assert copied_share(["x"], ["b"], 2) is None
    assert lead("one  two\nthree", 2) == "one two"


def test_differences_are_paired():
    pairs = [Pair(f"word{n} and more", f"word{n} and") for n in range(20)]
    found = score_summaries(pairs, {"base": ["and"] * 20, "m": [p.summary for p in pairs]})
    assert found["m"].above["rouge1"] == pytest.approx([1 / 3, 1 / 3, 1 / 3])  # each article by the same amount
    assert found["base"].above["rouge1"] == (0, 0, 0) and found["reference"].rouge is None
    assert found["m"].words == 2 and found["m"].copied["1"] == 1


# The task


def task(folder, *changes, seed=0):
    usual = SUMMARIES
    if any(change.startswith("data.train=") for change in changes):  # then none are generated
        usual = [change for change in SUMMARIES if not change.startswith("data.notices.")]
    made = recipe.load("summarize", [*usual, *changes])
    return Summarize(made.data, seed, CPU, folder, None)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return task(tmp_path_factory.mktemp("plain"), "data.copies=0")


def test_a_batch_is_a_pure_function_of_seed_and_step(plain, tmp_path):
    first = [plain.batch(step, 4) for step in (0, 5, AHEAD + 1)]
    again = [plain.batch(step, 4) for step in (AHEAD + 1, 5, 0)][::-1]
    other = task(tmp_path, "data.copies=0", seed=1).batch(0, 4)
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert other.x.shape != first[0].x.shape or not torch.equal(other.x, first[0].x)


def test_what_a_batch_holds(plain):
    assert plain.tokenizer.decode(plain.batch(3, 4).x[:, 0].tolist()) == "<start>" * 4
    texts = {
        plain.tokenizer.decode(plain.train.target[n, : plain.train.targets[n]].tolist())
        for n in range(len(plain.train))
    }
    widths = []
    for step in range(AHEAD):
        batch = plain.batch(step, 4)
        widths += [(int(n), batch.source.shape[1]) for n in batch.source_visible.sum(1)]
        for x, y, seen in zip(batch.x, batch.y, batch.visible, strict=True):
            assert torch.equal(y != IGNORE, seen) and torch.equal(x[1:][seen[1:]], y[:-1][seen[1:]])
            assert plain.tokenizer.decode(y[seen].tolist()) in texts
    assert sum(n for n, _ in widths) > 0.9 * sum(width for _, width in widths)  # alike in length: little padding


def test_rows_that_copy_go_on_with_their_article(tmp_path):
    made = task(tmp_path, "data.copies=0.5")
    copying = 0
    for step in range(AHEAD):
        batch = made.batch(step, 4)
        for x, y, seen, source in zip(batch.x, batch.y, batch.visible, batch.source, strict=True):
            if x[0] != made.tokenizer.id(COPY):
                continue
            copying += 1
            passage = [*x[1:][seen[1:]].tolist(), int(y[seen][-1])]
            text = source.tolist()
            assert any(text[n : n + len(passage)] == passage for n in range(len(text)))
            assert (y[:GIVEN] == IGNORE).all() and y[seen][GIVEN:].tolist() == passage[GIVEN:]
    assert 16 < copying < 48  # half of 64


def test_padding_changes_no_loss(plain):
    model = small(plain)
    whole = make_batch(plain.train, torch.arange(6), plain.start)
    assert whole.source.shape[1] > trim_padding(whole).source.shape[1]
    alone = sum(plain.loss(model, trim_padding(whole.rows(n, n + 1))) for n in range(6))
    assert torch.allclose(plain.loss(model, whole), alone, rtol=1e-5)
    assert torch.allclose(plain.loss(model, trim_padding(whole)), alone, rtol=1e-5)


def small(task):
    torch.manual_seed(0)
    size = {"width": 16, "layers": 1, "attention": {"heads": 2}}
    parts = {part: task.given[part] | size for part in ("encoder", "decoder")}
    return regard.Seq2Seq(**task.given | parts, shared=True)


def test_label_smoothing_is_the_formula_and_nothing_that_is_measured_has_it(plain):
    logits, y = torch.randn(5, 7, dtype=torch.float64), torch.tensor([1, 2, IGNORE, 0, 6])
    logp, seen = logits.log_softmax(-1), y != IGNORE
    want = -(0.8 * logp[seen].gather(1, y[seen, None]).sum() + 0.2 * logp[seen].mean(1).sum())
    assert torch.allclose(token_loss(logits, y, mean=False, smoothing=0.2), want)
    model, batch = small(plain), plain.batch(0, 4)
    assert plain.loss(model, batch, 0.5) != plain.loss(model, batch)
    with torch.no_grad():
        measured = plain.evaluate(model.eval())
        every = trim_padding(make_batch(plain.dev, torch.arange(len(plain.dev)), plain.start))
        alone = plain.loss(model, every) / (every.y != IGNORE).sum()
    assert measured["dev/loss"] == pytest.approx(float(alone), rel=1e-5)
    assert measured["dev/perplexity"] == pytest.approx(float(alone.exp()), rel=1e-4)


@pytest.mark.parametrize("changes", [[], ["model.encoder.mechanism=performer", "model.cross=elu"]])
def test_a_stopped_training_goes_on_to_the_same_bits(changes, tmp_path):
    made = recipe.load("summarize", [*SUMMARIES, "model.encoder.dropout=0.1", "train.seed=3", *changes])
    whole = stage.train(made, tmp_path / "whole")
    with pytest.raises(Crash):
        stage.train(made, tmp_path / "parts", progress=StopAt(8))
    assert bits(stage.resume(tmp_path / "parts")) == bits(whole)


def test_encoder_and_decoder_may_differ_in_everything(tmp_path):
    asked = ["model.shared=false", "model.encoder.width=24", "model.encoder.layers=2", "model.encoder.mechanism=elu"]
    asked += ["model.encoder.attention.heads=3", "model.cross=performer", "model.cross_options.features=8"]
    run = stage.train(recipe.load("summarize", [*SUMMARIES, *asked, "train.steps=1"]), tmp_path / "run")
    model = regard.load(run.path / "model")
    assert model.config.encoder.width == 24 and model.config.decoder.width == 16
    assert model.config.mechanism == "encoder elu, decoder softmax, cross performer"
    assert model.tokenizer.role("end") is not None
    weights = attention_maps(model, torch.tensor([[0, 5, 6]]), source=torch.tensor([[7, 8, 9, 10]]), cross=True)
    assert [list(w.shape) for w in weights] == [[1, 2, 3, 4]]
    assert torch.allclose(weights[0].sum(-1), torch.ones(1, 2, 3), atol=1e-5)


def test_real_pairs_with_dev_and_test_cut_off(tmp_path):
    pairs = [
        Pair(f"The thing number {n} is blue and round and {'very ' * (n % 9)}old.", f"thing {n}") for n in range(120)
    ]
    write_pairs(tmp_path / "a.jsonl", [*pairs, Pair("", "x"), Pair("y", "")])
    asked = [f"data.train={tmp_path / 'a.jsonl'}", "data.held_out=0.1", "data.source=16"]
    with pytest.warns(UserWarning) as told:
        made = task(tmp_path / "run", *asked)
    said = " ".join(str(w.message) for w in told)
    assert "2 of 122 pairs have an empty article or summary and are left out" in said
    assert "have more than 16 tokens and are cut there (data.source)" in said
    assert made.rows < 115 and len(made.dev) > 3 and made.train.source.shape[1] == 16
    trained = BPE.train([t for p in pairs for t in (p.article, p.summary)], 400)
    assert made.tokenizer.size <= 400 and trained.size <= 400


@pytest.mark.parametrize(
    "changes, words",
    [
        (["data.dev=x.jsonl"], "data.dev is given without data.train"),
        (["data.train=none.jsonl"], "none.jsonl cannot be read"),
        (["data.tokenizer=bp"], "Did you mean 'bpe'"),
        (["data.source=1"], "data.source = 1: expected at least 2 tokens"),
        (["data.copies=1"], "data.copies = 1: expected at least 0 and less than 1"),
        (["data.notices.told=2"], "data.notices.told = 2: expected 0 to 1"),
        (["data.notices.people=3"], "data.notices: data.world.people = 3|data.world.people = 3"),
        (["train.smoothing=2"], "train.smoothing = 2: expected 0 to 1"),
        (["compare.rates=[]"], "compare.rates = \\[\\]: expected at least one"),
        (["compare.n=9"], "compare.n = 9 summaries of compare.beams = 4"),
        (["compare.rats=[1]"], "no key 'rats' in compare. Did you mean 'rates'"),
    ],
)
def test_experiments_that_cannot_begin(changes, words, tmp_path):
    with pytest.raises(regard.RegardError, match=words):
        experiment.run("summarize", tmp_path / "x", [*TOY, *changes])
    assert not (tmp_path / "x" / "experiment.toml").exists()


def test_too_few_pairs_to_cut(tmp_path):
    write_pairs(tmp_path / "a.jsonl", [Pair("one two", "one")])
    with pytest.raises(DataError, match=r"has 1 pairs: too few to cut 5% off for .*give data.dev=FILE"):
        task(tmp_path / "run", f"data.train={tmp_path / 'a.jsonl'}")


# The experiment


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("summarize") / "whole"
    return out, experiment.run("summarize", out, TOY)


def test_what_the_experiment_leaves(whole):
    out, results = whole
    assert {p.name for p in out.iterdir()} == {
        ".lock",
        *("experiment.toml", "data", "predictions", "results.json", "report.html"),
        *("base-lr-0.01", "performer-8-lr-0.01"),
    }
    assert [row["mechanism"] for row in results["models"]] == ["softmax", "performer"]
    assert results["best"] == ["softmax, lr 0.01", "performer 8, lr 0.01"]
    model = regard.load(out / "base-lr-0.01" / "model")
    pairs = read_pairs(out / "data" / "test.jsonl")
    said = [row.summary for row in read_pairs(out / "predictions" / "base-lr-0.01.test.jsonl")]
    written = summaries(model, [p.article for p in pairs], Settings(beams=4, length_penalty=1.0))
    assert said == [s.text for s in written]
    tokenizers = {
        (out / name / "model" / "tokenizer.json").read_text() for name in ("base-lr-0.01", "performer-8-lr-0.01")
    }
    assert len(tokenizers) == 1  # their losses can be compared
    cells = [cell for row in results["outcome"]["rows"] for cell in row[2:]]
    assert all(re.fullmatch(r"– *| *\S+ \[\S+\]", cell) for cell in cells), "an interval is one word"
    page = (out / "report.html").read_text()
    for title in ("Outcome", "True, confused and invented", "Who may see whom", "Where it looks", "Side by side"):
        assert f">{title}</h2>" in page
    assert write_report([out], out.parent / "again.html").read_text() == page


@pytest.mark.parametrize("lead, marked", [(0.0, 1), (0.99, 1), (None, 0)])
def test_what_is_brought_out_has_the_highest_score(lead, marked, whole):
    """The lead of an article may be a better summary than what a model writes, or as good."""
    document = json.loads((whole[0] / "results.json").read_text())
    first, *others = document["best"]
    test = document["scores"]["test"]
    for name in others:
        test[name]["rouge"]["rougeL"] = [0.1, 0.0, 0.2]
    test[first]["rouge"]["rougeL"] = [0.5, 0.4, 0.6]
    baseline = next(name for name, row in test.items() if row["rouge"] and name not in document["best"])
    test[baseline]["rouge"]["rougeL"] = [0.5 if lead is None else lead, 0.0, 1.0]
    page = summarize_page(document).html().partition("The same on the dev pairs")[0]
    assert page.count('class="best"') == marked
    if marked:
        assert re.search(rf'class="best"><th[^>]*>{re.escape(baseline if lead else first)}<', page)


def test_the_masks_are_those_of_the_model(whole):
    masks = whole[1]["masks"]
    source, target = masks["source"], masks["target"]
    assert 0 in source and source[0] == 1
    assert masks["matrices"]["encoder"] == [source] * len(source)
    assert masks["matrices"]["cross"] == [source] * len(target)
    causal = [[int(j <= i) for j in range(len(target))] for i in range(len(target))]
    assert masks["matrices"]["causal"] == causal
    both = [[a & b for a, b in zip(row, target, strict=True)] for row in causal]
    real = sum(target)
    assert masks["matrices"]["decoder"][:real] == both[:real]
    assert hidden_reasons([[1, 0, 0]], [1, 1, 0]).tolist() == [[0, 1, 2]]


def test_the_experiment_goes_on_after_a_crash(whole, tmp_path):
    def shown(name):
        return StopAt(7) if "performer" in name else Progress()

    with pytest.raises(Crash):
        experiment.run("summarize", tmp_path / "x", TOY, shown=experiment.Shown(progress=shown))
    results = experiment.resume(tmp_path / "x")
    for key in ("scores", "facts", "examples", "best", "masks"):
        assert json.loads(json.dumps(results[key])) == json.loads(json.dumps(whole[1][key])), key


def test_a_rate_that_was_asked_for_is_the_only_one(tmp_path):
    with pytest.raises(ConfigError, match=r"compare.rates = \[-1\]"):
        experiment.run("summarize", tmp_path / "x", [*NOTICES, "train.lr=-1"])


# The command


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*words, typed=""):
        monkeypatch.setattr(sys, "argv", ["regard", "summarize", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as left:
            main()
        shown = capsys.readouterr()
        return left.value.code, shown.out, shown.err

    return run


def test_summaries_on_the_command_line(whole, command, tmp_path):
    out, _ = whole
    pairs = read_pairs(out / "data" / "test.jsonl")[:3]
    write_pairs(tmp_path / "a.jsonl", pairs)
    (tmp_path / "a.txt").write_text("".join(p.article + "\n" for p in pairs))
    (tmp_path / "a.csv").write_text("text\n" + "".join(quoted(p.article) + "\n" for p in pairs))
    code, said, _ = command(out, tmp_path / "a.jsonl")
    assert code == 0 and len(said.split("\n")[:-1]) == 3
    assert command(out, tmp_path / "a.txt")[1] == command(out, "-", typed=(tmp_path / "a.txt").read_text())[1] == said
    assert command(out / "base-lr-0.01", tmp_path / "a.csv", "--article", "text")[1] == said
    code, shown, _ = command(out, tmp_path / "a.jsonl", "--beams", 4, "--n", 3, "--json")
    rows = json.loads(shown)
    assert [len({s["score"] for s in row["summaries"]}) for row in rows] == [3, 3, 3]
    assert [row["summaries"][0]["text"] for row in rows] == said.split("\n")[:-1]
    assert command(out, tmp_path / "a.jsonl", "--out", tmp_path / "said.txt")[0] == 0
    assert (tmp_path / "said.txt").read_text() == said
    assert len(command(out, tmp_path / "a.txt", "--temperature", 1, "--n", 2, "--seed", 0)[1].split("\n")) == 7
    greedy = command(out, tmp_path / "a.txt", "--beams", 1)[1]
    assert command(out, tmp_path / "a.txt", "--top-k", 1)[1] == greedy


def test_empty_and_long_articles_on_the_command_line(whole, command):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, said, told = command(whole[0], "-", typed="Ada was born.\n\n" + "word " * 500 + "\n")
    assert code == 0 and said.split("\n")[1] == ""
    assert "1 of 3 articles are empty" in told and "1 of 3 articles are longer than the model reads" in told


@pytest.mark.parametrize(
    "words, typed, said",
    [
        (["OUT", "none.txt"], "", "none.txt cannot be read"),
        (["OUT", "-"], "", "the input is empty; expected one article a line"),
        (["OUT", "-", "--n", "9", "--beams", "4"], "x", "9 outputs of 4 beams"),
        (["OUT", "-", "--n", "2", "--out", "x.txt"], "x", "need a file that ends in .jsonl"),
        (["GPT", "-"], "x", "is a GPT, which does not summarise"),
    ],
)
def test_commands_that_are_refused(whole, command, words, typed, said, tmp_path):
    regard.GPT.preset("nano", vocabulary=12, length=8).save(tmp_path / "gpt")
    known = {"OUT": whole[0], "GPT": tmp_path / "gpt"}
    code, _, told = command(*(known.get(word, word) for word in words), typed=typed)
    assert code == 2 and said in told.replace("\n", " ")


def test_what_a_tokenizer_must_have(tmp_path):
    BPE.train(["a b"], 300).save(tmp_path / "t.json")
    with pytest.raises(DataError, match="no special token for the start of a summary"):
        task(tmp_path / "run", f"data.tokenizer_file={tmp_path / 't.json'}")
    rows = encode_pairs(BPE.train(["a b"], 300, ("<start>", "<end>")), [Pair("a b", "b")], 5, 5)
    assert rows.targets.tolist() == [2] and rows.cut == (0, 0)
    assert SummarizeData().tokenizer == "bpe"
