"""AdamW with both moments quantised to 8 bits: 2 bytes per weight instead of 4 or 8. Needs torchao.

Values are quantised in blocks of 256. Each block is scaled by its largest absolute value, and each value is rounded to
one of 256 codes of a non-linear map: Dettmers et al. 2021, https://arxiv.org/abs/2110.02861. Map, rounding and
arithmetic are those of torchao.optim.AdamW8bit, with three differences:
- The state is made of plain tensors.
- The step can be skipped, and the gradients scaled, on the device.
- Blocks never cross rows, so that a shard has whole blocks on any number of ranks. Where the row length is not a
  multiple of 256, blocks have 128 or 64 elements.
Small parameters, and those whose row length is not a multiple of 64, have AdamW's state.
"""

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ligermodels.training.optimizers.adamw import AdamW, compiled_on_gpu, local_shard, write_if_finite
from ligermodels.training.packages import import_package

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 64  # elements
MIN_QUANTIZED_SIZE = 4096  # elements of a parameter


class AdamW8bit(AdamW):
    """The state of a quantised parameter is step, exp_avg, exp_avg_sq, exp_avg_scale and exp_avg_sq_scale.

    exp_avg, exp_avg_sq: uint8 codes in the shape of the parameter. exp_avg_scale, exp_avg_sq_scale: fp32
    [rows, blocks per row]. Raises InputError if torchao is missing.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        quantization_module()

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
        self.count_step([self.state_of(p)["step"] for p in quantized])
        device = quantized[0].device
        lr = torch.full((), group["lr"], device=device)  # a Python float would be compiled in as a constant
        (beta1, beta2), maps = group["betas"], (code_map(True, device), code_map(False, device))
        update = compiled_on_gpu(quantized_update, device)
        for p in quantized:
            parameter, state = local_shard(p), {name: local_shard(x) for name, x in self.state_of(p).items()}
            if parameter.numel():
                assert p.grad is not None
                block = block_size(p)
                update(
                    quantization_module(), parameter.view(-1, block), local_shard(p.grad).reshape(-1, block),
                    state["exp_avg"].view(-1, block), state["exp_avg_scale"].view(-1, 1),
                    state["exp_avg_sq"].view(-1, block), state["exp_avg_sq_scale"].view(-1, 1),
                    *maps, state["step"], lr, beta1, beta2, group["eps"], group["weight_decay"],
                    self.grad_scale, self.found_inf,
                )  # fmt: skip


def block_size(p: Tensor) -> int:
    """Returns the number of elements that share one scale."""
    return math.gcd(p.shape[1:].numel(), LARGEST_BLOCK)


def is_quantized(p: Tensor) -> bool:
    """Whether the moments of a parameter are quantised: depends on its full shape, not on this rank's shard."""
    return p.ndim >= 2 and p.numel() >= MIN_QUANTIZED_SIZE and block_size(p) >= SMALLEST_BLOCK


def zero_scales(p: Tensor) -> Tensor:
    """Returns zeros, fp32 [rows, blocks per row], sharded like the parameter."""
    blocks = p.shape[1:].numel() // block_size(p)
    scales = torch.zeros(local_shard(p).shape[0], blocks, device=p.device)
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
    """One step, in place.

    param, grad: [blocks, block size]. exp_avg, exp_avg_sq: codes in the same shape. Scales: [blocks, 1]. Maps: fp32
    [256]. quant_utils: the module that `quantization_module` returns, passed in because an import cannot be compiled.
    """
    p, g = param.float(), grad.float()
    if grad_scale is not None:
        g = g / grad_scale
    m = dequantize(exp_avg, exp_avg_scale, signed_map).lerp(g, 1 - beta1)
    v = dequantize(exp_avg_sq, exp_avg_sq_scale, unsigned_map).lerp(g.square(), 1 - beta2)
    denominator = v.sqrt() / (1 - beta2**step).sqrt() + eps
    p = p - lr * weight_decay * p
    write_if_finite(param, p - lr * (m / (1 - beta1**step)) / denominator, found_inf)
    for codes, scale, new, code_map in (
        (exp_avg, exp_avg_scale, m, signed_map),
        (exp_avg_sq, exp_avg_sq_scale, v, unsigned_map),
    ):
        scaled, new_scale = quant_utils.scale_tensor(new, new.shape[1])
        write_if_finite(codes, quant_utils.quantize_8bit_with_qmap(scaled, code_map), found_inf)
        write_if_finite(scale, new_scale[:, None], found_inf)


def dequantize(codes: Tensor, scale: Tensor, code_map: Tensor) -> Tensor:
    return code_map[codes.int()] * scale


@functools.cache
def code_map(signed: bool, device: torch.device) -> Tensor:
    """Returns the values of the 256 codes, fp32 [256]."""
    return torch.tensor(quantization_module().create_dynamic_map(signed), device=device)


def quantization_module() -> ModuleType:
    """Returns torchao's quantisation functions. Raises InputError if torchao is missing."""
    return import_package("torchao.optim.quant_utils", "--optimizer adamw8bit")
