"""What heads hand on and what a model would say next: against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch
from small_models import FAMILIES, stirred

from regard import GPT
from regard.data.tokenizers import Bytes
from regard.errors import OptionError
from regard.lens import decode, record
from regard.lens.recording.stream import StreamError
from regard.lens.trace.format import encode, to_bytes
from regard.lens.trace.trace import Trace

IDS = [5, 6, 7, 8, 9, 6, 7]


def of_family(name, **changes):
    transformers = pytest.importorskip("transformers")
    kind, config, sizes = FAMILIES[name]
    torch.manual_seed(0)
    return stirred(getattr(transformers, kind)(getattr(transformers, config)(**{**sizes, **changes})), 0.2)


def own(**changes):
    torch.manual_seed(3)
    model = GPT.preset("nano", vocabulary=256, **changes)
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p))
    model.tokenizer = Bytes()
    return model


def close(x, y, exact=1e-4):
    assert x.shape == y.shape
    torch.testing.assert_close(x, y, atol=exact, rtol=0)


def parts_sum(found):
    return sum(x.sum(-1) for x in found.heads) + found.rest.sum(-1)


@torch.no_grad()
def test_heads_of_gpt2_by_hand():
    """Each head, each MLP and the embeddings through the last norm, from transformers' own modules."""
    model = of_family("gpt2").eval()
    recording = record(model, IDS).recordings[0]
    found = recording.predictions
    kept = {}
    core = model.transformer
    for n, block in enumerate(core.h):
        block.mlp.register_forward_hook(lambda m, x, out, n=n: kept.__setitem__(f"mlp {n}", out[0]))
    out = model(torch.tensor([IDS]), output_hidden_states=True)
    close(found.logits, out.logits[0].gather(1, found.candidates.long()))
    last, norm = core.h[-1], core.ln_f
    x = out.hidden_states[-2][0]
    H, D = model.config.n_head, model.config.n_embd
    total = None
    stream = [core.wte.weight[IDS] + core.wpe.weight[: len(IDS)]]
    heads = []
    for n, block in enumerate(core.h):
        attended = recording.attention(n)
        mixed = torch.stack([recording.weights(n, h) @ attended.v[h] for h in range(H)])
        matrix = block.attn.c_proj.weight.view(H, D // H, D)
        heads.append(mixed @ matrix)
        stream.append(stream[-1] + heads[-1].sum(0) + block.attn.c_proj.bias + kept[f"mlp {n}"])
    assert x.shape == stream[-1].shape and last is core.h[-1]
    scale = (stream[-1].var(-1, unbiased=False) + norm.eps).rsqrt()

    def logit(part, t, token):
        turned = (part[..., t, :] - part[..., t, :].mean(-1, keepdim=True)) * scale[t] * norm.weight
        return turned @ model.lm_head.weight[token]

    for t in (0, 3, len(IDS) - 1):
        for c, token in enumerate(found.candidates[t].tolist()):
            for n, by_head in enumerate(heads):
                close(found.heads[n][t, c], logit(by_head, t, token))
                mlp = kept[f"mlp {n}"] + core.h[n].attn.c_proj.bias
                close(found.rest[t, c, n + 1], logit(mlp, t, token))
            close(found.rest[t, c, 0], logit(stream[0], t, token))
            close(found.rest[t, c, -1], norm.bias @ model.lm_head.weight[token])
    total = parts_sum(found)
    close(total, found.logits)


@torch.no_grad()
def test_layers_of_gpt2_by_hand():
    model = of_family("gpt2").eval()
    found = record(model, IDS).recordings[0].predictions
    out = model(torch.tensor([IDS]), output_hidden_states=True)
    for n, x in enumerate(out.hidden_states[:-1]):
        p = model.lm_head(model.transformer.ln_f(x[0])).softmax(-1)
        best = p.topk(found.top.shape[-1])
        assert torch.equal(found.top[n].long(), best.indices)
        close(found.p[n], best.values, 1e-6)
    close(found.p[-1], out.logits[0].softmax(-1).topk(found.top.shape[-1]).values, 1e-6)
    for t in range(len(IDS) - 1):  # the likeliest of all, and the one that comes
        assert int(out.logits[0, t].argmax()) in found.candidates[t] and IDS[t + 1] in found.candidates[t]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False, "block": {"norm": "rms", "bias": False, "mlp": "swiglu"}},
        {"attention": {"heads": 4, "groups": 2}, "width": 32, "position": "rotary"},
        {"mechanism": "elu"},
    ],
)
@torch.no_grad()
def test_own_models(changes):
    model = own(**changes)
    recording = record(model, list(b"The dog ran")).recordings[0]
    found = recording.predictions
    close(found.logits, model(torch.tensor([list(b"The dog ran")]))[0].gather(1, found.candidates.long()))
    close(parts_sum(found), found.logits)
    attended = recording.attention(0)
    H, G = attended.heads, attended.groups
    matrix = model.stack.layers[0].attention.out.weight.T.view(H, -1, model.config.width)
    values = attended.v.repeat_interleave(H // G, 0)
    close(attended.vo, (values @ matrix).norm(dim=-1))
    # What a head adds to the stream is its weights, values and projection; the first block's are known exactly.
    t = 5
    mixed = torch.stack([recording.weights(0, h)[t] @ values[h] for h in range(H)])
    norm = model.stack.final_norm
    parts = (mixed[:, None] @ matrix)[:, 0]
    stream = []
    model.stack.layers[-1].register_forward_hook(lambda m, x, out: stream.append(out[0, t]))
    model(torch.tensor([list(b"The dog ran")]))
    if isinstance(norm, torch.nn.LayerNorm):
        turned = (parts - parts.mean(-1, keepdim=True)) * (stream[0].var(unbiased=False) + norm.eps).rsqrt()
    else:
        turned = parts * (stream[0].square().mean() + norm.eps).rsqrt()
    rows = model._head_weight[found.candidates[t].long()] * norm.weight
    close(found.heads[0][t], rows @ turned.T)


@torch.no_grad()
def test_lengths_of_an_encoder():
    """‖v · W_o‖ of BERT, whose projection stands in another module than its attention."""
    model = of_family("bert").eval()
    recording = record(model, IDS).recordings[0]
    attended = recording.attention(1)
    weight = model.bert.encoder.layer[1].attention.output.dense.weight
    H = attended.heads
    by_hand = attended.v @ weight.T.reshape(H, -1, weight.shape[0])
    close(attended.vo, by_hand.norm(dim=-1), 1e-5)
    assert recording.predictions is None  # it says nothing of a next token


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_parts_add_up(name):
    found = record(of_family(name), IDS).recordings[0].predictions
    assert found.why == ""
    close(parts_sum(found), found.logits)


def test_what_does_not_add_up_is_not_shown():
    """Gemma 2 caps its logits; OLMo 2 norms what heads give before it adds it."""
    transformers = pytest.importorskip("transformers")
    gemma = of_family("gemma2")
    assert record(gemma, IDS).recordings[0].predictions is None
    with pytest.raises(StreamError, match="capped"):
        record(gemma, IDS, contributions=True)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(0)
    olmo = stirred(transformers.Olmo2ForCausalLM(transformers.Olmo2Config(vocab_size=64, **sizes)), 0.2)
    found = record(olmo, IDS).recordings[0].predictions
    assert "normed" in found.why and found.heads == [] and found.top.shape[0] == 3
    with pytest.raises(OptionError, match="normed"):
        found.contributions(0, int(found.candidates[0, 0]))


def test_round_trip():
    trace = record(own(), "The dog ran")
    again = decode(to_bytes(encode(trace)))
    before, after = trace.recordings[0], again.recordings[0]
    assert torch.equal(before.attention(0).vo, after.attention(0).vo)
    one, two = before.predictions, after.predictions
    assert one.tokens == two.tokens and one.attentions == two.attentions
    for name in ("top", "p", "candidates", "logits", "rest"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    token = int(two.candidates[4, 1])
    heads, rest = two.contributions(4, token)
    close(sum(x.sum() for x in heads) + rest.sum(), two.logits[4, 1])
    assert two.text(token) == chr(token)


def test_long_texts_have_none_unless_asked():
    model = own(length=1024)
    long = list(b"abcdefgh" * 65)
    recording = record(model, long).recordings[0]
    assert recording.predictions is None and recording.attention(0).vo is None
    asked = record(model, long, contributions=True).recordings[0]
    assert asked.predictions is not None and asked.attention(0).vo.shape == (3, 520)
    never = record(model, "The dog ran", contributions=False).recordings[0]
    assert never.predictions is None and never.attention(0).vo is None


def test_traces_of_before_open():
    trace = record(own(), "The dog ran")
    encoded = encode(trace)
    header = {**encoded.header, "check": None}
    for recording in header["recordings"]:
        del recording["predictions"]
        for attention in recording["attentions"]:
            del attention["arrays"]["vo"]
    again = decode(to_bytes(type(encoded)(header, encoded.blocks)))
    assert isinstance(again, Trace) and again.recordings[0].predictions is None
    assert torch.equal(again.weights(0, 0), decode(to_bytes(encode(trace))).weights(0, 0))
