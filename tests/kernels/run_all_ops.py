"""Runs every op forward and backward once, at small odd shapes: the program that compute-sanitizer checks."""

import torch

from tests.kernels.compiled_kernels import assert_all_compiled
from tests.kernels.ops import OPS
from tests.kernels.ops.base import run_all_kernels
from tests.kernels.ops.norms import run_chunked_norm
from tests.kernels.ops.quantised import run_fp8_products

for name, op in OPS.items():
    for length in (4, 70) if "norm" in name else (4,):  # the small-M path and the persistent kernel
        run_all_kernels(name, op.case(length=length, dtype=torch.bfloat16))
run_chunked_norm()
run_fp8_products()
torch.cuda.synchronize()
assert_all_compiled()
