"""Attention from other libraries (peers), whose time and memory are compared with ours where they are installed.

Each takes q, k, v [B,H,N,·] as ours do. What a peer does to take them (transposing axes, computing features before the
call) is part of its time, as it is part of using it.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from regard.errors import RegardError
from regard.shapes import Size

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class PeerError(RegardError, RuntimeError):
    """Raised for a peer that is not installed, or that does not support what was asked of it."""


class Peer(NamedTuple):
    """Someone else's implementation of the mechanism `like`.

    `make` returns it for a size and a number of features, or raises PeerError. The memory of a `compiled` one cannot be
    counted on a CPU.
    """

    name: str
    like: str
    make: Callable[[Size, int], Attend]
    compiled: bool = False


def _sdpa(size: Size, features: int) -> Attend:
    """Returns PyTorch's scaled_dot_product_attention."""
    grouped = size.G != size.H
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=size.causal, enable_gqa=grouped)


def _flex(size: Size, features: int) -> Attend:
    """Returns PyTorch's FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    mask: Any = None
    if size.causal:
        mask = create_block_mask(before, None, None, size.T, size.S, device=str(size.device))
    attend: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: attend(q, k, v, block_mask=mask, enable_gqa=size.G != size.H)


def _fla(size: Size, features: int) -> Attend:
    """Returns linear attention of flash-linear-attention with the features elu + 1."""
    chunk = _fla_chunk(size)
    return lambda q, k, v: chunk(functional.elu(q) + 1, functional.elu(k) + 1, v)


def _fla_performer(size: Size, features: int) -> Attend:
    """Returns FAVOR+ put together from fla: features in PyTorch, their maximum taken over the whole sequence."""
    chunk = _fla_chunk(size)
    w = torch.randn(features, size.K, device=size.device, dtype=size.dtype)

    def positive(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        x = x * size.K**-0.25
        scores = x @ w.T - x.float().square().sum(-1, keepdim=True).to(x.dtype) / 2
        return (scores - scores.amax(axes, keepdim=True).detach()).exp() + 1e-4

    return lambda q, k, v: chunk(positive(q, (3,)), positive(k, (2, 3)), v)


def _fla_chunk(size: Size) -> Attend:
    """Returns fla's chunked kernel of linear attention, for our order of axes."""
    if not size.causal:
        raise PeerError("it is causal only")
    if torch.device(size.device).type != "cuda":
        raise PeerError("its kernels need a GPU")
    if size.G != size.H:
        raise PeerError("it takes as many key/value heads as queries")
    call = _import_peer("fla.ops.linear_attn").chunk_linear_attn

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = call(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=True)[0]
        return out.transpose(1, 2)

    return attend


def _performer_pytorch(size: Size, features: int) -> Attend:
    """Returns FAVOR+ of performer-pytorch."""
    if size.G != size.H:
        raise PeerError("it takes as many key/value heads as queries")
    _provide_distutils()
    cls = _import_peer("performer_pytorch.performer_pytorch").FastAttention
    with redirect_stdout(StringIO()):  # it prints that some kernels of another package are not there
        attend: Attend = cls(size.K, nb_features=features, causal=size.causal).to(size.device)
    return attend


def _retention(size: Size, features: int) -> Attend:
    """Returns power attention of degree two: (q·k)², where ours is (q·k + 1)²."""
    if not size.causal:
        raise PeerError("it is causal only")
    call = _import_peer("retention").power_retention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = call(*(x.transpose(1, 2) for x in (q, k, v)), deg=2, chunk_size=min(1024, size.T))
        return out.transpose(1, 2)

    return attend


PEERS = (
    Peer("SDPA", "softmax", _sdpa),
    Peer("FlexAttention", "softmax", _flex, compiled=True),
    Peer("fla", "elu", _fla),
    Peer("fla + features", "performer", _fla_performer),
    Peer("performer-pytorch", "performer", _performer_pytorch),
    Peer("retention", "quadratic", _retention),
)


def _import_peer(name: str) -> Any:
    """Returns a peer's module, or raises a PeerError where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of theirs, at import
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise PeerError(f"not installed ({error})") from error


def _provide_distutils() -> None:
    """Registers a substitute for `distutils.version`, which Python 3.12 no longer has.

    performer-pytorch uses it to check that PyTorch is at least 1.8.
    """
    if sys.version_info < (3, 12) or "distutils.version" in sys.modules:
        return
    version = types.ModuleType("distutils.version")
    version.LooseVersion = lambda text: tuple(int(n) for n in str(text).split("+")[0].split(".")[:2])
    sys.modules.setdefault("distutils", types.ModuleType("distutils"))
    sys.modules["distutils.version"] = version
