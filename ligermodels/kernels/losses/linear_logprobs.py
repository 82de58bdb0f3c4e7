"""Log-probabilities of tokens under softmax(hidden @ weightᵀ), in chunks of rows: what losses of post-training read.

    l = softcap(s · hidden @ weightᵀ) / temperature      logprob = log softmax(l)_t      entropy = -Σ p log p

hidden [N, H] and weight [V, H] of one float dtype, targets [N] int64; results [N] fp32. Logits are fp32, because those
in bf16 are wrong by 0.02 nats a token; only their gradient is rounded to the inputs' dtype, once. At most a chunk of
them exists at a time:

| route | when | FLOP | kept for backward |
|---|---|---|---|
| recompute | in general | 2 N H V, backward 6 | 8 bytes a row beside hidden |
| row gradients | frozen head, entropy without gradient | 4 N H V, backward 0 | ∂logprob/∂hidden, in hidden's dtype |
| keep logits | few rows (`keeps_logits`) | 2 N H V, backward 4 | 4 N V bytes |
| low memory | low_memory=True | 2 N H V, backward 8 | as recompute, and 64 MiB beyond the gradients |

All routes compute the same log-probabilities to the bit, with and without gradients, but low memory, whose chunks
are smaller: a ratio of two passes over the same rows and weights is exactly 1. Forward chunks are rows; those of
recompute's backward are parts of the vocabulary, so that it sums dhidden in fp32 and not dweight: 4 N H bytes instead
of 4 V H. All sums are fp32. The reference, `logprobs_of_logits`, is also what a head that was replaced is given to: it
takes several times the memory of its logits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.dispatch import (
    INT64,
    Node,
    autocast,
    check_dtypes,
    check_linear,
    check_one_of,
    check_shape,
    is_last_use,
    is_traced,
    runs_kernels,
    shape_of,
    widen,
)
from ligermodels.kernels.launch import as_matrix
from ligermodels.kernels.losses.logits_chunks import all_logits, keeps_logits
from ligermodels.kernels.losses.logprob_chunks import (
    linear_logprobs_backward,
    linear_logprobs_forward,
    linear_logprobs_low_memory,
    logits_dtype,
    overwrite_with_gradient,
)
from ligermodels.kernels.losses.logprob_rows import RowLogProbs, empty_logprobs, launch_logprobs
from ligermodels.kernels.losses.rescale import rescale

EXTRAS = ("entropy", "log_sum_squares", "mean_logit", "greedy")


class LogProbs(NamedTuple):
    """Results of `linear_logprobs`, each [...]; None where not required. All are 0 for an ignored target."""

    logprobs: Tensor  # fp32; minus infinity for a target outside the vocabulary
    entropy: Tensor | None = None  # fp32, in nats
    log_sum_squares: Tensor | None = None  # fp32, log Σ p²
    mean_logit: Tensor | None = None  # fp32, over the vocabulary
    greedy: Tensor | None = None  # bool: the target is the first class of the highest logit

    def map(self, function: Callable[[Tensor], Tensor]) -> "LogProbs":
        """The function's values of those fields that are not None."""
        return LogProbs(function(self.logprobs), *(None if x is None else function(x) for x in self[1:]))


def logprobs_of_logits(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, entropy: bool = False, extras: Sequence[str] = (), ignore_index: int = -100,
) -> LogProbs:  # fmt: skip
    """`linear_logprobs` of logits [..., V] that exist already, in plain PyTorch: takes several times their memory."""
    check_logprob_options(extras, temperature)
    logits = widen(logits)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature != 1.0:
        logits = logits / temperature
    supervised = targets != ignore_index
    valid = supervised & (targets >= 0) & (targets < logits.shape[-1])
    index = torch.where(valid, targets, 0)[..., None]
    gap = logits.scatter(-1, index, -torch.inf).logsumexp(-1) - logits.gather(-1, index).squeeze(-1)
    logprobs = -torch.logaddexp(gap, torch.zeros_like(gap))
    results: dict[str, Tensor] = {"logprobs": torch.where(valid, logprobs, torch.where(supervised, -torch.inf, 0.0))}
    if entropy or "entropy" in extras:
        log_p = logits.log_softmax(-1)
        log_p = log_p.clamp_min(torch.finfo(log_p.dtype).min)  # so that 0 log 0 is 0, and its gradient too
        value = torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0.0)
        results["entropy"] = value if entropy else value.detach()
    logits = logits.detach()
    if "log_sum_squares" in extras:
        results["log_sum_squares"] = torch.where(valid, (2 * logits.log_softmax(-1)).logsumexp(-1), 0.0)
    if "mean_logit" in extras:
        results["mean_logit"] = torch.where(valid, logits.mean(-1), 0.0)
    if "greedy" in extras:
        results["greedy"] = valid & (logits.argmax(-1) == targets)
    return LogProbs(**results)


def check_logprob_options(extras: Sequence[str], temperature: float) -> None:
    """Raises ValueError for an unknown extra and for a temperature that is not positive."""
    if unknown := [name for name in extras if name not in EXTRAS]:
        raise ValueError(f"linear_logprobs: unknown extra {unknown[0]!r}; supported: {', '.join(EXTRAS)}")
    if not temperature > 0:
        raise ValueError(f"linear_logprobs: temperature is {temperature}; a positive number is needed")


def linear_logprobs_reference(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> LogProbs:
    """Options as in `linear_logprobs`, without `low_memory`."""
    hidden, weight = autocast(hidden, weight)
    if not torch._C._is_any_autocast_enabled():
        return logprobs_of_logits(F.linear(widen(hidden), widen(weight)), targets, **options)
    with torch.autocast(hidden.device.type, enabled=False):  # the product is fp32, of factors in the autocast dtype
        return logprobs_of_logits(F.linear(widen(hidden), widen(weight)), targets, **options)


class _Recomputed(Node):
    """Backward computes the logits once more."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, entropy, extras, low_memory, *options):
        logprobs, lse, entropies, more, _ = linear_logprobs_forward(
            hidden, weight, targets, entropy, extras, False, low_memory, *options
        )
        ctx.save_for_backward(hidden, weight, targets, logprobs, lse, entropies if entropy else None)
        ctx.low_memory, ctx.options = low_memory, options
        return _outputs(ctx, logprobs, entropies if entropy else None, more if extras else None)

    @staticmethod
    def backward(ctx, dlogprobs, *others):
        *saved, entropies = ctx.saved_tensors  # once: checkpointing raises on a second access
        gradients = _upstream(ctx, dlogprobs, others, saved[-1])
        backward = linear_logprobs_low_memory if ctx.low_memory else linear_logprobs_backward
        needed = ctx.needs_input_grad[:2]
        computed = backward(*saved, entropies, *gradients, *needed, *ctx.options)
        return *[x if is_needed else None for x, is_needed in zip(computed, needed, strict=True)], *[None] * 7


class _RowGradients(Node):
    """Forward computes the gradient of each row's log-probability with respect to hidden; backward scales it."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, entropy, extras, low_memory, *options):
        logprobs, _, entropies, more, dhidden = linear_logprobs_forward(
            hidden, weight, targets, entropy, extras, True, low_memory, *options
        )
        ctx.save_for_backward(dhidden)
        return _outputs(ctx, logprobs, entropies if entropy else None, more if extras else None)

    @staticmethod
    def backward(ctx, dlogprobs, *_):
        (dhidden,) = ctx.saved_tensors
        return None if dlogprobs is None else rescale(dhidden, dlogprobs, None, 1.0, dhidden.dtype), *[None] * 8


class _KeptLogits(Node):
    """Keeps all logits; backward overwrites them with their gradient. Not for tracing."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, entropy, extras, _, *options):
        logits = all_logits(hidden, weight, logits_dtype(hidden))
        results = empty_logprobs(targets, entropy, extras)
        launch_logprobs(logits, targets, results, None, *options)
        ctx.save_for_backward(hidden, weight, targets, logits, *results[:3])
        ctx.options = options
        return _outputs(ctx, results.logprobs, results.entropy, results.extras)

    @staticmethod
    def backward(ctx, dlogprobs, *others):
        hidden, weight, targets, logits, logprobs, lse, entropies = ctx.saved_tensors
        gradients = _upstream(ctx, dlogprobs, others, lse)
        overwritten = logits if is_last_use(logits, lse) else logits.clone()
        results = RowLogProbs(logprobs, lse, entropies)
        rows = slice(0, hidden.shape[0])
        dlogits = overwrite_with_gradient(overwritten, targets, results, *gradients, hidden.dtype, rows, *ctx.options)
        hidden_grad, weight_grad = ctx.needs_input_grad[:2]
        dhidden = torch.mm(dlogits, weight) if hidden_grad else None
        return dhidden, torch.mm(dlogits.T, hidden) if weight_grad else None, *[None] * 7


def _outputs(ctx: Any, logprobs: Tensor, entropies: Tensor | None, more: Tensor | None) -> tuple[Tensor, ...]:
    """What a node's forward returns. The upstream gradient of an output that is not used is None."""
    ctx.set_materialize_grads(False)
    ctx.entropy = entropies is not None
    return tuple(x for x in (logprobs, entropies, more) if x is not None)


def _upstream(
    ctx: Any, dlogprobs: Tensor | None, others: tuple[Tensor | None, ...], lse: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The upstream gradients of the log-probabilities, zeros if only the entropies were used, and of the entropies."""
    return torch.zeros_like(lse) if dlogprobs is None else dlogprobs, others[0] if ctx.entropy else None


def check_head(op: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Raises ValueError unless hidden [..., H], weight [V, H] and targets [...] fit each other."""
    *rows, columns = shape_of(op, "hidden", hidden)
    check_linear(op, columns, weight, None)
    check_shape(op, "targets", targets, *rows)
    check_one_of(op, INT64, targets=targets)
    check_dtypes(op, hidden=hidden, weight=weight)


def linear_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, entropy: bool = False, extras: Sequence[str] = (), low_memory: bool = False,
    ignore_index: int = -100,
) -> LogProbs:  # fmt: skip
    """Log-probability of each target under softmax(softcap(logit_scale · hidden @ weightᵀ) / temperature).

    hidden [..., H] and weight [V, H] of one float dtype, targets [...] int64 in [0, V) or ignore_index -> `LogProbs`,
    each field [...]. Logits are fp32 whatever the dtype, and never all in memory unless they are few. Ignored targets
    have 0 and no gradient; targets outside the vocabulary minus infinity and no gradient.

    entropy: also the entropy of the distribution, with its gradient.
    extras: more results, without gradients: "entropy", "log_sum_squares", "mean_logit", "greedy".
    low_memory: at most 64 MiB beyond the results and the gradients; takes 1.4 to 1.5 times as long.
    A weight without gradient, as of a frozen head, makes forward compute ∂logprob/∂hidden, unless the entropy has a
    gradient: two products with the weight in all, instead of four.
    Raises ValueError if the shapes disagree, for an unknown extra and for a temperature that is not positive.
    """
    hidden, weight = autocast(hidden, weight)
    check_head("linear_logprobs", hidden, weight, targets)
    if not runs_kernels(hidden):
        return linear_logprobs_reference(
            hidden, weight, targets, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
            entropy=entropy, extras=extras, ignore_index=ignore_index,
        )  # fmt: skip
    check_logprob_options(extras, temperature)
    more = any(name != "entropy" for name in extras)
    flags = entropy or "entropy" in extras, more, low_memory
    options = ignore_index, None if softcap is None else softcap / temperature, logit_scale / temperature
    rows, flat = as_matrix(hidden), targets.reshape(-1).contiguous()
    outputs = _choose_node(rows, weight, entropy, low_memory).apply(rows, weight, flat, *flags, *options)
    if targets.ndim != 1:  # a view takes microseconds
        outputs = [x.view(*x.shape[:-1], *targets.shape) for x in outputs]
    return as_logprobs(outputs, entropy, flags[0], more, extras)


def _choose_node(rows: Tensor, weight: Tensor, entropy: bool, low_memory: bool) -> type[Node]:
    needed = [torch.is_grad_enabled() and x.requires_grad for x in (rows, weight)]
    if needed == [True, False] and not entropy:
        return _RowGradients
    size = rows.shape[0], rows.shape[1], weight.shape[0]
    keeps = not low_memory and not is_traced((rows, weight)) and keeps_logits(*size, torch.float32, *needed)
    return _KeptLogits if keeps else _Recomputed


def as_logprobs(
    outputs: Sequence[Tensor], entropy: bool, has_entropy: bool, more: bool, extras: Sequence[str]
) -> LogProbs:
    """The outputs of a node by name; extras without gradient."""
    results: dict[str, Tensor] = {"logprobs": outputs[0]}
    if has_entropy:
        results["entropy"] = outputs[1] if entropy else outputs[1].detach()
    if more:
        log_sum_squares, mean_logit, greedy = outputs[-1].detach().unbind(0)
        values = {"log_sum_squares": log_sum_squares, "mean_logit": mean_logit, "greedy": greedy > 0}
        results |= {name: values[name] for name in extras if name != "entropy"}
    return LogProbs(**results)
