"""LoRA: linears and routed experts whose weights stay as they are and learn a low-rank update beside them.

y = base(x) + alpha / rank * (x Aᵀ) Bᵀ, Hu et al. 2021, https://arxiv.org/abs/2106.09685. Must not know any
architecture, nor how adapters are stored; `lora_targets` gives a model such modules.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.kernels.experts import experts
from ligermodels.kernels.grouped_low_rank import GroupedLowRank
from ligermodels.kernels.linear import Columns, LowRank, low_rank_update
from ligermodels.weights.module import LowRankModule
from ligermodels.weights.sharding import copy_local_shard

if TYPE_CHECKING:
    from ligermodels.layers.moe import Experts


class LoRALinear(LowRankModule):
    """A linear with an update of its own for each of the projections that are packed in it.

    base_layer: an ordinary Linear, or what has taken its place; the caller freezes its parameters.
    columns: of each projection with an update, where it starts and stops in the output, ascending; all of the output
    where it is not packed. dropout: the probability with which an element of x is dropped from the update's input.
    dtype: of the update's parameters; None for the base's.
    Parameters, projection by projection: lora_A [P rank, in], lora_B [Σ (stop - start), rank].
    """

    def __init__(
        self,
        base_layer: nn.Linear,
        rank: int,
        alpha: float,
        *,
        columns: Columns | None = None,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.columns = ((0, base_layer.out_features),) if columns is None else columns
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank
        self.dropout = dropout
        updated = sum(stop - start for start, stop in self.columns)
        weight = base_layer.weight
        self.lora_A = nn.Parameter(weight.new_empty(len(self.columns) * rank, base_layer.in_features, dtype=dtype))
        self.lora_B = nn.Parameter(weight.new_empty(updated, rank, dtype=dtype))
        reset_update(self)
        self.train(base_layer.training)

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
        return f"rank={self.rank}, scale={self.scale}, columns={self.columns}, dropout={self.dropout}"


class GroupedUpdate(LowRankModule):
    """The update of one projection, a stacked weight [E, N, K]: alpha / rank * B_e A_e for each of E experts.

    Parameters: lora_A [E r, K], one A_e after another; lora_B [N, r E], column j E + e being column j of B_e.
    """

    dropout = 0.0  # x is not one tensor here that elements could be dropped from: each expert reads rows of its own

    def __init__(self, weight: Tensor, rank: int, alpha: float, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.groups, outputs, inputs = weight.shape
        self.columns = ((0, outputs),)
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(weight.new_empty(self.groups * rank, inputs, dtype=dtype))
        self.lora_B = nn.Parameter(weight.new_empty(outputs, rank * self.groups, dtype=dtype))

    def low_rank(self, dtype: torch.dtype) -> GroupedLowRank:
        """The update as kernels take it, computed in `dtype`."""
        a = self.lora_A.to(dtype).unflatten(0, (self.groups, self.rank))  # [E, r, K]
        b = self.lora_B.to(dtype).unflatten(1, (self.rank, self.groups)).permute(2, 0, 1)  # [E, N, r]
        return GroupedLowRank(a, b.contiguous(), self.scale)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}, experts={self.groups}"


class LoRAExperts(nn.Module):
    """Experts, which the caller freezes, with an update of both projections."""

    def __init__(self, base_layer: "Experts", rank: int, alpha: float, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.gate_up_proj = GroupedUpdate(base_layer.gate_up_proj, rank, alpha, dtype)
        self.down_proj = GroupedUpdate(base_layer.down_proj, rank, alpha, dtype)
        for update in updates(self):
            reset_update(update)
        self.train(base_layer.training)

    def forward(self, x: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
        """As Experts: x [tokens, H], expert_index and expert_weight [tokens, k] -> [tokens, H]."""
        base = self.base_layer
        return experts(
            x, expert_index, expert_weight, base.gate_up_proj, base.down_proj, base.activation,
            self.gate_up_proj.low_rank(x.dtype), self.down_proj.low_rank(x.dtype),
        )  # fmt: skip


@torch.no_grad()
def reset_update(update: LoRALinear | GroupedUpdate, generator: torch.Generator | None = None) -> None:
    """An update of zero that learns: A as a Linear's weight begins, B zero.

    Where the parameters are sharded, every rank draws all of A and keeps its part: give equal generators.
    """
    a = torch.empty(update.lora_A.shape, dtype=update.lora_A.dtype, device=update.lora_A.device)
    copy_local_shard(update.lora_A, nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator))
    nn.init.zeros_(update.lora_B)


def updates(model: nn.Module) -> Iterator[LoRALinear | GroupedUpdate]:
    return (module for module in model.modules() if isinstance(module, LoRALinear | GroupedUpdate))


def initialize_lora(model: nn.Module, generator: torch.Generator) -> None:
    """Gives all updates of a model their first values, the same on any number of ranks, which have equal generators."""
    for module in updates(model):
        reset_update(module, generator)
