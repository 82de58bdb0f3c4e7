"""Every op forward and backward once, at small odd shapes: what compute-sanitizer is run over."""

import torch

from tests.kernels.ops import OPS

for op in OPS.values():
    case = op.case(dtype=torch.bfloat16)
    case.step(case.ours, case.upstream())
torch.cuda.synchronize()
