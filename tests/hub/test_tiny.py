"""Every family in a small size: it is built in a moment, and the laws accuse none of what it did not do."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import regard
from regard.cli.app import app
from regard.errors import HubError, OptionError
from regard.hub import fetching, find_source, open_model, untrained
from regard.hub.tiny import shrink_config

hf = pytest.importorskip("transformers")

FAMILIES = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "phi", "gpt_neox", "opt", "bloom", "bert", "roberta"),
    *("modernbert", "t5", "bart", "whisper", "vit", "gpt_oss", "qwen3_next", "mamba2", "jamba"),
)
# What transformers itself breaks; docs/referee.md shows each without regard.
BROKEN = {"jamba": {"cache", "long", "packed"}, "qwen3_next": {"packed"}}
FAST = {"vit", "whisper", "mamba2", "jamba"}


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_a_family_is_checked_without_a_false_accusation(name: str) -> None:
    model = untrained(f"{name}@tiny").model
    assert sum(p.numel() for p in model.parameters()) < 300_000
    verdicts = regard.check(model, draws=1)
    assert {v.law for v in verdicts.broken} == BROKEN.get(name, set()), repr(verdicts)
    assert not verdicts.problems
    held = {v.law for v in verdicts if v.status == "holds"}
    assert "batch" in held and all(v.detail for v in verdicts)


def test_the_text_part_of_a_config_of_text_and_images_is_built():
    model = untrained("random:qwen3_5@tiny").model
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    recording = regard.record(model, list(range(9))).recordings[0]
    assert len(recording.attentions) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next", "gpt_oss"])
def test_a_small_config_keeps_every_kind_of_layer(name: str) -> None:
    large = hf.CONFIG_MAPPING[name]()
    small = shrink_config(large)
    assert set(small.layer_types) == set(large.layer_types) and len(small.layer_types) == small.num_hidden_layers <= 4
    assert (small.num_key_value_heads < small.num_attention_heads) == (
        large.num_key_value_heads < large.num_attention_heads
    )


def test_settings_that_are_no_sizes_stay(tmp_path) -> None:
    config = hf.LlamaConfig(
        hidden_size=256, num_attention_heads=8, num_hidden_layers=6, attention_bias=True, hidden_act="relu"
    )
    folder = tmp_path / "model"
    config.save_pretrained(folder)
    model = open_model(f"random:{folder}@tiny").model
    assert model.config.attention_bias and model.config.hidden_act == "relu" and model.config.hidden_size == 64


def test_models_by_name(tmp_path) -> None:
    assert find_source("random:llama@tiny").location == "llama@tiny"
    assert open_model("random:gpt2@tiny").name == "random:gpt2@tiny"
    regard.GPT.preset("nano", vocabulary=20, length=8).save(tmp_path / "ours")
    with pytest.raises(OptionError, match="only models of transformers are made small by @tiny"):
        open_model(f"random:{tmp_path / 'ours'}@tiny")


def test_encoder_decoders_and_encoders_are_whole() -> None:
    kinds = {name: type(untrained(f"{name}@tiny").model).__name__ for name in ("bart", "t5", "bert", "whisper")}
    assert kinds == {
        "bart": "BartForConditionalGeneration",
        "t5": "T5ForConditionalGeneration",
        "bert": "BertForMaskedLM",
        "whisper": "WhisperForConditionalGeneration",
    }


def test_what_exceeds_half_of_the_memory_is_refused_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "free_memory", lambda device: 40 << 30)
    with pytest.raises(HubError, match=r"llama with random weights takes 26,953,662,976 bytes, more than half of the"):
        untrained("llama")
    needed = sum(p.nbytes for p in untrained("gpt2@tiny").model.parameters())
    monkeypatch.setattr(fetching, "free_memory", lambda device: 2 * needed - 2)
    with pytest.raises(HubError, match=f"takes {needed:,} bytes"):
        untrained("gpt2@tiny")
    monkeypatch.setattr(fetching, "free_memory", lambda device: 2 * needed)
    untrained("gpt2@tiny")


def test_the_command_line_checks_a_small_one() -> None:
    result = CliRunner().invoke(app, ["check", "random:llama", "--only", "batch", "--only", "window", "--json"])
    assert result.exit_code == 0, result.output
    assert [row["status"] for row in json.loads(result.output)] == ["holds", "does not apply"]


def test_inputs_that_nobody_knows_could_not_be_asked() -> None:
    class Odd(hf.ViTModel):
        main_input_name = "smells"

    model = Odd(shrink_config(hf.ViTConfig())).eval()
    verdicts = regard.check(model, draws=1)
    assert not verdicts.asked and {v.status for v in verdicts} == {"could not be asked"}
    assert verdicts.problems == ["Odd reads smells; the laws are asked with tokens, images or sound"]
