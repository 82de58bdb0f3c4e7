"""What mixes the tokens of a block: the base class of attention and of layers with states."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ligermodels.generation.cache import Kept, PerToken
from ligermodels.kernels.attention.attention import packed_attention_name
from ligermodels.layers.inputs import Positions
from ligermodels.layers.norm import PreNorm
from ligermodels.layers.packed import PackingModule


class Mixer(PackingModule, ABC):
    """Base class.

    name_in_block: the module's name in a block. dropout: of attention's probabilities.
    window: how many keys a query attends to, its own included; None for all.
    source: the layer that it has keys and values from; None for itself.
    is_read: whether later layers read its keys and values.
    """

    name_in_block: ClassVar[str]
    hidden_size: int
    dropout: float = 0.0
    window: int | None = None
    source: int | None = None
    is_read: bool = False
    num_heads: int

    @abstractmethod
    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: Any
    ) -> tuple[Tensor, Tensor]:
        """x, residual [B, T, H] -> (output [B, T, H], residual stream x + residual [B, T, H]).

        The layer reads norm(x + residual), or x + residual if norm is None. cache: a `LayerCache`, or `LayerStates` for
        a layer that keeps states.
        """

    @property
    def score_width(self) -> int:
        """Columns of all queries and of all values together: what a query costs for each key."""
        return 0

    @property
    def output_size(self) -> int:
        """Elements of attention's output for a token, where `score_width` is not 0."""
        return self.score_width // 2

    @property
    def state_flops(self) -> int:
        """FLOPs of a token in forward that read and change states."""
        return 0

    @abstractmethod
    def kept(self) -> Kept:
        """What a cache keeps for this layer."""

    @abstractmethod
    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        """What computes packed documents there, for reports."""


class AttentionMixer(Mixer):
    """Base class of attention over the earlier tokens' keys and values, in heads of D elements."""

    name_in_block = "self_attn"
    head_dim: int
    num_key_value_heads: int
    softcap: float | None = None

    @property
    def score_width(self) -> int:
        return 2 * self.num_heads * self.head_dim

    def kept(self) -> PerToken:
        return PerToken(2 * self.num_key_value_heads * self.head_dim, self.window)

    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        return packed_attention_name(device, dtype, self.head_dim, self.softcap)


def mean_attended_keys(length: int, window: int | None) -> float:
    """Returns the average number of keys that a query of a row attends to, its own included."""
    most = min(window or length, length)
    return (most * (most + 1) / 2 + (length - most) * most) / length
