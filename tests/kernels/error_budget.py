"""The tolerance of a kernel test is the error that plain PyTorch makes in the same dtype, against a float64 oracle.

Our relative error (Frobenius norm) may be at most FACTOR times the plain path's, or one rounding of the output's dtype
where that path makes none. A few numbers are right by luck in one path or the other: of these it may be one unit in the
last place.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tests.conftest import DEVICE

FACTOR = 1.5
FEW = 16  # numbers: too few for their errors to average out
# The Triton interpreter's bf16 comparisons and dots are wrong: there the half precision tested is fp16.
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.float16, torch.bfloat16]


def relative_error(result: Tensor, oracle: Tensor) -> float:
    return ((result.double() - oracle).norm() / oracle.norm().clamp_min(1e-300)).item()


def check(
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Iterable[Tensor],
    dtype: torch.dtype,
    factor: float = FACTOR,
    place: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """Compares outputs and the gradients of all floating inputs, under random upstream gradients.

    inputs: float64 tensors (differentiated, cast to `dtype`) and integer ones (passed as they are), on the test device.
    ours, reference: take the inputs and return one tensor or several; non-floating outputs must be equal.
    place: lays out what ours is given, upstream gradients too, in another way.
    """
    inputs = [x.to(dtype).double() if x.is_floating_point() else x for x in inputs]
    generator = torch.Generator().manual_seed(1)
    oracle = run(reference, inputs, torch.float64, generator)
    plain = run(reference, inputs, dtype, generator)
    result = run(ours, inputs, dtype, generator, place)
    assert len(result) == len(oracle)
    for index, (got, expected, baseline) in enumerate(zip(result, oracle, plain, strict=True)):
        assert got.dtype == baseline.dtype and got.shape == baseline.shape, f"tensor {index}: {got.dtype} {got.shape}"
        error = relative_error(got, expected)
        least = torch.finfo(got.dtype).eps / (1 if got.numel() < FEW else 4)
        allowed = max(factor * relative_error(baseline, expected), least)
        assert error <= allowed, f"tensor {index} of {len(result)}: error {error:.3e}, allowed {allowed:.3e}"


def run(function, inputs, dtype, generator, place=lambda x: x) -> list[Tensor]:
    """Outputs, then the gradient of each floating input; of an op without gradients outputs only."""
    generator.manual_seed(1)
    inputs = [place(as_leaf(x, dtype)).detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    upstream = [place(random_like(y, generator, dtype)) for y in outputs]
    leaves = [x for x in inputs if x.requires_grad]
    gradients = torch.autograd.grad(outputs, leaves, upstream) if outputs[0].requires_grad else []
    return [*(y.detach() for y in outputs), *gradients]


def as_leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A leaf of the same strides: expanded and transposed inputs stay so."""
    return x.detach().to(dtype, memory_format=torch.preserve_format).requires_grad_()


def random_like(y: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Upstream gradients in the precision under test, the same values for every dtype."""
    half = torch.randn(y.shape, generator=generator, dtype=torch.float32).half()
    return half.to(y.device, y.dtype)
