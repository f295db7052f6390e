"""Resolving how training steps are compiled, and running a step as one CUDA graph.

Small models spend their time on launching kernels, and a graph is one launch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from regard.config import ConfigError
from regard.data.batch import Batch
from regard.errors import quote

EAGER = 3  # steps before the capture, in which compilers and libraries set themselves up


def resolve_compile(name: str, device: torch.device, varies: bool = False, processes: int = 1) -> str:
    """Returns how steps are compiled: `name`, or what "auto" means here.

    "auto" is "graph" on a GPU, which `regard.train.compiling` may raise to "both". It is "off" on a CPU, where batches
    vary in shape, and where several processes exchange gradients.
    """
    can_capture = device.type == "cuda" and not varies and processes == 1
    if name in ("graph", "both") and not can_capture:
        needs = "a CUDA device"
        if varies:
            needs = "batches of one shape, and this task's vary"
        elif processes > 1:
            needs = "a single process"
        raise ConfigError(f"train.compile = {quote(name)} needs {needs}; expected auto, off or inductor here")
    if name != "auto":
        return name
    return "graph" if can_capture else "off"


class CapturedStep:
    """Runs `step(batch)` eagerly EAGER times, then as a graph of the same kernels. Every batch has the same shape."""

    def __init__(self, step: Callable[[Batch], None]) -> None:
        self.step = step
        self.eager_left = EAGER
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Batch | None = None

    def __call__(self, batch: Batch) -> None:
        static = self._copy_in(batch)
        if self.eager_left:
            self.eager_left -= 1
            # On a side stream, as a capture is: what is allocated here must not belong to the default stream.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.step(static)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # captured, not run
                self.step(static)
        self.graph.replay()

    def _copy_in(self, batch: Batch) -> Batch:
        """Copies a batch into the tensors that the graph reads, and returns these as a batch."""
        if self.batch is None:
            copies = {name: x.contiguous().clone() for name, x in batch._asdict().items() if x is not None}
            self.batch = Batch(**copies)
        for static, new in zip(self.batch, batch, strict=True):
            if static is not None and new is not None:
                static.copy_(new)
        return self.batch
