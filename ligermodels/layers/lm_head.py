"""Heads: of language models, for logits, the loss of targets, their log-probabilities or the divergence from a teacher,
of all tokens or of some; and of reward models.
"""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ligermodels.kernels.dispatch import widen
from ligermodels.kernels.losses.cross_entropy import cross_entropy
from ligermodels.kernels.losses.linear_cross_entropy import linear_cross_entropy
from ligermodels.kernels.losses.linear_divergence import DivergenceOutput, TeacherInputs, linear_divergence
from ligermodels.kernels.losses.linear_logprobs import LogProbs, linear_logprobs, logprobs_of_logits
from ligermodels.kernels.losses.linear_logprobs_loss import LogProbsLoss, RowLoss, linear_logprobs_loss, loss_of_rows
from ligermodels.layers.fused import is_quantised
from ligermodels.layers.packed import is_intercepted


class LMHead(nn.Linear):
    """Hidden states [..., H] -> logits [..., V], or the loss or log-probabilities of targets, or a divergence.

    All are computed by the head's own forward, because FSDP gathers a weight only when the module that owns it is
    called.

    low_memory_loss: cross-entropies form their gradients in the inputs' dtype, with few logits at a time: `low_memory`
    of `linear_cross_entropy`.
    """

    low_memory_loss = False

    def forward(
        self, input: Tensor, targets: Tensor | None = None, *, logprobs: bool = False, row_loss: RowLoss | None = None,
        teacher: TeacherInputs | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """With targets [...]: the cross-entropy of the logits, or `LogProbs`, or with a row_loss `LogProbsLoss`, or the
        `DivergenceOutput` of a teacher.

        options: as those of `linear_cross_entropy`, `linear_logprobs`, `linear_logprobs_loss` or `linear_divergence`.
        """
        if teacher is not None:
            return linear_divergence(input, self.weight.to(input.dtype), teacher, targets=targets, **options)
        if is_quantised(self.weight):
            logits = super().forward(input)
            if targets is None:
                return logits
            if row_loss is not None:
                return loss_of_logits(logits, targets, row_loss, **options)
            return logprobs_of(logits, targets, **options) if logprobs else cross_entropy(logits, targets, **options)
        weight = self.weight.to(input.dtype)  # it may be wider, where the head is trained beside LoRA
        if targets is None:
            return F.linear(input, weight)
        if row_loss is not None:
            return linear_logprobs_loss(input, weight, targets, row_loss, **options)
        if logprobs:
            return linear_logprobs(input, weight, targets, **options)
        return linear_cross_entropy(input, weight, targets, low_memory=self.low_memory_loss, **options)


class ScoreHead(nn.Linear):
    """Hidden states [..., H] -> scores [..., 1] of a reward model, in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(widen(input), widen(self.weight))


def loss_of(head: nn.Module, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """The cross-entropy of hidden [..., H] against targets [...]; options as those of `cross_entropy`.

    A head that was replaced, or has hooks, is called for its logits; ours computes the loss itself.
    """
    if computes_results(head):
        return head(hidden, targets, **options)
    return cross_entropy(head(hidden), targets, **options)


def logprobs_from(head: nn.Module, hidden: Tensor, targets: Tensor, **options: Any) -> LogProbs:
    """Returns the log-probabilities of the targets; options are those of `linear_logprobs`."""
    if computes_results(head):
        return head(hidden, targets, logprobs=True, **options)
    return logprobs_of(head(hidden), targets, **options)


def logprobs_loss_from(
    head: nn.Module, hidden: Tensor, targets: Tensor, row_loss: RowLoss, **options: Any
) -> LogProbsLoss:
    """Returns a loss of the log-probabilities; options are those of `linear_logprobs_loss`."""
    if computes_results(head):
        return head(hidden, targets, row_loss=row_loss, **options)
    return loss_of_logits(head(hidden), targets, row_loss, **options)


def divergence_from(
    head: nn.Module, hidden: Tensor, targets: Tensor, teacher: TeacherInputs, **options: Any
) -> DivergenceOutput:
    """The divergence from a teacher; options as those of `linear_divergence`.

    Raises ValueError for a head that was replaced, or has hooks: it has no weight to multiply with.
    """
    if not computes_results(head):
        raise ValueError("divergence: the language-model head was replaced, or has hooks; remove them")
    return head(hidden, targets, teacher=teacher, **options)


def computes_results(head: nn.Module) -> bool:
    """Whether the head is ours, and nothing but FSDP intercepts its calls."""
    return isinstance(head, LMHead) and (isinstance(head, FSDPModule) or not is_intercepted(head))


def logprobs_of(logits: Tensor, targets: Tensor, *, low_memory: bool = False, **options: Any) -> LogProbs:
    """low_memory has no effect on logits that exist."""
    return logprobs_of_logits(logits, targets, **options)


def loss_of_logits(
    logits: Tensor, targets: Tensor, row_loss: RowLoss, *, borders: Sequence[int] | None = None, **options: Any
) -> LogProbsLoss:
    """row_loss is called once, so that borders have no effect."""
    return loss_of_rows(logprobs_of(logits, targets, **options), row_loss)


def select_rows(hidden: Tensor, targets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [B, T, H] and targets [B, T] at flat places `rows` [N] -> [N, H] and [N].

    Backward adds the rows' gradients. Where only padding repeats a place, whose gradient is zero, their order does not
    change a bit.
    """
    return hidden.flatten(0, 1).index_select(0, rows), targets.flatten().index_select(0, rows)
