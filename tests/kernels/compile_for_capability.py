"""Compiles every kernel for a GPU that need not be present.

python -m tests.kernels.compile_for_capability CAPABILITY LIMIT [PREFIX ...]

Each op runs forward and backward at the largest of its sizes, on uninitialized CPU tensors; a launch only compiles the
kernel. CAPABILITY: 80, 86 or 90. LIMIT: bytes of shared memory that one program may use on such a GPU. PREFIX:
how the names of the ops begin; without it all ops, which must launch every kernel.
Prints one line for each variant: bytes of shared memory, registers a thread, bytes of stack (register spills), name.
"""

import re
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from ligermodels.kernels import launch
from ligermodels.kernels.losses import logits_chunks, logprob_chunks
from ligermodels.kernels.norms.norm_tiles import SMALL_M_ROWS
from tests.kernels.compiled_kernels import assert_all_compiled, compiled_kernels, kernels

TOKENS = (32,)  # few, because some matrix products are really computed
# Experts need enough tokens for the largest tiles of the grouped GEMM. Some ops have other kernels for few rows.
TOKENS_OF_OP = {"experts": (512,)} | dict.fromkeys(("norm_linear", "layer_norm_linear"), (2 * SMALL_M_ROWS,))
TOKENS_OF_OP |= dict.fromkeys(
    ("rms_norm", "add_rms_norm", "layer_norm", "linear_cross_entropy"), (32, 2 * SMALL_M_ROWS)
)
# Sizes to compile besides the largest: short rows share a tile, and these kernels need the most registers for them.
EXTRA_SIZES = dict.fromkeys(("norm_linear", "layer_norm_linear"), ((576, 64),))


def pretend_device(capability: int, limit: int) -> None:
    """Makes Triton compile for a device that is not present, and ops launch kernels on CPU tensors."""
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
    # The tensors are uninitialized, so products need not be computed: in half precision they would take seconds.
    torch.mm = lambda a, b, out=None: a.new_empty(a.shape[0], b.shape[1]) if out is None else out
    addmm = torch.addmm  # without `out` the logits are differentiated by the next op
    torch.addmm = lambda bias, a, b, out=None: addmm(bias, a, b) if out is None else out
    torch.Tensor.addmm_ = lambda total, a, b, **factors: total
    for module in (logits_chunks, logprob_chunks):
        module.accumulate_ = lambda total, a, b, beta: None  # without a GPU it widens a and b first
    torch.normal, torch.randn_like = zeros, torch.empty_like


def zeros(mean: float, std: float, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Numbers for which FP8 has codes. NumPy writes no page of its zeros: experts have GiB, which none reads."""
    return torch.from_numpy(np.zeros(shape, np.int16)).view(torch.bfloat16)


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
    pretend_device(*map(int, sys.argv[1:3]))
    prefixes = tuple(sys.argv[3:])
    # These import tests/conftest.py: kernels that are imported after it are built for the interpreter.
    from tests.kernels.ops import OPS
    from tests.kernels.ops.base import run_all_kernels
    from tests.kernels.ops.norms import run_chunked_norm
    from tests.kernels.ops.quantised import run_fp8_products

    for name, entry in OPS.items():
        if prefixes and not name.startswith(prefixes):
            continue
        for tokens, size in product(TOKENS_OF_OP.get(name, TOKENS), (*EXTRA_SIZES.get(name, ()), *entry.real[-1:])):
            run_all_kernels(name, entry.draw(1, tokens, *size).to(torch.bfloat16))
    if not prefixes:
        run_chunked_norm()
        run_fp8_products()
        assert_all_compiled()
    for name, kernel in compiled_kernels():
        print(kernel.metadata.shared, *resources(kernel), name)
