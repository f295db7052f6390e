"""Randomness that belongs to a place: a seed for each purpose, step and process, derived from one number."""

from __future__ import annotations

from hashlib import blake2b

import torch


def derive(seed: int, *place: str | int) -> int:
    """Returns a seed of 63 bits for one purpose: `derive(seed, "dropout", step, rank)`."""
    # A hash keeps the streams of neighbouring seeds and steps independent, which seed + step would not.
    digest = blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *place: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a generator of its own for one purpose: what else is drawn changes none of its numbers."""
    return torch.Generator(device).manual_seed(derive(seed, *place))


def seed_default(device: torch.device, seed: int) -> None:
    """Seeds the generator that dropout draws from on a device; torch.manual_seed seeds all devices, slowly."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.manual_seed(seed)
