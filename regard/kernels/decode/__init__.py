"""One more token over a cache: in Triton on a GPU, in place on a CPU."""

from regard.kernels.decode import cpu, gpu, positions

__all__ = ["cpu", "gpu", "positions"]
