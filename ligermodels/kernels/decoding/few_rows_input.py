"""What the kernels of few_rows_linear.py do with an element of the input before they multiply it."""

import triton
import triton.language as tl

from ligermodels.kernels.activations.gated_activation import activate


@triton.jit
def few_rows_input(
    x_ptr, residual_ptr, hidden_ptr, row, k, inside, x_stride, residual_stride, scale,
    DEPTH: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr, GATE_MULTIPLIER: tl.constexpr,
    DOWN_MULTIPLIER: tl.constexpr,
):  # fmt: skip
    """Columns k of a row -> (what is multiplied by the weight, what the norm squares), fp32.

    inside: which columns there are. scale: of the norm's weight. The first program stores the sum with the residual.
    """
    x = tl.load(x_ptr + row * x_stride + k, inside, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + k, inside, other=0.0).to(tl.float32)
        hidden = (x + residual).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row * DEPTH + k, hidden, inside & (tl.program_id(0) == 0))
        x = hidden.to(tl.float32)
    if ACTIVATION is not None:
        up = tl.load(x_ptr + row * x_stride + DEPTH + k, inside, other=0.0).to(tl.float32)
        activated, _ = activate(x * GATE_MULTIPLIER, ACTIVATION)
        x = activated * up * DOWN_MULTIPLIER
    return x * scale, x
