"""Mixture of experts (MoE) with gated experts as one autograd node, without capacity limits or dropped tokens:

    y_t = Σ_j w_tj (D_e (act(G_e x_t) * U_e x_t) + b_e), e = index_tj, the j-th of the k experts chosen for t

Every (token, expert) pair is a row; rows are sorted by expert (permute.py) and multiplied by grouped GEMMs. Row
r has a token t, an expert e and a routing weight w:
    forward   p_r = w act(g) * u, [g, u] = GU_e x_t + c_e;   y_t = Σ over the token's rows of D_e p_r + w b_e
    backward  dp_r = D_eᵀ dy_t;  dw_r = Σ dp_r act(g) u + dy_t · b_e;  d[g, u] = w dp_r * ∂(act(g) u);
              dD_e = Σ dy_t p_rᵀ;  dGU_e = Σ d[g, u] x_tᵀ;  dx_t = Σ over the token's rows of GU_eᵀ d[g, u];
              dc_e = Σ d[g, u];  db_e = Σ w dy_t
GU and D may be quantised and frozen: each is dequantised before its product, and again in backward, which keeps its
bytes alone. The biases b and c are optional. They cost no pass forward: c is added where [g, u] is read, b where rows
are summed (expert_bias.py). expert_product.py computes p and its gradients, and lists the activations.
The routing weight multiplies the inner activation, which is I wide, instead of the output, which is H wide. Saved for
backward: x, [g, u] and the routing. Not saved: the permuted copy of x, p (recomputed by the activation's backward) and
the experts' outputs per row. Unpermuting gathers and sums rows in fp32 without atomics: bit-identical from run to run.

x [T, H], GU [E, 2 I, H] (gate rows first), D [E, H, I], c [E, 2 I] and b [E, H] in one float dtype; index [T, k]
int64 or int32; w [T, k] fp32. 6 T k H I FLOP forward, twice that backward. No host synchronisation: no size depends on
the routing.

Backward needs R (3 I + H) elements beside its inputs and outputs, R = T k: [g, u], overwritten by its gradient; dp,
overwritten by p; the permuted copy of dy, later of x. [g, u] is freed before dD is computed. dD is computed last
because it needs only p, which is narrower; dy is permuted a second time instead of being kept. If the graph is retained
for another backward, [g, u] is not overwritten; the peak is then 6 R I elements, if that is more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from ligermodels.kernels.dispatch import (
    INDICES,
    Node,
    autocast,
    check_dtypes,
    check_floats,
    check_one_of,
    check_shape,
    runs_kernels,
    shape_of,
    widen,
)
from ligermodels.kernels.moe.expert_bias import bias_dots, grouped_row_sums, sort_weights, unpermute_with_bias
from ligermodels.kernels.moe.expert_product import (
    EXPERT_ACTIVATIONS,
    expert_glu_reference,
    experts_product,
    product_backward_from_saved,
)
from ligermodels.kernels.moe.grouped_gemm import (
    TENSORS,
    GroupedLowRank,
    Projection,
    group_linear_reference,
    grouped_low_gradient,
    grouped_weight_gradient,
    low_rank_grouped_gemm,
    low_rank_grouped_input_gradient,
)
from ligermodels.kernels.moe.permute import permute, sort_by_expert, unpermute
from ligermodels.kernels.quant.quantised_weight import Weight, dense, operand


def route(logits: Tensor, k: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """Top-k routing: router logits [T, E] -> (weights [T, k] fp32, expert indices [T, k] int64).

    The weights are softmax probabilities over all experts. `normalize` divides them by their sum, which makes them a
    softmax over the k chosen experts (Mixtral). Plain PyTorch on every device.
    """
    experts = shape_of("route", "logits", logits, "T, E")[1]
    check_floats("route", logits=logits)
    if not 0 < k <= experts:
        raise ValueError(f"route: k is {k}; logits are of {experts} experts")
    weight, index = torch.softmax(logits, -1, dtype=torch.float32).topk(k)
    return (weight / weight.sum(-1, keepdim=True) if normalize else weight), index


def route_by_sigmoid(
    logits: Tensor, bias: Tensor | None, k: int, *, groups: int, top_groups: int, normalize: bool, scale: float,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Top-k routing within groups: router logits [T, E] fp32 -> (weights [T, k] fp32, expert indices [T, k] int64).

    scores = sigmoid(logits); scores + bias [E], if there is one, choose: the top_groups of the groups of experts by the
    sum of their two best, then the k best experts in these. The weights are the scores, divided by their sum + eps if
    `normalize`, times `scale`. Neither the choice nor the bias gets a gradient. Plain PyTorch on every device.
    Source: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437.
    """
    scores = logits.sigmoid()
    with torch.no_grad():
        choice = scores if bias is None else scores + bias
        if top_groups < groups:
            by_group = choice.unflatten(-1, (groups, -1))
            best = by_group.topk(2).values.sum(-1).topk(top_groups).indices
            left_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            choice = by_group.masked_fill(left_out[..., None], -torch.inf).flatten(-2)
        index = choice.topk(k).indices
    weight = scores.gather(-1, index)
    if normalize:
        weight = weight / (weight.sum(-1, keepdim=True) + eps)
    return weight * scale, index


def experts_reference(
    x: Tensor, expert_index: Tensor, expert_weight: Tensor, gate_up: Weight, down: Weight, activation: str = "silu",
    gate_up_update: GroupedLowRank | None = None, down_update: GroupedLowRank | None = None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    gate_up, down = dense(*operand(gate_up)), dense(*operand(down))

    def expert_output(rows: Tensor, expert: int) -> Tensor:
        gates = group_linear_reference(rows, gate_up, expert, gate_up_update, gate_up_bias)
        product = expert_glu_reference(gates, activation)
        return group_linear_reference(product, down, expert, down_update, down_bias)

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


class _Experts(Node):
    """projections: the fields of the first, whose result is gate_up, and of the second, which is down."""

    @staticmethod
    def forward(ctx, x, expert_index, weight, num_experts, activation, *projections):
        first, second = _pair(projections)
        row, offsets = sort_by_expert(expert_index, num_experts)
        gate_up, first_low = low_rank_grouped_gemm(permute(x, row), offsets, first)
        index = None if first.bias is None and second.bias is None else expert_index
        product = experts_product(gate_up, weight, row, first.bias, index, activation)
        rows, second_low = low_rank_grouped_gemm(product, offsets, second)
        ctx.save_for_backward(
            x, gate_up, weight, row, offsets, index, first_low, second_low, *first[:TENSORS], *second[:TENSORS]
        )
        ctx.activation, ctx.constants = activation, (first[TENSORS:], second[TENSORS:])
        if second.bias is None:
            return unpermute(rows, row)
        return unpermute_with_bias(rows, row, expert_index, weight, second.bias)

    @staticmethod
    def backward(ctx, dy):
        x, gate_up, weight, row, offsets, index, first_low, second_low, *tensors = ctx.saved_tensors
        first = Projection(*tensors[:TENSORS], *ctx.constants[0])
        second = Projection(*tensors[TENSORS:], *ctx.constants[1])
        needs_x, _, needs_weight, _, _, *needs = ctx.needs_input_grad
        needs_first, needs_second = _pair(needs)
        reads_product, reads_x = needs_second.weight or needs_second.a, needs_first.weight or needs_first.a
        reads_dgate_up = needs_x or reads_x or needs_first.b or needs_first.bias
        reads_dproduct = reads_dgate_up or needs_weight
        dx = dweight = dfirst_weight = dfirst_a = dfirst_b = dfirst_bias = None
        dsecond_weight = dsecond_a = dsecond_b = dsecond_bias = None
        dgate_up = dproduct = product = dsecond_low = dfirst_low = None
        if reads_dproduct or needs_second.a or needs_second.b or needs_second.bias:
            drows = permute(dy, row)
            if reads_dproduct or needs_second.a:
                dsecond_low = grouped_low_gradient(drows, offsets, second)
            if reads_dproduct:
                dproduct = low_rank_grouped_input_gradient(drows, offsets, dsecond_low, second)
            dsecond_b = grouped_weight_gradient(drows, second_low, offsets) if needs_second.b else None
            dsecond_bias = grouped_row_sums(drows, offsets, sort_weights(weight, row)) if needs_second.bias else None
            del drows
        if reads_dproduct:
            dgate_up, dweight, product = product_backward_from_saved(
                dproduct, gate_up, weight, row, first.bias, index, ctx.activation, reads_dgate_up, needs_weight,
                reads_product,
            )  # fmt: skip
        elif reads_product:
            product = experts_product(gate_up, weight, row, first.bias, index, ctx.activation)
        if needs_weight and second.bias is not None:
            dweight += bias_dots(dy, index, second.bias)
        del gate_up, dproduct
        free_saved_tensors(ctx)
        if reads_dgate_up:
            dfirst_bias = grouped_row_sums(dgate_up, offsets, None) if needs_first.bias else None
            if needs_x or needs_first.a:
                dfirst_low = grouped_low_gradient(dgate_up, offsets, first)
            if needs_x:
                dx_rows = low_rank_grouped_input_gradient(dgate_up, offsets, dfirst_low, first)
                dx = unpermute(dx_rows, row)
                del dx_rows
            rows = permute(x, row) if reads_x else None
            dfirst_weight = grouped_weight_gradient(dgate_up, rows, offsets) if needs_first.weight else None
            dfirst_a = grouped_weight_gradient(dfirst_low, rows, offsets) if needs_first.a else None
            dfirst_b = grouped_weight_gradient(dgate_up, first_low, offsets) if needs_first.b else None
            del rows
        del dgate_up
        dsecond_a = grouped_weight_gradient(dsecond_low, product, offsets) if needs_second.a else None
        if needs_second.weight:
            dsecond_weight = grouped_weight_gradient(permute(dy, row), product, offsets)
        return (
            dx, None, dweight if needs_weight else None, None, None,
            dfirst_weight, dfirst_a, dfirst_b, dfirst_bias, None, None,
            dsecond_weight, dsecond_a, dsecond_b, dsecond_bias, None, None,
        )  # fmt: skip


def _pair(fields: Sequence[Any]) -> tuple[Projection, Projection]:
    """Both projections, from what was given or is known of each of their fields."""
    half = len(fields) // 2
    return Projection(*fields[:half]), Projection(*fields[half:])


def free_saved_tensors(ctx) -> None:
    """Frees the saved tensors of a node during its backward, unless the graph is retained. Autograd itself would free
    them only after backward returned."""
    if not torch.compiler.is_compiling():  # a compiled graph frees each tensor after its last use anyway
        ctx.maybe_clear_saved_tensors()


def check_expert_inputs(
    x: Tensor, expert_index: Tensor, expert_weight: Tensor, gate_up: Weight, down: Weight, activation: str,
    gate_up_update: GroupedLowRank | None, down_update: GroupedLowRank | None, gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:  # fmt: skip
    """Raises ValueError for what `experts` cannot take, on a CPU and a GPU alike: kernels would read out of bounds."""
    op = "experts"
    num_experts, width, hidden = shape_of(op, "gate_up", gate_up, "E, 2 I, H")
    if activation not in EXPERT_ACTIVATIONS:
        supported = ", ".join(EXPERT_ACTIVATIONS)
        raise ValueError(f"{op}: unknown activation {activation!r}; supported: {supported}")
    if width % 2:
        raise ValueError(f"{op}: gate_up has {width} rows per expert; an even number is required")
    tokens, chosen = shape_of(op, "expert_index", expert_index, "T, k")
    check_shape(op, "x", x, tokens, hidden)
    check_shape(op, "expert_weight", expert_weight, tokens, chosen)
    check_shape(op, "down", down, num_experts, hidden, width // 2)
    check_shape(op, "gate_up_bias", gate_up_bias, num_experts, width)
    check_shape(op, "down_bias", down_bias, num_experts, hidden)
    for name, update, weight in (("gate_up_update", gate_up_update, gate_up), ("down_update", down_update, down)):
        if update:
            rank = shape_of(op, f"{name}.b", update.b)[-1]
            check_shape(op, f"{name}.a", update.a, num_experts, rank, weight.shape[2])
            check_shape(op, f"{name}.b", update.b, *weight.shape[:2], rank)
    check_floats(op, expert_weight=expert_weight)
    check_one_of(op, INDICES, expert_index=expert_index)


def experts(
    x: Tensor, expert_index: Tensor, expert_weight: Tensor, gate_up: Weight, down: Weight, activation: str = "silu",
    gate_up_update: GroupedLowRank | None = None, down_update: GroupedLowRank | None = None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sum over each token's k experts e of expert_weight * (down_e (activation(gate_e x) * up_e x) + bias_e).

    x [T, H] float, expert_index [T, k] int64 or int32 in [0, E), expert_weight [T, k] fp32, gate_up [E, 2 I, H] with
    the gate rows first, down [E, H, I], both tensors or quantised, activation "silu", "gelu_tanh", "gelu" or
    "clamped_silu" (gpt-oss's, see expert_product.py), gate_up_update and down_update: low-rank updates of the two
    projections, gate_up_bias [E, 2 I] and down_bias [E, H] -> [T, H] in x's dtype.
    An expert without tokens gets a zero gradient. Frozen arguments cost no gradient.
    Raises ValueError for any other activation, an odd width of gate_up, shapes or dtypes that disagree, and an
    expert_index of another dtype.
    """
    check_expert_inputs(
        x, expert_index, expert_weight, gate_up, down, activation, gate_up_update, down_update, gate_up_bias, down_bias
    )
    x, gate_up, down, gate_up_update, down_update, gate_up_bias, down_bias = autocast(
        x, gate_up, down, gate_up_update, down_update, gate_up_bias, down_bias
    )
    updates = {
        f"{name}.{field}": getattr(update, field)
        for name, update in (("gate_up_update", gate_up_update), ("down_update", down_update)) if update
        for field in ("a", "b")
    }  # fmt: skip
    check_dtypes("experts", x=x, gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias, **updates)
    if not runs_kernels(x):
        return experts_reference(
            x, expert_index, expert_weight, gate_up, down, activation, gate_up_update, down_update, gate_up_bias,
            down_bias,
        )  # fmt: skip
    return _Experts.apply(
        x, expert_index, expert_weight, gate_up.shape[0], activation,
        *Projection.of(gate_up, gate_up_update, gate_up_bias), *Projection.of(down, down_update, down_bias),
    )  # fmt: skip
