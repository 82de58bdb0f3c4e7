"""Correctness check of a provider: its outputs and gradients against the op's reference implementation in fp32.

The relative error (Frobenius norm) of each tensor may be at most `Op.max_error_ratio` times the error of the reference
implementation in bf16, or as many times ROUNDING_ERROR, whichever is larger.
Knows no particular op or provider.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.ops import Op, Shape
from benchmarks.timing import as_list

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING_ERROR = torch.finfo(torch.bfloat16).eps / 4  # relative error of one rounding to bf16


def fresh_inputs(op: Op, shape: Shape, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        return op.inputs(*shape)


def as_fp32(x: Tensor) -> Tensor:
    return x.detach().float().requires_grad_(x.requires_grad) if x.dtype == torch.bfloat16 else x


def upstream_gradients(outputs: list[Tensor]) -> list[Tensor]:
    """1 for a scalar loss, random values that bf16 can represent for every other output."""

    def gradient(y: Tensor) -> Tensor:
        make = torch.randn if y.dim() else torch.ones
        return make(y.shape, dtype=torch.bfloat16, device=DEVICE).to(y.dtype)

    return [*map(gradient, outputs)]


def evaluate(function: Callable, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs, followed by the gradient of each input that requires one."""
    outputs = as_list(function(*inputs))
    leaves = [x for x in inputs if x.requires_grad]
    values = [y.detach().clone() for y in outputs]  # some backward passes overwrite tensors that they read
    torch.manual_seed(1)
    return values + (list(torch.autograd.grad(outputs, leaves, upstream_gradients(outputs))) if leaves else [])


def with_layout(layout: Callable, function: Callable) -> Callable:
    """A function of the op's own inputs: `layout` converts them, then the provider's `function` runs."""
    return lambda *inputs: function(*layout(*inputs))


def relative_errors(tensors: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [relative_error(actual, reference) for actual, reference in zip(tensors, expected, strict=True)]


def relative_error(actual: Tensor, reference: Tensor) -> float:
    if actual.shape != reference.shape:
        return math.inf
    return ((actual.float() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


class ReferenceResult:
    """The results of the reference implementation at one shape in fp32, and its relative errors in bf16."""

    def __init__(self, op: Op, shape: Shape) -> None:
        self.expected = evaluate(op.reference, [as_fp32(x) for x in fresh_inputs(op, shape)])
        self.bf16_errors = relative_errors(evaluate(op.reference, fresh_inputs(op, shape)), self.expected)

    def error_ratio(self, tensors: list[Tensor]) -> float:
        """The largest ratio of a tensor's error to the reference's bf16 error. Not finite if a result is not finite."""
        errors = relative_errors(tensors, self.expected)
        ratios = [error / max(bf16, ROUNDING_ERROR) for error, bf16 in zip(errors, self.bf16_errors, strict=True)]
        return max(ratios, key=lambda ratio: math.inf if math.isnan(ratio) else ratio)
