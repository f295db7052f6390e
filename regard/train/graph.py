"""A training step as one CUDA graph: small models spend their time on launching kernels, and a graph is one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from regard.data.batch import Batch

EAGER = 3  # steps before the capture, in which compilers and libraries set themselves up


class GraphStep:
    """Runs `step(batch)` as it is a few times, then as a graph of the same kernels. Every batch has the same shape."""

    def __init__(self, step: Callable[[Batch], None]) -> None:
        self.step = step
        self.left = EAGER
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Batch | None = None

    def __call__(self, batch: Batch) -> None:
        own = self._kept(batch)
        if self.left:
            self.left -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.step(own)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):  # captured, not run
                self.step(own)
        self.graph.replay()

    def _kept(self, batch: Batch) -> Batch:
        """The batch at the addresses that the graph reads, which are the same from the first step on."""
        if self.batch is None:
            self.batch = Batch(*(None if t is None else t.contiguous().clone() for t in batch))  # type: ignore[arg-type]
        for own, new in zip(self.batch, batch, strict=True):
            if own is not None and new is not None:
                own.copy_(new)
        return self.batch
