"""Laws of whole models at windows, chunks and in packed rows: each catches a model that is broken on purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import regard
from regard.checking import Verdicts
from regard.mechanisms import Linear, Softmax
from regard.models import GPT
from regard.nn import Attention
from regard.shapes import Mask

hf = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

from regard.hub import untrained  # noqa: E402


def status(verdicts: Verdicts) -> dict[str, str]:
    return {v.law: v.status for v in verdicts}


def gpt(mechanism: str = "softmax", window: int | None = None) -> GPT:
    torch.manual_seed(0)
    config = GPT.preset("nano", layers=2, width=24, length=160, vocabulary=50, position="rotary").config
    attention = replace(config.attention, heads=2, window=window)
    return GPT(replace(config, mechanism=mechanism, attention=attention)).eval()


class TooWide(Softmax):
    """Softmax whose window is one token too wide."""

    def weights(self, q: torch.Tensor, k: torch.Tensor, mask: Mask = Mask()) -> torch.Tensor:
        return super().weights(q, k, mask.but(window=mask.window + 1))


class TestWindow:
    laws = ("window",)

    def test_holds_where_masks_are_as_wide_as_the_config_says(self) -> None:
        for name in ("mistral", "gemma2", "modernbert"):
            assert status(regard.check(untrained(f"{name}@tiny").model, only=self.laws, draws=1)) == {"window": "holds"}

    @pytest.mark.parametrize("name", ["mistral", "gemma2"])
    @pytest.mark.parametrize(("wrong", "said"), [(-1, "does not see token 0"), (1, "16 away")])
    def test_a_window_that_is_wrong_by_one(
        self, name: str, wrong: int, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = masking_utils.sliding_window_overlay
        monkeypatch.setattr(masking_utils, "sliding_window_overlay", lambda width: right(width + wrong))
        model = untrained(f"{name}@tiny").model
        (verdict,) = regard.check(model, only=self.laws, draws=1)
        assert verdict.status == "broken" and said in verdict.detail

    def test_a_model_without_one(self) -> None:
        assert (
            status(regard.check(untrained("llama@tiny").model, only=self.laws, draws=1))["window"] == "does not apply"
        )


class TestPacked:
    laws = ("packed",)

    def test_holds_where_transformers_separates_documents(self) -> None:
        for name in ("gpt2", "mistral"):
            assert status(regard.check(untrained(f"{name}@tiny").model, only=self.laws, draws=1)) == {"packed": "holds"}

    def test_packing_that_leaks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def leaky(documents: torch.Tensor):
            # The first token of a document is let into the document before it.
            return lambda b, h, q, k: (documents[b, q] == documents[b, k]) | (documents[b, q] == documents[b, k] + 1)

        monkeypatch.setattr(masking_utils, "packed_sequence_mask_function", leaky)
        (verdict,) = regard.check(untrained("llama@tiny").model, only=self.laws, draws=1)
        assert verdict.status == "broken" and verdict.detail.startswith(("document 2", "document 3"))

    @pytest.mark.parametrize(
        ("name", "why"), [("opt", "does not look for documents"), ("bert", "cannot be told"), ("t5", "cannot be told")]
    )
    def test_a_family_without_packing_is_not_accused(self, name: str, why: str) -> None:
        (verdict,) = regard.check(untrained(f"{name}@tiny").model, only=self.laws, draws=1)
        assert verdict.status == "does not apply" and why in verdict.detail


class TestLong:
    laws = ("long",)

    @pytest.mark.parametrize("fault", ["looks ahead within a chunk", "forgets at a chunk"])
    def test_a_fault_at_a_chunk_of_64(self, fault: str) -> None:
        """Neither can be seen in eleven tokens."""
        model = untrained("llama@tiny").model

        def spoil(module: torch.nn.Module, args: tuple, output: tuple) -> tuple:
            out = output[0].clone()
            if out.shape[1] > 64 and fault.startswith("looks"):
                out[:, 63] += 0.1 * out[:, 64]
            elif out.shape[1] > 64:
                out[:, 64:] = 0
            return (out, *output[1:])

        model.model.layers[0].self_attn.register_forward_hook(spoil)
        verdicts = regard.check(model, draws=1)
        assert status(verdicts)["long"] == "broken"
        assert {v.law for v in verdicts.broken} <= {"long", "packed"}
        (broken,) = (v for v in verdicts.broken if v.law == "long")
        assert "around 64 tokens" in broken.detail

    def test_a_cache_that_keeps_one_token_too_few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A ring of a window that is off by one, as it is met only after `window` tokens."""
        layer = hf.cache_utils.DynamicSlidingWindowLayer
        update = layer.update

        def short(self, *args: object, **kwargs: object):
            keys, values = update(self, *args, **kwargs)
            if keys.shape[-2] == self.sliding_window:
                keys[..., 0, :] = 0
            return keys, values

        monkeypatch.setattr(layer, "update", short)
        model = untrained("mistral@tiny").model
        found = status(regard.check(model, only=["cache", "long"], draws=1))
        assert found == {"cache": "holds", "long": "broken"}


class TestOurOwn:
    @pytest.mark.parametrize(("mechanism", "window"), [("softmax", 20), ("elu", None)])
    def test_all_laws_hold(self, mechanism: str, window: int | None) -> None:
        found = status(regard.check(gpt(mechanism, window), draws=2))
        assert found.pop("window") == ("does not apply" if window is None else "holds")
        assert set(found.values()) == {"holds"}

    @pytest.mark.slow
    @pytest.mark.parametrize("window", [None, 20])
    @pytest.mark.parametrize("mechanism", [n for n, cls in regard.mechanisms().items() if not cls.causal_only])
    def test_long_texts_of_every_mechanism(self, mechanism: str, window: int | None) -> None:
        found = status(regard.check(gpt(mechanism, window), only=["long", "window"], draws=8))
        assert found == {"window": "does not apply" if window is None else "holds", "long": "holds"}

    def test_a_window_that_is_wrong_by_one(self) -> None:
        model = gpt(window=20)
        layers = [m for m in model.modules() if isinstance(m, Attention)]
        layers[1].mechanism = TooWide()
        (verdict,) = regard.check(model, only=["window"], draws=1)
        assert verdict.status == "broken" and "token 20 sees token 0, 20 away" in verdict.detail

    def test_a_state_that_forgets_at_a_chunk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Linear attention whose sums begin anew after 64 tokens, which eleven tokens do not show."""
        scan = Linear._scan_chunk

        def forget(self, chunk, state, current, *more):
            out, state, current = scan(self, chunk, state, current, *more)
            if chunk[0].shape[2] >= 64:
                state = type(state)(*(x * 0 if i == 0 else x for i, x in enumerate(state)))
            return out, state, current

        monkeypatch.setattr(Linear, "_scan_chunk", forget)
        found = status(regard.check(plain_model(gpt("elu")), only=["cache", "long"], draws=1))
        assert found == {"cache": "holds", "long": "broken"}


def plain_model(model: GPT) -> GPT:
    """The model without kernels, so that it computes by the reference that a test changes."""
    for layer in [m for m in model.modules() if isinstance(m, Attention)]:
        layer.mechanism = regard.kernels.plain(layer.mechanism)
    return model
