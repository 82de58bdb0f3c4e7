"""Every op forward and backward once, at small odd shapes: what compute-sanitizer is run over."""

import torch

from tests.kernels.ops import OPS, step_all

for name, op in OPS.items():
    for length in (4, 70) if name.endswith("norm") else (4,):  # few rows and more: other kernels
        step_all(name, op.case(length=length, dtype=torch.bfloat16))
torch.cuda.synchronize()
