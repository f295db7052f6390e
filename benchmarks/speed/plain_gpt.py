"""The peer of `train_gpu.py`: a GPT-2 of PyTorch's own parts, trained as people usually do on one GPU.

Its choices are those of nanoGPT: the model is compiled as a whole, bfloat16 by autocast, PyTorch's fused causal
attention, one tensor of logits for the loss, fused AdamW with decay for matrices only, gradients clipped at 1, and a
loss that is read every ten steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The size of a GPT-2: 124 million parameters unless said."""

    vocabulary: int = 50_304
    length: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768


class PlainBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        D = shape.width
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.attended = nn.Linear(D, D)
        self.norm_2 = nn.LayerNorm(D)
        self.hidden = nn.Linear(D, 4 * D)
        self.out = nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(D, -1))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(heads.transpose(1, 2).reshape(B, T, D))
        return x + self.out(functional.gelu(self.hidden(self.norm_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 with learned positions and a head that is its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
            if isinstance(part, nn.Linear):
                nn.init.zeros_(part.bias)
        for block in self.blocks:
            for linear in (block.attended, block.out):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of all targets."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(at)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainTraining:
    """One step after the other of a compiled PlainGPT. `lr` is a function of the step."""

    def __init__(self, shape: Shape, decay: float = 0.1, seed: int = 0, device: str = "cuda") -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = PlainGPT(shape).to(device)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, fused=True)
        self.loss = torch.compile(self.model)

    def step(self, tokens: Tensor, targets: Tensor, lr: float) -> Tensor:
        """Trains one step on tokens and targets [B,T] in pinned memory or on the device; returns its loss []."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        tokens, targets = (x.to(self.device, non_blocking=True) for x in (tokens, targets))
        with torch.autocast(self.device, torch.bfloat16):
            loss: Tensor = self.loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
