"""Every Triton program is compiled to an H200's machine code as regard launches it, which needs no GPU."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import regard

KERNELS = Path(regard.__file__).parent / "kernels"
HELPERS = Path(__file__).parents[1] / "helpers"
# Bytes of a thread that find no register. Three products for one need so many that they spill at any setting tried.
MOST_SPILLED = {"bf16x3": 4096, "tf32x3": 4096}
MOST_SPILLED_ELSE = 832

BROKEN = """
import sys
import ahead_of_time
import torch
import triton
import triton.language as tl

@triton.jit
def greedy_kernel(x, y, N):
    i = tl.arange(0, 64)
    tile = i[:, None] * 64 + i[None, :]
    acc = tl.zeros([64, 64], tl.float32)
    for start in range(0, N):
        acc = tl.dot(tl.load(x + start * 4096 + tile), tl.load(y + start * 4096 + tile), acc)
    tl.store(x + tile, acc)

try:
    greedy_kernel[(1,)](torch.zeros(64, 64), torch.zeros(64, 64), 512, num_stages=16)
except Exception as error:
    print(type(error).__name__)
print(ahead_of_time.COMPILED[-1].fits)
"""


def run(*arguments):
    """Returns what a process of its own prints, since compiling ahead changes PyTorch and Triton."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HELPERS), str(KERNELS.parents[1])])}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _the_assembler():
    backend = pytest.importorskip("triton.backends.nvidia", reason="triton is not installed")
    if not (Path(backend.__file__).parent / "bin" / "ptxas").exists():
        pytest.skip("this triton brings no ptxas")


def launched_programs():
    """Returns the names of all Triton programs that no other Triton program names."""
    programs, called = set(), set()
    for path in KERNELS.rglob("triton_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                programs.add(node.name)
                called |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return programs - called


def judge(found):
    """Raises where a program needs more than an H200 has, or spills more than is known of its kind."""
    assert found
    for row in found:
        assert row["fits"], f"{row['program']} needs {row['shared']} bytes of shared memory: {row}"
        most = MOST_SPILLED.get(row["constants"].get("PRECISION"), MOST_SPILLED_ELSE)
        assert row["spilled"] <= most, f"{row['program']} spills {row['spilled']} bytes of a thread: {row}"


def test_programs_of_decoding_and_losses_compile_for_an_h200():
    judge(json.loads(run(str(HELPERS / "gpu_calls.py"), "--json", "losses", "tokens")))


def test_a_program_that_does_not_fit_is_noticed(tmp_path):
    program = tmp_path / "broken.py"  # Triton reads the source of a program
    program.write_text(BROKEN)
    assert run(str(program)).splitlines() == ["OutOfResources", "False"]


@pytest.mark.slow
def test_all_programs_compile_for_an_h200():
    found = json.loads(run(str(HELPERS / "gpu_calls.py"), "--json"))
    judge(found)
    assert {row["program"] for row in found} >= launched_programs()
