"""The tolerance of a kernel test: the error that plain PyTorch makes in the same dtype, relative to a float64 result.

Our relative error (Frobenius norm) may be at most FACTOR times that of plain PyTorch, or one rounding of the output's
dtype if plain PyTorch happens to make no error. An output of few numbers may be exact by chance in one path and not in
the other: it may be off by one unit in the last place, or by the error of a typical output of its dtype.
"""

from collections.abc import Callable, Iterable
from statistics import median_low

import torch
from torch import Tensor

from tests.conftest import DEVICE

FACTOR = 1.5
APPROXIMATE = 2.0  # times that in fp32 on a GPU, where exponentials and divisions of Triton are approximate to 2 ulp
FEW_NUMBERS = 16  # up to this, errors do not average out
# The Triton interpreter computes bf16 comparisons and dots wrongly: under it, fp16 is the half precision tested.
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.float16, torch.bfloat16]


def relative_error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def check(
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Iterable[Tensor],
    dtype: torch.dtype,
    factor: float = FACTOR,
    change_layout: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """Compares outputs and the gradients of all floating-point inputs, under random upstream gradients.

    inputs: float64 tensors, cast to `dtype` and differentiated, and integer tensors, passed unchanged; on the test
    device. ours, reference: take the inputs and return one tensor or several; integer outputs must be equal.
    change_layout: applied to the inputs and upstream gradients of ours only.
    """
    inputs = [x.to(dtype).double() if x.is_floating_point() else x for x in inputs]
    generator = torch.Generator().manual_seed(1)
    exact = run(reference, inputs, torch.float64, generator)
    plain = run(reference, inputs, dtype, generator)
    result = run(ours, inputs, dtype, generator, change_layout)
    assert len(result) == len(exact)
    factor *= APPROXIMATE if DEVICE == "cuda" and dtype == torch.float32 else 1.0
    for index, (got, expected, baseline) in enumerate(zip(result, exact, plain, strict=True)):
        assert got.dtype == baseline.dtype and got.shape == baseline.shape, f"tensor {index}: {got.dtype} {got.shape}"
        error = relative_error(got, expected)
        least = torch.finfo(got.dtype).eps / (1 if got.numel() <= FEW_NUMBERS else 4)
        own_error = relative_error(baseline, expected)
        if got.numel() <= FEW_NUMBERS:
            own_error = max(own_error, typical_error(plain, exact, got.dtype))
        allowed = max(factor * own_error, least)
        assert error <= allowed, f"tensor {index} of {len(result)}: error {error:.3e}, allowed {allowed:.3e}"


def typical_error(plain: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> float:
    """The median of plain PyTorch's errors of the tensors in a dtype."""
    return median_low(relative_error(x, y) for x, y in zip(plain, exact, strict=True) if x.dtype == dtype)


def run(function, inputs, dtype, generator, change_layout=lambda x: x) -> list[Tensor]:
    """The outputs, then the gradient of each floating-point input if the op has gradients."""
    generator.manual_seed(1)
    inputs = [
        change_layout(as_leaf(x, dtype)).detach().requires_grad_() if x.is_floating_point() else x for x in inputs
    ]
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    upstream = [change_layout(random_like(y, generator, dtype)) for y in outputs]
    leaves = [x for x in inputs if x.requires_grad]
    gradients = torch.autograd.grad(outputs, leaves, upstream) if outputs[0].requires_grad else []
    return [*(y.detach() for y in outputs), *gradients]


def as_leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A leaf with the same strides: expanded and transposed inputs stay expanded and transposed."""
    return x.detach().to(dtype, memory_format=torch.preserve_format).requires_grad_()


def random_like(y: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """A random upstream gradient in the dtype of y, with the same values for every dtype."""
    half = torch.randn(y.shape, generator=generator, dtype=torch.float32).half()
    return half.to(y.device, y.dtype)


# Of the way that weights go in 50 steps: on a GPU, kernels compiled with other contractions to fused multiply-adds give
# moments in 8 bits that are one code off now and then.
CONTRACTION = 1e-3


def relative_distance(weights, others, start):
    """How far weights are apart, beside how far they went."""
    return ((weights - others).norm() / (others - start).norm()).item()
