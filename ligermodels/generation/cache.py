"""What models and generation see of each other: a model of its cache, generation of a model.

`KVCache` (kv_cache.py) is a plain cache for calls of a model's forward; the views of the paged cache that the steps of
the engine have (prefill.py, rows.py) are the others. Must not know any family.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ligermodels.configs.base import Config
from ligermodels.kernels.cache_write import CacheSlots


class LatentHeads(Protocol):
    """How the heads of latent attention read what a cache keeps of a token, [latent | rotated key] [B, S, 1, L + R].

    Keys and values of all heads can be computed from it, or queries and outputs be moved to the latents.
    """

    @property
    def latent_size(self) -> int: ...

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B, S, 1, L + R] -> keys [B, S, H, D] and values [B, S, H, V]."""
        ...

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [B, T, H, D] -> queries of the latents, [B, T, H, L + R]."""
        ...

    def restore(self, out: Tensor) -> Tensor:
        """Weighted latents [B, T, H, L] -> weighted values [B, T, H, V]."""
        ...


class LayerCache(Protocol):
    """The cache of one layer.

    slots: where the caller writes keys and values before it calls `attend`; None if `attend` stores them.
    """

    @property
    def slots(self) -> CacheSlots | None: ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, *, is_read: bool = False, **options: Any
    ) -> Tensor:
        """Attention of q [B, T, Hq, D] at position_ids [B, T] over earlier tokens and their own k, v [B, T, Hkv, D].

        is_read: whether `attend_again` follows.
        options: scale, window, softcap, sinks, as those of `kernels.attention.attention`. Returns [B, T, Hq, D].
        """
        ...

    def attend_again(self, q: Tensor, position_ids: Tensor, **options: Any) -> Tensor:
        """The same over the keys and values of the `attend` of this call of the model, by queries of another layer."""
        ...

    def attend_latents(
        self, q: Tensor, latents: Tensor, position_ids: Tensor, heads: LatentHeads, *, scale: float
    ) -> Tensor:
        """The same of latent attention, whose keys and values the cache keeps as latents [B, T, 1, L + R]."""
        ...


class Cache(Protocol):
    """The cache of a model."""

    @property
    def layers(self) -> Sequence[LayerCache]: ...

    @property
    def sequence_lengths(self) -> Tensor | None:
        """The length of each token's sequence, [B, T], on which scalings of RoPE may depend; None for what the
        positions of the call say."""
        ...

    def next_positions(self, count: int) -> Tensor:
        """Positions [B, count] of the next tokens of every row."""
        ...

    def advance(self, count: int | Tensor) -> None:
        """Counts the tokens of a call, after its last layer; count: of all rows, or of each, [B]."""
        ...


class GenerativeModel(Protocol):
    """What generation uses of a model; a `CausalLM` has it, also inside PEFT's wrapper."""

    config: Config
    generation_config: dict[str, Any]

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def attention_windows(self) -> list[int | None]:
        """The window of each layer, None for full attention."""
        ...

    def cache_widths(self) -> list[int]:
        """Elements that the cache of each layer keeps of a token."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]: ...

    def __call__(self, *args: Any, **options: Any) -> Any: ...
