"""The recall experiment: its data from their definition, and the whole of it at a toy size."""

import json

import pytest
import torch

from regard.config import ConfigError
from regard.data.batch import IGNORE
from regard.data.seeds import generator
from regard.lab import experiment
from regard.lab.recall.results import RecallModel, RecallTraining
from regard.lab.recall.run import RecallComparison, _best_rate, _with_plugins
from regard.models import GPT
from regard.train import recipe
from regard.train.tasks.recall import Recall, RecallData, Sizes, make_examples

SIZE = Sizes(24, 3, 500)
TOY = ["data.vocabulary=16", "data.dev=8", "train.steps=2", "train.batch=4", "train.evaluation.every=1"]
TOY += ["data.train=[{length=16, pairs=2, examples=12}, {length=24, pairs=3, examples=8}]"]
TOY += ["data.test=[{length=16, pairs=2, examples=10}, {length=24, pairs=3, examples=10}]"]
FEW = ['compare.mechanisms=["softmax", "elu"]', "compare.widths=[8]", "compare.seeds=2"]


@pytest.mark.parametrize("empty", ["zeros", "random"])
def test_examples_are_those_of_the_definition(empty):
    V, (L, P, n) = 64, SIZE
    batch = make_examples(SIZE, n, V, empty, generator(0, "test"))
    assert batch.x.shape == batch.y.shape == (n, L) and int(batch.x.max()) < V
    keys, values = batch.x[:, 0 : 2 * P : 2], batch.x[:, 1 : 2 * P : 2]
    assert int(keys.min()) == 1 and int(keys.max()) == V // 2 - 1
    assert int(values.min()) == V // 2 and int(values.max()) == V - 1
    for row, answers, k, v in zip(batch.x.tolist(), batch.y.tolist(), keys.tolist(), values.tolist(), strict=True):
        assert len(set(k)) == P and len(set(v)) == P
        asked = [t for t in range(L) if answers[t] != IGNORE]
        # Queries stand first in their slots of two, behind the pairs; each key is asked for once.
        assert all(t >= 2 * P and (t - 2 * P) % 2 == 0 for t in asked)
        assert sorted(row[t] for t in asked) == sorted(k)
        assert [answers[t] for t in asked] == [v[k.index(row[t])] for t in asked]
        if empty == "zeros":
            assert all(row[t] == 0 for t in range(2 * P, L) if t not in asked)
    if empty == "random":
        assert int((batch.x == 0).sum()) < n * L // 10


def test_near_places_are_asked_for_more_often():
    size = Sizes(20, 1, 10_000)
    batch = make_examples(size, 10_000, 8, "zeros", generator(0, "test"))
    counts = (batch.y != IGNORE).sum(0)[2::2].double()
    likely = torch.arange(1, 10, dtype=torch.float64) ** -0.99
    torch.testing.assert_close(counts / 10_000, likely / likely.sum(), atol=0.02, rtol=0)


def test_a_batch_has_one_size_and_an_epoch_has_all_of_them():
    loaded = recipe.load("recall", TOY)
    task = Recall(loaded.data, 5, torch.device("cpu"), None, None)
    first = [task.batch(step, 4) for step in range(5)]
    assert sorted(len(batch.x[0]) for batch in first) == [16, 16, 16, 24, 24]
    again = [task.batch(step, 4) for step in range(5, 10)]
    assert {str(b.x.tolist()) for b in first} == {str(b.x.tolist()) for b in again}
    assert torch.equal(task.batch(3, 4).x, first[3].x) and task.length == 24
    other = Recall(loaded.data, 6, torch.device("cpu"), None, None)
    assert not torch.equal(other.batch(0, 4).x[:, :8], first[0].x[:, :8])


def test_the_loss_is_that_of_the_labels_alone():
    loaded = recipe.load("recall", TOY)
    task = Recall(loaded.data, 0, torch.device("cpu"), None, None)
    model = GPT(vocabulary=16, width=8, layers=1, attention={"heads": 1}, length=24, block={"mlp": "none"})
    batch = task.batch(0, 4)
    torch.testing.assert_close(task.loss(model, batch), model.loss(batch.x, batch.y, mean=False))
    measured = task.test(model.eval())
    assert measured["accuracy"] == pytest.approx((measured["accuracy 16/2"] + measured["accuracy 24/3"]) / 2)
    assert task.test(model) == measured and set(task.evaluate(model)) == set(measured)


class Oracle(torch.nn.Module):
    """Answers by looking up what followed each token before."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Identity()

    def stack(self, tokens):
        followed = torch.zeros(*tokens.shape, 1)
        for row, out in zip(tokens, followed, strict=True):
            for t, token in enumerate(row.tolist()):
                earlier = [i for i in range(t) if int(row[i]) == token]
                out[t] = float(row[earlier[0] + 1]) if earlier else 0
        return followed

    def logits(self, x):
        return torch.nn.functional.one_hot(x[..., 0].long(), 16).float()


def test_who_looks_up_has_every_answer_right():
    task = Recall(recipe.load("recall", TOY).data, 0, torch.device("cpu"), None, None)
    assert task.test(Oracle())["accuracy"] == 1.0


@pytest.mark.parametrize(
    "changes, words",
    [
        ("data.test=[{length=16, pairs=5, examples=1}]", "at least four tokens a pair"),
        ("data.test=[{length=16, pair=4, examples=1}]", "expected tables of length, pairs, examples"),
        ("data.train=[]", "at least one table"),
        ("data.vocabulary=6", "different keys"),
        ("data.empty=nothing", "zeros or random"),
    ],
)
def test_data_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        recipe.load("recall", [*TOY, changes])


@pytest.mark.parametrize(
    "changes, words",
    [
        ("model.mechanism=elu", r"compare\.mechanisms"),
        ("train.lr=1", r"compare\.rates"),
        ("compare.widths=[0]", "at least one number above 0"),
    ],
)
def test_what_is_compared_is_said_under_compare(changes, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        experiment.run("recall", tmp_path / "run", [*TOY, *FEW, changes])


def test_a_training_ends_at_its_target(tmp_path):
    changes = ["train.evaluation.target=0.0", "model.width=8", "train.steps=9", "train.saving.every=0"]
    loaded = recipe.load("recall", [*TOY, *changes])
    from regard.train import train

    run = train(loaded, tmp_path / "run")
    assert max(row["step"] for row in run.metrics()) == 1
    assert run.finished


def test_a_mechanism_of_ones_own_is_compared_with_the_others(monkeypatch):
    from regard.mechanisms import Linear
    from regard.mechanisms.base import MECHANISMS

    class Mine(Linear):
        """A mechanism of a file of the user's."""

    Mine.__module__ = "regard_plugin_mine"
    monkeypatch.setitem(MECHANISMS._entries, "mine", Mine)
    assert _with_plugins(["softmax"])[-1] == "mine"
    everything = _with_plugins([])
    assert {"softmax", "mine"} <= set(everything) and "linear" not in everything
    assert RecallComparison(mechanisms=("softmax",)).mechanisms == ("softmax",)


def test_the_best_rate_is_chosen_by_other_examples_than_those_that_are_reported():
    model = RecallModel("elu", 8, 4)

    def trained(rate, seed, dev, accuracy):
        return RecallTraining(model, rate, seed, "run", 1.0, 2, 100, dev, accuracy, {"16/2": accuracy})

    rows = [trained(0.1, 0, 0.5, 0.9), trained(0.1, 1, 0.5, 0.9), trained(0.2, 0, 0.6, 0.3), trained(0.2, 1, 0.7, 0.5)]
    point = _best_rate(model, rows, 64)
    assert (point.rate, point.low, point.high, point.state) == (0.2, 0.3, 0.5, 64)
    assert point.accuracy == pytest.approx(0.4) and point.by_size == {"16/2": pytest.approx(0.4)}


def test_the_experiment_at_a_toy_size(tmp_path):
    path = tmp_path / "run"
    results = experiment.run("recall", path, [*TOY, *FEW, "compare.convolutions=[4, 0]"])
    read = json.loads((path / "results.json").read_text())
    assert read["points"] == results["points"] and len(results["points"]) == 4 and len(results["trainings"]) == 8
    states = {(p["model"]["mechanism"], p["model"]["convolution"]): p["state"] for p in results["points"]}
    # Float32: keys and values of 24 tokens, 8 wide, in two layers; 4·5 sums a head; three inputs of q, k and v.
    convolved = 2 * 3 * 3 * 8 * 4
    assert states == {
        ("softmax", 0): 2 * 24 * 16 * 4,
        ("softmax", 4): 2 * 24 * 16 * 4 + convolved,
        ("elu", 0): 2 * 2 * 4 * 5 * 4,
        ("elu", 4): 2 * 2 * 4 * 5 * 4 + convolved,
    }
    for point in results["points"]:
        own = [row["accuracy"] for row in results["trainings"] if row["model"] == point["model"]]
        assert (point["low"], point["high"]) == (min(own), max(own))
    assert [len(row) for row in results["outcome"]["rows"]] == [7] * 4
    page = (path / "report.html").read_text()
    assert "Gated DeltaNet" in page and "2402.18668" in page and "no convolution" in page
    assert (path / "softmax-8-0-0.005-0" / "model").is_dir()


def test_the_default_and_the_full_size_can_be_planned():
    data = recipe.load("recall").data
    assert isinstance(data, RecallData)
    full = recipe.load("recall", variant="full")
    assert full.train.total(180_000) == 22_500 and full.data.vocabulary == 8192
    assert [size.name for size in full.data.test_sizes][-1] == "1024/256"
