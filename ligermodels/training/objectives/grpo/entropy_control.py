"""EntropyControl: the weight of the entropy in the loss, adapted to a target. Must not know models or losses."""

import math

import torch
from torch import Tensor

from ligermodels.losses import next_entropy_coef


class EntropyControl:
    """Without a target the weight stays as it was given.

    With one, a step adds the entropy only where that of the step before was at most the target, and the weight rises or
    falls by 0.005 a step. Source: Skywork-OR1, arXiv 2505.22312, as TRL has it.
    """

    def __init__(self, weight: float, target: float | None) -> None:
        self.target = target
        # Of the next step, and the entropy per token of the last one: as a tensor, which a checkpoint fills in place.
        self.values = torch.tensor([weight, math.inf], dtype=torch.float64)

    @property
    def is_used(self) -> bool:
        return self.target is not None or self.weight > 0

    @property
    def weight(self) -> float:
        return float(self.values[0])

    @property
    def applied(self) -> float:
        """The weight in the loss of the next step."""
        return self.weight if self.target is None or float(self.values[1]) <= self.target else 0.0

    def finish_step(self, entropy: float) -> None:
        """entropy: of the step, per token. A step that is not finite changes nothing."""
        if self.target is not None and math.isfinite(entropy):
            weight = next_entropy_coef(self.weight, entropy, entropy_target=self.target)
            self.values.copy_(torch.tensor([weight, entropy]))

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint saves."""
        return {} if self.target is None else {"entropy_control": self.values}
