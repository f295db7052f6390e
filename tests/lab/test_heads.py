"""The heads experiment: its statistics, what it measures of merges, and the whole of it at a toy size."""

import json
import math
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import Crash, StopAt

import regard
from regard.config import ConfigError
from regard.data.prose import python_prose
from regard.data.tokenizers import Bytes
from regard.lab import experiment
from regard.lab.heads import measures as merging
from regard.lab.heads.page import heads_page
from regard.lab.heads.run import MEASURES
from regard.lab.heads.statistics import beyond, detectable, holm, paired, student_limit
from regard.models import GPT
from regard.nn import MERGES
from regard.report.page import ReportError
from regard.reporting import write_report
from regard.train.progress import Progress
from regard.train.tasks.heads import SENTENCES, HeadsData

TOY = ["data.tokenizer=bytes", "data.block=64", "model.width=12", "model.layers=1", "model.attention.heads=3"]
TOY += ["data.sentences.long=Short enough for a toy.", "train.steps=4", "train.batch=2", "train.evaluation.every=2"]
FEW = ['data.merges=["concatenate", "shift", "reweight-sequence"]', "data.seeds=2"]


# Statistics


@pytest.mark.parametrize(
    "degrees, t, p", [(1, 1, 0.5), (2, 4.30265, 0.05), (2, 9.92484, 0.01), (3, 3.18245, 0.05), (9, 2.26216, 0.05)]
)
def test_students_distribution_is_that_of_the_tables(degrees, t, p):
    assert beyond(t, degrees) == pytest.approx(p, rel=1e-4)
    assert student_limit(p, degrees) == pytest.approx(t, rel=1e-4)


@given(st.floats(0, 50), st.integers(1, 60))
def test_students_distribution_is_that_of_scipy(t, degrees):
    stats = pytest.importorskip("scipy.stats")
    assert beyond(t, degrees) == pytest.approx(2 * stats.t.sf(t, degrees), abs=1e-12)


def test_paired_differences():
    found = paired([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.p == pytest.approx(0.0741799, rel=1e-5)
    assert (found.low, found.high) == pytest.approx((2 - 2.484138, 2 + 2.484138), rel=1e-5)
    assert paired([0.5]) == (0.5, None, None, None)
    assert paired([0.5, 0.5]).p == 0 and paired([0.0, 0.0]).p == 1


def test_holm_multiplies_the_smallest_by_all_and_never_falls():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1, 1] and holm([]) == []


def test_noise_alone_is_seldom_called_real():
    draw, runs, called = torch.Generator().manual_seed(0), 500, 0
    for _ in range(runs):
        noise = torch.randn(13, 3, generator=draw, dtype=torch.float64)
        t = (noise.mean(1) / (noise.std(1) / math.sqrt(3))).abs()
        called += min(holm([beyond(float(x), 2) for x in t])) < 0.05
    assert called / runs < 0.08  # 5%, and three standard errors


def test_a_difference_counts_from_the_detectable_size_on():
    size = detectable(4, tests=7)
    spread = [-1.0, 1.0, -1.0, 1.0]  # of standard deviation 2/√3
    for factor, real in ((1.01, True), (0.99, False)):
        p = paired([factor * size * 2 / math.sqrt(3) + d for d in spread]).p
        assert (holm([p] + [1.0] * 6)[0] < 0.05) is real


# The text and the sentences


def test_prose_is_english_and_each_paragraph_stands_once():
    found = python_prose()
    assert len(found) == len(set(found)) > 300 and sum(map(len, found)) > 80_000
    words = " ".join(found).lower().split()
    assert words.count("the") / len(words) > 0.04
    assert not any(">>>" in text or "\n" in text or "  " in text for text in found)


def test_the_sentences():
    assert SENTENCES["normal"] == "Thank you so much for all your help with this !"
    assert SENTENCES["weird"] == "After learning language models model natural language"
    assert len(SENTENCES["long"].split()) == 100 and SENTENCES["long"].count(".") == 1


@pytest.mark.parametrize(
    "changes, words",
    [
        (["data.seeds=0"], "data.seeds = 0: expected 1 to 100"),
        (['data.merges=["reweigt"]'], "data.merges: no 'reweigt'. Did you mean 'reweight'"),
        (["data.positions=[]"], "expected at least one name"),
        (['data.merges=["shift", "shift"]'], "none twice"),
        (["data.sentences.odd=x"], "no key 'odd' in data.sentences"),
        (["data.block=16"], "data.sentences.normal has 47 tokens, windows have 16"),
        (["data.tokenizer=characters", "data.text=abc.txt"], "data.sentences.normal: character 'T'.*=bytes"),
        (["model.position=rotary"], "model.position: this experiment compares them; say which by data.positions"),
        (["model.attention.merge=shift"], "model.attention.merge: .*data.merges"),
        (["data.text=none.txt"], "none.txt cannot be read"),
        (["train.lrr=1"], "no key 'lrr' in train"),
    ],
)
def test_what_cannot_be_run_is_told_before_any_training(changes, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "abc.txt").write_text("abcabc" * 100)
    with pytest.raises(regard.RegardError, match=words):
        experiment.run("heads", tmp_path / "x", [*TOY, *changes])
    assert not (tmp_path / "x" / "experiment.toml").exists()


def test_a_change_to_one_sentence_leaves_the_others():
    data = HeadsData().but(sentences={"weird": "So it goes"})
    assert data.sentences == SENTENCES | {"weird": "So it goes"}
    with pytest.raises(ConfigError):
        HeadsData(merges=("none such",))


# What is measured of a merge


def small(merge, position="learned", **options):
    torch.manual_seed(0)
    attention = {"heads": 3, "merge": merge, "merge_options": options}
    model = GPT(vocabulary=11, length=40, width=12, layers=2, position=position, attention=attention)
    for p in model.parameters():  # larger than at the beginning, so that heads matter
        p.data += 0.2 * torch.randn_like(p)
    return model.double().eval()


def tokens(T=40, B=3):
    return torch.randint(0, 11, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("merge", list(MERGES))
def test_only_reweight_sequence_looks_ahead_and_grows(merge):
    model = small(merge)
    ahead, grown = merging.sees_ahead(model, 40), merging.slope(merging.growth(model, tokens()))
    if merge == "reweight-sequence":
        assert ahead.broken and ahead.error > 1e-3 and 0.35 < grown < 0.65
    else:
        assert not ahead.broken and ahead.error == 0 and abs(grown) < 0.1


def test_slope_is_the_exponent():
    assert merging.slope([{"tokens": n, "ratio": 3 * n**0.7} for n in (8, 16, 40)]) == pytest.approx(0.7)


def test_a_model_that_shifts_is_one_that_concatenates():
    model = small("shift")
    assert merging.shift_is_concatenate(model, tokens()) < 1e-12
    other = merging.with_merge(model, "concatenate")
    assert float((other(tokens()) - model(tokens())).detach().abs().max()) > 1e-2  # the blocks have to move


def test_shift_from_moved_weights_trains_as_concatenate_does():
    shifted = small("shift").train()
    straight = merging.straightened(shifted).train()
    seen = []
    for model in (shifted, straight):
        rule = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(10):
            x = torch.randint(0, 11, (4, 20), generator=torch.Generator().manual_seed(step))
            loss = model.loss(x[:, :-1], x[:, 1:])
            rule.zero_grad()
            loss.backward()
            rule.step()
            losses.append(loss.item())
        seen.append(losses)
    assert seen[0] == pytest.approx(seen[1], rel=1e-9) and seen[0][-1] < seen[0][0]


@pytest.mark.parametrize("merge", list(MERGES))
def test_as_it_writes(merge):
    model, x = small(merge), tokens(T=41)
    rows = merging.as_it_writes(model, regard.data.batch.Batch(x[:, :-1], x[:, 1:]))
    assert [row["tokens"] for row in rows] == sorted({round(n * 40 / 12) for n in range(1, 13)})
    gaps = [abs(row["before"] - row["whole"]) for row in rows]
    if merge != "reweight-sequence":
        assert max(gaps) < 1e-6 and "state" not in rows[0]
        return
    assert gaps[-1] < 1e-6 < 1e-3 < max(gaps)  # the last prefix is the whole window
    plain = merging.as_it_writes(merging.with_merge(model, "concatenate"), regard.data.batch.Batch(x[:, :-1], x[:, 1:]))
    assert [row["off"] for row in rows] == pytest.approx([row["whole"] for row in plain])
    assert max(abs(row["state"] - row["whole"]) for row in rows) > 1e-3


# The whole


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("\n".join(python_prose()[:40]))
    return f"data.text={path}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("heads") / "whole"
    return out, experiment.run("heads", out, [*TOY, *FEW, text])


def timeless(value):
    if isinstance(value, dict):
        return {key: timeless(x) for key, x in value.items() if key != "seconds"}
    return [timeless(x) for x in value] if isinstance(value, list) else value


def test_what_the_experiment_leaves(whole):
    out, results = whole
    names = [
        f"{p}-{m}-{s}"
        for s in (0, 1)
        for p in ("learned", "sinusoidal")
        for m in ("concatenate", "shift", "reweight-sequence")
    ]
    assert {p.name for p in out.iterdir()} == {
        *names,
        ".lock",
        "tokens",
        "experiment.toml",
        "results.json",
        "report.html",
    }
    assert [row["run"] for row in results["trainings"]] == names
    assert json.loads((out / "results.json").read_text()) == json.loads(json.dumps(results))
    assert not (out / names[0] / "tokens").exists()  # all read the same
    for row in results["trainings"]:
        model = regard.load(out / row["run"] / "model")
        assert (model.config.position, model.config.attention.merge) == (row["position"], row["merge"])
        assert [e["step"] for e in row["evaluations"]] == [2, 4]
        assert ("off" in row) == (row["merge"] == "reweight-sequence") == row["ahead"]["broken"]
        assert row["straightened"] < 1e-5 if row["merge"] == "shift" else "straightened" not in row


def test_losses_are_means_over_the_tokens_of_each_text(whole):
    out, results = whole
    row = results["trainings"][0]
    model, read = regard.load(out / row["run"] / "model"), Bytes()
    for name in SENTENCES:
        ids = torch.tensor([read.encode(results["sentences"][name]["text"])])
        with torch.no_grad():
            assert row["losses"][name] == pytest.approx(float(model.loss(ids[:, :-1], ids[:, 1:])), rel=1e-5)
    last = row["evaluations"][-1]
    assert row["losses"]["dev"] == pytest.approx(min(e["dev/loss"] for e in row["evaluations"]))
    assert last["normal/loss"] == pytest.approx(row["losses"]["normal"])
    assert row["losses"]["train"] != row["losses"]["dev"]


def test_differences_are_taken_seed_by_seed(whole):
    _, results = whole
    losses = {(r["position"], r["merge"], r["seed"]): r["losses"] for r in results["trainings"]}
    assert len(results["comparisons"]) == len(MEASURES) * (2 * 2 + 3)
    for row in results["comparisons"]:
        a, b = (tuple(row[key].values()) for key in ("of", "against"))
        each = [losses[*a, s][row["measure"]] - losses[*b, s][row["measure"]] for s in (0, 1)]
        assert row["differences"] == pytest.approx(each) and row["mean"] == pytest.approx(mean(each))
        assert row["p"] <= row["corrected"] and row["exceeds"] == (row["corrected"] < 0.05)


def test_trainings_of_one_seed_begin_alike(tmp_path, text):
    """Without learning, merges that keep the order of heads give the same losses, to the bit."""
    pytest.importorskip("matplotlib")
    changes = ["train.lr=0", "train.steps=1", 'data.merges=["concatenate", "shuffle"]', "data.seeds=2"]
    results = experiment.run("heads", tmp_path / "x", [*TOY, *changes, text, 'data.positions=["learned"]'])
    first, second, third, _ = (row["losses"] for row in results["trainings"])
    assert first == second and first != third
    assert all(row["mean"] == 0 and row["p"] == 1 and not row["exceeds"] for row in results["comparisons"])


def test_an_experiment_goes_on_to_the_same_results(whole, text, tmp_path):
    first, out = whole[0], tmp_path / "again"
    where = "5 of 12: sinusoidal, shift, seed 0"
    shown = experiment.Shown(progress=lambda name: StopAt(3) if name == where else Progress())
    with pytest.raises(Crash):
        experiment.run("heads", out, [*TOY, *FEW, text], shown=shown)
    assert not (out / "results.json").exists()
    began = (out / "learned-shift-0/metrics.jsonl").stat().st_mtime_ns
    experiment.resume(out)
    assert (out / "learned-shift-0/metrics.jsonl").stat().st_mtime_ns == began  # what had ended stays
    read = [timeless(json.loads((folder / "results.json").read_text())) for folder in (first, out)]
    assert read[0] == read[1]


# The page


def test_the_page_says_what_was_found(whole, tmp_path):
    out, results = whole
    page = (out / "report.html").read_text()
    assert write_report([out], tmp_path / "again.html").read_text() == page
    for name in ("Outcome", "Which differences exceed the noise?", "Shift is concatenate", "One merge cheats"):
        assert f">{name}</h2>" in page
    assert "broken: looks ahead" in page and "off at inference" in page and SENTENCES["weird"] in page
    for row in results["trainings"]:
        if (row["position"], row["merge"]) == ("learned", "shift"):
            assert f"{row['losses']['dev']:.4g}"[:5] in page
    both = [r["losses"]["dev"] for r in results["trainings"] if (r["position"], r["merge"]) == ("learned", "shift")]
    assert f"{mean(both):.3f}" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page


def test_parts_without_their_merge_are_left_out_and_one_seed_proves_nothing(whole):
    results = whole[1]
    rows = [r for r in results["trainings"] if r["merge"] == "concatenate" and r["seed"] == 0]
    compared = [
        row | {"differences": row["differences"][:1], "low": None, "high": None, "p": None, "corrected": None}
        for row in results["comparisons"]
        if row["of"]["merge"] == row["against"]["merge"] == "concatenate"
    ]
    page = heads_page(results | {"trainings": rows, "comparisons": compared}).html()
    assert "nothing can be said" in page and "cheats" not in page and "Shift is" not in page
    with pytest.raises(ReportError, match="expected those of `regard run`"):
        heads_page(results | {"trainings": [{"merge": "shift", "ahead": {"broken": False}}], "comparisons": []})


def test_results_of_an_unknown_experiment_have_no_page(whole, tmp_path):
    (tmp_path / "results.json").write_text('{"experiment": "haeds"}')
    with pytest.raises(ReportError, match=r"'haeds' has no page; expected one of .*heads"):
        write_report([tmp_path])


def test_the_recipe_alone_trains_one_model(tmp_path):
    made = regard.train.recipe.load("heads", [*TOY, "model.attention.merge=reweight"])
    run = regard.train.train(made, tmp_path / "one")
    assert run.finished and (run.path / "prose.txt").is_file()
    assert set(run.metrics()[-1]) >= {"dev/loss", "normal/loss", "weird/loss", "long/loss"}
