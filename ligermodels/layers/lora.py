"""LoRA: a linear whose weight stays as it is and learns a low-rank update beside it.

y = base(x) + alpha / rank * (x Aᵀ) Bᵀ, Hu et al. 2021, https://arxiv.org/abs/2106.09685. Must not know which
projections of a model have one, nor how adapters are stored.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.kernels.linear import Columns, LowRank, low_rank_update


class LoRALinear(nn.Module):
    """A linear with an update of its own for each of the projections that are packed in it.

    base_layer: an ordinary Linear, or what has taken its place; the caller freezes its parameters.
    columns: of each projection with an update, where it starts and stops in the output, ascending; all of the output
    where it is not packed. dropout: the probability with which an element of x is dropped from the update's input.
    Parameters, projection by projection and in the base's dtype: lora_A [P rank, in], lora_B [Σ (stop - start), rank].
    """

    def __init__(
        self,
        base_layer: nn.Linear,
        rank: int,
        alpha: float,
        *,
        columns: Columns | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.columns = ((0, base_layer.out_features),) if columns is None else columns
        self.scale = alpha / rank
        self.dropout = dropout
        updated = sum(stop - start for start, stop in self.columns)
        weight = base_layer.weight
        self.lora_A = nn.Parameter(weight.new_empty(len(self.columns) * rank, base_layer.in_features))
        self.lora_B = nn.Parameter(weight.new_empty(updated, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """An update of zero that learns: A as a Linear's weight begins, B zero."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def low_rank(self, dtype: torch.dtype) -> LowRank:
        """The update as kernels take it, computed in `dtype`: A and B may be kept in a wider one."""
        return LowRank(self.lora_A.to(dtype), self.lora_B.to(dtype), self.columns, self.scale)

    @property
    def drops(self) -> bool:
        """Whether dropout is active."""
        return self.training and self.dropout > 0.0

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        kept = F.dropout(x, self.dropout, self.training)
        # First the update: recomputation stops at the last tensor kept, which the base keeps before its product.
        update = low_rank_update(kept, self.low_rank(x.dtype), self.base_layer.out_features)
        return self.base_layer(x) + update

    def extra_repr(self) -> str:
        return f"rank={self.lora_B.shape[1]}, scale={self.scale}, columns={self.columns}, dropout={self.dropout}"
