"""The same weights give the same numbers as transformers' and PyTorch's own models. Offline: the weights are random."""

from typing import Any

import pytest
import torch
from torch import nn

from regard.generate import generate
from regard.models import GPT, Encoder, Seq2Seq

TOLERANCE = 1e-5


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert float((got - want).detach().abs().max()) <= TOLERANCE * float(want.detach().abs().max())


def stirred(model: nn.Module) -> Any:
    """Weights large enough that every part matters, norms and biases too."""
    torch.manual_seed(1)
    for p in model.parameters():
        p.data = torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.5) + (1.0 if p.dim() == 1 else 0.0)
    return model.eval()


def copy(into: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    into.load_state_dict({name: x.detach().clone() for name, x in weights.items()})


def test_gpt_is_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=24, n_embd=24, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None
    )
    theirs = stirred(transformers.GPT2LMHeadModel(config))
    ours = GPT(vocabulary=37, length=24, width=24, layers=3, attention={"heads": 4}).eval()
    t = theirs.transformer
    weights = {
        "embedding.weight": t.wte.weight,
        "stack.positions.table.weight": t.wpe.weight,
        "stack.final_norm.weight": t.ln_f.weight,
        "stack.final_norm.bias": t.ln_f.bias,
    }
    parts = {
        "attention_norm": "ln_1",
        "attention.project": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.into": "mlp.c_fc",
        "mlp.out": "mlp.c_proj",
    }
    for n, block in enumerate(t.h):
        for mine, other in parts.items():
            part = block.get_submodule(other)
            weight = part.weight if "norm" in mine else part.weight.T
            weights |= {f"stack.blocks.{n}.{mine}.weight": weight, f"stack.blocks.{n}.{mine}.bias": part.bias}
    copy(ours, weights)
    tokens = torch.randint(0, 37, (3, 17))
    close(ours(tokens), theirs(tokens).logits)
    visible = torch.arange(17) >= torch.tensor([[0], [3], [5]])
    places = (visible.cumsum(1) - 1).clamp(min=0)
    padded = theirs(tokens, attention_mask=visible.long(), position_ids=places).logits
    close(ours(tokens, visible)[visible], padded[visible])
    want = theirs.generate(
        tokens[:1, :5], attention_mask=torch.ones(1, 5), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert generate(ours, tokens[0, :5].tolist(), max_tokens=12).tokens == want[0, 5:].tolist()


def test_gpt_with_rotary_rms_swiglu_and_groups_is_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = stirred(transformers.LlamaForCausalLM(config))
    ours = GPT(
        vocabulary=37,
        width=24,
        layers=2,
        position="rotary",
        tied=False,
        attention={"heads": 6, "groups": 2},
        block={"norm": "rms", "eps": 1e-6, "mlp": "swiglu", "hidden": 20, "bias": False},
    ).eval()
    t = theirs.model
    weights = {
        "embedding.weight": t.embed_tokens.weight,
        "head.weight": theirs.lm_head.weight,
        "stack.final_norm.weight": t.norm.weight,
    }
    for n, layer in enumerate(t.layers):
        a, m = layer.self_attn, layer.mlp
        part = {
            "attention_norm": layer.input_layernorm.weight,
            "attention.project": torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]),
            "attention.out": a.o_proj.weight,
            "mlp_norm": layer.post_attention_layernorm.weight,
            "mlp.into": torch.cat([m.gate_proj.weight, m.up_proj.weight]),
            "mlp.out": m.down_proj.weight,
        }
        weights |= {f"stack.blocks.{n}.{name}.weight": x for name, x in part.items()}
    copy(ours, weights)
    tokens = torch.randint(0, 37, (2, 19))
    close(ours(tokens), theirs(tokens).logits)


def _bert(theirs: Any, **head: Any) -> tuple[Encoder, dict[str, torch.Tensor]]:
    """Our encoder of that size, and the weights of their embeddings and layers under our names."""
    block = {"before": False, "embedding_norm": True, "mlp": "gelu", "hidden": 20, "eps": 1e-12}
    ours = Encoder(
        vocabulary=37, width=24, layers=2, length=32, token_types=2, attention={"heads": 4}, block=block, **head
    )
    e = theirs.embeddings
    weights = {
        "embedding.weight": e.word_embeddings.weight,
        "types.weight": e.token_type_embeddings.weight,
        "stack.positions.table.weight": e.position_embeddings.weight,
        "stack.embedding_norm.weight": e.LayerNorm.weight,
        "stack.embedding_norm.bias": e.LayerNorm.bias,
    }
    for n, layer in enumerate(theirs.encoder.layer):
        a = layer.attention
        for kind in ("weight", "bias"):
            project = torch.cat([getattr(x, kind) for x in (a.self.query, a.self.key, a.self.value)])
            part = {
                "attention.project": project,
                "attention.out": getattr(a.output.dense, kind),
                "attention_norm": getattr(a.output.LayerNorm, kind),
                "mlp.into": getattr(layer.intermediate.dense, kind),
                "mlp.out": getattr(layer.output.dense, kind),
                "mlp_norm": getattr(layer.output.LayerNorm, kind),
            }
            weights |= {f"stack.blocks.{n}.{name}.{kind}": x for name, x in part.items()}
    return ours.eval(), weights


@pytest.mark.parametrize("head", ["none", "masked", "classes"])
def test_encoder_is_bert(head: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 37,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 20,
        "max_position_embeddings": 32,
        "num_labels": 5,
    }
    config = transformers.BertConfig(**sizes)
    tokens, types = torch.randint(0, 37, (3, 13)), torch.randint(0, 2, (3, 13))
    visible = torch.arange(13) < torch.tensor([[13], [9], [6]])
    inputs = {"input_ids": tokens, "attention_mask": visible.long(), "token_type_ids": types}
    if head == "none":
        theirs = stirred(transformers.BertModel(config))
        ours, weights = _bert(theirs, head="none")
        copy(ours, weights)
        close(ours(tokens, visible, types)[visible], theirs(**inputs).last_hidden_state[visible])
    elif head == "masked":
        theirs = stirred(transformers.BertForMaskedLM(config))
        ours, weights = _bert(theirs.bert, head="masked")
        p = theirs.cls.predictions
        weights |= {
            "head.dense.weight": p.transform.dense.weight,
            "head.dense.bias": p.transform.dense.bias,
            "head.norm.weight": p.transform.LayerNorm.weight,
            "head.norm.bias": p.transform.LayerNorm.bias,
            "head.offset": p.bias,
        }
        copy(ours, weights)
        close(ours(tokens, visible, types)[visible], theirs(**inputs).logits[visible])
    else:
        theirs = stirred(transformers.BertForSequenceClassification(config))
        ours, weights = _bert(theirs.bert, head="classes", classes=5)
        for kind in ("weight", "bias"):
            weights[f"head.dense.{kind}"] = getattr(theirs.bert.pooler.dense, kind)
            weights[f"head.classes.{kind}"] = getattr(theirs.classifier, kind)
        copy(ours, weights)
        close(ours(tokens, visible, types), theirs(**inputs).logits)


def test_seq2seq_is_pytorchs_transformer() -> None:
    theirs = stirred(nn.Transformer(24, 4, 2, 3, 20, dropout=0.0, batch_first=True))
    block = {"before": False, "final_norm": True, "mlp": "relu", "hidden": 20}
    side = {"width": 24, "attention": {"heads": 4}, "position": "none", "block": block}
    ours = Seq2Seq(vocabulary=37, encoder={**side, "layers": 2}, decoder={**side, "layers": 3}).eval()
    weights = {n: x for n, x in ours.state_dict().items() if "embedding" in n}

    def take(into: str, part: nn.Module) -> None:
        weights.update({f"{into}.{n}": x for n, x in part.named_parameters()})

    def attention(into: str, part: nn.MultiheadAttention, cross: bool) -> None:
        for kind in ("weight", "bias"):
            x = getattr(part, f"in_proj_{kind}")
            if cross:
                weights[f"{into}.project.{kind}"], weights[f"{into}.project_source.{kind}"] = x[:24], x[24:]
            else:
                weights[f"{into}.project.{kind}"] = x
        take(f"{into}.out", part.out_proj)

    for stack, side_of in (("encoder", theirs.encoder), ("stack", theirs.decoder)):
        take(f"{stack}.final_norm", side_of.norm)
        for n, layer in enumerate(side_of.layers):
            at = f"{stack}.blocks.{n}"
            attention(f"{at}.attention", layer.self_attn, cross=False)
            take(f"{at}.attention_norm", layer.norm1)
            if stack == "stack":
                attention(f"{at}.cross", layer.multihead_attn, cross=True)
                take(f"{at}.cross_norm", layer.norm2)
            take(f"{at}.mlp_norm", layer.norm3 if stack == "stack" else layer.norm2)
            take(f"{at}.mlp.into", layer.linear1)
            take(f"{at}.mlp.out", layer.linear2)
    copy(ours, weights)
    source, target = torch.randint(0, 37, (2, 9)), torch.randint(0, 37, (2, 7))
    visible = torch.arange(9) < torch.tensor([[9], [6]])
    assert ours.source_embedding is not None
    want = theirs(
        ours.source_embedding(source),
        ours.embedding(target),
        tgt_mask=torch.ones(7, 7).triu(1).bool(),
        tgt_is_causal=True,
        src_key_padding_mask=~visible,
        memory_key_padding_mask=~visible,
    )
    close(ours(source, target, visible), ours.logits(want))
