"""Seeds for each purpose, step and process, all derived from one number."""

from __future__ import annotations

from hashlib import blake2b

import torch


def derive(seed: int, *place: str | int) -> int:
    """Returns a seed of 63 bits for one purpose: `derive(seed, "dropout", step, rank)`."""
    # A hash keeps the streams of neighbouring seeds and steps independent, which seed + step would not.
    digest = blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *place: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a new generator for one purpose, whose numbers do not depend on what else is drawn."""
    return torch.Generator(device).manual_seed(derive(seed, *place))


def seed_default(device: torch.device, seed: int) -> None:
    """Seeds a device's default generator, which dropout uses; torch.manual_seed would seed all devices, slowly."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.manual_seed(seed)
