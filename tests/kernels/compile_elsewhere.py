"""Compiles every kernel for a device that need not be there: python -m tests.kernels.compile_elsewhere CAPABILITY LIMIT

Each op takes its forward and backward at the largest of its sizes, on tensors of the CPU that hold nothing; launches
compile and do no more. CAPABILITY: 80, 86, 90. LIMIT: bytes of shared memory that one program may use there.
Prints a line for each variant: bytes of shared memory, registers, bytes of stack (spills), name.
"""

import re
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from ligermodels.kernels import launch
from ligermodels.kernels.norm_tiles import SMALL_M_ROWS
from tests.kernels import ops
from tests.kernels.kernels_of import assert_all_compiled, compiled_kernels, kernels

TOKENS = (32,)  # few, because some matrix products are computed
# Of experts enough for the largest tiles of the grouped products; of few rows and of many some ops' kernels differ.
TOKENS_OF = {"experts": (512,), "norm_linear": (2 * SMALL_M_ROWS,)} | dict.fromkeys(
    ("rms_norm", "add_rms_norm", "layer_norm", "linear_cross_entropy"), (32, 2 * SMALL_M_ROWS)
)
# Beside the largest: rows of which several share a tile, in the kernel that takes the most registers for them.
SHORT_ROWS = {"norm_linear": ((576, 64),)}


def be(capability: int, limit: int) -> None:
    """Makes Triton believe in a device, and ops believe that tensors on the CPU are there."""
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": limit}),
    )
    triton.runtime.driver.set_active(driver)
    for kernel in kernels():
        type(kernel).__getitem__ = lambda self, grid: partial(getattr(self, "jit", self).warmup, grid=grid)
    launch.interpreting = True
    triton.knobs.runtime.interpret = False  # tiles are chosen for the device, not for the interpreter
    # Of tensors that hold nothing; those of half precision and few columns would take seconds.
    torch.mm = lambda a, b, out=None: a.new_empty(a.shape[0], b.shape[1]) if out is None else out
    ops.normal = lambda *shape, scale=1.0: torch.empty(shape, dtype=torch.bfloat16)


def resources(kernel) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return int(registers), int(stack)


if __name__ == "__main__":
    be(*map(int, sys.argv[1:]))
    for name, entry in ops.OPS.items():
        for tokens, size in product(TOKENS_OF.get(name, TOKENS), (*SHORT_ROWS.get(name, ()), *entry.real[-1:])):
            ops.step_all(name, entry.draw(1, tokens, *size).to(torch.bfloat16))
    ops.norm_by_chunks()
    assert_all_compiled()
    for name, kernel in compiled_kernels():
        print(kernel.metadata.shared, *resources(kernel), name)
