"""Cross-entropy of logits, with softcap, logit scale, z-loss, label smoothing, class weights and metrics.

For each row with target t

    loss = (1 - ε) w_t (lse - l_t) + ε mean(w (lse - l)) + z w_t lse²      lse = log Σ exp(l)
    dlogits = g s (p ((1 - ε) w_t + ε mean(w) + 2 z w_t lse) - (1 - ε) w_t [column = t] - ε w / V) (1 - (l / softcap)²)

where l = softcap * tanh(s * logits / softcap), without a softcap l = s * logits, and s = logit_scale; p = exp(l - lse);
ε is label smoothing, z is z_loss, w are the class weights, 1 without them. Token scaling multiplies both by p_t, taken
as a constant (dynamic fine-tuning, Wu et al. 2025, https://arxiv.org/abs/2508.05629). Both are zero if t is
ignore_index. If t is another number outside [0, V), the loss is infinite and dlogits zero. The entropy
H = Σ p (lse - l) has the gradient s p (lse - H - l), times that of the softcap.
logits [rows, V] any float dtype, targets [rows] int64, class weights [V] fp32; loss, lse, entropy and the row's
upstream gradient g [rows] fp32. Computed in fp32; dlogits is rounded once, because p_t - 1 would cancel in half
precision.
Moves R V elements forward and 2 R V backward. In place, the forward writes dlogits over the logits and moves 2 R V in
all, provided that the second read of a row hits a cache. `cross_entropy_rows.py` has the kernel.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import (
    INT64,
    Node,
    check_floats,
    check_one_of,
    check_shape,
    is_last_use,
    is_traced,
    register_op,
    runs_kernels,
    shape_of,
    widen,
)
from ligermodels.kernels.launch import as_rows
from ligermodels.kernels.losses.cross_entropy_rows import RowResults, empty_results, launch_cross_entropy
from ligermodels.kernels.losses.loss_reduction import (
    REDUCTIONS,
    mean_factor,
    reduce_losses,
    reduce_rows,
    target_weights,
)
from ligermodels.kernels.losses.rescale import scale_gradient_

# Scale of fp16 gradients stored before the upstream gradient is known. Keeps them out of fp16's subnormals; exact.
FP16_SCALE = 2.0**10


class CrossEntropyOutput(NamedTuple):
    """A loss with its metrics. Ignored targets and those outside the vocabulary have no metrics.

    Only the loss has a gradient, and the entropy where the op's docstring says so. Reduced like the loss: the z-loss,
    which is part of it, and the accuracy, whose "sum" is the number of correct predictions and whose "mean" ignores
    class weights.
    """

    loss: Tensor
    z_loss: Tensor
    token_accuracy: Tensor
    predicted_tokens: Tensor  # [...] int64: the first class of the highest logit; -1 without metrics
    entropy: Tensor  # [...] fp32, of softmax(logits), in nats; 0 without metrics


def cross_entropy_reference(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Options as in `cross_entropy`, without `inplace`."""
    return _reference(logits, targets, False, **options)


def cross_entropy_with_metrics_reference(logits: Tensor, targets: Tensor, **options: Any) -> CrossEntropyOutput:
    return _reference(logits, targets, True, **options)


def _reference(
    logits: Tensor, targets: Tensor, metrics: bool, *, class_weight: Tensor | None = None, ignore_index: int = -100,
    softcap: float | None = None, logit_scale: float = 1.0, z_loss: float = 0.0, label_smoothing: float = 0.0,
    token_scaling: bool = False, reduction: str = "mean",
) -> Any:  # fmt: skip
    logits = widen(logits)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    supervised = targets != ignore_index
    valid = supervised & (targets >= 0) & (targets < logits.shape[-1])
    log_probs = logits.log_softmax(-1)
    log_prob = log_probs.gather(-1, torch.where(valid, targets, 0)[..., None]).squeeze(-1)
    loss, z = (label_smoothing - 1) * log_prob, torch.zeros_like(log_prob)
    if z_loss:
        z = z_loss * logits.logsumexp(-1).square()
    if class_weight is not None:
        loss, z = (target_weights(targets, class_weight) * x for x in (loss, z))
    if label_smoothing:
        loss = loss - label_smoothing * (log_probs if class_weight is None else log_probs * class_weight).mean(-1)
    if z_loss:
        loss = loss + z
    if token_scaling:
        loss, z = (log_prob.detach().exp() * x for x in (loss, z))
    settings = targets, class_weight, ignore_index, reduction
    loss = reduce_rows(torch.where(valid, loss, torch.where(supervised, torch.inf, 0.0)), *settings)
    if not metrics:
        return loss
    finite = log_probs.clamp_min(torch.finfo(log_probs.dtype).min)  # so that 0 log 0 is 0, and its gradient too
    entropy = -(finite.exp() * finite).sum(-1)
    entropy, z = (torch.where(valid, x, 0.0) for x in (entropy, z))
    return add_metrics(loss, torch.stack((entropy, z, torch.where(valid, logits.argmax(-1), -1))), *settings)


def add_metrics(
    loss: Tensor, row_metrics: Tensor, targets: Tensor, class_weight: Tensor | None, ignore_index: int, reduction: str
) -> CrossEntropyOutput:
    """The loss, which is reduced already, with metrics of the rows [3, ...]: entropy, z-loss, predicted class."""
    entropy, z_losses, predicted = row_metrics.view(3, *targets.shape)
    predicted = predicted.detach().long()
    correct = ((predicted == targets) & (predicted >= 0)).float()
    return CrossEntropyOutput(
        loss,
        reduce_rows(z_losses.detach(), targets, class_weight, ignore_index, reduction),
        reduce_rows(correct, targets, None, ignore_index, reduction),
        predicted,
        entropy if reduction == "none" else entropy.detach(),
    )


def check_cross_entropy(
    op: str, shape: torch.Size, inputs: Tensor, targets: Tensor, class_weight: Tensor | None, reduction: str
) -> Tensor | None:
    """shape: [..., V] of the logits. Raises ValueError for arguments that disagree. Returns the class weights as the
    kernels take them: contiguous, in fp32, without a gradient."""
    *rows, vocab = shape
    check_shape(op, "targets", targets, *rows)
    check_one_of(op, INT64, targets=targets)
    check_floats(op, class_weight=class_weight)
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: unknown reduction {reduction!r}; supported: {', '.join(REDUCTIONS)}")
    if class_weight is None:
        return None
    if class_weight.shape != (vocab,) or class_weight.device != inputs.device:
        raise ValueError(
            f"{op}: class_weight has shape {tuple(class_weight.shape)} on {class_weight.device}; expected"
            f" {(vocab,)}, one weight for each class, on {inputs.device}"
        )
    return class_weight.detach().to(torch.promote_types(inputs.dtype, torch.float32)).contiguous()


def _launch_forward(
    logits: Tensor, targets: Tensor, class_weight: Tensor | None, metrics: bool, token_scaling: bool, *options
) -> tuple[Tensor | None, ...]:
    results = empty_results(targets, metrics, token_scaling)
    launch_cross_entropy(as_rows(logits), targets.contiguous(), class_weight, results, 1.0, None, *options)
    return tuple(results)


def _launch_backward(
    logits: Tensor, targets: Tensor, class_weight: Tensor | None, lse: Tensor, scale: Tensor, factor: Tensor | None,
    row_metrics: Tensor | None, dentropy: Tensor | None, *options, inplace: bool = False,
) -> Tensor:  # fmt: skip
    dlogits = logits.detach() if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
    scale = scale.reshape(-1) if scale.ndim > 1 else scale
    dentropy = None if dentropy is None else dentropy.reshape(-1)
    launch_cross_entropy(
        as_rows(logits), targets.contiguous(), class_weight, RowResults(None, lse, None, row_metrics), scale,
        as_rows(dlogits), *options, factor=factor, dentropy=dentropy,
    )  # fmt: skip
    return dlogits


def cross_entropy_in_place(
    logits: Tensor, targets: Tensor, class_weight: Tensor | None, metrics: bool, token_scaling: bool,
    scale: Tensor | float, *options,
) -> RowResults:  # fmt: skip
    """Overwrites the logits with scale * their gradient. logits [rows, V] with unit stride along V.

    Not a registered op: only called when nothing is traced.
    """
    results = empty_results(targets, metrics, token_scaling)
    launch_cross_entropy(logits, targets.contiguous(), class_weight, results, scale, logits, *options)
    return results


def _fake_forward(logits, targets, class_weight, metrics, token_scaling, *options):
    return tuple(empty_results(targets, metrics, token_scaling))


OPTIONS = "int ignore_index, float? softcap, float logit_scale, float z_loss, float label_smoothing"
RESULTS = "Tensor loss, Tensor lse, Tensor probability, Tensor row_metrics"
cross_entropy_forward = register_op(
    "cross_entropy(Tensor logits, Tensor targets, Tensor? class_weight, bool metrics, bool token_scaling,"
    f" {OPTIONS}) -> ({RESULTS})",
    _launch_forward,
    _fake_forward,
)
cross_entropy_backward = register_op(
    "cross_entropy_backward(Tensor logits, Tensor targets, Tensor? class_weight, Tensor lse, Tensor scale,"
    f" Tensor? factor, Tensor? row_metrics, Tensor? dentropy, {OPTIONS}) -> Tensor dlogits",
    _launch_backward,
    None,
)


class _CrossEntropy(Node):
    """The loss; with `metrics` also the metrics of the rows. Only the loss and the entropy have gradients."""

    @staticmethod
    def forward(ctx, logits, targets, class_weight, reduction, temporary, metrics, token_scaling, *options):
        loss, lse, probability, row_metrics = cross_entropy_forward(
            logits, targets, class_weight, metrics, token_scaling, *options
        )
        factor = None
        if reduction != "none":
            loss, factor = reduce_losses(loss, targets, class_weight, options[0], reduction == "mean")
        ctx.save_for_backward(logits, targets, class_weight, lse, factor, probability, row_metrics)
        ctx.temporary, ctx.token_scaling, ctx.options = temporary, token_scaling, options
        return outputs_of(ctx, loss, row_metrics, metrics)

    @staticmethod
    def backward(ctx, dloss, dmetrics=None):
        logits, targets, class_weight, lse, factor, probability, row_metrics = ctx.saved_tensors
        scale = row_scale(dloss, lse, probability if ctx.token_scaling else None)
        entropy = (None, None) if dmetrics is None else (row_metrics, dmetrics[0])
        saved = logits, targets, class_weight, lse, scale, factor, *entropy, *ctx.options
        inplace = ctx.temporary and is_last_use(logits, scale)
        dlogits = _launch_backward(*saved, inplace=True) if inplace else cross_entropy_backward(*saved)
        return dlogits, *[None] * 11


def outputs_of(ctx: Any, loss: Tensor, row_metrics: Tensor, metrics: bool) -> Any:
    """What a node's forward returns: the loss, or (loss, metrics of the rows)."""
    if not metrics:
        return loss
    ctx.set_materialize_grads(False)  # the gradient of the metrics is None unless the entropy was used
    return loss, row_metrics


def row_scale(dloss: Tensor | None, lse: Tensor, probability: Tensor | None) -> Tensor:
    """The upstream gradient of the rows' losses before token scaling; 0 if only the entropy was used."""
    if dloss is None:
        return torch.zeros_like(lse)
    return dloss if probability is None else dloss * probability


class _CrossEntropyInPlace(Node):
    """The loss, with `metrics` also metrics of the rows; the forward overwrites the logits with their gradient."""

    @staticmethod
    def forward(ctx, logits, targets, class_weight, reduction, metrics, token_scaling, *options):
        gradient, mean = logits.detach(), reduction == "mean"
        # In fp16, gradients times 1 / N may round to zero: 1 / N is applied in backward, together with the upstream
        # gradient, which may be a loss scale.
        ctx.defers_factor = logits.dtype == torch.float16
        scale = FP16_SCALE if ctx.defers_factor else mean_factor(targets, class_weight, options[0]) if mean else 1.0
        loss, _, _, row_metrics = cross_entropy_in_place(
            gradient, targets, class_weight, metrics, token_scaling, scale, *options
        )
        torch.autograd.graph.increment_version(gradient)  # so that autograd raises if another node saved the logits
        factor = None
        if reduction != "none":
            loss, factor = reduce_losses(loss, targets, class_weight, options[0], mean)
        ctx.save_for_backward(gradient, factor if ctx.defers_factor else None)
        return outputs_of(ctx, loss, row_metrics, metrics)

    @staticmethod
    def backward(ctx, dloss, _=None):
        gradient, factor = ctx.saved_tensors
        scale = dloss if factor is None else dloss * factor
        return scale_gradient_(gradient, scale / FP16_SCALE if ctx.defers_factor else scale), *[None] * 10


def cross_entropy_of_temporary(
    logits: Tensor, targets: Tensor, class_weight: Tensor | None, reduction: str, *options: Any
) -> Any:
    """The loss of logits to which no one else holds a reference, or (loss, metrics of the rows).

    Backward overwrites the logits with their gradient, unless the graph is retained or being traced. logits [rows, V],
    targets [rows]; options: whether to compute metrics, token_scaling, and those of OPTIONS.
    """
    return _CrossEntropy.apply(logits, targets, class_weight, reduction, True, *options)


def cross_entropy(
    logits: Tensor, targets: Tensor, *, class_weight: Tensor | None = None, ignore_index: int = -100,
    softcap: float | None = None, logit_scale: float = 1.0, z_loss: float = 0.0, label_smoothing: float = 0.0,
    token_scaling: bool = False, reduction: str = "mean", inplace: bool = False,
) -> Tensor:  # fmt: skip
    """Cross-entropy of logits against class indices; the module's docstring has the formula.

    logits [..., V] float, targets [...] int64 in [0, V) or ignore_index -> fp32: a scalar, or [...] for "none". "mean"
    divides by the number of targets that are not ignored, and is 0 if all are. An ignored row has loss 0 and
    gradient 0; a target outside the vocabulary gives an infinite loss and gradient 0.

    class_weight: float [V], multiplies each class's loss; a token's z-loss by the weight of its target. "mean" then
    divides by the sum of the targets' weights. Gets no gradient.
    token_scaling: multiplies each token's loss by the probability of its target, taken as a constant.
    inplace: if logits require a gradient, the forward overwrites them with it (their values are lost). Backward then
    multiplies it by the upstream gradient, unless that is 1, with a second rounding, and can run only once. Has no
    effect while tracing: memory is then left to the compiler.
    Raises ValueError if the shapes or devices disagree and for any other reduction.
    """
    options = ignore_index, softcap, logit_scale, z_loss, label_smoothing
    return _cross_entropy(logits, targets, class_weight, reduction, inplace, False, token_scaling, *options)


def cross_entropy_with_metrics(
    logits: Tensor, targets: Tensor, *, class_weight: Tensor | None = None, ignore_index: int = -100,
    softcap: float | None = None, logit_scale: float = 1.0, z_loss: float = 0.0, label_smoothing: float = 0.0,
    token_scaling: bool = False, reduction: str = "mean", inplace: bool = False,
) -> CrossEntropyOutput:  # fmt: skip
    """`cross_entropy` with its metrics, which the same kernel computes: z-loss, accuracy, predicted tokens, entropy.

    The entropy has a gradient if reduction is "none" and `inplace` is not set.
    """
    options = ignore_index, softcap, logit_scale, z_loss, label_smoothing
    return _cross_entropy(logits, targets, class_weight, reduction, inplace, True, token_scaling, *options)


def _cross_entropy(
    logits: Tensor, targets: Tensor, class_weight: Tensor | None, reduction: str, inplace: bool, metrics: bool,
    token_scaling: bool, *options: Any,
) -> Any:  # fmt: skip
    shape = shape_of("cross_entropy", "logits", logits)
    check_floats("cross_entropy", logits=logits)
    class_weight = check_cross_entropy("cross_entropy", shape, logits, targets, class_weight, reduction)
    if not runs_kernels(logits):
        output = run_reference(logits, targets, class_weight, reduction, metrics, token_scaling, *options)
    elif inplace and torch.is_grad_enabled() and logits.requires_grad and not is_traced((logits,)):
        rows = as_rows(logits)
        if rows.stride(0) < rows.shape[1]:  # expanded: rows share memory
            rows = rows.contiguous()
        flat = targets.reshape(-1)
        result = _CrossEntropyInPlace.apply(rows, flat, class_weight, reduction, metrics, token_scaling, *options)
        output = as_output(result, targets, class_weight, reduction, metrics, options[0])
    else:
        result = _CrossEntropy.apply(logits, targets, class_weight, reduction, False, metrics, token_scaling, *options)
        output = as_output(result, targets, class_weight, reduction, metrics, options[0])
    return output._replace(entropy=output.entropy.detach()) if metrics and inplace else output


def as_output(
    result: Any, targets: Tensor, class_weight: Tensor | None, reduction: str, metrics: bool, ignore_index: int
) -> Any:
    """The result of a node, in the shape of the targets and with reduced metrics."""
    loss, row_metrics = result if metrics else (result, None)
    if reduction == "none" and loss.shape != targets.shape:  # a view costs microseconds
        loss = loss.view(targets.shape)
    if row_metrics is None:
        return loss
    return add_metrics(loss, row_metrics, targets, class_weight, ignore_index, reduction)


def run_reference(
    logits: Tensor, targets: Tensor, class_weight: Tensor | None, reduction: str, metrics: bool, token_scaling: bool,
    ignore_index: int, softcap: float | None, logit_scale: float, z_loss: float, label_smoothing: float,
) -> Any:  # fmt: skip
    reference = cross_entropy_with_metrics_reference if metrics else cross_entropy_reference
    return reference(
        logits, targets, class_weight=class_weight, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale,
        z_loss=z_loss, label_smoothing=label_smoothing, token_scaling=token_scaling, reduction=reduction,
    )  # fmt: skip
