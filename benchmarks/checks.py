"""Whether a provider is right: its outputs and gradients against the op's reference in fp32.

A relative error (Frobenius norm) may be FACTOR times what the reference itself makes in bf16, or FACTOR roundings.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.ops import Op, Shape
from benchmarks.timing import as_list

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FACTOR = 4.0  # room for more roundings than the reference's one, none for another formula
ROUNDING = torch.finfo(torch.bfloat16).eps / 4  # the relative error of one


def fresh_inputs(op: Op, shape: Shape, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        return op.inputs(*shape)


def in_single(x: Tensor) -> Tensor:
    return x.detach().float().requires_grad_(x.requires_grad) if x.dtype == torch.bfloat16 else x


def upstream_of(outputs: list[Tensor]) -> list[Tensor]:
    """1 for a loss, random bf16 values for everything else."""

    def like(y: Tensor) -> Tensor:
        make = torch.randn if y.dim() else torch.ones
        return make(y.shape, dtype=torch.bfloat16, device=DEVICE).to(y.dtype)

    return [*map(like, outputs)]


def evaluate(function: Callable, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs, then the gradient of each input that requires one."""
    outputs = as_list(function(*inputs))
    leaves = [x for x in inputs if x.requires_grad]
    values = [y.detach().clone() for y in outputs]  # some backwards write where they read
    torch.manual_seed(1)
    return values + (list(torch.autograd.grad(outputs, leaves, upstream_of(outputs))) if leaves else [])


def after(layout: Callable, function: Callable) -> Callable:
    """What a provider computes of the op's own inputs."""
    return lambda *inputs: function(*layout(*inputs))


def relative_errors(tensors: list[Tensor], oracle: list[Tensor]) -> list[float]:
    return [relative_error(got, expected) for got, expected in zip(tensors, oracle, strict=True)]


def relative_error(got: Tensor, expected: Tensor) -> float:
    if got.shape != expected.shape:
        return math.inf
    return ((got.float() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


class Truth:
    """What the reference gives at one shape in fp32, and the errors that it makes in bf16."""

    def __init__(self, op: Op, shape: Shape) -> None:
        self.oracle = evaluate(op.reference, [in_single(x) for x in fresh_inputs(op, shape)])
        self.plain = relative_errors(evaluate(op.reference, fresh_inputs(op, shape)), self.oracle)

    def error_of(self, tensors: list[Tensor]) -> float:
        """The worst of all tensors' errors, as a multiple of plain bf16's. Not finite where a result is not."""
        errors = relative_errors(tensors, self.oracle)
        worst = [error / max(plain, ROUNDING) for error, plain in zip(errors, self.plain, strict=True)]
        return max(worst, key=lambda error: math.inf if math.isnan(error) else error)
