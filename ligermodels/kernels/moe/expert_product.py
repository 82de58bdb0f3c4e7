"""The gated product of permuted experts' rows, weighted by the routing; a part of experts.py.

    p_r = w_r act(g) up(u),  [g, u] = GU_r + b_e
    silu, gelu_tanh, gelu   act as in gated_activation.py, up(u) = u
    clamped_silu            act(g) = G σ(1.702 G), G = min(g, 7);  up(u) = 1 + min(max(u, -7), 7)      (gpt-oss)
Backward: dw_r = Σ dp act(g) up(u);  dg = w dp up(u) act'(g);  du = w dp act(g) up'(u); the gradients of clamp are 0
beyond its limits. Slot s = (token, choice) has the row row[s], the routing weight w[s] and the expert e = index[s].
GU [R, 2 I] (gate first) without the bias b [E, 2 I], which is added here in fp32: it costs no pass of its own. R rows
move 3 R I elements forward, 5 R I backward, 6 R I if p is recomputed.
Source of clamped_silu: gpt-oss, https://arxiv.org/abs/2508.10925.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.activations.gated_activation import ACTIVATION_FUNCTIONS, activate, gated_activation_reference
from ligermodels.kernels.dispatch import is_last_use, register_op, widen
from ligermodels.kernels.launch import kernel

CLAMPED_SILU = "clamped_silu"
EXPERT_ACTIVATIONS = (*ACTIVATION_FUNCTIONS, CLAMPED_SILU)
GLU_LIMIT, GLU_SHARPNESS = 7.0, 1.702
LIMIT, SHARPNESS = tl.constexpr(GLU_LIMIT), tl.constexpr(GLU_SHARPNESS)


def expert_glu_reference(gate_up: Tensor, activation: str) -> Tensor:
    """act(g) up(u): gate_up [..., 2 I] with its bias -> [..., I]."""
    if activation != CLAMPED_SILU:
        return gated_activation_reference(gate_up, activation)
    gate, up = widen(gate_up).chunk(2, -1)
    gate, up = gate.clamp(max=GLU_LIMIT), up.clamp(-GLU_LIMIT, GLU_LIMIT)
    return (gate * torch.sigmoid(GLU_SHARPNESS * gate) * (1.0 + up)).to(gate_up.dtype)


@triton.jit
def expert_glu(gate, up, ACTIVATION: tl.constexpr):
    """act(g), up(u) and their derivatives, in fp32."""
    if ACTIVATION == "clamped_silu":
        # Comparisons keep a NaN, which minimum and maximum may drop. g σ(a g) is silu(a g) / a.
        activated, slope = activate(SHARPNESS * tl.where(gate > LIMIT, LIMIT, gate), "silu")
        clamped = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        slope = tl.where(gate > LIMIT, 0.0, slope)
        return activated / SHARPNESS, 1.0 + clamped, slope, tl.where(clamped == up, 1.0, 0.0)
    else:
        activated, slope = activate(gate, ACTIVATION)
        return activated, up, slope, 1.0


@triton.jit
def _load_gate_and_up(gate_up_ptr, bias_ptr, index_ptr, slot, row, column, columns, BIAS: tl.constexpr):
    """Gate and up of some columns of a row, with their biases, in fp32."""
    mask = column < columns
    gate_ptr = gate_up_ptr + row * (2 * columns) + column
    gate = tl.load(gate_ptr, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + columns, mask, other=0.0).to(tl.float32)
    if BIAS:
        bias_ptr += tl.load(index_ptr + slot).to(tl.int64) * (2 * columns) + column
        gate += tl.load(bias_ptr, mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + columns, mask, other=0.0).to(tl.float32)
    return gate, up


@kernel()
def _product_kernel(
    gate_up_ptr, weight_ptr, row_ptr, bias_ptr, index_ptr, product_ptr, columns, ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program computes the weighted product p of one slot."""
    slot = tl.program_id(0)
    row = tl.load(row_ptr + slot).to(tl.int64)
    weight = tl.load(weight_ptr + slot)
    for step in range(tl.cdiv(columns, TILE)):
        column = tl.arange(0, TILE) + step * TILE
        mask = column < columns
        gate, up = _load_gate_and_up(gate_up_ptr, bias_ptr, index_ptr, slot, row, column, columns, BIAS)
        activated, linear, _, _ = expert_glu(gate, up, ACTIVATION)
        product = weight * activated * linear
        tl.store(product_ptr + row * columns + column, product.to(product_ptr.dtype.element_ty), mask)


@kernel()
def _product_backward_kernel(
    dproduct_ptr, gate_up_ptr, weight_ptr, row_ptr, bias_ptr, index_ptr, dgate_up_ptr, dweight_ptr, product_ptr,
    columns, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, INPUT_GRAD: tl.constexpr, WEIGHT_GRAD: tl.constexpr,
    EMIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program handles one slot: INPUT_GRAD: dgate and dup; WEIGHT_GRAD: dweight; EMIT: the weighted product p."""
    slot = tl.program_id(0)
    row = tl.load(row_ptr + slot).to(tl.int64)
    weight = tl.load(weight_ptr + slot)
    dweight = tl.zeros([TILE], tl.float32)
    for step in range(tl.cdiv(columns, TILE)):
        column = tl.arange(0, TILE) + step * TILE
        mask = column < columns
        dgate_ptr = dgate_up_ptr + row * (2 * columns) + column
        gate, up = _load_gate_and_up(gate_up_ptr, bias_ptr, index_ptr, slot, row, column, columns, BIAS)
        dproduct = tl.load(dproduct_ptr + row * columns + column, mask, other=0.0).to(tl.float32)
        activated, linear, slope, linear_slope = expert_glu(gate, up, ACTIVATION)
        dweight += dproduct * activated * linear
        if INPUT_GRAD:
            dgate, dup = weight * dproduct * linear * slope, weight * dproduct * activated * linear_slope
            tl.store(dgate_ptr, dgate.to(dgate_up_ptr.dtype.element_ty), mask)
            tl.store(dgate_ptr + columns, dup.to(dgate_up_ptr.dtype.element_ty), mask)
        if EMIT:
            product = weight * activated * linear
            tl.store(product_ptr + row * columns + column, product.to(product_ptr.dtype.element_ty), mask)
    if WEIGHT_GRAD:
        tl.store(dweight_ptr + slot, tl.sum(dweight, 0))


def _product_tile(columns: int) -> tuple[int, int]:
    """(columns, warps) of one step: the widest power of two without idle lanes, at 16 bytes per lane."""
    tile = max(256, min(1024, columns & -columns))
    return tile, tile // 256


def _launch_product(
    gate_up: Tensor, weight: Tensor, row: Tensor, bias: Tensor | None, index: Tensor | None, activation: str
) -> Tensor:
    product = _fake_product(gate_up, weight, row, bias, index, activation)
    rows, columns = product.shape
    tile, warps = _product_tile(columns)
    if rows:
        gate_up, weight = gate_up.contiguous(), weight.contiguous()
        launch = _product_kernel.bind(ACTIVATION=activation, BIAS=bias is not None, TILE=tile, num_warps=warps)
        launch(rows, gate_up, weight, row, *_bias_and_index(bias, index, gate_up, row), product, columns)
    return product


def _bias_and_index(bias: Tensor | None, index: Tensor | None, gate_up: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """The two as a kernel takes them; without a bias, gate_up and row in their place, which it does not read."""
    if bias is None or index is None:
        return gate_up, row
    return bias.contiguous(), index.contiguous()


def _launch_product_backward(
    dproduct: Tensor, gate_up: Tensor, weight: Tensor, row: Tensor, bias: Tensor | None, index: Tensor | None,
    activation: str, input_grad: bool, weight_grad: bool, emit: bool, *, inplace: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """inplace: dgate_up overwrites gate_up and product overwrites dproduct. This is safe because each program reads its
    tile before it writes it."""
    dproduct, gate_up, weight = dproduct.contiguous(), gate_up.contiguous(), weight.contiguous()
    if inplace:
        dgate_up, product = gate_up.detach() if input_grad else None, dproduct if emit else None
        dweight = torch.empty_like(weight) if weight_grad else None
    else:
        dgate_up, dweight, product = _fake_product_backward(
            dproduct, gate_up, weight, row, bias, index, activation, input_grad, weight_grad, emit
        )
    rows, columns = dproduct.shape
    tile, warps = _product_tile(columns)
    if rows:
        launch = _product_backward_kernel.bind(
            ACTIVATION=activation, BIAS=bias is not None, INPUT_GRAD=input_grad, WEIGHT_GRAD=weight_grad, EMIT=emit,
            TILE=tile, num_warps=warps,
        )  # fmt: skip
        launch(
            rows, dproduct, gate_up, weight, row, *_bias_and_index(bias, index, gate_up, row),
            gate_up if dgate_up is None else dgate_up, weight if dweight is None else dweight,
            gate_up if product is None else product, columns,
        )  # fmt: skip
    return dgate_up, dweight, product


def _fake_product(gate_up, weight, row, bias, index, activation):
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _fake_product_backward(dproduct, gate_up, weight, row, bias, index, activation, input_grad, weight_grad, emit):
    dgate_up = gate_up.new_empty(*gate_up.shape) if input_grad else None
    dweight = weight.new_empty(*weight.shape) if weight_grad else None
    return dgate_up, dweight, dproduct.new_empty(*dproduct.shape) if emit else None


experts_product = register_op("experts_product", _launch_product, _fake_product)
experts_product_backward = register_op("experts_product_backward", _launch_product_backward, _fake_product_backward)


def product_backward_from_saved(
    dproduct: Tensor, gate_up: Tensor, weight: Tensor, row: Tensor, bias: Tensor | None, index: Tensor | None,
    activation: str, input_grad: bool, weight_grad: bool, emit: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """experts_product_backward for a node that owns gate_up and dproduct: in place if this is their last use."""
    inputs = dproduct, gate_up, weight, row, bias, index, activation, input_grad, weight_grad, emit
    if not is_last_use(gate_up, dproduct):
        return experts_product_backward(*inputs)
    return _launch_product_backward(*inputs, inplace=True)
