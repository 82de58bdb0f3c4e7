"""What a model sees of a key-value cache: one object a layer that attends, and the positions of new tokens.

`KVCache` (kv_cache.py) is the plain one for calls of one's own; the steps of the generation engine (paged_cache.py) are
the others. Must not know models.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class LayerCache(Protocol):
    """The cache of one layer."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, **options: Any) -> Tensor:
        """Stores k, v [B, T, Hkv, D] of the tokens at position_ids [B, T] and returns what q [B, T, Hq, D] attends to.

        options: scale, window, softcap, as those of `kernels.attention.attention`. Returns [B, T, Hq, D].
        """
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
