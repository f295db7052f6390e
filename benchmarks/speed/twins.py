"""A GPT-2 of transformers and a GPT of ours with the same weights."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils import logging

from regard import hub
from regard.models import GPT

logging.set_verbosity_error()


def twin(theirs: Any) -> GPT:
    """Our GPT with the weights of a GPT2LMHeadModel."""
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = hub.load(folder)
    assert isinstance(ours, GPT)
    return ours.to(theirs.device).eval()


def sharpened(model: torch.nn.Module) -> Any:
    """Random weights large enough that the likeliest token is never in doubt."""
    for p in model.parameters():
        p.data = torch.randn_like(p) * (0.1 if p.dim() > 1 else 0.5) + (p.dim() == 1)
    return model.eval()
