"""A linear as one autograd node with what is fused with it: a low-rank (LoRA) update, the norm or activation before it.

    low_rank_linear                    y = x Wᵀ + b + update
    norm_linear, layer_norm_linear     h = x + residual, y = norm(h) Wᵀ + b + update
    activated_linear, gated_linear     y = act(x) Wᵀ + b + update, y = (d act(m gate) * up) Wᵀ + b + update

W may pack several projections along its rows, each with its own update. Projection i of P owns the columns start_i to
stop_i of y and adds s low_i B_iᵀ to them, where low_i = x A_iᵀ. With dy_i = dy[..., start_i:stop_i]:
    dlow_i = s dy_i B_i    dx = dy W + dlow A    dA = dlowᵀ x    dB_i = s dy_iᵀ low_i    dW = dyᵀ x    db = Σ dy
x [..., K], W [N, K], b [N], A [P r, K], B [Σ (stop_i - start_i), r], low [..., P r] -> y [..., N], in one float dtype.
The products are torch GEMMs, which accumulate in fp32.
Extra memory traffic of an update: forward reads x once more and updates its columns of y in place; backward reads those
columns of dy twice and x once, and updates dx in place.
Saved for backward: x and low. Frozen tensors cost no GEMM.

The nodes with a norm save h, its statistics and low, those with an activation its input and low. They do not save what
the linear reads: the backward kernel of the norm or activation recomputes it for dW = dyᵀ norm(h) and for dA, which
costs one write of K elements per token, and the norm's adds the gradient that reaches h through the residual stream. No
full-width GEMM is recomputed.

Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.activations.gated_activation import backward_from_saved as gated_backward_from_saved
from ligermodels.kernels.activations.gated_activation import (
    check_gate_up,
    gated_activation_forward,
    gated_activation_reference,
)
from ligermodels.kernels.activations.plain_activation import (
    check_activation,
    plain_activation_forward,
    plain_activation_reference,
    plain_backward_from_saved,
)
from ligermodels.kernels.dispatch import (
    Node,
    autocast,
    check_dtypes,
    check_linear,
    check_shape,
    is_traced,
    runs_kernels,
    shape_of,
)
from ligermodels.kernels.launch import as_matrix
from ligermodels.kernels.norms.layer_norm import (
    add_layer_norm_forward,
    layer_norm_backward,
    layer_norm_forward,
    layer_norm_reference,
)
from ligermodels.kernels.norms.rms_norm import (
    add_rms_norm_forward,
    added,
    check_norm,
    check_offset,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_reference,
)
from ligermodels.kernels.quant.quantised_weight import (
    Weight,
    WeightLayout,
    dense_dtype,
    frozen_linear,
    operand,
    product,
    product_gradient,
)

Columns = tuple[tuple[int, int], ...]


class LowRank(NamedTuple):
    """Low-rank update of a linear layer that packs P projections."""

    a: Tensor  # [P r, K], the A_i one after another
    b: Tensor  # [Σ (stop - start), r], the B_i one after another
    columns: Columns  # (start, stop) of each projection, ascending; columns of y outside all of them get no update
    scale: float


NO_LOW_RANK = None, None, (), 1.0  # passed to a node in place of LowRank's fields


def low_rank_update(x: Tensor, low_rank: LowRank, width: int) -> Tensor:
    """The update alone, in plain PyTorch: x [..., K] -> [..., width]."""
    a, b, columns, scale = low_rank
    factors = zip(columns, split_b(b, columns), strict=True)
    blocks = torch.cat([F.pad(b_i, (0, 0, start, width - stop)) for (start, stop), b_i in factors], 1)  # [width, P r]
    return scale * F.linear(F.linear(x, a), blocks)


def low_rank_linear_reference(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank | None) -> Tensor:
    y = F.linear(x, weight, bias) if isinstance(weight, Tensor) else frozen_linear(x, weight, bias)
    return y if low_rank is None else y + low_rank_update(x, low_rank, weight.shape[0])


def norm_linear_reference(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, weight: Weight, bias: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    hidden = added(x, residual)
    normed = rms_norm_reference(hidden, norm_weight, eps, offset)
    return low_rank_linear_reference(normed.to(weight.dtype), weight, bias, low_rank), hidden


def layer_norm_linear_reference(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None, weight: Weight,
    bias: Tensor | None = None, eps: float = 1e-5, low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    hidden = added(x, residual)
    normed = layer_norm_reference(hidden, norm_weight, norm_bias, eps)
    return low_rank_linear_reference(normed.to(weight.dtype), weight, bias, low_rank), hidden


def activated_linear_reference(
    x: Tensor, weight: Weight, bias: Tensor | None = None, activation: str = "gelu", low_rank: LowRank | None = None
) -> Tensor:
    return low_rank_linear_reference(plain_activation_reference(x, activation), weight, bias, low_rank)


def gated_linear_reference(
    gate_up: Tensor, weight: Weight, bias: Tensor | None = None, activation: str = "silu",
    low_rank: LowRank | None = None, gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
) -> Tensor:  # fmt: skip
    activated = gated_activation_reference(gate_up, activation, None, gate_multiplier, down_multiplier)
    return low_rank_linear_reference(activated, weight, bias, low_rank)


def check_operands(
    op: str, columns: int, weight: Weight, bias: Tensor | None, low_rank: LowRank | None, **inputs: Tensor
) -> None:
    """Raises ValueError unless the operands of a linear of so many columns fit each other. inputs: those that the
    linear takes in its weight's dtype."""
    check_linear(op, columns, weight, bias)
    if low_rank is None:
        check_dtypes(op, **inputs, weight=weight, bias=bias)
        return
    a, b, spans, _ = low_rank
    rank = shape_of(op, "low_rank.b", b, "N, r")[1]
    check_shape(op, "low_rank.a", a, len(spans) * rank, columns)
    check_shape(op, "low_rank.b", b, sum(stop - start for start, stop in spans), rank)
    if spans[-1][1] > weight.shape[0]:
        raise ValueError(f"{op}: low_rank is of columns up to {spans[-1][1]}, but weight has {weight.shape[0]} rows")
    check_dtypes(op, **inputs, weight=weight, bias=bias, **{"low_rank.a": a, "low_rank.b": b})


def split_b(b: Tensor, columns: Columns) -> tuple[Tensor, ...]:
    """The B_i [stop_i - start_i, r], as views."""
    return b.split([stop - start for start, stop in columns])


def split_by_projection(y: Tensor, low: Tensor, b: Tensor, columns: Columns) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of each projection: its columns of y [rows, N], its columns of low [rows, P r] and its rows of b."""
    y, low = as_matrix(y), as_matrix(low)
    for (start, stop), low_i, b_i in zip(columns, low.chunk(len(columns), 1), split_b(b, columns), strict=True):
        yield y[:, start:stop], low_i, b_i


def linear_forward(
    x: Tensor, weight: Tensor, layout: WeightLayout | None, bias: Tensor | None, a: Tensor | None, b: Tensor | None,
    columns: Columns, scale: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y [..., N], and low [..., P r], which is None without an update. Call it only where autograd does not record."""
    y = product(x, weight, layout, bias)
    if a is None or b is None:
        return y, None
    low = F.linear(x, a)
    if is_traced((x,)):  # not in place: selective checkpointing may have saved what F.linear returned
        return add_update(y, low, b, columns, scale), low
    for y_i, low_i, b_i in split_by_projection(y, low, b, columns):
        y_i.addmm_(low_i, b_i.t(), alpha=scale)
    return y, low


def add_update(y: Tensor, low: Tensor, b: Tensor, columns: Columns, scale: float) -> Tensor:
    """y plus the update, in new memory."""
    rows, blocks, end = as_matrix(y), [], 0
    for (start, stop), (y_i, low_i, b_i) in zip(columns, split_by_projection(y, low, b, columns), strict=True):
        blocks += [rows[:, end:start], torch.addmm(y_i, low_i, b_i.t(), alpha=scale)]
        end = stop
    return torch.cat([*blocks, rows[:, end:]], 1).view(y.shape)


def low_gradient(dy: Tensor, a: Tensor, b: Tensor, columns: Columns, scale: float) -> Tensor:
    """dlow [..., P r]."""
    dlow = dy.new_empty(*dy.shape[:-1], a.shape[0])
    for dy_i, dlow_i, b_i in split_by_projection(dy, dlow, b, columns):
        dlow_i.addmm_(dy_i, b_i, beta=0, alpha=scale)
    return dlow


def input_gradient(
    dy: Tensor, weight: Tensor, layout: WeightLayout | None, dlow: Tensor | None, a: Tensor | None
) -> Tensor:
    """dx [..., K] = dy W + dlow A; without an update dy W."""
    dx = product_gradient(as_matrix(dy), weight, layout)
    if dlow is not None and a is not None:
        dx.addmm_(as_matrix(dlow), a)
    return dx if dy.ndim == 2 else dx.view(*dy.shape[:-1], dx.shape[1])


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW [N, K] = dyᵀ x; with dlow in place of dy, dA [P r, K]."""
    return torch.mm(as_matrix(dy).t(), as_matrix(x))


def bias_gradient(dy: Tensor) -> Tensor:
    """db [N] = Σ dy over all rows."""
    return as_matrix(dy).sum(0)


def up_gradient(dy: Tensor, low: Tensor, b: Tensor, columns: Columns, scale: float) -> Tensor:
    """dB, the gradient of the up-projections, in the shape of b."""
    db = torch.empty_like(b)
    for dy_i, low_i, db_i in split_by_projection(dy, low, db, columns):
        db_i.addmm_(dy_i.t(), low_i, beta=0, alpha=scale)
    return db


def parameter_gradients(
    dy: Tensor, x: Any, dlow: Any, low: Any, b: Any, update: tuple[Columns, float], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of weight, layout (none), bias, a and b of a product of x, each None unless it is `needed`.

    x, dlow, low, b: tensors; None where no gradient that is needed reads them.
    """
    needs_weight, _, needs_bias, needs_a, needs_b = needed
    return (
        weight_gradient(dy, x) if needs_weight else None,
        None,
        bias_gradient(dy) if needs_bias else None,
        weight_gradient(dlow, x) if needs_a else None,
        up_gradient(dy, low, b, *update) if needs_b else None,
    )


class _LowRankLinear(Node):
    @staticmethod
    def forward(ctx, x, weight, layout, bias, a, b, columns, scale):
        y, low = linear_forward(x, weight, layout, bias, a, b, columns, scale)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.layout, ctx.update = layout, (columns, scale)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, a, b, low = ctx.saved_tensors
        needs_x, *needed, _, _ = ctx.needs_input_grad
        *_, needs_a, _ = needed
        dlow = low_gradient(dy, a, b, *ctx.update) if a is not None and (needs_x or needs_a) else None
        return (
            input_gradient(dy, weight, ctx.layout, dlow, a) if needs_x else None,
            *parameter_gradients(dy, x, dlow, low, b, ctx.update, needed),
            None,
            None,
        )


class _GradientsOfLinear(_LowRankLinear):
    """Backward alone: forward computes what backward reads, and leaves its output as the memory is."""

    @staticmethod
    def forward(ctx, x, weight, layout, bias, a, b, columns, scale):
        ctx.save_for_backward(x, weight, a, b, None if a is None else F.linear(x, a))
        ctx.layout, ctx.update = layout, (columns, scale)
        return x.new_empty(*x.shape[:-1], (weight if layout is None else layout).shape[0])


def gradients_of_linear(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank | None) -> Tensor:
    """Is `low_rank_linear` without the product, also without an update: the output has no values, but its gradients
    are those of the linear. For a backward pass that recomputes what is before the linear, and reads no output."""
    x, weight, bias, low_rank = autocast(x, weight, bias, low_rank)
    return _GradientsOfLinear.apply(x, *operand(weight), bias, *(low_rank or NO_LOW_RANK))


def low_rank_linear(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank) -> Tensor:
    """linear(x, weight, bias) plus the low-rank update.

    x [..., K] float, weight [N, K], a tensor or quantised, bias [N] or None, low_rank.a [P r, K],
    low_rank.b [Σ (stop - start), r] -> [..., N]. Frozen arguments cost no gradient. Raises ValueError where shapes or
    dtypes disagree.
    """
    x, weight, bias, low_rank = autocast(x, weight, bias, low_rank)
    check_operands("low_rank_linear", shape_of("low_rank_linear", "x", x)[-1], weight, bias, low_rank, x=x)
    if not runs_kernels(x):
        return low_rank_linear_reference(x, weight, bias, low_rank)
    return _LowRankLinear.apply(x, *operand(weight), bias, *low_rank)


class Norm(NamedTuple):
    """The ops of a norm, as `NormLinear` calls them.

    parameters: of the norm, its weight first. offset: what is added to the weight, for a norm that takes one.
    """

    # (x, *parameters, eps, *offset, dtype) -> (normed, statistics)
    forward: Callable[..., tuple[Tensor, Tensor]]
    # (x, residual, *parameters, eps, *offset, dtype) -> (normed, hidden, statistics)
    add_forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    # (dnormed, dhidden, hidden, statistics, *parameters, *offset, which gradients are needed, whether normed is) ->
    # (dx, gradients of the parameters, normed)
    backward: Callable[..., tuple[Tensor, ...]]


RMS_NORM = Norm(rms_norm_forward, add_rms_norm_forward, rms_norm_backward)
LAYER_NORM = Norm(layer_norm_forward, add_layer_norm_forward, layer_norm_backward)


class NormLinear(Node):
    """offset: one number or none, and parameters: as in `Norm`."""

    @staticmethod
    def forward(ctx, x, residual, weight, layout, bias, a, b, columns, scale, norm, eps, offset, *parameters):
        dtype = dense_dtype(weight, layout)
        if residual is None:
            normed, statistics = norm.forward(x, *parameters, eps, *offset, dtype)
            hidden = x.view_as(x)  # a new output, so that its gradient arrives at this node
        else:
            normed, hidden, statistics = norm.add_forward(x, residual, *parameters, eps, *offset, dtype)
        y, low = linear_forward(normed, weight, layout, bias, a, b, columns, scale)
        ctx.save_for_backward(hidden, statistics, weight, a, b, low, *parameters)
        ctx.layout, ctx.update = layout, (columns, scale)
        ctx.norm, ctx.eps, ctx.offset = norm, eps, offset
        return y, hidden

    @staticmethod
    def backward(ctx, dy, dhidden):
        hidden, statistics, weight, a, b, low, *parameters = ctx.saved_tensors
        needs_x, needs_residual, *others = ctx.needs_input_grad
        needed, needs_parameters = others[:5], others[-len(parameters) :]
        needs_weight, *_, needs_a, _ = needed
        needs_hidden = needs_x or needs_residual
        needs_normed, reads_normed = needs_hidden or any(needs_parameters), needs_weight or needs_a
        dx = normed = dlow = None
        gradients = [None] * len(parameters)
        if a is not None and (needs_normed or needs_a):
            dlow = low_gradient(dy, a, b, *ctx.update)
        if needs_normed:  # dnormed is not bound to a name: its memory is freed before the weight gradients are computed
            dx, *gradients, normed = ctx.norm.backward(
                input_gradient(dy, weight, ctx.layout, dlow, a), dhidden, hidden, statistics, *parameters,
                *ctx.offset, needs_hidden, *needs_parameters, reads_normed,
            )  # fmt: skip
        elif reads_normed:
            dtype = dense_dtype(weight, ctx.layout)
            normed, _ = ctx.norm.forward(hidden, *parameters, ctx.eps, *ctx.offset, dtype)
        return (
            dx if needs_x else None,
            dx if needs_residual else None,
            *parameter_gradients(dy, normed, dlow, low, b, ctx.update, needed),
            *(None,) * 5,
            *(x if needed else None for x, needed in zip(gradients, needs_parameters, strict=True)),
        )


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, weight: Weight, bias: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns linear(rms_norm(hidden), weight, bias) and hidden = x + residual, the updated residual stream.

    x, residual [..., H] float (hidden is x if residual is None), norm_weight [H] or None, weight [N, H], a tensor or
    quantised, bias [N] or None, low_rank: the linear's update -> (y [..., N] in weight's dtype, hidden [..., H] in the
    dtype of the sum).
    Frozen arguments cost no gradient.
    Raises ValueError where shapes or dtypes disagree, if H exceeds 65536, and for an offset without a norm's weight.
    """
    if norm_weight is None:
        check_offset("norm_linear", offset)
    check_norm("norm_linear", x, residual, norm_weight=norm_weight)
    weight, bias, low_rank = autocast(weight, bias, low_rank)
    check_operands("norm_linear", x.shape[-1], weight, bias, low_rank)
    if not runs_kernels(x):
        return norm_linear_reference(x, residual, norm_weight, weight, bias, eps, offset, low_rank)
    return NormLinear.apply(
        x, residual, *operand(weight), bias, *(low_rank or NO_LOW_RANK), RMS_NORM, eps, (offset,), norm_weight
    )


def layer_norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None, weight: Weight,
    bias: Tensor | None = None, eps: float = 1e-5, low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns linear(layer_norm(hidden), weight, bias) and hidden = x + residual, the updated residual stream.

    x, residual [..., H] float (hidden is x if residual is None), norm_weight [H], norm_bias [H] or None, weight [N, H],
    a tensor or quantised, bias [N] or None, low_rank: the linear's update -> (y [..., N] in weight's dtype, hidden
    [..., H] in the dtype of the sum).
    Frozen arguments cost no gradient. Raises ValueError where shapes or dtypes disagree, or if H exceeds 65536.
    """
    check_norm("layer_norm_linear", x, residual, norm_weight=norm_weight, norm_bias=norm_bias)
    weight, bias, low_rank = autocast(weight, bias, low_rank)
    check_operands("layer_norm_linear", x.shape[-1], weight, bias, low_rank)
    if not runs_kernels(x):
        return layer_norm_linear_reference(x, residual, norm_weight, norm_bias, weight, bias, eps, low_rank)
    return NormLinear.apply(
        x, residual, *operand(weight), bias, *(low_rank or NO_LOW_RANK), LAYER_NORM, eps, (), norm_weight, norm_bias
    )


def _activate(x: Tensor, activation: str, multipliers: tuple[float, ...]) -> Tensor:
    forward = gated_activation_forward if multipliers else plain_activation_forward
    return forward(x, activation, *multipliers)


class ActivatedLinear(Node):
    """multipliers: the two of a gated activation; none for an activation without a gate."""

    @staticmethod
    def forward(ctx, x, weight, layout, bias, a, b, columns, scale, activation, inplace, *multipliers):
        activated = _activate(x, activation, multipliers)
        y, low = linear_forward(activated, weight, layout, bias, a, b, columns, scale)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.layout, ctx.update = layout, (columns, scale)
        ctx.activation, ctx.inplace, ctx.multipliers = activation, inplace, multipliers
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, a, b, low = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad[:6]
        needs_weight, *_, needs_a, _ = needed
        reads_activated = needs_weight or needs_a
        dx = activated = dlow = None
        if a is not None and (needs_x or needs_a):
            dlow = low_gradient(dy, a, b, *ctx.update)
        if needs_x:  # its gradient behind the activation is not bound to a name: the memory is freed before dW
            through_activation = gated_backward_from_saved if ctx.multipliers else plain_backward_from_saved
            dx, activated, *_ = through_activation(
                input_gradient(dy, weight, ctx.layout, dlow, a), x, ctx.activation, reads_activated,
                *ctx.multipliers, ctx.inplace,
            )  # fmt: skip
        elif reads_activated:
            activated = _activate(x, ctx.activation, ctx.multipliers)
        return (
            dx,
            *parameter_gradients(dy, activated, dlow, low, b, ctx.update, needed),
            *(None,) * (4 + len(ctx.multipliers)),
        )


def activated_linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, activation: str = "gelu", low_rank: LowRank | None = None, *,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    """linear(activation(x), weight, bias).

    x [..., I] float, weight [N, I], a tensor or quantised, bias [N] or None, activation: as those of
    `plain_activation`, low_rank: the linear's update -> [..., N].
    inplace: backward overwrites x with its gradient, unless the graph is retained for another backward or is being
    traced. Its values are then lost.
    Frozen arguments cost no gradient. Raises ValueError for any other activation, and where shapes or dtypes disagree.
    """
    check_activation("activated_linear", x, activation)
    x, weight, bias, low_rank = autocast(x, weight, bias, low_rank)
    check_operands("activated_linear", x.shape[-1], weight, bias, low_rank, x=x)
    if not runs_kernels(x):
        return activated_linear_reference(x, weight, bias, activation, low_rank)
    return ActivatedLinear.apply(x, *operand(weight), bias, *(low_rank or NO_LOW_RANK), activation, inplace)


def gated_linear(
    gate_up: Tensor, weight: Weight, bias: Tensor | None = None, activation: str = "silu",
    low_rank: LowRank | None = None, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    """linear(down_multiplier * activation(gate_multiplier * gate) * up, weight, bias), where gate is the first half of
    gate_up's columns, up the second.

    gate_up [..., 2 I] float, weight [N, I], a tensor or quantised, bias [N] or None, activation "silu", "gelu_tanh" or
    "gelu", low_rank: the linear's update -> [..., N]. The multipliers are constants of a model: see `gated_activation`.
    inplace: as in `gated_activation`; the recomputed product also takes the memory of its gradient.
    Frozen arguments cost no gradient. Raises ValueError for any other activation, an odd width, and where shapes or
    dtypes disagree.
    """
    check_gate_up("gated_linear", gate_up, activation)
    gate_up, weight, bias, low_rank = autocast(gate_up, weight, bias, low_rank)
    check_operands("gated_linear", gate_up.shape[-1] // 2, weight, bias, low_rank, gate_up=gate_up)
    if not runs_kernels(gate_up):
        return gated_linear_reference(gate_up, weight, bias, activation, low_rank, gate_multiplier, down_multiplier)
    return ActivatedLinear.apply(
        gate_up, *operand(weight), bias, *(low_rank or NO_LOW_RANK), activation, inplace, gate_multiplier,
        down_multiplier,
    )  # fmt: skip
