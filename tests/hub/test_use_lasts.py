"""A mechanism in a Hugging Face model stays in it, or the model says that it cannot: nothing drops it in silence."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from regard import hub
from regard.errors import HubError
from regard.hub.attention import replacement_in
from regard.hub.cache import StateLayer
from regard.hub.masks import recognise_structure

V = 61
SIZES = {
    **{"vocab_size": V, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def llama(config: hf.LlamaConfig | None = None, **sizes: int) -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config or hf.LlamaConfig(**SIZES | sizes)).eval()
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return model


def tokens(B: int = 2, T: int = 11) -> torch.Tensor:
    return torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: hf.PreTrainedModel, ids: torch.Tensor, **more: object) -> torch.Tensor:
    return model(ids, **more).logits


@pytest.mark.parametrize("other", ["elu", None])
def test_models_that_share_a_config_do_not_disable_each_other(other: str | None) -> None:
    config, ids = hf.LlamaConfig(**SIZES), tokens()
    first, second = llama(config), llama(config)
    own = logits(second, ids)
    hub.use(first, "elu")
    if other is not None:
        hub.use(second, other)
    want = logits(first, ids)
    hub.restore(second)
    assert torch.equal(logits(first, ids), want)
    assert torch.equal(logits(second, ids), own)
    with hub.recording_attention(second, Silent()):  # and what a recording puts back is the shared entry
        logits(second, ids)
    assert torch.equal(logits(first, ids), want)
    assert torch.equal(logits(hub.restore(first), ids), own) and config._attn_implementation == "sdpa"


class Silent:
    """A recorder that keeps nothing."""

    def begin(self, call: object) -> None:
        """Does nothing."""

    def rows(self, call: object, start: int, weights: torch.Tensor) -> None:
        """Does nothing."""

    def end(self, call: object, out: torch.Tensor) -> torch.Tensor:
        return out


def test_another_implementation_after_use_is_refused_until_use_is_called_again() -> None:
    model, ids = llama(), tokens()
    own = logits(model, ids)
    want = logits(hub.use(model, "elu"), ids)
    model.set_attn_implementation("eager")
    with pytest.raises(HubError, match=r"layers\.0\.self_attn: .*'eager' after use\(\).*elu would not be called"):
        logits(model, ids)
    hub.use(model, "elu", layers=[1])
    torch.testing.assert_close(logits(model, ids), want)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(hub.restore(model), ids), own)


def test_a_saved_model_with_a_mechanism_works_in_a_new_process(tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    hub.use(model, "elu", layers=[0])
    hub.use(model, "performer", layers=[1], features=8)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    torch.save((model, ids, mask), tmp_path / "model.pt")
    program = (
        "import sys, torch\n"
        "model, ids, mask = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.save(model(ids, attention_mask=mask).logits.detach(), sys.argv[2])\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "model.pt", tmp_path / "out.pt"], check=True)
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(got, logits(model, ids, attention_mask=mask))


class TestCompiled:
    """`torch.compile`, with the backend that runs the captured graphs as they are."""

    @pytest.fixture(autouse=True)
    def _nothing_compiled(self) -> None:
        torch._dynamo.reset()

    @pytest.mark.parametrize("mechanism", ["softmax", pytest.param("elu", marks=pytest.mark.slow)])
    def test_a_mask_may_come_second(self, mechanism: str) -> None:
        model, ids = hub.use(llama(num_hidden_layers=1), mechanism), tokens()
        mask = torch.ones_like(ids)
        mask[1, -4:] = 0
        compiled = torch.compile(model, backend="eager")
        for more in ({}, {"attention_mask": mask}):
            got, want = (logits(m, ids, use_cache=False, **more) for m in (compiled, model))
            torch.testing.assert_close(got[mask.bool()], want[mask.bool()])

    @pytest.mark.slow
    @pytest.mark.parametrize("mechanism", ["elu", "synthesizer"])
    def test_generate_compiles_over_a_static_cache(self, mechanism: str) -> None:
        model, ids = hub.use(llama(num_hidden_layers=1), mechanism), tokens()
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        config = hf.CompileConfig(backend="eager", mode=None)
        config._compile_all_devices = True  # on a GPU generate() compiles by itself
        how = {"attention_mask": mask, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        want = model.generate(ids, **how, use_cache=False)
        assert torch.equal(model.generate(ids, **how, cache_implementation="static", compile_config=config), want)


class TestPacked:
    """Documents packed into one row, told apart by positions that start again."""

    lengths = (4, 5, 2)

    def positions(self, B: int = 2) -> torch.Tensor:
        return torch.cat([torch.arange(n) for n in self.lengths]).expand(B, -1)

    @pytest.mark.parametrize("mechanism", ["softmax", "argmax", "elu", "performer"])
    def test_they_are_as_each_alone(self, mechanism: str) -> None:
        model, ids = hub.use(llama().double(), mechanism), tokens()
        got = logits(model, ids, position_ids=self.positions(), use_cache=False)
        want = torch.cat([logits(model, part, use_cache=False) for part in ids.split(self.lengths, 1)], 1)
        torch.testing.assert_close(got, want)

    def test_a_state_refuses_them(self) -> None:
        model, ids = hub.use(llama(), "elu"), tokens()
        with pytest.raises(HubError, match=r"position_ids that start again.*use_cache=False"):
            logits(model, ids, position_ids=self.positions(), use_cache=True)
        document = torch.arange(3).repeat_interleave(torch.tensor(self.lengths))
        packed = (document[:, None] == document) & torch.ones(11, 11).tril().bool()
        with pytest.raises(HubError, match="elu cannot honour this mask"):
            logits(model, ids, attention_mask=packed.expand(2, 1, 11, 11), use_cache=True)

    def test_padding_on_the_left_is_no_document(self) -> None:
        model, ids = hub.use(llama().double(), "elu"), tokens()
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as generate() counts them
        cache = hf.DynamicCache(config=model.config)
        got = logits(model, ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        assert isinstance(cache.layers[0], StateLayer)
        torch.testing.assert_close(got[1:, 4:], logits(model, ids[1:, 4:], use_cache=False))

    def test_the_structure_of_a_mask_over_documents(self) -> None:
        ids = torch.tensor([[0, 0, 1, 1, 1, 2]])
        apart = (ids[:, :, None] == ids[:, None]) & torch.ones(6, 6).tril().bool()
        found = recognise_structure(apart[:, None])
        assert found is not None and torch.equal(found.allowed(6, 6, apart.device)[:, 0], apart)
        for changed in ((0, 5, 0), (0, 2, 1), (0, 3, 4)):  # one pair across documents, or ahead: no such structure
            leaky = apart.clone()
            leaky[changed] = True
            assert recognise_structure(leaky[:, None]) is None


def test_cross_attention_by_a_state_applies_the_models_dropout() -> None:
    sizes = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "max_position_embeddings": 32}
    torch.manual_seed(0)
    model = hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=V, **sizes, **heads)).eval()
    hub.use(model, "elu", parts=["cross"])
    ids = tokens()
    cross = next(p.module for p in hub.places(model) if replacement_in(p.module) is not None)
    still = logits(model, ids, decoder_input_ids=ids, use_cache=True)
    cross.dropout = 0.5
    assert torch.equal(logits(model, ids, decoder_input_ids=ids, use_cache=True), still)
    cross.train()  # the rest of the model stays in evaluation mode, so that nothing else is dropped
    outputs = [logits(model, ids, decoder_input_ids=ids, use_cache=True) for _ in range(2)]
    assert not torch.allclose(outputs[0], still) and not torch.allclose(outputs[0], outputs[1])


@pytest.mark.parametrize("name", ["softmax", "elu"])
@pytest.mark.parametrize("additive", [False, True])
def test_one_row_of_a_mask_holds_for_all_queries(name: str, additive: bool) -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(vocab_size=V, **sizes)).eval()
    hub.use(model, name)
    ids = tokens()
    keep = torch.ones(ids.shape, dtype=torch.bool)
    keep[0, 7:] = False
    row = keep[:, None, None, :]
    if additive:
        row = torch.zeros(row.shape).masked_fill(~row, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = model(ids, attention_mask=keep.long()).last_hidden_state[keep]
        torch.testing.assert_close(model(ids, attention_mask=row).last_hidden_state[keep], want)


def test_a_prefix_that_all_may_see_is_honoured_or_refused() -> None:
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=V, n_embd=24, n_layer=2, n_head=3)).eval()
    ids = tokens(1, 9)
    prefix = torch.ones(9, 9, dtype=torch.bool).tril()
    prefix[:4, :4] = True
    hub.use(model, "elu")
    causal = logits(model, ids, use_cache=False)
    seen = logits(model, ids, attention_mask=prefix[None, None], use_cache=False)
    assert not torch.allclose(seen[:, 0], causal[:, 0])
    with pytest.raises(HubError, match="not just that with padding"):
        logits(model, ids, attention_mask=prefix[None, None], use_cache=True)


def test_sinks_of_zero_are_refused_as_any_others_where_there_is_no_sum() -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
    }
    experts = {"intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = hf.GptOssForCausalLM(hf.GptOssConfig(vocab_size=V, **sizes, **experts)).eval()
    model.model.layers[0].self_attn.sinks.data.zero_()
    hub.use(model, "elu")
    with pytest.raises(HubError, match="no sum of exponentials that a sink could join"):
        logits(model, tokens())
