"""Figures for papers: what is drawn is what the mechanisms compute, in the format and size that was asked for."""

from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from regard import GPT, Seq2Seq
from regard.cli.plot import plot
from regard.data.tokenizers import Bytes
from regard.errors import OptionError
from regard.lens import record
from regard.nn.positions import shift_matrix, sinusoids
from regard.report import paper
from regard.shapes import Mask


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = GPT.preset("nano", vocabulary=256, length=64)
    made.tokenizer = Bytes()
    return made


def painted(monkeypatch, draw):
    """What a function puts on its figure: the axes, after drawing."""
    kept = []
    whole = paper.figure_file

    def figure(path, size):
        manager = whole(path, size)
        enter = manager.__enter__

        def entered():
            kept.append(enter())
            return kept[-1]

        manager.__class__ = type("Kept", (manager.__class__,), {"__enter__": lambda self: entered()})
        return manager

    monkeypatch.setattr(paper, "figure_file", figure)
    draw()
    return kept[0].axes


def test_every_mask_is_drawn_as_softmax_has_it(tmp_path, monkeypatch):
    axes = painted(monkeypatch, lambda: paper.plot_masks(tmp_path / "masks.svg", length=9))
    panels = list(paper._example_masks(9))
    seen = np.array(matplotlib.colors.to_rgb(paper._REASONS[paper.SEEN]))
    assert len(axes) == len(panels) == 10
    assert {(panel.queries, panel.keys) for panel in panels if "cross" in panel.title} == {(6, 9)}
    for ax, (title, mask, queries, keys) in zip(axes, panels, strict=True):
        wanted = mask.softmax(torch.randn(1, 1, queries, keys))[0, 0] > 0
        blue = (np.asarray(ax.images[0].get_array()) == seen).all(-1)
        assert ax.get_title() == title and np.array_equal(blue, wanted.numpy()), title


def test_reasons_name_the_first_rule_that_hides():
    names = list(paper._REASONS)
    mask = Mask(causal=True, window=2, visible=torch.tensor([[False, True, True, True]]))
    why = paper._hidden_reasons(mask, 4, 4)
    assert [names[n] for n in why[3]] == [paper.PADDING, paper.FAR, paper.SEEN, paper.SEEN]
    assert names[why[1, 2]] == paper.LATER and names[why[1, 0]] == paper.PADDING
    packed = paper._hidden_reasons(Mask(causal=True, documents=torch.tensor([[0, 0, 1, 1]])), 4, 4)
    cross = paper._hidden_reasons(Mask(visible=torch.tensor([[True, True, False]])), 2, 3)
    assert [[names[n] for n in row] for row in cross] == [[paper.SEEN, paper.SEEN, paper.PADDING]] * 2
    assert names[packed[2, 0]] == paper.OTHER and names[packed[0, 3]] == paper.LATER


def test_positions_are_those_of_the_models(tmp_path, monkeypatch):
    axes = painted(monkeypatch, lambda: paper.plot_positions(tmp_path / "p.svg", length=16, width=8))
    assert np.allclose(axes[0].images[0].get_array(), sinusoids(16, 8))
    assert np.allclose(axes[1].images[0].get_array(), shift_matrix(8))
    lines = {line.get_label(): line.get_ydata() for line in axes[5].lines}
    assert np.allclose(lines["slope 1/2"], -np.arange(16) / 2) and len(lines) == 4
    rotary = axes[4].lines[1].get_ydata()
    angles = np.arange(16)[:, None] * 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    assert np.allclose(rotary, np.cos(angles).mean(1), atol=1e-6)


def test_one_head_has_its_weights_and_tokens(model, tmp_path, monkeypatch):
    trace = record(model, "A $dog")
    out = tmp_path / "head.svg"
    ax = painted(monkeypatch, lambda: paper.plot_weights(trace.recordings[0], out, layers=[1], heads=[2]))[0]
    cells = ax.images[0].get_array()
    hidden = np.triu(np.ones((6, 6), bool), 1)
    assert np.array_equal(np.ma.getmaskarray(cells), hidden)
    assert np.allclose(cells.filled(0), trace.weights(1, 2).numpy(), atol=1e-6)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["A", "␣", "$", "d", "o", "g"]
    assert "GPT, layer 1, head 2" in out.read_text("utf-8")  # text stays text


def test_all_heads_are_there_each_on_its_own_scale(model, tmp_path, monkeypatch):
    trace = record(model, "A dog")
    axes = painted(monkeypatch, lambda: paper.plot_weights(trace.recordings[0], tmp_path / "all.svg"))
    images = [ax.images[0].get_array() for ax in axes[:9]]
    assert len(axes) == 10 and all(np.isclose(x.max(), 1) for x in images)  # nine heads and the colour bar
    whole = trace.weights(2, 0)
    assert np.allclose(images[6].filled(0), (whole / whole.max()).numpy(), atol=1e-6)


def test_cross_attention_has_rows_of_its_own(tmp_path, monkeypatch):
    torch.manual_seed(0)
    stack = {"width": 24, "layers": 1, "attention": {"heads": 3}}
    model = Seq2Seq(vocabulary=256, encoder=stack, decoder=stack)
    model.tokenizer = Bytes()
    trace = record(model, "source", target="to")
    axes = painted(monkeypatch, lambda: paper.plot_weights(trace.recordings[0], tmp_path / "both.svg"))
    assert [axes[n].get_ylabel() for n in (0, 3, 6)] == ["encoder layer 0", "decoder layer 0", "decoder cross layer 0"]


@pytest.mark.parametrize("ending", paper.FORMATS)
def test_the_file_has_the_format_and_size_that_were_asked_for(ending, tmp_path):
    out = tmp_path / f"masks.{ending}"
    paper.plot_masks(out, size=(6, 3.5), length=4)
    raw = out.read_bytes()
    if ending == "png":
        assert struct.unpack(">II", raw[16:24]) == (1800, 1050)  # 300 dots an inch
    elif ending == "svg":
        root = ElementTree.fromstring(raw)
        assert (root.get("width"), root.get("height")) == ("432pt", "252pt")
        assert "causal, window 2" in {t.text for t in root.iter("{http://www.w3.org/2000/svg}text")}
    else:
        assert re.search(rb"/MediaBox \[ ?0 0 432 252 ?\]", raw) and b"/Type3" not in raw
    paper.plot_masks(out, size=(6, 3.5), length=4)
    assert out.read_bytes() == raw


@pytest.mark.parametrize(
    "draw, words",
    [
        (lambda p, m: paper.plot_masks(p / "x.jpg"), "ends in .png, .svg or .pdf"),
        (lambda p, m: paper.plot_masks(p / "x.png", size=(0, 3)), "expected 1 to 50 inches"),
        (lambda p, m: paper.plot_masks(p / "x.png", length=1), "expected 4 to 64"),
        (lambda p, m: paper.plot_positions(p / "x.png", width=7), "an even width"),
        (lambda p, m: paper.plot_weights(m, p / "x.png", layers=[9]), "no layer 9: there are 0 to 2"),
        (lambda p, m: paper.plot_weights(m, p / "x.png", heads=[3]), "no head 3: there are 0 to 2"),
    ],
)
def test_what_cannot_be_drawn_is_told_and_nothing_is_written(draw, words, model, tmp_path):
    with pytest.raises(OptionError, match=re.escape(words)):
        draw(tmp_path, record(model, "A dog").recordings[0])
    assert list(tmp_path.iterdir()) == []


def test_the_command_line(model, tmp_path):
    model.save(tmp_path / "model")
    run = CliRunner().invoke
    out = tmp_path / "w.svg"
    told = run(plot, ["weights", str(tmp_path / "model"), "A dog", "-o", str(out), "--layer", "0", "--size", "5x4"])
    assert told.exit_code == 0 and out.is_file() and "bytes" in told.output
    wrong = run(plot, ["masks", "-o", str(tmp_path / "m.png"), "--size", "wide"])
    assert isinstance(wrong.exception, OptionError) and "such as 7x4" in str(wrong.exception)
