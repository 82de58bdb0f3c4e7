"""What mixes the tokens of a block: the base class of attention and of layers with states. Must not know any family."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ligermodels.generation.cache import Kept
from ligermodels.generation.image_features import CrossFeatures
from ligermodels.kernels.attention.attention import DocumentRun, attention, attention_by_run
from ligermodels.kernels.attention.shared_keys import SharedKeys, gather_keys
from ligermodels.layers.context_parallel import ContextGroup
from ligermodels.layers.norm import PreNorm
from ligermodels.layers.packed import PackingModule

KeysAndValues = tuple[Tensor, Tensor]  # each [B, T, Hkv, D]


class KeysReadLater:
    """Keys and values that later layers read, by layer type, written by the layer that computes them. Neither a dict
    nor a dataclass: of those FSDP2 passes copies to a block."""

    def __init__(self) -> None:
        self.of_type: dict[str, KeysAndValues] = {}


@dataclass(frozen=True)
class Positions:
    """Positions of the tokens of a batch, with what depends on them alone; computed once for all layers."""

    position_ids: Tensor  # [B or 1, T]
    angles: Mapping[str, tuple[Tensor, Tensor]]  # layer type -> (cos, sin), each [B * T or T, R / 2] fp32
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    shared_keys: SharedKeys | None = None  # where packed documents share prefixes: the keys that each one reads
    query_scale: Tensor | None = None  # [B or 1, T, 1, 1] in the queries' dtype; None if queries are not scaled
    causal: bool = True
    padding: Tensor | None = None  # int64 [B], with a cache: how many places at the end of each row are no tokens
    layer_input: Tensor | None = None  # [B, T, size], what the present layer reads beside the residual stream
    ahead: Tensor | None = None  # int64 [B, T], how many tokens behind it a token sees; None where all see none
    cross: CrossFeatures | None = None  # images that cross-attention reads; None without
    read_later: KeysReadLater | None = None  # None where no layer reads the keys of another
    context: ContextGroup | None = None  # the ranks that share the row, whose offsets cu_seqlens are; None for one
    runs: tuple[DocumentRun, ...] | None = None  # the packed documents, where their lengths are known on the host

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **options: Any) -> Tensor:
        """Attention within rows or packed documents. sinks, options: as those of `attention`."""
        shared = self.shared_keys
        documents: dict[str, Any] = {"cu_seqlens": self.cu_seqlens, "max_seqlen": self.max_seqlen}
        documents["causal"] = self.causal
        if shared is not None:
            k, v = (gather_keys(x, shared.offsets, shared.places) for x in (k, v))
            documents |= {"cu_seqlens_k": shared.cu_seqlens, "max_seqlen_k": shared.max_seqlen}
        if self.runs is not None and not torch.compiler.is_compiling():  # which would compile again for other runs
            return attention_by_run(q, k, v, self.runs, causal=self.causal, sinks=sinks, **options)
        if self.context is not None:
            return self.context.attend(attention, q, k, v, sinks, **documents, **options)
        return attention(q, k, v, sinks=sinks, **documents, **options)


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
        self,
        norm: PreNorm | None,
        x: Tensor,
        residual: Tensor | None,
        positions: Positions,
        cache: Any,
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


def mean_attended_keys(length: int, window: int | None) -> float:
    """Returns the average number of keys that a query of a row attends to, its own included."""
    most = min(window or length, length)
    return (most * (most + 1) / 2 + (length - most) * most) / length
