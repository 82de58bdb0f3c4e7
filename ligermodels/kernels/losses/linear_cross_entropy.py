"""Fused linear cross-entropy: the loss of logits = hidden @ weightᵀ + bias, in chunks of rows.

hidden [T, H] and weight [V, H] of one float dtype, targets [T] int64; loss fp32. With many rows, only one chunk of
logits exists at a time, in the inputs' dtype. Its gradient overwrites it, and then

    dhidden = dlogits @ weight        dweight = Σ_chunks dlogitsᵀ @ hidden, summed in fp32

The chunk size changes the order of the fp32 sums of dweight (relative difference 1e-6) and nothing else.
"mean" and "sum" compute both gradients in the forward, in fp32: 6 T H V FLOP. Backward only multiplies them by the
upstream gradient and rounds. "none" saves the log-sum-exp of each row and recomputes the logits: 8 T H V FLOP.

Few rows. The logits take 2 T V bytes in half precision, fp32 sums of both gradients 4 H (T + V): up to about T = 2 H
the logits are smaller. They are then saved for backward, which overwrites them with their gradient and computes dhidden
and dweight in one GEMM each. There are no fp32 sums, and peak memory is no higher; at T = H it is half.

low_memory=True needs 64 MiB beyond the gradients and computes them in two passes. The first goes over chunks of rows,
whose logits are stored in dweight's own memory, and computes the log-sum-exps and dhidden. The second goes over chunks
of the vocabulary: it recomputes their logits and computes each row of dweight in one GEMM, summed in fp32 inside the
GEMM and rounded once: 8 T H V FLOP. If all logits fit the 64 MiB, they are not recomputed: 6 T H V FLOP.

Designs between the two do not pay off. Summing over chunks of c rows for a share g of the vocabulary and recomputing
the logits of the rest costs 2 (4 - g) T H V FLOP and 8 g H V T / c bytes of traffic, in 4 g H V + 2 c V bytes of
memory. Relative to the time of the GEMMs alone on an H200, 1.2 GiB beyond half-precision gradients give at best 1.10 at
16384×4096×128256 (g 0.86, c 2048; 1.23 with g 1, c 896) and 1.26 at 16384×2304×256000 (g 0.60, c 2048), where 2.2 and
2.3 GiB give 1.03 and 1.10. 64 MiB give 1.29 and 1.44 (g 0.25, c 2048; g 0.10, c 1792); low_memory takes 1.35 and 1.51.
Sums kept in 24 bits, in dweight and one more byte per element, need a GEMM of our own, 8 to 17 % slower than cuBLAS's
into fp32: 1.10 and 1.31. Sums in half precision have 2.2 times the error of plain PyTorch with eight chunks, 2.9 times
with 32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ligermodels.kernels.dispatch import (
    Node,
    autocast,
    check_dtypes,
    check_linear,
    is_traced,
    register_op,
    runs_kernels,
    shape_of,
)
from ligermodels.kernels.launch import as_matrix
from ligermodels.kernels.losses.cross_entropy import (
    OPTIONS,
    RESULTS,
    CrossEntropyOutput,
    as_output,
    check_cross_entropy,
    cross_entropy_of_temporary,
    cross_entropy_reference,
    cross_entropy_with_metrics_reference,
    outputs_of,
    row_scale,
    run_reference,
)
from ligermodels.kernels.losses.cross_entropy_rows import RowResults, empty_results, launch_cross_entropy
from ligermodels.kernels.losses.logits_chunks import (
    GRADIENT_SCALE,
    accumulate_gradients_,
    chunks_of_logits,
    chunks_of_vocabulary,
    empty_gradients,
    keeps_logits,
    low_memory_buffer,
    project,
    slice_rows,
)
from ligermodels.kernels.losses.loss_reduction import mean_factor, reduce_losses, reduce_rows
from ligermodels.kernels.losses.rescale import rescale, rescale_pair, scale_gradient_


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Options as in `linear_cross_entropy`, without `low_memory`."""
    return cross_entropy_reference(F.linear(hidden, weight, bias), targets, **options)


def linear_cross_entropy_with_metrics_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **options: Any
) -> CrossEntropyOutput:
    return cross_entropy_with_metrics_reference(F.linear(hidden, weight, bias), targets, **options)


def _launch_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weight: Tensor | None,
    hidden_grad: bool, weight_grad: bool, bias_grad: bool, metrics: bool, token_scaling: bool, *options,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    results = empty_results(targets, metrics, token_scaling)
    gradients = empty_gradients(hidden, weight, hidden_grad, weight_grad, bias_grad)
    sums = gradients[0].numel() + gradients[1].numel()
    for chunk, logits in chunks_of_logits(hidden, weight, bias, sums):
        dlogits = logits if hidden_grad or weight_grad or bias_grad else None
        row_data = slice_rows(targets, chunk), class_weight, results.slice(chunk)
        launch_cross_entropy(logits, *row_data, GRADIENT_SCALE, dlogits, *options)
        accumulate_gradients_(gradients, logits, hidden, weight, chunk)
    return *results, *gradients


def _launch_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weight: Tensor | None, lse: Tensor,
    scale: Tensor, row_metrics: Tensor | None, dentropy: Tensor | None,
    hidden_grad: bool, weight_grad: bool, bias_grad: bool, *options,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    results = RowResults(None, lse, None, row_metrics)
    gradients = empty_gradients(hidden, weight, hidden_grad, weight_grad, bias_grad)
    sums = gradients[0].numel() + gradients[1].numel()
    for chunk, logits in chunks_of_logits(hidden, weight, bias, sums):
        row_data = slice_rows(targets, chunk), class_weight, results.slice(chunk), slice_rows(scale, chunk)
        dentropy_of_rows = None if dentropy is None else slice_rows(dentropy, chunk)
        launch_cross_entropy(logits, *row_data, logits, *options, dentropy=dentropy_of_rows)
        accumulate_gradients_(gradients, logits, hidden, weight, chunk)
    return gradients


def _launch_low_memory(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weight: Tensor | None,
    lse: Tensor | None, scale: Tensor, row_metrics: Tensor | None, dentropy: Tensor | None,
    hidden_grad: bool, weight_grad: bool, bias_grad: bool, metrics: bool, token_scaling: bool, *options,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of Σ scale * row loss, in the inputs' dtype; also the results of rows if lse is not given."""
    rows = hidden.shape[0]
    if lse is None:
        results = empty_results(targets, metrics, token_scaling)
    else:
        results = RowResults(None, lse, None, row_metrics)
    dhidden = torch.empty(hidden.shape if hidden_grad else 0, dtype=hidden.dtype, device=hidden.device)
    make = torch.empty if rows else torch.zeros
    dweight = make(weight.shape if weight_grad else 0, dtype=weight.dtype, device=weight.device)
    dbias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if bias_grad else None
    (elements, holds_all), row_pass = low_memory_buffer(hidden, weight), hidden_grad or bias_grad or lse is None
    buffer = torch.empty(elements, dtype=hidden.dtype, device=hidden.device)
    single_pass = row_pass and weight_grad and holds_all  # no logits are recomputed
    if row_pass:
        memory = dweight.view(-1) if dweight.numel() > elements and not single_pass else buffer
        for chunk, logits in chunks_of_logits(hidden, weight, bias, buffer=memory):
            dlogits = logits if hidden_grad or bias_grad or single_pass else None
            row_data = slice_rows(targets, chunk), class_weight, results.slice(chunk), slice_rows(scale, chunk)
            dentropy_of_rows = None if dentropy is None else slice_rows(dentropy, chunk)
            launch_cross_entropy(logits, *row_data, dlogits, *options, dentropy=dentropy_of_rows)
            if hidden_grad:
                torch.mm(logits, weight, out=slice_rows(dhidden, chunk))
            if dbias is not None:
                dbias += logits.sum(0, dtype=torch.float32)
            if single_pass:  # there is only one chunk
                torch.mm(logits.T, hidden, out=dweight)
    if weight_grad and rows and not single_pass:
        # All rows, one chunk of the vocabulary at a time: each element of dweight is one fp32 sum, rounded once.
        scale = scale if results.probability is None else scale * results.probability
        given = RowResults(None, results.lse, None, row_metrics)
        for classes, logits in chunks_of_vocabulary(hidden, weight, bias, buffer):
            launch_cross_entropy(
                logits, targets, class_weight, given, scale, logits, *options,
                dentropy=dentropy, first_class=classes.start, vocab=weight.shape[0],
            )  # fmt: skip
            torch.mm(logits.T, hidden, out=dweight[classes])
    dbias = None if dbias is None else dbias.to(weight.dtype)
    return *(results if lse is None else [None] * 4), dhidden, dweight, dbias


def _fake_gradients(hidden, weight, hidden_grad, weight_grad, bias_grad, dtype):
    dhidden = hidden.new_empty(hidden.shape if hidden_grad else 0, dtype=dtype)
    dweight = weight.new_empty(weight.shape if weight_grad else 0, dtype=dtype)
    return dhidden, dweight, weight.new_empty(weight.shape[0], dtype=dtype) if bias_grad else None


def _fake_forward(hidden, weight, bias, targets, class_weight, *flags):
    *needed, metrics, token_scaling = flags[:5]
    return *empty_results(targets, metrics, token_scaling), *_fake_gradients(hidden, weight, *needed, torch.float32)


def _fake_backward(hidden, weight, bias, targets, class_weight, lse, scale, row_metrics, dentropy, *flags):
    return _fake_gradients(hidden, weight, *flags[:3], torch.float32)


def _fake_low_memory(hidden, weight, bias, targets, class_weight, lse, scale, row_metrics, dentropy, *flags):
    *needed, metrics, token_scaling = flags[:5]
    results = empty_results(targets, metrics, token_scaling) if lse is None else [None] * 4
    return *results, *_fake_gradients(hidden, weight, *needed, hidden.dtype)


_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? class_weight"
_SAVED = "Tensor scale, Tensor? row_metrics, Tensor? dentropy"
_NEEDED = "bool hidden_grad, bool weight_grad, bool bias_grad"
_GRADIENTS = "Tensor dhidden, Tensor dweight, Tensor dbias"
linear_cross_entropy_forward = register_op(
    f"linear_cross_entropy({_INPUTS}, {_NEEDED}, bool metrics, bool token_scaling, {OPTIONS})"
    f" -> ({RESULTS}, {_GRADIENTS})",
    _launch_forward,
    _fake_forward,
)
linear_cross_entropy_backward = register_op(
    f"linear_cross_entropy_backward({_INPUTS}, Tensor lse, {_SAVED}, {_NEEDED}, {OPTIONS}) -> ({_GRADIENTS})",
    _launch_backward,
    _fake_backward,
)
linear_cross_entropy_low_memory = register_op(
    f"linear_cross_entropy_low_memory({_INPUTS}, Tensor? lse, {_SAVED}, {_NEEDED}, bool metrics, bool token_scaling,"
    f" {OPTIONS}) -> ({RESULTS}, {_GRADIENTS})",
    _launch_low_memory,
    _fake_low_memory,
)


@register_flop_formula(torch.ops.ligermodels.linear_cross_entropy)
def _forward_flops(hidden, weight, bias, targets, class_weight, hidden_grad, weight_grad, *others, **_) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + hidden_grad + weight_grad)


@register_flop_formula(torch.ops.ligermodels.linear_cross_entropy_backward)
def _backward_flops(
    hidden, weight, bias, targets, class_weight, lse, scale, row_metrics, dentropy, hidden_grad, weight_grad, *others,
    **_,
) -> int:  # fmt: skip
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + hidden_grad + weight_grad)


@register_flop_formula(torch.ops.ligermodels.linear_cross_entropy_low_memory, get_raw=True)
def _low_memory_flops(
    hidden, weight, bias, targets, class_weight, lse, scale, row_metrics, dentropy,
    hidden_grad, weight_grad, bias_grad, *others, **_,
) -> int:  # fmt: skip
    holds_all, row_pass = low_memory_buffer(hidden, weight)[1], hidden_grad or bias_grad or lse is None
    products = row_pass + hidden_grad + 2 * weight_grad - (row_pass and weight_grad and holds_all)
    return 2 * hidden.numel() * weight.shape[0] * products


class _ReducedLoss(Node):
    """Sum or mean of the losses, with `metrics` also metrics of the rows. Forward computes the gradients in fp32;
    backward scales and rounds them."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, class_weight, mean, *flags_and_options):
        losses, _, _, row_metrics, *gradients = linear_cross_entropy_forward(
            hidden, weight, bias, targets, class_weight, *flags_and_options
        )
        *needed, metrics, _, ignore_index = flags_and_options[:6]
        loss, factor = reduce_losses(losses, targets, class_weight, ignore_index, mean)
        ctx.save_for_backward(*gradients, factor)
        ctx.dtype, ctx.needed = weight.dtype, needed
        return outputs_of(ctx, loss, row_metrics, metrics)

    @staticmethod
    def backward(ctx, dloss, _=None):
        (dhidden, dweight, dbias, factor), (hidden_grad, weight_grad, bias_grad) = ctx.saved_tensors, ctx.needed
        scale = dloss, factor, 1 / GRADIENT_SCALE, ctx.dtype
        dbias = rescale(dbias[None], *scale)[0] if bias_grad else None
        if hidden_grad and weight_grad:
            return *rescale_pair(dhidden, dweight, *scale), dbias, *[None] * 13
        dhidden = rescale(dhidden, *scale) if hidden_grad else None
        dweight = rescale(dweight, *scale) if weight_grad else None
        return dhidden, dweight, dbias, *[None] * 13


class _LowMemoryLoss(Node):
    """Sum or mean of the losses, with `metrics` also metrics of the rows. Forward computes the gradients in the inputs'
    dtype; backward multiplies them in place if the upstream gradient is not 1."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, class_weight, mean, *flags_and_options):
        *needed, metrics, _, ignore_index = flags_and_options[:6]
        scale = mean_factor(targets, class_weight, ignore_index) if mean else targets.new_ones((), dtype=torch.float32)
        losses, _, _, row_metrics, *gradients = linear_cross_entropy_low_memory(
            hidden, weight, bias, targets, class_weight, None, scale.expand(targets.shape), None, None,
            *flags_and_options,
        )  # fmt: skip
        loss, _ = reduce_losses(losses, targets, class_weight, ignore_index, mean)
        ctx.save_for_backward(*gradients)
        ctx.needed = needed
        return outputs_of(ctx, loss, row_metrics, metrics)

    @staticmethod
    def backward(ctx, dloss, _=None):
        (dhidden, dweight, dbias), (hidden_grad, weight_grad, bias_grad) = ctx.saved_tensors, ctx.needed
        dhidden = scale_gradient_(dhidden, dloss) if hidden_grad else None
        dweight = scale_gradient_(dweight, dloss) if weight_grad else None
        dbias = scale_gradient_(dbias[None], dloss)[0] if bias_grad else None
        return dhidden, dweight, dbias, *[None] * 13


class _RowLosses(Node):
    """The loss of each row; with `metrics` also the metrics of the rows. Only the loss and the entropy have gradients.
    Backward recomputes the logits."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, class_weight, low_memory, metrics, token_scaling, *options):
        inputs, flags = (hidden, weight, bias, targets, class_weight), (False, False, False, metrics, token_scaling)
        if low_memory:
            scale = hidden.new_empty(targets.shape, dtype=torch.float32)  # not read without gradients
            results = linear_cross_entropy_low_memory(*inputs, None, scale, None, None, *flags, *options)
        else:
            results = linear_cross_entropy_forward(*inputs, *flags, *options)
        loss, lse, probability, row_metrics, *_ = results
        ctx.save_for_backward(*inputs, lse, probability, row_metrics)
        ctx.low_memory, ctx.token_scaling, ctx.options = low_memory, token_scaling, options
        return outputs_of(ctx, loss, row_metrics, metrics)

    @staticmethod
    def backward(ctx, dloss, dmetrics=None):
        *inputs, lse, probability, row_metrics = ctx.saved_tensors  # once: checkpointing raises on a second access
        scale = row_scale(dloss, lse, probability if ctx.token_scaling else None)
        entropy = (None, None) if dmetrics is None else (row_metrics, dmetrics[0])
        needed, dtype = ctx.needs_input_grad[:3], inputs[0].dtype
        arguments = *inputs, lse, scale, *entropy, *needed
        if ctx.low_memory:
            *_, dhidden, dweight, dbias = linear_cross_entropy_low_memory(*arguments, False, False, *ctx.options)
        else:
            dhidden, dweight, dbias = linear_cross_entropy_backward(*arguments, *ctx.options)
        gradients = zip((dhidden, dweight, dbias), needed, strict=True)
        return *[x.to(dtype) if is_needed else None for x, is_needed in gradients], *[None] * 10


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    ignore_index: int = -100, softcap: float | None = None, logit_scale: float = 1.0, z_loss: float = 0.0,
    label_smoothing: float = 0.0, token_scaling: bool = False, reduction: str = "mean", low_memory: bool = False,
) -> Tensor:  # fmt: skip
    """Cross-entropy of the logits hidden @ weightᵀ + bias, which are never all in memory unless they are few.

    hidden [..., H], weight [V, H] and bias [V] of one float dtype, targets [...] int64 in [0, V) or ignore_index; loss
    and options as in `cross_entropy`.
    low_memory: only 64 MiB beyond the gradients. Takes at least a third more time than the default, unless all logits
    fit the 64 MiB. An upstream gradient other than 1 then rounds the gradients a second time, and backward can run only
    once.
    Raises ValueError if the shapes disagree.
    """
    options = token_scaling, ignore_index, softcap, logit_scale, z_loss, label_smoothing
    return _linear_cross_entropy(hidden, weight, bias, targets, class_weight, reduction, low_memory, False, *options)


def linear_cross_entropy_with_metrics(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    ignore_index: int = -100, softcap: float | None = None, logit_scale: float = 1.0, z_loss: float = 0.0,
    label_smoothing: float = 0.0, token_scaling: bool = False, reduction: str = "mean", low_memory: bool = False,
) -> CrossEntropyOutput:  # fmt: skip
    """`linear_cross_entropy` with its metrics, which the same kernel computes: z-loss, accuracy, predicted tokens,
    entropy.

    With reduction="none" the entropy has a gradient, and -loss is the log-probability of the target.
    """
    options = token_scaling, ignore_index, softcap, logit_scale, z_loss, label_smoothing
    return _linear_cross_entropy(hidden, weight, bias, targets, class_weight, reduction, low_memory, True, *options)


def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weight: Tensor | None, reduction: str,
    low_memory: bool, metrics: bool, *options: Any,
) -> Any:  # fmt: skip
    """options: token_scaling, then those of OPTIONS."""
    op = "linear_cross_entropy"
    *rows_shape, columns = shape_of(op, "hidden", hidden)
    check_linear(op, columns, weight, bias)
    shape = torch.Size((*rows_shape, weight.shape[0]))
    hidden, weight, bias = autocast(hidden, weight, bias)
    check_dtypes(op, hidden=hidden, weight=weight, bias=bias)
    class_weight = check_cross_entropy(op, shape, hidden, targets, class_weight, reduction)
    if not runs_kernels(hidden):
        return run_reference(F.linear(hidden, weight, bias), targets, class_weight, reduction, metrics, *options)
    rows = as_matrix(hidden)
    flat = targets.contiguous() if targets.ndim == 1 else targets.reshape(-1).contiguous()
    result = _apply_node(rows, weight, bias, flat, class_weight, reduction, low_memory, metrics, *options)
    return as_output(result, targets, class_weight, reduction, metrics, options[1])


def _apply_node(
    rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weight: Tensor | None, reduction: str,
    low_memory: bool, metrics: bool, *options: Any,
) -> Any:  # fmt: skip
    inputs = rows, weight, bias, targets, class_weight
    # With low_memory, gradients are stored in the inputs' dtype before the upstream gradient is known. In fp16 they
    # could underflow before a loss scale reaches them; they are computed in backward instead.
    if reduction == "none" or (low_memory and rows.dtype == torch.float16):
        result = _RowLosses.apply(*inputs, low_memory, metrics, *options)
        losses, *row_metrics = result if metrics else (result,)
        loss = reduce_rows(losses, targets, class_weight, options[1], reduction)
        return (loss, *row_metrics) if metrics else loss
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (rows, weight, bias)]
    if low_memory:
        return _LowMemoryLoss.apply(*inputs, reduction == "mean", *needed, metrics, *options)
    size = rows.shape[0], rows.shape[1], weight.shape[0]
    if not is_traced((rows, weight, targets)) and keeps_logits(*size, rows.dtype, *needed[:2]):
        return cross_entropy_of_temporary(
            project(rows, weight, bias), targets, class_weight, reduction, metrics, *options
        )
    return _ReducedLoss.apply(*inputs, reduction == "mean", *needed, metrics, *options)
