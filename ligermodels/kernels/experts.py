"""Mixture of experts (MoE) with gated experts as one autograd node, without capacity limits or dropped tokens:

    y_t = Σ_j w_tj D_e (act(G_e x_t) * U_e x_t), e = index_tj, the j-th of the k experts that the router chose for t

Every (token, expert) pair is a row; rows are sorted by expert (kernels/permute.py) and multiplied by grouped GEMMs. Row
r has a token t, an expert e and a routing weight w:
    forward   p_r = w act(g) * u, [g, u] = GU_e x_t;   y_t = Σ over the token's rows of D_e p_r
    backward  dp_r = D_eᵀ dy_t;  dw_r = Σ dp_r act(g) u;  d[g, u] = w dp_r * ∂(act(g) u);  dD_e = Σ dy_t p_rᵀ;
              dGU_e = Σ d[g, u] x_tᵀ;  dx_t = Σ over the token's rows of GU_eᵀ d[g, u]
The routing weight multiplies the inner activation, which is I wide, instead of the output, which is H wide. Saved for
backward: x, [g, u] and the routing. Not saved: the permuted copy of x, p (recomputed by the activation's backward) and
the experts' outputs per row. Unpermuting gathers and sums rows in fp32 without atomics: bit-identical from run to run.

x [T, H], GU [E, 2 I, H] (gate rows first) and D [E, H, I] in one float dtype; index [T, k] int64 or int32; w [T, k]
fp32. 6 T k H I FLOP forward, twice that backward. No host synchronisation: no size depends on the routing.

Backward needs R (3 I + H) elements beside its inputs and outputs, R = T k: [g, u], overwritten by its gradient; dp,
overwritten by p; the permuted copy of dy, later of x. [g, u] is freed before dD is computed. dD is computed last
because it needs only p, which is narrower; dy is permuted a second time instead of being kept. If the graph is retained
for another backward, [g, u] is not overwritten; the peak is then 6 R I elements, if that is more.
"""

import torch
import triton.language as tl
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from ligermodels.kernels.dispatch import Node, autocast, is_last_use, register_op, runs_kernels, widen
from ligermodels.kernels.gated_activation import activate, check_gate_up, gated_activation_reference
from ligermodels.kernels.grouped_gemm import grouped_weight_gradient
from ligermodels.kernels.grouped_low_rank import (
    NO_GROUPED_LOW_RANK,
    GroupedLowRank,
    group_linear_reference,
    grouped_low_gradient,
    low_rank_grouped_gemm,
    low_rank_grouped_input_gradient,
)
from ligermodels.kernels.launch import kernel
from ligermodels.kernels.permute import permute, sort_by_expert, unpermute


def route(logits: Tensor, k: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """Top-k routing: router logits [T, E] -> (weights [T, k] fp32, expert indices [T, k] int64).

    The weights are softmax probabilities over all experts. `normalize` divides them by their sum, which makes them a
    softmax over the k chosen experts (Mixtral). Plain PyTorch on every device.
    """
    weight, index = torch.softmax(logits, -1, dtype=torch.float32).topk(k)
    return (weight / weight.sum(-1, keepdim=True) if normalize else weight), index


def route_by_sigmoid(
    logits: Tensor, bias: Tensor, k: int, *, groups: int, top_groups: int, normalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Top-k routing within groups: router logits [T, E] fp32 -> (weights [T, k] fp32, expert indices [T, k] int64).

    scores = sigmoid(logits); scores + bias [E] choose: the top_groups of the groups of experts by the sum of their two
    best, then the k best experts in these. The weights are the scores, divided by their sum if `normalize`, times
    `scale`. Neither the choice nor the bias gets a gradient. Plain PyTorch on every device.
    Source: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437.
    """
    scores = logits.sigmoid()
    with torch.no_grad():
        choice = scores + bias
        if top_groups < groups:
            by_group = choice.unflatten(-1, (groups, -1))
            best = by_group.topk(2).values.sum(-1).topk(top_groups).indices
            left_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            choice = by_group.masked_fill(left_out[..., None], -torch.inf).flatten(-2)
        index = choice.topk(k).indices
    weight = scores.gather(-1, index)
    if normalize:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    return weight * scale, index


def experts_reference(
    x: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
    gate_up_update: GroupedLowRank | None = None,
    down_update: GroupedLowRank | None = None,
) -> Tensor:
    def expert_output(rows: Tensor, expert: int) -> Tensor:
        gates = group_linear_reference(rows, gate_up, expert, gate_up_update)
        return group_linear_reference(gated_activation_reference(gates, activation), down, expert, down_update)

    y = torch.zeros_like(widen(x))
    for expert in range(gate_up.shape[0]):
        chosen = expert_index == expert
        if _are_functorch_transforms_active():  # vmap cannot select the rows: their number depends on the data
            out = expert_output(x, expert)
            y = y + widen(out) * torch.where(chosen, expert_weight, 0.0).sum(-1, keepdim=True)
        else:
            token, slot = torch.where(chosen)
            out = expert_output(x[token], expert)
            y = y.index_add(0, token, widen(out) * expert_weight[token, slot, None])
    return y.to(out.dtype)


@kernel()
def _product_kernel(
    gate_up_ptr, weight_ptr, row_ptr, product_ptr, columns, ACTIVATION: tl.constexpr, TILE: tl.constexpr
):
    """One program computes the weighted product p of one slot."""
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
    """One program handles one slot: INPUT_GRAD: dgate and dup; WEIGHT_GRAD: dweight; EMIT: the weighted product p."""
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


def _product_tile(columns: int) -> tuple[int, int]:
    """(columns, warps) of one step: the widest power of two without idle lanes, at 16 bytes per lane."""
    tile = max(256, min(1024, columns & -columns))
    return tile, tile // 256


def _launch_product(gate_up: Tensor, weight: Tensor, row: Tensor, activation: str) -> Tensor:
    product = _fake_product(gate_up, weight, row, activation)
    rows, columns = product.shape
    tile, warps = _product_tile(columns)
    if rows:
        gate_up, weight = gate_up.contiguous(), weight.contiguous()
        launch = _product_kernel.bind(ACTIVATION=activation, TILE=tile, num_warps=warps)
        launch(rows, gate_up, weight, row, product, columns)
    return product


def _launch_product_backward(
    dproduct: Tensor, gate_up: Tensor, weight: Tensor, row: Tensor, activation: str,
    input_grad: bool, weight_grad: bool, emit: bool, inplace: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """inplace: dgate_up overwrites gate_up and product overwrites dproduct. This is safe because each program reads its
    tile before it writes it."""
    dproduct, gate_up, weight = dproduct.contiguous(), gate_up.contiguous(), weight.contiguous()
    if inplace:
        dgate_up, product = gate_up.detach() if input_grad else None, dproduct if emit else None
        dweight = torch.empty_like(weight) if weight_grad else None
    else:
        dgate_up, dweight, product = _fake_product_backward(
            dproduct, gate_up, weight, row, activation, input_grad, weight_grad, emit
        )
    rows, columns = dproduct.shape
    tile, warps = _product_tile(columns)
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


experts_product = register_op(
    "experts_product(Tensor gate_up, Tensor weight, Tensor row, str activation) -> Tensor",
    _launch_product,
    _fake_product,
)
experts_product_backward = register_op(
    "experts_product_backward(Tensor dproduct, Tensor gate_up, Tensor weight, Tensor row, str activation,"
    " bool input_grad, bool weight_grad, bool emit) -> (Tensor dgate_up, Tensor dweight, Tensor product)",
    _launch_product_backward,
    _fake_product_backward,
)


def product_backward_from_saved(
    dproduct: Tensor, gate_up: Tensor, weight: Tensor, row: Tensor, activation: str,
    input_grad: bool, weight_grad: bool, emit: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """experts_product_backward for a node that owns gate_up and dproduct: in place if this is their last use."""
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
        gate_up, gate_up_low = low_rank_grouped_gemm(
            permute(x, row), gate_up_weight, offsets, gate_up_a, gate_up_b, gate_up_scale
        )
        product = experts_product(gate_up, weight, row, activation)
        rows, down_low = low_rank_grouped_gemm(product, down_weight, offsets, down_a, down_b, down_scale)
        ctx.save_for_backward(
            x, gate_up, weight, row, offsets, gate_up_weight, gate_up_a, gate_up_b, gate_up_low, down_weight, down_a,
            down_b, down_low,
        )  # fmt: skip
        ctx.scales = gate_up_scale, down_scale
        ctx.activation = activation
        return unpermute(rows, row)

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
            drows = permute(dy, row)
            if reads_dproduct or needs_down_a:
                ddown_low = grouped_low_gradient(drows, offsets, down_b, down_scale)
            if reads_dproduct:
                dproduct = low_rank_grouped_input_gradient(drows, down_weight, offsets, ddown_low, down_a)
            ddown_b = grouped_weight_gradient(drows, down_low, offsets) if needs_down_b else None
            del drows
        if reads_dproduct:
            dgate_up, dweight, product = product_backward_from_saved(
                dproduct, gate_up, weight, row, ctx.activation, reads_dgate_up, needs_weight, reads_product
            )
        elif reads_product:
            product = experts_product(gate_up, weight, row, ctx.activation)
        del gate_up, dproduct
        free_saved_tensors(ctx)
        if reads_dgate_up:
            if needs_x or needs_gate_up_a:
                dgate_up_low = grouped_low_gradient(dgate_up, offsets, gate_up_b, gate_up_scale)
            if needs_x:
                dx = unpermute(
                    low_rank_grouped_input_gradient(dgate_up, gate_up_weight, offsets, dgate_up_low, gate_up_a), row
                )
            rows = permute(x, row) if reads_x else None
            dgate_up_weight = grouped_weight_gradient(dgate_up, rows, offsets) if needs_gate_up else None
            dgate_up_a = grouped_weight_gradient(dgate_up_low, rows, offsets) if needs_gate_up_a else None
            dgate_up_b = grouped_weight_gradient(dgate_up, gate_up_low, offsets) if needs_gate_up_b else None
            del rows
        del dgate_up
        ddown_a = grouped_weight_gradient(ddown_low, product, offsets) if needs_down_a else None
        if needs_down:
            ddown_weight = grouped_weight_gradient(permute(dy, row), product, offsets)
        return (
            dx, None, dweight if needs_weight else None, dgate_up_weight, dgate_up_a, dgate_up_b, None, ddown_weight,
            ddown_a, ddown_b, None, None,
        )  # fmt: skip


def free_saved_tensors(ctx) -> None:
    """Frees the saved tensors of a node during its backward, unless the graph is retained. Autograd itself would free
    them only after backward returned."""
    if not torch.compiler.is_compiling():  # a compiled graph frees each tensor after its last use anyway
        ctx.maybe_clear_saved_tensors()


def check_expert_inputs(x: Tensor, expert_index: Tensor, expert_weight: Tensor, gate_up: Tensor, down: Tensor) -> None:
    num_experts, width, hidden = gate_up.shape
    routed = expert_index.shape[0] == x.shape[0] and expert_weight.shape == expert_index.shape
    if not routed or x.shape[1] != hidden or down.shape != (num_experts, hidden, width // 2):
        found = ", ".join(str(list(y.shape)) for y in (x, expert_index, expert_weight, gate_up, down))
        raise ValueError(
            f"experts: x, expert_index, expert_weight, gate_up and down have shapes {found};"
            " expected [T, H], [T, k], [T, k], [E, 2 I, H], [E, H, I]"
        )
    if expert_index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"experts: expert_index is {expert_index.dtype}; it must be torch.int64 or torch.int32")


def experts(
    x: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
    gate_up_update: GroupedLowRank | None = None,
    down_update: GroupedLowRank | None = None,
) -> Tensor:
    """Sum over each token's k experts e of expert_weight * down_e (activation(gate_e x) * up_e x).

    x [T, H] float, expert_index [T, k] int64 or int32 in [0, E), expert_weight [T, k] fp32, gate_up [E, 2 I, H] with
    the gate rows first, down [E, H, I], activation "silu", "gelu_tanh" or "gelu", gate_up_update and down_update:
    low-rank updates of the two projections -> [T, H] in x's dtype.
    An expert without tokens gets a zero gradient. Frozen arguments cost no gradient.
    Raises ValueError for any other activation, an odd width of gate_up, shapes that disagree, and an expert_index of
    another dtype.
    """
    check_gate_up(gate_up.mT, activation)
    check_expert_inputs(x, expert_index, expert_weight, gate_up, down)
    x, gate_up, down, gate_up_update, down_update = autocast(x, gate_up, down, gate_up_update, down_update)
    if not runs_kernels(x):
        return experts_reference(x, expert_index, expert_weight, gate_up, down, activation, gate_up_update, down_update)
    return _Experts.apply(
        x, expert_index, expert_weight, gate_up, *(gate_up_update or NO_GROUPED_LOW_RANK),
        down, *(down_update or NO_GROUPED_LOW_RANK), activation,
    )  # fmt: skip
