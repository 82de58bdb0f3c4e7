"""A layer of gated experts as one autograd node: y_t = Σ_j w_tj D_e (act(G_e x_t) * U_e x_t), e token t's j-th expert.

Each token's k slots are rows of their own, sorted by expert: row r has a token t, an expert e and a weight w.
    forward   p_r = w act(g) * u, [g, u] = GU_e x_t;   y_t = Σ over the token's rows of D_e p_r
    backward  dp_r = D_eᵀ dy_t;  dw_r = Σ dp_r act(g) u;  d[g, u] = w dp_r * ∂(act(g) u);  dD_e = Σ dy_t p_rᵀ;
              dGU_e = Σ d[g, u] x_tᵀ;  dx_t = Σ over the token's rows of GU_eᵀ d[g, u]
The weight multiplies the inner activation, where a row is I wide, not the output, where it is H wide. Kept for
backward: x, [g, u] and the routing; the sorted copy of x, p (emitted again by the activation's backward) and the rows'
outputs are not. Rows go back to tokens by a gather and a sum in fp32: no atomics, equal bits from run to run.

x [T, H], GU [E, 2 I, H] (the gate's rows first) and D [E, H, I] in one float dtype; index [T, k] int64; w [T, k] fp32.
6 T k H I FLOP forward, twice that backward. Nothing here waits for the device: no size depends on the routing.

Backward needs R (3 I + H) elements beside its inputs and outputs, R = T k: [g, u], whose memory its gradient takes, dp,
whose memory p takes, and the sorted copy of dy, then of x. [g, u] goes before dD is computed. dD comes last because it
needs the narrower p, and dy is sorted twice rather than kept. Of a graph that is kept for another backward [g, u] is
not written over: 6 R I then, where that is more.
"""

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import Node, autocast, is_last_use, register, runs_kernels, widen
from ligermodels.kernels.gated_activation import activate, check_gated, gated_activation_reference
from ligermodels.kernels.grouped_gemm import grouped_weight_gradient
from ligermodels.kernels.grouped_low_rank import (
    NO_UPDATE,
    GroupedLowRank,
    group_reference,
    grouped_backward,
    grouped_forward,
    grouped_low_gradient,
)
from ligermodels.kernels.launch import kernel
from ligermodels.kernels.permute import gather_sum, sort_by_expert, spread


def route(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The k likeliest experts of each token: logits [T, E] -> (weights [T, k] fp32, indices [T, k] int64).

    The weights are probabilities under a softmax over all experts; with `normalize` divided by their sum, which makes
    them a softmax over the k.
    """
    weight, index = torch.softmax(logits, -1, dtype=torch.float32).topk(k)
    return (weight / weight.sum(-1, keepdim=True) if normalize else weight), index


def experts_reference(
    x: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_update: GroupedLowRank | None = None,
    down_update: GroupedLowRank | None = None,
) -> Tensor:
    y = torch.zeros_like(widen(x))
    for expert in range(gate_up.shape[0]):
        token, slot = torch.where(expert_index == expert)
        product = gated_activation_reference(group_reference(x[token], gate_up, expert, gate_up_update), activation)
        out = group_reference(product, down, expert, down_update)
        y = y.index_add(0, token, widen(out) * expert_weight[token, slot, None])
    return y.to(out.dtype)


@kernel()
def _product_kernel(
    gate_up_ptr, weight_ptr, row_ptr, product_ptr, columns, ACTIVATION: tl.constexpr, TILE: tl.constexpr
):
    """One program walks over one slot's weighted product."""
    slot = tl.program_id(0)
    row = tl.load(row_ptr + slot).to(tl.int64)
    weight = tl.load(weight_ptr + slot)
    for step in range(tl.cdiv(columns, TILE)):
        column = tl.arange(0, TILE) + step * TILE
        mask = column < columns
        gate_ptr = gate_up_ptr + row * (2 * columns) + column
        gate = tl.load(gate_ptr, mask, other=0.0).to(tl.float32)
        up = tl.load(gate_ptr + columns, mask, other=0.0).to(tl.float32)
        activated, _ = activate(gate, ACTIVATION)
        product = weight * activated * up
        tl.store(product_ptr + row * columns + column, product.to(product_ptr.dtype.element_ty), mask)


@kernel()
def _product_backward_kernel(
    dproduct_ptr, gate_up_ptr, weight_ptr, row_ptr, dgate_up_ptr, dweight_ptr, product_ptr, columns,
    ACTIVATION: tl.constexpr, INPUT_GRAD: tl.constexpr, WEIGHT_GRAD: tl.constexpr, EMIT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program walks over what is asked for of a slot: its dgate and dup, its dweight, its weighted product."""
    slot = tl.program_id(0)
    row = tl.load(row_ptr + slot).to(tl.int64)
    weight = tl.load(weight_ptr + slot)
    dweight = tl.zeros([TILE], tl.float32)
    for step in range(tl.cdiv(columns, TILE)):
        column = tl.arange(0, TILE) + step * TILE
        mask = column < columns
        gate_ptr = gate_up_ptr + row * (2 * columns) + column
        dgate_ptr = dgate_up_ptr + row * (2 * columns) + column
        gate = tl.load(gate_ptr, mask, other=0.0).to(tl.float32)
        up = tl.load(gate_ptr + columns, mask, other=0.0).to(tl.float32)
        dproduct = tl.load(dproduct_ptr + row * columns + column, mask, other=0.0).to(tl.float32)
        activated, slope = activate(gate, ACTIVATION)
        dweight += dproduct * activated * up
        if INPUT_GRAD:
            tl.store(dgate_ptr, (weight * dproduct * up * slope).to(dgate_up_ptr.dtype.element_ty), mask)
            tl.store(dgate_ptr + columns, (weight * dproduct * activated).to(dgate_up_ptr.dtype.element_ty), mask)
        if EMIT:
            product = weight * activated * up
            tl.store(product_ptr + row * columns + column, product.to(product_ptr.dtype.element_ty), mask)
    if WEIGHT_GRAD:
        tl.store(dweight_ptr + slot, tl.sum(dweight, 0))


def tile_of(columns: int) -> tuple[int, int]:
    """Columns and warps of one step: the widest power of two that leaves no lane idle, 16 bytes a lane."""
    tile = max(256, min(1024, columns & -columns))
    return tile, tile // 256


def _launch_product(gate_up: Tensor, weight: Tensor, row: Tensor, activation: str) -> Tensor:
    product = _fake_product(gate_up, weight, row, activation)
    rows, columns = product.shape
    tile, warps = tile_of(columns)
    if rows:
        gate_up, weight = gate_up.contiguous(), weight.contiguous()
        launch = _product_kernel.bind(ACTIVATION=activation, TILE=tile, num_warps=warps)
        launch(rows, gate_up, weight, row, product, columns)
    return product


def _launch_product_backward(
    dproduct: Tensor, gate_up: Tensor, weight: Tensor, row: Tensor, activation: str,
    input_grad: bool, weight_grad: bool, emit: bool, inplace: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """inplace: dgate_up over gate_up and product over dproduct: a program reads its tile before it writes."""
    dproduct, gate_up, weight = dproduct.contiguous(), gate_up.contiguous(), weight.contiguous()
    if inplace:
        dgate_up, product = gate_up.detach() if input_grad else None, dproduct if emit else None
        dweight = torch.empty_like(weight) if weight_grad else None
    else:
        dgate_up, dweight, product = _fake_product_backward(
            dproduct, gate_up, weight, row, activation, input_grad, weight_grad, emit
        )
    rows, columns = dproduct.shape
    tile, warps = tile_of(columns)
    if rows:
        launch = _product_backward_kernel.bind(
            ACTIVATION=activation, INPUT_GRAD=input_grad, WEIGHT_GRAD=weight_grad, EMIT=emit, TILE=tile, num_warps=warps
        )
        launch(
            rows, dproduct, gate_up, weight, row, gate_up if dgate_up is None else dgate_up,
            weight if dweight is None else dweight, gate_up if product is None else product, columns,
        )  # fmt: skip
    return dgate_up, dweight, product


def _fake_product(gate_up, weight, row, activation):
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _fake_product_backward(dproduct, gate_up, weight, row, activation, input_grad, weight_grad, emit):
    dgate_up = gate_up.new_empty(*gate_up.shape) if input_grad else None
    dweight = weight.new_empty(*weight.shape) if weight_grad else None
    return dgate_up, dweight, dproduct.new_empty(*dproduct.shape) if emit else None


experts_product = register(
    "experts_product(Tensor gate_up, Tensor weight, Tensor row, str activation) -> Tensor",
    _launch_product,
    _fake_product,
)
experts_product_backward = register(
    "experts_product_backward(Tensor dproduct, Tensor gate_up, Tensor weight, Tensor row, str activation,"
    " bool input_grad, bool weight_grad, bool emit) -> (Tensor dgate_up, Tensor dweight, Tensor product)",
    _launch_product_backward,
    _fake_product_backward,
)


def product_backward_of_saved(
    dproduct: Tensor, gate_up: Tensor, weight: Tensor, row: Tensor, activation: str,
    input_grad: bool, weight_grad: bool, emit: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """As experts_product_backward, of a node's own gate_up and dproduct: in place, where this is their last use."""
    inputs = dproduct, gate_up, weight, row, activation, input_grad, weight_grad, emit
    if not is_last_use(gate_up, dproduct):
        return experts_product_backward(*inputs)
    return _launch_product_backward(*inputs, inplace=True)


class _Experts(Node):
    @staticmethod
    def forward(
        ctx, x, expert_index, weight, gate_up_weight, gate_up_a, gate_up_b, gate_up_scale, down_weight, down_a, down_b,
        down_scale, activation,
    ):  # fmt: skip
        row, offsets = sort_by_expert(expert_index, gate_up_weight.shape[0])
        gate_up, gate_up_low = grouped_forward(
            spread(x, row), gate_up_weight, offsets, gate_up_a, gate_up_b, gate_up_scale
        )
        product = experts_product(gate_up, weight, row, activation)
        rows, down_low = grouped_forward(product, down_weight, offsets, down_a, down_b, down_scale)
        ctx.save_for_backward(
            x, gate_up, weight, row, offsets, gate_up_weight, gate_up_a, gate_up_b, gate_up_low, down_weight, down_a,
            down_b, down_low,
        )  # fmt: skip
        ctx.scales = gate_up_scale, down_scale
        ctx.activation = activation
        return gather_sum(rows, row)

    @staticmethod
    def backward(ctx, dy):
        (
            x, gate_up, weight, row, offsets, gate_up_weight, gate_up_a, gate_up_b, gate_up_low, down_weight, down_a,
            down_b, down_low,
        ) = ctx.saved_tensors  # fmt: skip
        gate_up_scale, down_scale = ctx.scales
        (
            needs_x, _, needs_weight, needs_gate_up, needs_gate_up_a, needs_gate_up_b, _, needs_down, needs_down_a,
            needs_down_b, *_,
        ) = ctx.needs_input_grad  # fmt: skip
        reads_product, reads_x = needs_down or needs_down_a, needs_gate_up or needs_gate_up_a
        reads_dgate_up = needs_x or reads_x or needs_gate_up_b
        reads_dproduct = reads_dgate_up or needs_weight
        dx = dweight = dgate_up_weight = dgate_up_a = dgate_up_b = ddown_weight = ddown_a = ddown_b = None
        dgate_up = dproduct = product = ddown_low = dgate_up_low = None
        if reads_dproduct or needs_down_a or needs_down_b:
            drows = spread(dy, row)
            if reads_dproduct or needs_down_a:
                ddown_low = grouped_low_gradient(drows, offsets, down_b, down_scale)
            if reads_dproduct:
                dproduct = grouped_backward(drows, down_weight, offsets, ddown_low, down_a)
            ddown_b = grouped_weight_gradient(drows, down_low, offsets) if needs_down_b else None
            del drows
        if reads_dproduct:
            dgate_up, dweight, product = product_backward_of_saved(
                dproduct, gate_up, weight, row, ctx.activation, reads_dgate_up, needs_weight, reads_product
            )
        elif reads_product:
            product = experts_product(gate_up, weight, row, ctx.activation)
        del gate_up, dproduct
        free_saved(ctx)
        if reads_dgate_up:
            if needs_x or needs_gate_up_a:
                dgate_up_low = grouped_low_gradient(dgate_up, offsets, gate_up_b, gate_up_scale)
            if needs_x:
                dx = gather_sum(grouped_backward(dgate_up, gate_up_weight, offsets, dgate_up_low, gate_up_a), row)
            rows = spread(x, row) if reads_x else None
            dgate_up_weight = grouped_weight_gradient(dgate_up, rows, offsets) if needs_gate_up else None
            dgate_up_a = grouped_weight_gradient(dgate_up_low, rows, offsets) if needs_gate_up_a else None
            dgate_up_b = grouped_weight_gradient(dgate_up, gate_up_low, offsets) if needs_gate_up_b else None
            del rows
        del dgate_up
        ddown_a = grouped_weight_gradient(ddown_low, product, offsets) if needs_down_a else None
        if needs_down:
            ddown_weight = grouped_weight_gradient(spread(dy, row), product, offsets)
        return (
            dx, None, dweight if needs_weight else None, dgate_up_weight, dgate_up_a, dgate_up_b, None, ddown_weight,
            ddown_a, ddown_b, None, None,
        )  # fmt: skip


def free_saved(ctx) -> None:
    """Lets go of what a node saved, unless its graph is retained; autograd would once its backward has returned."""
    if not torch.compiler.is_compiling():  # a compiled graph frees each tensor after its last use
        ctx.maybe_clear_saved_tensors()


def check_shapes(x: Tensor, expert_index: Tensor, expert_weight: Tensor, gate_up: Tensor, down: Tensor) -> None:
    num_experts, width, hidden = gate_up.shape
    routed = expert_index.shape[0] == x.shape[0] and expert_weight.shape == expert_index.shape
    if not routed or x.shape[1] != hidden or down.shape != (num_experts, hidden, width // 2):
        found = ", ".join(str(list(y.shape)) for y in (x, expert_index, expert_weight, gate_up, down))
        raise ValueError(
            f"experts: x, expert_index, expert_weight, gate_up, down are {found};"
            " needed [T, H], [T, k], [T, k], [E, 2 I, H], [E, H, I]"
        )


def experts(
    x: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_update: GroupedLowRank | None = None,
    down_update: GroupedLowRank | None = None,
) -> Tensor:
    """Σ over each token's experts e of expert_weight * down_e (activation(gate_e x) * up_e x).

    x [T, H] float, expert_index [T, k] int64 in 0 … E - 1, expert_weight [T, k] fp32, gate_up [E, 2 I, H], the gate's
    rows first, down [E, H, I], activation "silu", "gelu_tanh" or "gelu", low-rank updates of the two projections ->
    [T, H] in x's dtype. An expert without tokens gets a zero gradient; frozen arguments cost none. Raises ValueError
    for any other activation, an odd 2 I and where the shapes disagree.
    """
    check_gated(gate_up.mT, activation)
    check_shapes(x, expert_index, expert_weight, gate_up, down)
    x, gate_up, down, gate_up_update, down_update = autocast(x, gate_up, down, gate_up_update, down_update)
    if not runs_kernels(x):
        return experts_reference(x, expert_index, expert_weight, gate_up, down, activation, gate_up_update, down_update)
    return _Experts.apply(
        x, expert_index, expert_weight, gate_up, *(gate_up_update or NO_UPDATE), down, *(down_update or NO_UPDATE),
        activation,
    )  # fmt: skip
