"""Makes Triton's interpreter do bfloat16: it rounds towards zero, and multiplies the bits of bfloat16, not its values.

Import it in a process that was started with TRITON_INTERPRET=1, before any program runs. Kernels then take CPU tensors.
"""

from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from regard.kernels.linear import plan, triton_features
from regard.kernels.linear import register as linear

_cast = interpreter.InterpreterBuilder.cast_impl


def _values(x):
    return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data


def _dot(self, a, b, d, *_):
    return interpreter.TensorHandle(np.matmul(_values(a), _values(b), dtype=np.float32) + d.data, d.dtype.scalar)


def _rounded(self, x, to):
    if x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
        bits = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits.reshape(x.data.shape), tl.bfloat16)
    return _cast(self, x, to)


interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.cast_impl = _rounded
np.seterr(all="ignore")
linear._runs_triton = lambda x: True
linear._smem_bytes_per_block = lambda device: 1 << 20
triton_features.libdevice = SimpleNamespace(fast_sinf=lambda x: tl.sin(x), fast_cosf=lambda x: tl.cos(x))
plan.sm_count = lambda device: 2  # several segments even where sequences are short, of more than one chunk
