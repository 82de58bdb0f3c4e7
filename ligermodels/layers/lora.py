"""LoRA modules: a trained low-rank update added to a frozen linear or to a frozen stacked weight.

y = base(x) + alpha / rank * (x Aᵀ) Bᵀ, Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.kernels.linear.linear import Columns, LowRank, low_rank_update
from ligermodels.kernels.moe.grouped_gemm import GroupedLowRank
from ligermodels.kernels.quant.quantised_weight import Weight
from ligermodels.weights.module import LowRankModule
from ligermodels.weights.sharding import copy_local_shard


class LoRALinear(LowRankModule):
    """A linear with LoRA. If it packs several projections, each of them has its own update.

    Parameters, for P projections in order: lora_A [P rank, in], lora_B [Σ (stop - start), rank].

    base_layer: an `nn.Linear` or its replacement (float8, quantised); the caller freezes its parameters.
    columns: (start, stop) in the output of each projection with an update, ascending; None for the whole output.
    dropout: probability of dropping an element of the update's input.
    dtype: of lora_A and lora_B; None for the base's.
    """

    def __init__(
        self, base_layer: nn.Linear, rank: int, alpha: float, *, columns: Columns | None = None, dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
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
        reset_lora(self)
        self.train(base_layer.training)

    def low_rank(self, dtype: torch.dtype) -> LowRank:
        """The update as the kernels take it, cast to `dtype`; A and B may be stored in a wider one."""
        return LowRank(self.lora_A.to(dtype), self.lora_B.to(dtype), self.columns, self.scale)

    @property
    def dropout_active(self) -> bool:
        """Whether dropout is applied: in training mode, with a probability above 0, to an update that is added."""
        return self.enabled and self.training and self.dropout > 0.0

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if not self.enabled:
            return self.base_layer(x)
        dropped = F.dropout(x, self.dropout, self.training)
        # The update comes first: under activation checkpointing, recomputation stops at the last saved tensor. The base
        # saves that tensor before its matrix product, so that this product is not recomputed.
        update = low_rank_update(dropped, self.low_rank(x.dtype), self.base_layer.out_features)
        return self.base_layer(x) + update

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}, columns={self.columns}, dropout={self.dropout}"


class GroupedUpdate(LowRankModule):
    """LoRA updates of a stacked weight [E, N, K]: alpha / rank * B_e A_e for each of its E matrices.

    Parameters, in PEFT's layout: lora_A [E r, K], the A_e one after another; lora_B [N, r E], where column j E + e is
    column j of B_e.
    """

    dropout = 0.0  # not supported: each expert reads other rows of the input

    def __init__(self, weight: Weight, rank: int, alpha: float, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.groups, outputs, inputs = weight.shape
        self.columns = ((0, outputs),)
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(weight.new_empty(self.groups * rank, inputs, dtype=dtype))
        self.lora_B = nn.Parameter(weight.new_empty(outputs, rank * self.groups, dtype=dtype))

    def low_rank(self, dtype: torch.dtype, groups: slice = slice(None)) -> GroupedLowRank:
        """The updates of these matrices as the kernels take them, cast to `dtype`."""
        a = self.lora_A.unflatten(0, (self.groups, self.rank))[groups]  # [E, r, K]
        b = self.lora_B.unflatten(1, (self.rank, self.groups))[..., groups].permute(2, 0, 1)  # [E, N, r]
        return GroupedLowRank(a.to(dtype), b.to(dtype).contiguous(), self.scale)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}, groups={self.groups}"


@contextmanager
def lora_disabled(model: nn.Module) -> Iterator[None]:
    """Within it the model computes without its updates, and without their dropout: as its base does."""
    modules = list(lora_modules(model))
    for module in modules:
        module.enabled = False
    try:
        yield
    finally:
        for module in modules:
            module.enabled = True


@torch.no_grad()
def reset_lora(update: LoRALinear | GroupedUpdate, generator: torch.Generator | None = None) -> None:
    """Initial values: A as the weight of an `nn.Linear`, B zero, so that the update is zero.

    If the parameters are sharded, every rank draws the whole A and keeps its shard: all ranks need equal generators.
    """
    a = torch.empty(update.lora_A.shape, dtype=update.lora_A.dtype, device=update.lora_A.device)
    copy_local_shard(update.lora_A, nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator))
    nn.init.zeros_(update.lora_B)


def lora_modules(model: nn.Module) -> Iterator[LoRALinear | GroupedUpdate]:
    """All modules of a model that own LoRA parameters."""
    return (module for module in model.modules() if isinstance(module, LoRALinear | GroupedUpdate))


def initialize_lora(model: nn.Module, generator: torch.Generator) -> None:
    """Initialises all LoRA parameters of a model: equal on any number of ranks, if their generators are equal."""
    for module in lora_modules(model):
        reset_lora(module, generator)
