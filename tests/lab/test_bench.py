"""The race: what takes part, what is measured, what is left out and why, and what is shown of it."""

from __future__ import annotations

import gc
import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import cost
from regard.checking import plugin
from regard.cli.app import app
from regard.config import ConfigError
from regard.cost import timing
from regard.devices import free_memory
from regard.errors import RegardError
from regard.lab.bench import entrants as bench_entrants
from regard.lab.bench import peers
from regard.lab.bench import run as bench
from regard.lab.bench.memory import peak
from regard.lab.bench.page import bench_page, picture
from regard.lab.bench.results import RaceResults, RaceRow
from regard.lab.bench.run import Race, race
from regard.laws import subject
from regard.reporting import write_report
from regard.train.claim import claimed

CPU = torch.device("cpu")
NAMES = [peer.name for peer in peers.PEERS]
SMALL: dict[str, Any] = {
    "tokens": (16, 32),
    "seconds": 0.001,
    "draws": 1,
    "heads": 2,
    "groups": 2,
    "width": 8,
    "features": 8,
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return {"lab": "bench", "command": "regard bench"} | measured(
        Race(**SMALL), ("softmax", "elu", "performer"), peers=NAMES
    )


def measured(*args: Any, **options: Any) -> dict[str, Any]:
    """What a race writes to results.json; reading that gives the same results again."""
    results = race(*args, **options)
    document: dict[str, Any] = json.loads(json.dumps(results.as_dict()))
    assert RaceResults.from_dict(document).as_dict() == document
    return document


def of(found: dict[str, Any], what: str, passing: str) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["what"] == what and row["pass"] == passing]


def test_everyone_is_measured_at_every_size_in_every_pass(found: dict[str, Any]) -> None:
    for name in ("softmax", "elu", "performer"):
        for passing in bench.PASSES:
            rows = of(found, name, passing)
            assert [row["N"] for row in rows] == [16, 32]
            for row in rows:
                low, middle, high = row["seconds"]
                assert 0 < low <= middle <= high
                assert row["repeats"] >= 3
    assert [row["N"] for row in of(found, "SDPA", "training")] == [16, 32]
    assert not of(found, "SDPA", "decode")


def test_work_and_floor_are_those_of_the_cost_model(found: dict[str, Any]) -> None:
    config, device = Race(**SMALL), cost.device("cpu")
    for row in found["rows"]:
        size = config.size(row["N"], row["pass"])
        face: Any = "recurrent" if row["pass"] == "decode" else "parallel"
        options = {"features": 8} if row["like"] == "performer" else {}
        work = cost.of(row["like"], size, face, training=row["pass"] == "training", **options)
        assert (row["flops"], row["bytes"]) == (work.useful, work.bytes)
        assert row["floor"] == pytest.approx(cost.floor(work, device, torch.float32))


def test_peers_that_cannot_run_here_are_named_with_the_reason(found: dict[str, Any]) -> None:
    why = {one["what"]: one["why"] for one in found["absent"] if one["pass"] == "forward"}
    assert "GPU" in why["fla"]
    assert {peer.name for peer in peers.PEERS if peer.like in ("softmax", "elu", "performer")} == {
        *why, *(row["what"] for row in found["rows"] if row["peer"])
    }  # fmt: skip


def test_who_breaks_a_law_does_not_start() -> None:
    leaky = plugin(str(Path(__file__).parents[2] / "examples" / "leaky_performer.py"))
    found = measured(Race(**SMALL | {"passes": ("forward",), "draws": 6}), plugins=[leaky])
    assert not found["rows"]
    assert "'looks-ahead'" in found["absent"][0]["why"]


def test_a_stranger_who_keeps_the_laws_races_without_a_floor(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def mine(q, k, v, causal=True):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)\n"
    )
    asked = Race(**SMALL | {"passes": ("forward", "decode")})
    found = measured(asked, ("elu",), [plugin(str(file))])
    assert [row["N"] for row in of(found, "mine", "forward")] == [16, 32]
    assert all("floor" not in row for row in of(found, "mine", "forward"))
    assert not of(found, "mine", "decode")
    page = bench_page({"command": "regard bench", **found}).html()
    # One's own is in the summary, first or not, and the page does not say that times come again.
    assert re.search(r"<strong>mine</strong> takes|, mine [\d.e+]+ times that", page.partition("<h2")[0])
    assert "gives the same numbers but for times" in page


def test_a_roofline_has_numbers_at_both_axes_however_narrow(found: dict[str, Any]) -> None:
    narrow = found | {"rows": [row for row in found["rows"] if row["what"] == "elu" and row["pass"] == "forward"]}
    svg = bench_page(narrow).html().partition("useful FLOPs a byte")[0].rpartition("<svg")[2]
    assert len(re.findall(r"<text[^>]*>[\d.,]+</text>", svg)) >= 2


def test_a_size_that_would_take_too_long_is_left_out_and_said() -> None:
    found = measured(Race(**SMALL | {"tokens": (16, 8192), "passes": ("forward",), "patience": 0.2}), ("softmax",))
    assert [row["N"] for row in found["rows"]] == [16]
    assert found["absent"][0]["N"] == 8192
    assert "patience = 0.2 s" in found["absent"][0]["why"]


def test_a_size_that_would_take_too_much_memory_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "free_memory", lambda device: 1 << 20)
    found = measured(Race(**SMALL | {"tokens": (16, 4096), "passes": ("forward",)}), ("argmax",))
    assert [row["N"] for row in found["rows"]] == [16]
    assert "GiB can be spared" in found["absent"][0]["why"]


def test_fewer_sequences_at_a_larger_size_are_expected_to_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    row = RaceRow("argmax", "argmax", False, "forward", 16, 256, (1.0, 1.0, 1.0), repeats=3, peak=1 << 30)
    config = Race(**SMALL | {"tokens": (16, 64), "total": 4096, "patience": 5.0})
    monkeypatch.setattr(bench, "free_memory", lambda device: 8 << 30)
    size, device = config.size(64, "forward"), torch.device("cpu")
    assert size.B == 64
    assert bench._too_much(config, [row], size, None, device) is None  # 16 times a sequence, a quarter of them
    alone = bench._too_much(config, [replace(row, B=64)], size, None, device)
    assert alone is not None and "16.0 GiB" in alone


def test_what_would_be_learned_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "free_memory", lambda device: 1 << 40)
    found = measured(Race(**SMALL | {"tokens": (1 << 20,), "passes": ("forward",)}), ("synthesizer-random",))
    assert not found["rows"]
    assert "GiB can be spared" in found["absent"][0]["why"]


def test_one_that_fails_does_not_end_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(size: Any, features: int) -> Any:
        raise torch.OutOfMemoryError("tried to allocate more than there is")

    one = peers.Peer("SDPA", "softmax", broken)
    monkeypatch.setattr(bench_entrants, "PEERS", (one,))
    found = measured(Race(**SMALL | {"passes": ("forward",)}), ("softmax",), peers=NAMES)
    assert [row["what"] for row in found["rows"]] == ["softmax", "softmax"]
    assert found["absent"] == [
        {"what": "SDPA", "pass": "forward", "N": 16, "why": "OutOfMemoryError: tried to allocate more than there is"}
    ]


def test_interrupted_it_keeps_what_was_measured() -> None:
    def stop(text: str) -> None:
        if text.startswith("training, 16 tokens"):
            raise KeyboardInterrupt

    found = measured(Race(**SMALL), ("elu",), say=stop)
    assert found["interrupted"]
    assert [(row["pass"], row["N"]) for row in found["rows"]] == [("forward", 16), ("forward", 32)]


def test_killed_it_has_kept_every_size_before() -> None:
    def kill(text: str) -> None:
        if text.startswith("training, 16 tokens"):
            raise SystemExit

    kept: list[list[tuple[str, int]]] = []
    with pytest.raises(SystemExit):
        race(
            Race(**SMALL),
            ("elu",),
            say=kill,
            keep=lambda results: kept.append([(row.passing, row.N) for row in results.rows]),
        )
    assert kept == [[("forward", 16)], [("forward", 16), ("forward", 32)]]


def test_long_runs_leave_no_garbage_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Knot:
        def __init__(self) -> None:
            self.self = self

    kept: list[weakref.ref[Knot]] = []

    def run() -> None:
        assert not any(knot() for knot in kept), "the knot of an earlier run is still there"
        kept.append(weakref.ref(Knot()))

    monkeypatch.setattr(timing, "LONG", 0.0)
    gc.disable()
    try:
        timing.time_interleaved([run], torch.device("cpu"), seconds=0.0, rounds=4)
    finally:
        gc.enable()
    assert len(kept) == 5


def test_peaks_are_those_of_tensors_alive_together() -> None:
    x = torch.randn(100, 100)
    assert peak(lambda: x @ x, CPU) == x.nbytes
    assert peak(lambda: (x @ x) @ x, CPU) == 2 * x.nbytes
    assert peak(lambda: [x + n for n in range(5)], CPU) == 5 * x.nbytes
    assert peak(lambda: x.exp().exp().exp().exp().exp(), CPU) == 2 * x.nbytes  # what is freed counts no more
    plain = regard.kernels.plain(regard.mechanism("softmax"))
    q = torch.randn(1, 1, 256, 4)
    assert peak(lambda: plain(q, q, q), CPU) >= 256 * 256 * 4
    assert free_memory(CPU) > 1 << 20


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tokens": ()}, "rising order"),
        ({"tokens": (32, 16)}, "rising order"),
        ({"passes": ("forwards",)}, "forward"),
        ({"groups": 3}, "divisor"),
        ({"patience": 0.0}, "more than zero"),
    ],
)
def test_bad_settings_are_named(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Race(**SMALL | asked)


def test_the_command_writes_results_page_and_pictures(tmp_path: Path) -> None:
    out = tmp_path / "race"
    asked = [
        "bench",
        "elu",
        "softmax",
        "--quick",
        "--tokens",
        "16,32",
        "--heads",
        "2",
        "--width",
        "8",
        "--device",
        "cpu",
    ]
    done = CliRunner().invoke(app, [*asked, "-o", str(out)])
    assert done.exit_code == 0, done.output
    files = [".lock", "bench.html", "bench.png", "bench.svg", "results.json"]
    assert sorted(file.name for file in out.iterdir()) == files
    assert "times the floor" in done.output
    results = json.loads((out / "results.json").read_text())
    assert {row["what"] for row in results["rows"]} == {"elu", "softmax"}
    assert write_report([out]) == out / "report.html"
    again = CliRunner().invoke(app, [*asked, "-o", str(out)])
    assert "holds results already" in str(again.exception)


def test_a_race_that_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    for name, out in (("elu", tmp_path / "file" / "race"), ("nobody", tmp_path / "race")):
        (tmp_path / "file").write_text("mine")
        failed = CliRunner().invoke(app, ["bench", name, "--quick", "--tokens", "16", "-o", str(out)])
        assert isinstance(failed.exception, RegardError)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_races_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with claimed(tmp_path / "race", (), bool):
        failed = CliRunner().invoke(app, ["bench", "elu", "--quick", "--tokens", "16", "-o", str(tmp_path / "race")])
        assert "another process is writing into" in str(failed.exception)


def test_the_page_shows_times_floors_and_what_is_missing(found: dict[str, Any], tmp_path: Path) -> None:
    page = bench_page(found).write(tmp_path / "page.html").read_text()
    for said in ("Forward and backward", "One more token", "Left out", "fla", "times the floor", "The roofline"):
        assert said in page
    picture([RaceResults.from_dict(found)] * 2, tmp_path / "two.svg")
    assert "softmax" in (tmp_path / "two.svg").read_text()


def test_a_size_of_no_memory_tells_nothing_of_the_next() -> None:
    """A run may take no memory above its inputs at one size and some at the other."""
    row = RaceRow("mine", None, False, "forward", 64, 1, (1e-3, 1e-3, 1e-3), repeats=3, peak=4096)
    rows = [row, replace(row, N=128, peak=0)]
    size = Race(**SMALL).size(256, "forward")
    assert bench._extrapolate(rows, size, lambda row: row.peak or 0, 4.0) == 0
    assert bench._extrapolate([replace(row, peak=0), replace(row, N=128)], size, lambda row: row.peak or 0, 4.0) > 0


def test_a_mechanism_that_is_named_and_plugged_in_races_once() -> None:
    found = bench_entrants.entrants(["softmax", "elu"], Race(**SMALL), [subject("elu")])
    assert [(entrant.name, entrant.peer) for entrant in found] == [("softmax", False), ("elu", True)]
