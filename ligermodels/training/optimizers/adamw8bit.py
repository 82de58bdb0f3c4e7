"""AdamW with both moments quantised to 8 bits: 2 bytes per weight instead of 4 or 8.

Values are quantised in blocks of 256. Each block is scaled by its largest absolute value, and each value is rounded to
one of 256 codes of a non-linear map: Dettmers et al. 2021, https://arxiv.org/abs/2110.02861. Our Triton kernel updates
a parameter in one pass on a GPU (kernels/optim/adamw8bit.py). Map, rounding and arithmetic are those of
torchao.optim.AdamW8bit, with four differences:
- The state is made of plain tensors.
- No second moment is rounded to 0 (kernels/optim/adamw8bit.py).
- The step can be skipped, and the gradients scaled, on the device.
- Blocks never cross rows, so that a shard has whole blocks on any number of ranks. Where the row length is not a
  multiple of 256, blocks have 128 or 64 elements.
Small parameters, and those whose row length is not a multiple of 64, have AdamW's state.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ligermodels.kernels.optim.adamw8bit import adamw8bit_, adamw8bit_reference
from ligermodels.training.optimizers.adamw import AdamW, local_view

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 64  # elements
MIN_QUANTIZED_SIZE = 4096  # elements of a parameter


class AdamW8bit(AdamW):
    """The state of a quantised parameter is step, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, and AdamW's
    low_bits.

    exp_avg, exp_avg_sq: uint8 codes in the shape of the parameter. exp_avg_scale, exp_avg_sq_scale: fp32
    [rows, blocks per row].
    """

    def new_state(self, p: nn.Parameter) -> dict[str, Tensor]:
        if not is_quantized(p):
            return super().new_state(p)
        state = {"step": torch.zeros((), device=p.device)}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(p, dtype=torch.uint8)
            state[f"{name}_scale"] = zero_scales(p)
        return state | self.new_low_bits(p)

    def update(self, params: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        super().update([p for p in params if not is_quantized(p)], group)
        quantized = [p for p in params if is_quantized(p)]
        if not quantized:
            return
        self.count_step([self.state_of(p)["step"] for p in quantized])
        beta1, beta2 = group["betas"]
        scalars = {"beta1": beta1, "beta2": beta2} | {name: group[name] for name in ("lr", "eps", "weight_decay")}
        for p in quantized:
            assert p.grad is not None
            states = {name: local_view(x) for name, x in self.state_of(p).items()}
            adamw8bit_(
                local_view(p), local_view(p.grad), **states | self.rounding(p), **scalars,
                grad_scale=self.grad_scale, found_inf=self.found_inf,
            )  # fmt: skip

    def expect_update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        if not is_quantized(p):
            return super().expect_update(p, group)
        assert self.check is not None
        state, block, run = self.state_of(p), block_size(p), self.check.runs[p]
        blocks = slice(run.start // block, run.stop // block)
        grad, codes1, codes2 = (self.sampled(p, x) for x in (p.grad, state["exp_avg"], state["exp_avg_sq"]))
        scale1, scale2 = (local_view(state[f"{name}_scale"]).reshape(-1)[blocks] for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        exact, *_ = adamw8bit_reference(
            self.check.before[p], grad.double(), codes1, scale1, codes2, scale2, group["lr"], beta1, beta2,
            group["eps"], group["weight_decay"], state["step"] + 1, self.grad_scale, self.found_inf,
        )  # fmt: skip
        self.check.expect(p, exact)


def block_size(p: Tensor) -> int:
    """Returns the number of elements that share one scale."""
    return math.gcd(p.shape[1:].numel(), LARGEST_BLOCK)


def is_quantized(p: Tensor) -> bool:
    """Whether the moments of a parameter are quantised: depends on its full shape, not on this rank's shard."""
    return p.ndim >= 2 and p.numel() >= MIN_QUANTIZED_SIZE and block_size(p) >= SMALLEST_BLOCK


def zero_scales(p: Tensor) -> Tensor:
    """Returns zeros, fp32 [rows, blocks per row], sharded like the parameter."""
    blocks = p.shape[1:].numel() // block_size(p)
    scales = torch.zeros(local_view(p).shape[0], blocks, device=p.device)
    if not isinstance(p, DTensor):
        return scales
    shape = torch.Size((p.shape[0], blocks))
    return DTensor.from_local(scales, p.device_mesh, p.placements, run_check=False, shape=shape, stride=(blocks, 1))
