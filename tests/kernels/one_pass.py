"""Every op forward and backward once, at small odd shapes: what compute-sanitizer is run over."""

import torch

from tests.kernels.kernels_of import assert_all_compiled
from tests.kernels.ops import OPS, norm_by_chunks, step_all

for name, op in OPS.items():
    for length in (4, 70) if "norm" in name else (4,):  # few rows and more: other kernels
        step_all(name, op.case(length=length, dtype=torch.bfloat16))
norm_by_chunks()
torch.cuda.synchronize()
assert_all_compiled()
