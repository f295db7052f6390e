"""Pruning heads: the order by which they go, what is measured while they go, and that others are a fair control."""

import json

import pytest
import torch
from small_models import tiny
from typer.testing import CliRunner

from regard.cli.app import app
from regard.cli.heads_pruning import _draw_bar
from regard.cli.optional import fill_values
from regard.data.sentences import Sentence
from regard.data.tokenizers import Bytes, Characters
from regard.errors import OptionError
from regard.lens.heads.ablation import without_heads
from regard.lens.heads.examine import default_texts, examine
from regard.lens.heads.measures import _measure_sentences, encode_default_texts, split_sentences, split_texts
from regard.lens.heads.pruning import (
    PRUNING_ORDERS,
    RANDOM_ORDERS,
    curve_points,
    order_by_importance,
    order_by_label,
    order_greedily,
    prepare_pruning,
)
from regard.lens.models import RecordableModel, open_recordable
from regard.lens.recording.hub_models import hub_card
from regard.lens.recording.regard_models import regard_card
from regard.models import GPT

DEAD = {(0, 1), (0, 2), (1, 0)}
LABELS = [{"label": "mixed", "effect": 0.0}] * 3


def subject_of(model, tokenizer=None, spread=0.2):
    torch.manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn_like(p) * spread
    model.tokenizer = tokenizer or Bytes()
    return RecordableModel(model.eval(), model.tokenizer, regard_card(model))


def labels_of(subject):
    return examine(subject, ["the dog ran home and slept ."] * 2)[0]["heads"]


def twins(gone):
    """A cost where heads 0 and 1 stand in for each other, and head 2 is worth a little more than nothing."""
    return {0: 0.0, 1: 0.1, 2: 9.0}[len({0, 1} & set(gone))] + 0.5 * (2 in gone)


def test_greedy_sees_that_heads_stand_in_for_each_other_and_importance_does_not():
    assert order_by_importance(twins, LABELS) == [0, 1, 2]
    assert order_greedily(twins, LABELS) == [0, 2, 1]


def test_by_label_those_without_go_first_and_the_specialised_last():
    found = [("previous", 0.2), ("first", 0.9), ("mixed", 0.4), ("separator", 0.1), ("mixed", 0.1), ("induction", 0.5)]
    rows = [{"label": label, "effect": effect} for label, effect in found]
    assert order_by_label(twins, rows) == [4, 2, 3, 1, 0, 5]


def test_a_curve_goes_from_all_heads_to_none():
    assert curve_points(3) == [3, 2, 1, 0]
    points = curve_points(72)
    assert points[0] == 72 and points[-1] == 0 and len(points) == 17 and points == sorted(set(points), reverse=True)


@pytest.fixture(scope="module")
def half_dead():
    """A GPT of two layers with three heads each, of which those in DEAD say nothing."""
    subject = subject_of(GPT.preset("nano", vocabulary=256, length=64, layers=2))
    first, second = (layer.attention.out.weight.data for layer in subject.model.stack.layers)
    first[:, 16:48] = 0
    second[:, :16] = 0
    return subject


@pytest.mark.parametrize("order", ["importance", "greedy"])
def test_each_head_that_goes_is_the_cheapest_and_dead_ones_cost_nothing(half_dead, order):
    texts = [text[:50] for text in default_texts()[:4]]
    choose, judge = split_texts(half_dead, texts)
    pruning = prepare_pruning(half_dead, order, labels_of(half_dead), choose, judge)
    told = []
    found = pruning.run(lambda done, total: told.append((done, total)))
    losses = [row["loss"] for row in found["curve"]]
    assert [row["left"] for row in found["curve"]] == [6, 5, 4, 3, 2, 1, 0]
    places = [(row["layer"], row["head"]) for row in found["removed"]]
    for n, place in enumerate(places):
        if place in DEAD:
            assert losses[n + 1] == pytest.approx(losses[n], abs=1e-5)
        else:
            assert abs(losses[n + 1] - losses[n]) > 1e-4
    # By hand, on the texts that the order is chosen on.
    cost = {head: loss_without(half_dead, choose, [head]) for head in sorted(places)}
    assert places[0] == min(cost, key=cost.get)
    if order == "importance":
        assert [cost[place] for place in places] == sorted(cost.values())
    else:
        beside = {head: loss_without(half_dead, choose, [places[0], head]) for head in places[1:]}
        assert beside[places[1]] == min(beside.values())
    # What is announced is what is done.
    assert told == [(n, sum(pruning.passes)) for n in range(1, sum(pruning.passes) + 1)]
    assert found["chosen_on"] == found["measured_on"] == 2 and found["measure"] == "loss"
    assert found["random"][0]["loss"] == losses[0] and found["random"][-1]["loss"] == losses[-1]
    assert all(row["low"] <= row["loss"] <= row["high"] for row in found["random"])


def loss_without(subject, examples, heads):
    """The loss, as it is rounded, of the examples without these (layer, head)."""
    removed = {}
    for layer, head in heads:
        removed.setdefault(f"stack.blocks.{layer}.attention", []).append(head)
    with torch.no_grad(), without_heads(subject.model, removed):
        return round(examples.run()["loss"], 6)


def test_the_curve_is_the_loss_of_other_texts_without_those_heads(half_dead):
    texts = [text[:50] for text in default_texts()[:4]]
    found = prepare_pruning(half_dead, "label", labels_of(half_dead), *split_texts(half_dead, texts)).run()
    model = half_dead.model
    removed = {}
    for row in found["removed"][:4]:
        removed.setdefault(row["name"], []).append(row["head"])
    with torch.no_grad(), without_heads(model, removed):
        tokens = [torch.tensor([half_dead.ids(text)]) for text in texts[1::2]]
        loss = sum(float(model.loss(t[:, :-1], t[:, 1:])) for t in tokens) / 2
    assert found["curve"][4]["left"] == 2 and found["curve"][4]["loss"] == pytest.approx(loss, abs=1e-5)


def test_heads_of_a_masked_model_are_removed_together_and_judged_on_masked_tokens():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.3
    tokenizer = Bytes(("[MASK]",))
    subject = RecordableModel(model, tokenizer, hub_card(model))
    texts = ["the dog ran home", "a cat slept there", "it rained", "we sang"]
    judge = split_texts(subject, texts)[1]
    assert judge.measure == "loss"
    names = [f"bert.encoder.layer.{n}.attention.self" for n in range(2)]
    with torch.no_grad(), without_heads(model, {names[0]: [0, 2], names[1]: [3]}):
        removed = judge.run()["loss"]
    for layer, head in ((0, 0), (0, 2), (1, 3)):
        model.bert.encoder.layer[layer].attention.output.dense.weight.data[:, 6 * head : 6 * head + 6] = 0
    with torch.no_grad():
        assert judge.run()["loss"] == pytest.approx(removed, rel=1e-5)
        # Each token is predicted where it is masked, in a copy of the text of its own.
        ids = torch.tensor(subject.ids(texts[1]))
        copies = ids.repeat(len(ids), 1)
        copies.fill_diagonal_(tokenizer.id("[MASK]"))
        logits = model(input_ids=copies).logits[torch.arange(len(ids)), torch.arange(len(ids))]
        first = float(torch.nn.functional.cross_entropy(logits, ids))
        alone = split_texts(subject, [texts[0], texts[1]])[1].run()["loss"]
    assert alone == pytest.approx(first, rel=1e-5)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    pytest.importorskip("transformers")
    names = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    folder = tiny(tmp_path_factory.mktemp("classifier"), "BertForSequenceClassification", hidden_size=32, **names)
    return open_recordable(folder)


def test_a_classifier_is_judged_by_its_accuracy_whatever_the_padding(classifier):
    choose, judge = split_sentences(classifier, None)
    assert len(choose) == len(judge) == 64 and judge.measure == "accuracy" and judge.cost == "loss"
    texts = ["the plot is graceful", "i found the music really dull in this new cut", "the villain is stale"]
    right = []
    losses = []
    for n, text in enumerate(texts):
        logits = classifier.model(input_ids=torch.tensor([classifier.ids(text)])).logits.detach()
        right.append(float(logits.argmax(-1) == n % 2))
        losses.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor([n % 2]))))
    together = _measure_sentences(classifier, [Sentence(text, n % 2) for n, text in enumerate(texts)], "")
    measured = together.run()
    assert measured["accuracy"] == pytest.approx(sum(right) / 3) and together.chance == pytest.approx(2 / 3)
    assert measured["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_a_classifier_of_sentiment_is_pruned_without_files(classifier, tmp_path):
    asked = ["heads", classifier.model.name_or_path, "--prune", "--ablate"]
    shown = CliRunner().invoke(app, asked, catch_exceptions=False).stdout
    assert "accuracy" in shown and "generated sentences" in shown and "the most frequent label is right in" in shown
    assert "change of the last vectors" in shown  # of --ablate, which has no labels to go by


def test_texts_that_cannot_be_read_are_left_out_and_long_ones_cut():
    known = Characters.of("".join(default_texts()[5]))
    subject = subject_of(GPT.preset("nano", vocabulary=known.size, length=16, layers=1), known)
    ids = encode_default_texts(subject, 4)
    assert 1 <= len(ids) <= 4 and all(len(row) == 16 for row in ids)
    with pytest.raises(OptionError, match="needs 2 texts, has 1"):
        split_texts(subject, ["Copper"])


def test_a_wrong_order_is_named(half_dead):
    with pytest.raises(OptionError, match="Did you mean 'greedy'"):
        PRUNING_ORDERS.find("gredy")


def test_passes_are_few_where_the_order_is_known():
    assert [PRUNING_ORDERS.find(name).passes(72) for name in ("label", "importance", "greedy")] == [0, 72, 2627]
    assert RANDOM_ORDERS >= 3


def test_the_number_of_heads_that_suffice_ends_where_the_curve_first_leaves(half_dead):
    judge = split_texts(half_dead, [text[:50] for text in default_texts()[:2]])[1]
    rows = [{"left": left, "loss": loss} for left, loss in ((4, 2.0), (3, 2.09), (2, 2.2), (1, 2.0), (0, 3.0))]
    assert judge.fewest_heads(rows) == 3


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("M --prune", "M --prune=importance"),
        ("--prune M", "--prune=importance M"),
        ("--prune greedy M", "--prune greedy M"),
        ("M --prune greedy", "M --prune greedy"),
        ("M --prune --json", "M --prune=importance --json"),
        ("--syntax M --prune", "--syntax=own M --prune=importance"),
        ("--texts T --syntax M", "--texts T --syntax=own M"),
        ("--texts T --syntax S M", "--texts T --syntax S M"),
        ("M --prune=label", "M --prune=label"),
    ],
)
def test_an_option_may_stand_without_its_value(typed, meant):
    defaults = {"--prune": "importance", "--syntax": "own"}
    assert fill_values(typed.split(), defaults, {"--prune", "--syntax", "--texts"}) == meant.split()


def test_bars_are_as_long_as_their_values_with_a_mark():
    assert _draw_bar(1.0, 0.5, 1.0)[:22] == "█" * 11 + "┃" + "█" * 10
    assert _draw_bar(0.0, 0.0, 0.0) == "┃"
    assert _draw_bar(0.5, 1.0, 1.0) == "█" * 11 + " " * 11 + "┃"


def test_the_command_draws_the_curve_and_says_the_cost_before(half_dead, tmp_path):
    half_dead.model.save(tmp_path / "model")
    (tmp_path / "texts").write_text("the dog ran home and the dog slept .\nthe cat saw the dog , and ran .\n" * 2)
    asked = ["heads", str(tmp_path / "model"), "--texts", str(tmp_path / "texts"), "--prune"]
    shown = CliRunner().invoke(app, [*asked, "--plot", str(tmp_path / "curve.svg")], catch_exceptions=False)
    assert "6 passes to choose the order, 22 for the curves" in shown.stderr
    assert "Heads removed one after the other: loss" in shown.stdout and "With " in shown.stdout
    assert "heads left" in (tmp_path / "curve.svg").read_text()
    found = json.loads(CliRunner().invoke(app, [*asked, "label", "--json"], catch_exceptions=False).stdout)["pruning"]
    assert found["order"] == "label" and len(found["removed"]) == 6 and len(found["curve"]) == 7
    for wrong, match in (
        ([*asked[:-1], "--plot", "x.svg"], "--plot belongs to --prune or --checkpoints"),
        ([*asked[:-1], "--sentences", str(tmp_path / "labelled")], "--sentences belong to --prune"),
        ([*asked, "--plot", "x.txt"], "the name of a figure"),
        ([*asked, "--sentences", str(tmp_path / "labelled")], "gives no label"),
    ):
        (tmp_path / "labelled").write_text("good\t1\nbad\t0\n")
        with pytest.raises(OptionError, match=match):
            CliRunner().invoke(app, wrong, catch_exceptions=False)
