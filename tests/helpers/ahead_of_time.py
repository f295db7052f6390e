"""Compiles Triton's programs for an H200 on a machine that has none, as regard's own code launches them.

Import it in a process of its own, before any program runs. CPU tensors then pass for CUDA's, a launch compiles its
program down to machine code and does nothing else, and `COMPILED` lists what each came to. What programs would have
written is whatever the memory held, so results mean nothing.
"""

from __future__ import annotations

import contextlib
import io
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from regard.kernels import devices
from regard.kernels.decode import triton_decode
from regard.kernels.linear import plan, register
from regard.kernels.matvec import triton_project
from regard.kernels.recurrence import ops as recurrence

SHARED_MEMORY = 227 << 10  # bytes that one program may have on compute capability 9.0
PROCESSORS = 132


class Compiled(NamedTuple):
    """What a program came to."""

    program: str
    constants: dict[str, Any]  # all that it was specialised on by name: constexprs and the compiler's settings
    registers: int  # of each thread
    spilled: int  # bytes of each thread that are stored because no register is left
    shared: int  # bytes of shared memory

    @property
    def fits(self) -> bool:
        """Returns whether the device has the shared memory."""
        return self.shared <= SHARED_MEMORY


COMPILED: list[Compiled] = []
LAUNCHES: list[str] = []  # the programs launched, in order
_LAUNCHABLE: dict[int, _Launchable] = {}  # by the identity of what Triton compiled and keeps


class _Launchable:
    """A compiled program whose launches do nothing."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *arguments: Any) -> None:
        LAUNCHES.append(self.compiled.program)


class _Driver:
    """Stands in for the driver of a GPU of compute capability 9.0."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(program: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, *more: Any) -> Any:
    """Compiles a program as Triton does, and keeps what the assembler told of it."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        kernel = _compile_of_triton(program, key, signature, device, constants, options, *more)
    named = {program.arg_names[place[0]]: value for place, value in constants.items() if len(place) == 1}
    named |= {"num_warps": options.num_warps, "num_stages": options.num_stages, "maxnreg": options.maxnreg}
    compiled = Compiled(program.__name__, named, *_read_log(log.getvalue()), kernel.metadata.shared)
    COMPILED.append(compiled)
    _LAUNCHABLE[id(kernel)] = _Launchable(compiled)
    return kernel


def _run(program: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> _Launchable:
    """Compiles a program in place of its launch; raises as Triton does where the device has too little for it."""
    launchable = _LAUNCHABLE[id(_run_of_triton(program, *arguments, grid=grid, warmup=True, **named))]
    if not launchable.compiled.fits:
        raise OutOfResources(launchable.compiled.shared, SHARED_MEMORY, "shared memory")
    launchable.launch()
    return launchable


def _read_log(log: str) -> tuple[int, int]:
    """Returns the registers of a thread and the bytes that it spills, as the assembler tells them."""
    registers = re.search(r"Used (\d+) registers", log)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None and spilled is not None, f"the assembler did not tell of registers: {log!r}"
    return int(registers[1]), int(spilled[1])


_run_of_triton = JITFunction.run
_compile_of_triton = JITFunction._do_compile
JITFunction.run = _run
JITFunction._do_compile = _compile
driver.set_active(_Driver())
knobs.nvidia.dump_ptxas_log = True
knobs.compilation.always_compile = True  # what is in Triton's cache has no log
torch.cuda.is_current_stream_capturing = lambda: False
torch._C._cuda_getCurrentRawStream = lambda index: 0
torch.Tensor.is_cuda = property(lambda x: True)
_properties = SimpleNamespace(major=9, multi_processor_count=PROCESSORS, shared_memory_per_block_optin=SHARED_MEMORY)
devices._properties = lambda device: _properties
triton_decode.count_processors = lambda device: PROCESSORS
triton_project.shared_memory = lambda device: SHARED_MEMORY
register._smem_bytes_per_block = lambda device: SHARED_MEMORY
plan.sm_count = recurrence.sm_count = lambda device: PROCESSORS
