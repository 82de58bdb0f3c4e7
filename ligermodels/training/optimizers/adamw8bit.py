"""AdamW with both moments in 8 bits: 2 bytes a weight instead of 4 or 8. Needs torchao.

Values are quantised in blocks of 256, each scaled by its largest, to a map of 256 numbers: Dettmers et al. 2021,
https://arxiv.org/abs/2110.02861. Map, rounding and arithmetic are those of torchao.optim.AdamW8bit. What differs: the
states are plain tensors; the step may be refused, and the gradients scaled, on the device; blocks never cross rows, so
that a shard has whole blocks on any number of ranks, and are of 128 or 64 where a row is no multiple of more. What is
small, or has rows that are no multiple of 64, has AdamW's states.
"""

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ligermodels.training.optimizers.adamw import AdamW, fused, keep, local
from ligermodels.training.packages import needs

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 64
SMALLEST = 4096  # elements


class AdamW8bit(AdamW):
    """A parameter's state: step; exp_avg and exp_avg_sq, the codes, uint8 in the parameter's shape; exp_avg_scale and
    exp_avg_sq_scale, fp32 [rows, blocks of a row]. Raises InputError where torchao is missing."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        quantization()

    def new_state(self, p: nn.Parameter) -> dict[str, Tensor]:
        if not is_quantized(p):
            return super().new_state(p)
        state = {"step": torch.zeros((), device=p.device)}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(p, dtype=torch.uint8)
            state[f"{name}_scale"] = zero_scales(p)
        return state

    def update(self, params: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        super().update([p for p in params if not is_quantized(p)], group)
        quantized = [p for p in params if is_quantized(p)]
        if not quantized:
            return
        self.count([self.state_of(p)["step"] for p in quantized])
        device = quantized[0].device
        lr = torch.full((), group["lr"], device=device)  # a number would be a constant of what is compiled
        (beta1, beta2), maps = group["betas"], (code_map(True, device), code_map(False, device))
        run = fused(quantized_update, device)
        for p in quantized:
            state, parameter = self.state_of(p), local(p)
            if parameter.numel():
                assert p.grad is not None
                block = block_of(p)
                run(
                    quantization(), parameter.view(-1, block), local(p.grad).reshape(-1, block),
                    local(state["exp_avg"]).view(-1, block), local(state["exp_avg_scale"]).view(-1, 1),
                    local(state["exp_avg_sq"]).view(-1, block), local(state["exp_avg_sq_scale"]).view(-1, 1),
                    *maps, state["step"], lr, beta1, beta2, group["eps"], group["weight_decay"],
                    self.grad_scale, self.found_inf,
                )  # fmt: skip


def block_of(p: Tensor) -> int:
    """Elements that have one scale."""
    return math.gcd(p.shape[1:].numel(), LARGEST_BLOCK)


def is_quantized(p: Tensor) -> bool:
    """By the whole parameter, not this rank's part."""
    return p.ndim >= 2 and p.numel() >= SMALLEST and block_of(p) >= SMALLEST_BLOCK


def zero_scales(p: Tensor) -> Tensor:
    """fp32 [rows, blocks of a row] of a parameter, sharded as it is."""
    blocks = p.shape[1:].numel() // block_of(p)
    scales = torch.zeros(local(p).shape[0], blocks, device=p.device)
    if not isinstance(p, DTensor):
        return scales
    shape = torch.Size((p.shape[0], blocks))
    return DTensor.from_local(scales, p.device_mesh, p.placements, run_check=False, shape=shape, stride=(blocks, 1))


def quantized_update(
    quant_utils: ModuleType,
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_scale: Tensor, exp_avg_sq: Tensor, exp_avg_sq_scale: Tensor,
    signed_map: Tensor, unsigned_map: Tensor, step: Tensor, lr: Tensor,
    beta1: float, beta2: float, eps: float, weight_decay: float, grad_scale: Tensor | None, found_inf: Tensor | None,
) -> None:  # fmt: skip
    """One step in place of param, codes [blocks, elements] and scales [blocks, 1]. maps: [256] fp32.

    quant_utils: `quantization()`, as an import is nothing to compile.
    """
    p, g = param.float(), grad.float()
    if grad_scale is not None:
        g = g / grad_scale
    m = dequantized(exp_avg, exp_avg_scale, signed_map).lerp(g, 1 - beta1)
    v = dequantized(exp_avg_sq, exp_avg_sq_scale, unsigned_map).lerp(g.square(), 1 - beta2)
    denominator = v.sqrt() / (1 - beta2**step).sqrt() + eps
    p = p - lr * weight_decay * p
    keep(param, p - lr * (m / (1 - beta1**step)) / denominator, found_inf)
    for codes, scale, new, code_map in (
        (exp_avg, exp_avg_scale, m, signed_map),
        (exp_avg_sq, exp_avg_sq_scale, v, unsigned_map),
    ):
        scaled, new_scale = quant_utils.scale_tensor(new, new.shape[1])
        keep(codes, quant_utils.quantize_8bit_with_qmap(scaled, code_map), found_inf)
        keep(scale, new_scale[:, None], found_inf)


def dequantized(codes: Tensor, scale: Tensor, code_map: Tensor) -> Tensor:
    return code_map[codes.int()] * scale


@functools.cache
def code_map(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(quantization().create_dynamic_map(signed), device=device)


def quantization() -> ModuleType:
    return needs("torchao.optim.quant_utils", "--optimizer adamw8bit")
