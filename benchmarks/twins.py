"""A GPT-2 of transformers and a GPT of ours with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import logging

from regard.models import GPT

logging.set_verbosity_error()

PARTS = {
    "attention_norm": "ln_1",
    "attention.project": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.into": "mlp.c_fc",
    "mlp.out": "mlp.c_proj",
}


def twin(theirs: Any) -> GPT:
    """Our GPT with the weights of a GPT2LMHeadModel."""
    c, t = theirs.config, theirs.transformer
    ours = GPT(
        vocabulary=c.vocab_size, length=c.n_positions, width=c.n_embd, layers=c.n_layer, attention={"heads": c.n_head}
    )
    weights = {
        "embedding.weight": t.wte.weight,
        "stack.positions.table.weight": t.wpe.weight,
        "stack.final_norm.weight": t.ln_f.weight,
        "stack.final_norm.bias": t.ln_f.bias,
    }
    for n, block in enumerate(t.h):
        for mine, other in PARTS.items():
            part = block.get_submodule(other)
            weight = part.weight if "norm" in mine else part.weight.T  # its linear layers are stored transposed
            weights |= {f"stack.blocks.{n}.{mine}.weight": weight, f"stack.blocks.{n}.{mine}.bias": part.bias}
    ours.load_state_dict({name: x.detach().clone().contiguous() for name, x in weights.items()})
    return ours.to(theirs.device).eval()


def sharpened(model: torch.nn.Module) -> Any:
    """Random weights large enough that the likeliest token is never in doubt."""
    for p in model.parameters():
        p.data = torch.randn_like(p) * (0.1 if p.dim() > 1 else 0.5) + (p.dim() == 1)
    return model.eval()
