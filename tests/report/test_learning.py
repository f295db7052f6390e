"""Train and dev in one figure, the best of each, and when a training began to overfit."""

from __future__ import annotations

import math
import re

import pytest

from regard.lab.runs.page import compare_page
from regard.report.learning import (
    TrainAndDev,
    best_of,
    describe_overfitting,
    find_overfitting,
    learning_figure,
    train_and_dev,
)
from regard.report.plots import format_marks

pytest.importorskip("matplotlib")

STEPS = range(1, 11)
FALLING = [(n, 2.0 / n) for n in STEPS]
TURNING = [(n, 1.0 + 0.1 * abs(n - 4)) for n in STEPS]  # lowest at step 4


def evaluations(**columns):
    """Lines as a run logs them: `train_loss` is train/loss."""
    return [
        {"step": n, **{key.replace("_", "/"): value for key, value in zip(columns, row, strict=True)}}
        for n, *row in zip(STEPS, *columns.values(), strict=True)
    ]


def test_a_training_overfits_from_its_lowest_dev_loss_on():
    found = find_overfitting(TrainAndDev(FALLING, TURNING))
    assert found == (4, (0.5, 0.2), (1.0, 1.6))
    losses = {"adamw": TrainAndDev([(x / 2, y) for x, y in FALLING], [(x / 2, y) for x, y in TURNING])}
    losses |= {"sgd": TrainAndDev(FALLING, FALLING), "adam": TrainAndDev(FALLING, FALLING), "new": TrainAndDev([], [])}
    said = describe_overfitting(losses, "epoch")
    assert said.startswith("adamw overfits from epoch 2 on: its dev loss rises from 1 to 1.6 while its training loss")
    assert said.endswith("while the training loss falls: sgd, adam.") and describe_overfitting({}) == ""


@pytest.mark.parametrize(
    "train, dev",
    [
        (FALLING, FALLING),  # both fall
        (FALLING, [(n, 1.0 + 0.001 * n) for n in STEPS]),  # a rise of less than 2%
        ([(n, 1.0 + n) for n in STEPS], TURNING),  # both rise: it diverges
        (FALLING, TURNING[:1]),
        ([], TURNING),
        (FALLING, []),
    ],
)
def test_what_is_no_overfitting(train, dev):
    assert find_overfitting(TrainAndDev(train, dev)) is None


def test_both_losses_are_found_where_they_were_logged():
    curve = [{"step": n, "loss": 9.0 / n, "lr": 0.1} for n in STEPS]
    own = evaluations(train_loss=[3.0 / n for n in STEPS], dev_loss=[math.nan, *([2.0] * 9)])
    assert train_and_dev(curve, own).train[0] == (1, 3.0) and len(train_and_dev(curve, own).dev) == 9
    without = evaluations(dev_loss=[1.0] * 10)
    assert train_and_dev(curve, without).train[0] == (1, 9.0)
    means = train_and_dev(curve, [{"step": 2, "dev/loss": 1.0}, {"step": 4, "dev/loss": 1.0}]).train
    assert means == [(2, 6.75), (4, 2.625)]  # of the steps since the evaluation before
    assert len(train_and_dev(curve, []).train) == 10
    assert train_and_dev(curve, without, "accuracy") == ([], [])


def test_of_equals_the_one_that_was_kept_is_the_best_else_the_earliest():
    points = [(1, 0.5), (2, 0.9), (3, 0.9)]
    assert best_of(points, "max") == (2, 0.9) and best_of([], "max") is None and best_of([], "max", 3) is None
    assert best_of(points, "max", 3) == (3, 0.9) and best_of(points, "max", 1) == (2, 0.9)  # 1 is no equal


def test_the_dot_of_dev_stands_at_the_checkpoint_that_was_kept():
    flat = [(n, 0.5) for n in STEPS]

    def places(kept):
        svg = learning_figure({"a": TrainAndDev(flat, flat)}, best="max", kept={"a": kept})
        return re.findall(r'<use [^>]*x="([\d.]+)"[^>]*fill: var\(--series-', svg)

    assert places(None) == places(STEPS[0]) and len(places(None)) == 1
    assert float(places(STEPS[-1])[0]) > float(places(STEPS[0])[0])


def test_one_figure_has_both_lines_and_the_best_of_each():
    svg = learning_figure({"a": TrainAndDev(FALLING, TURNING), "b": TrainAndDev(FALLING, [])})
    lines = re.findall(r'<path d="M[^"]*L[^"]*"[^>]*clip-path[^>]*style="([^"]*)"', svg)
    coloured = [style for style in lines if "--series-" in style]
    assert len(coloured) == 3 and sum("stroke-dasharray" in style for style in coloured) == 2  # train is dotted
    assert "a, dev 1, train 0.2; b, train 0.2" in svg


def test_steps_are_whole_numbers_at_their_axis():
    losses = [(n, 3.0 - n / 10) for n in range(1, 5)]
    marks = re.findall(r"<text[^>]*>([\d.]+)</text>", learning_figure({"a": TrainAndDev(losses, losses)}))
    assert {"1", "2", "3", "4"} <= set(marks) and not {"1.6", "2.4", "3.2"} & set(marks)


def test_the_page_of_runs_tells_the_best_step_by_each_and_overfitting():
    rows = evaluations(
        train_loss=[y for _, y in FALLING],
        dev_loss=[y for _, y in TURNING],
        train_accuracy=[n / 10 for n in STEPS],
        dev_accuracy=[0.5, 0.8, *([0.6] * 8)],
    )
    run = {"name": "one", "path": "runs/one", "curve": [], "evaluations": rows, "best": rows[1]}
    page = re.sub(r"<[^>]*>", "|", compare_page([run]).html())
    assert re.search(r"one\|+80.0%\|+2\|+100.0%\|+10\|+from step 4", page)
    rows[4] |= {"dev/accuracy": 0.8}
    tied = re.sub(r"<[^>]*>", "|", compare_page([run | {"best": rows[4]}]).html())
    assert re.search(r"one\|+80.0%\|+5\|+100.0%\|+10\|+from step 4", tied)
    assert "1 run: dev/accuracy 80.0%" in page  # what it learned from does not come first
    assert "Accuracy, train and dev" in page and "Loss, train and dev" in page


@pytest.mark.parametrize(
    "values, written",
    [
        ([5.2741, 5.2742, 5.2743], ["5.2741", "5.2742", "5.2743"]),
        ([5.27425, 5.2745, 5.27475], ["5.27425", "5.27450", "5.27475"]),
        ([-123456.5, -123456.25], ["-123,456.50", "-123,456.25"]),
        ([3.0, 3.15, 3.3], ["3", "3.15", "3.3"]),
        ([0.0, 100.0, 12345.0], ["0", "100", "12,345"]),
        ([1e-7, 2e-7], ["1e-07", "2e-07"]),
        ([2.0], ["2"]),
        ([], []),
    ],
)
def test_marks_of_an_axis_differ(values, written):
    assert format_marks(values) == written


def test_an_axis_with_a_narrow_range_has_marks_that_differ():
    curve = [(n, 5.2741 + n * 1e-5) for n in STEPS]
    texts = re.findall(r"<text[^>]*>(5\.27[\d]*)</text>", learning_figure({"a": TrainAndDev([], curve)}))
    assert len(set(texts)) == len(texts) >= 3


def test_names_with_commas_are_told_apart():
    falling = TrainAndDev(FALLING, FALLING)
    assert describe_overfitting({"a": falling, "b": falling}).endswith(": a, b.")
    assert describe_overfitting({"a": falling, "a, slow": falling}).endswith(": a; a, slow.")


def test_a_run_whose_dev_loss_was_not_measured_is_not_called_free_of_overfitting():
    measured = {
        "name": "one",
        "path": "runs/one",
        "curve": [],
        "evaluations": evaluations(
            train_loss=[y for _, y in FALLING], dev_loss=[y for _, y in FALLING], dev_accuracy=[0.5] * 10
        ),
    }
    other = {"name": "two", "path": "runs/two", "curve": [], "evaluations": evaluations(dev_accuracy=[0.5] * 10)}
    page = re.sub(r"<[^>]*>", "|", compare_page([measured, other]).html())
    assert re.search(r"\|one\|+50.0%\|+1\|+–\|+–\|+no\|", page) and re.search(r"\|two\|+50.0%\|+1\|+–\|+–\|+–\|", page)
