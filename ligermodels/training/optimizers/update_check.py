"""Whether updates arrive in the weights: what sampled weights changed by, beside the same updates in float64.

An update that is small beside its weight is lost where the weight is rounded to nearest: it vanishes. Rounded
stochastically it becomes a whole unit in the last place now and then: it drowns in noise. Float32 parameters, and exact
bf16 parameters, lose only what is below 2^-25 of a weight.

The first updates at the peak learning rate are checked; in a run that is too short for that, its last ones. All sums
stay on the device; the loop reads them with the totals of the next step.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

STEPS = 10  # that are checked
RUNS, RUN = 16, 256  # at most this many parameters of a rank are sampled, and neighbouring elements of each
ENOUGH = 0.5  # of the weights that should change, and of the size of their change
TOO_MUCH = 2.0
CHANGED, CHANGED_EXACTLY, SIZE = "updates/changed", "updates/changed_exactly", "updates/relative_size"
SUMMED = tuple(f"updates/sum_{name}" for name in ("sampled", "changed", "exact", "square", "exact_square"))


class UpdateCheck:
    """Set as `AdamW.check` during a step, it sees the step's updates of the elements `runs`, by parameter.

    runs: of the flattened local shard, whole blocks of 8-bit moments.
    """

    def __init__(self, shards: Mapping[nn.Parameter, Tensor], warmup: int, steps: int) -> None:
        """shards: this rank's part of each trained parameter. warmup, steps: of the run."""
        self.runs = sample_runs(shards)
        self.first, self.checked = max(min(warmup, steps - 2), 0), 0
        self.end = min(self.first + STEPS, steps - 1)  # the step, from 0, that reports
        device = next(iter(shards.values())).device
        self.totals = torch.zeros(len(SUMMED), device=device)
        self.before: dict[nn.Parameter, Tensor] = {}
        self.exact: dict[nn.Parameter, Tensor] = {}

    def begins(self, step: int) -> bool:
        """Whether the updates of this step, from 0, are checked."""
        due = self.first <= step < self.end
        self.checked += due
        return due

    def expect(self, p: nn.Parameter, exact: Tensor) -> None:
        """exact: the sampled weights after the update, fp64, if nothing of it is lost."""
        self.exact[p] = exact

    def compare(self, p: nn.Parameter, after: Tensor) -> None:
        """after: the sampled weights after the update, fp64."""
        before = self.before.pop(p)
        change, exact = after - before, self.exact.pop(p) - before
        counts = torch.full_like(before, 1.0), change != 0, exact != 0, change.square(), exact.square()
        self.totals += torch.stack([x.sum(dtype=torch.float32) for x in counts])

    def sums(self, step: int) -> dict[str, Tensor]:
        """Device scalars of all checked updates before this step, to be added over ranks; empty where there are none,
        and when they have been reported."""
        if not self.checked or step > self.end:
            return {}
        return dict(zip(SUMMED, self.totals.clone().unbind(), strict=True))  # an update in backward adds to them

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """The shares of weights that changed and that should have, and the RMS of their change beside the exact one.

        sums: of all ranks, from which those of the check are removed.
        """
        sampled, changed, exact, square, exact_square = (sums.pop(name, 0.0) for name in SUMMED)
        if not exact_square:
            return {}
        return {CHANGED: changed / sampled, CHANGED_EXACTLY: exact / sampled, SIZE: math.sqrt(square / exact_square)}

    def warnings(self, step: int, metrics: Mapping[str, float], lossy_rounding: str | None) -> list[str]:
        """A line after the last checked update, if updates vanish or drown. step: as for `sums`. lossy_rounding: of
        bf16 parameters; None where updates have the precision of float32."""
        if step != self.end or not metrics:
            return []
        changed, exact, size = metrics[CHANGED], metrics[CHANGED_EXACTLY], metrics[SIZE]
        if changed >= ENOUGH * exact and ENOUGH <= size <= TOO_MUCH:
            return []
        remedy = (
            f"--param-rounding {lossy_rounding} loses small updates; use --param-rounding exact"
            if lossy_rounding
            else "they are too small for float32; raise --learning-rate"
        )
        return [
            f"the last {self.checked} updates changed {changed:.1%} of the weights by {size:.2g} times the exact "
            f"update, which would change {exact:.1%}: {remedy}"
        ]


def sample_runs(shards: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, slice]:
    """One run of neighbouring elements in each of at most RUNS parameters, by their size."""
    params: Sequence[nn.Parameter] = list(shards)
    ends = list(accumulate(shards[p].numel() for p in params))
    within, found = torch.rand(RUNS, generator=torch.Generator().manual_seed(0), dtype=torch.float64), {}
    for number, position in enumerate(within.tolist()):
        place = int((number + position) / RUNS * ends[-1])
        index = bisect_right(ends, place)
        if index < len(params):
            size = shards[params[index]].numel()
            start = (place - ends[index] + size) // RUN * RUN
            found[params[index]] = slice(start, min(start + RUN, size))
    return found
