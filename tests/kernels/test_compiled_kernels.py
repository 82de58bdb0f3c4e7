"""Checks of every compiled kernel: number of variants, registers, shared memory and memory accesses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ligermodels.kernels.moe import grouped_gemm
from tests.conftest import TENS_OF_GIB
from tests.kernels.compiled_kernels import compiled_kernels
from tests.kernels.ops import OPS, parametrize_ops
from tests.kernels.ops.base import run_all_kernels

ROOT = Path(__file__).parents[2]
KB = 1024
SANITIZER = shutil.which("compute-sanitizer")
LENGTHS = 64, 512  # some ops have other kernels for few rows
# Bytes of stack a thread, at most: so much the assembler spills of its own accord, to fit one program more on a
# multiprocessor. With Triton 3.7 one kernel for capability 90 (the backward of add_rms_norm at 16384 columns) and two
# for 86 have a stack; with Triton 3.6 one for 90 (the cross-entropy of unaligned rows with class weights).
MAX_STACK = 16
REGISTER_BYTES = 4
# On 86 products take their operands from registers: these keep more of a chunk than there are. Tiles are for 90.
MAX_STACK_OF = {
    (86, "ligermodels.kernels.linear_attention.delta_chunks._prepare_kernel"): 160,
    (86, "ligermodels.kernels.linear_attention.delta_gradients._gate_gradient_kernel"): 40,
    (86, "ligermodels.kernels.linear_attention.delta_gradients._qkv_gradient_kernel"): 304,
    (86, "ligermodels.kernels.linear_attention.mamba2_chunks._forward_scan_kernel"): 152,
    (86, "ligermodels.kernels.linear_attention.mamba2_outputs._output_kernel"): 72,
    (86, "ligermodels.kernels.linear_attention.mamba2_outputs._head_gradient_kernel"): 80,
    # Their programs of four warps take 14 and 34 % less time than those of eight, which spill nothing (measured:
    # benchmarks/results/2026-11-26-gated-delta-rule.md).
    (90, "ligermodels.kernels.linear_attention.delta_gradients._gate_gradient_kernel"): 424,
    (90, "ligermodels.kernels.linear_attention.delta_gradients._qkv_gradient_kernel"): 344,
    # Three stages take up to 34 % less time than two, which spill nothing; backward of 48 heads 8 % more (same file).
    (90, "ligermodels.kernels.linear_attention.delta_states._forward_scan_kernel"): 48,
    (90, "ligermodels.kernels.linear_attention.delta_states._backward_scan_kernel"): 88,
}


def run_module(name, *args, prefix=(), **environment):
    """The output of a test module, run in a process of its own that compiles its kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    command = [*prefix, sys.executable, "-m", name, *map(str, args)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


PRODUCTS = "experts", "biased experts", "decode_attention", "gated_delta", "mamba2"


@pytest.mark.parametrize(("capability", "limit", "prefixes"), [(86, 99 * KB, PRODUCTS), (90, 227 * KB, ())])
def test_no_kernel_spills_or_exceeds_the_shared_memory_of_a_capability(capability, limit, prefixes):
    """The GPU need not be present. Capability 80 has more shared memory than 86, and the same kernels.

    For 86 those of matrix products, which are other code there and fill its shared memory; all have its registers.
    """
    arguments = capability, limit, *prefixes
    lines = run_module("tests.kernels.compile_for_capability", *arguments, CUDA_VISIBLE_DEVICES="").splitlines()
    assert len(lines) > len([name for name, op in OPS.items() if op.real and name.startswith(prefixes or "")])
    bad = []
    for line in lines:
        shared, _, stack, name = line.split()
        if int(shared) > limit or int(stack) > MAX_STACK_OF.get((capability, name), MAX_STACK):
            bad.append(line)
    assert not bad, "shared memory, registers, stack, kernel:\n" + "\n".join(bad)


def step(op, batch, length, size):
    op.draw(batch, length, *size).to(torch.bfloat16).run()


@pytest.mark.gpu
@TENS_OF_GIB
@parametrize_ops(lambda op: op.real)
def test_no_kernel_is_compiled_for_another_batch_or_length(op):
    check_that_no_variant_is_added(op)


@pytest.mark.gpu
def test_no_grouped_gemm_by_triton_is_compiled_for_another_batch_or_length(monkeypatch):
    monkeypatch.setattr(grouped_gemm, "GROUPED_MM_CAPABILITIES", ())
    check_that_no_variant_is_added(OPS["experts"])


def check_that_no_variant_is_added(op):
    step(op, 2, 48, op.real[0])
    step(op, 2, 480, op.real[0])  # norms and linear_cross_entropy have other kernels for few rows
    for batch, length in op.more_variants:
        step(op, batch, length, op.real[0])
    known = {id(kernel) for _, kernel in compiled_kernels()}
    assert known
    for batch, length in [(1, 1), (2, 1), (1, 2), (3, 16), (1, 17), (3, 1000), (1, 4096)]:
        step(op, batch, length, op.real[0])
        new = [name for name, kernel in compiled_kernels() if id(kernel) not in known]
        assert not new, f"batch {batch}, length {length}: {new}"


@pytest.mark.gpu
@TENS_OF_GIB
@pytest.mark.timeout(900)
def test_no_kernel_spills_at_the_sizes_of_models():
    for name, op in OPS.items():
        for size in op.real:
            for length in LENGTHS:
                run_all_kernels(name, op.draw(1, length, *size).to(torch.bfloat16))
    compiled = compiled_kernels()
    assert len(compiled) > len(OPS)
    major, minor = torch.cuda.get_device_capability()
    spilled = [
        f"{name} {kernel.n_spills}"
        for name, kernel in compiled
        if kernel.n_spills * REGISTER_BYTES > MAX_STACK_OF.get((10 * major + minor, name), MAX_STACK)
    ]
    assert not spilled, "\n".join(spilled)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer")
def test_no_kernel_accesses_memory_out_of_bounds():
    prefix = SANITIZER, "--tool", "memcheck", "--error-exitcode", "1"
    run_module("tests.kernels.run_all_ops", prefix=prefix, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
