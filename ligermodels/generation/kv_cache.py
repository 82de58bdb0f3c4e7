"""A preallocated key-value cache for a batch whose rows may differ in length, for calls of a model's forward.

Generation uses the paged cache instead. Must not know models.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.generation.cache import LatentHeads
from ligermodels.kernels.attention import attention


class KVLayer:
    """Keys and values of one layer, [B, S, Hkv, D] each: position p of row b is at [b, p]. Allocated on first use.

    Of latent attention the keys are the latents, and the values have no columns.
    """

    slots = None

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, *, is_read: bool = False, **options: Any
    ) -> Tensor:
        keys, values = self.update(k, v, position_ids)
        return attention(q, keys, values, position_ids=position_ids, **options)

    def attend_again(self, q: Tensor, position_ids: Tensor, **options: Any) -> Tensor:
        assert self.keys is not None and self.values is not None
        return attention(q, self.keys, self.values, position_ids=position_ids, **options)

    def attend_latents(
        self, q: Tensor, latents: Tensor, position_ids: Tensor, heads: LatentHeads, *, scale: float
    ) -> Tensor:
        latents, _ = self.update(latents, latents[..., :0], position_ids)
        values = latents[..., : heads.latent_size]
        return heads.restore(attention(heads.absorb(q), latents, values, scale=scale, position_ids=position_ids))

    def update(self, k: Tensor, v: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k, v [B, T, Hkv, D] at position_ids [B, T] and returns all keys and values of the cache.

        The entries after a row's last position are not valid and must be masked by the caller.
        """
        if self.keys is None or self.values is None:
            rows = k.shape[0], self.max_length
            self.keys, self.values = (x.new_zeros(*rows, *x.shape[2:]) for x in (k, v))
        row = torch.arange(k.shape[0], device=k.device)[:, None]
        self.keys[row, position_ids] = k
        self.values[row, position_ids] = v
        return self.keys, self.values

    def reserve(self, max_length: int) -> None:
        """Makes room for this many positions."""
        if self.keys is not None and self.values is not None and max_length > self.max_length:
            more = (0, 0, 0, 0, 0, max_length - self.max_length)
            self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)
        self.max_length = max(max_length, self.max_length)

    def select_rows(self, rows: Tensor) -> None:
        """Replaces the rows by these, which are indices [B] of the present ones."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class KVCache:
    """One KVLayer for each layer, and the number of filled positions of each row: `lengths`, int64 [B]."""

    sequence_lengths = None

    def __init__(self, num_layers: int, batch_size: int, max_length: int, device: torch.device) -> None:
        self.layers = [KVLayer(max_length) for _ in range(num_layers)]
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)

    def next_positions(self, count: int) -> Tensor:
        """Positions [B, count] of the next tokens of every row."""
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    def advance(self, count: int | Tensor) -> None:
        self.lengths += count

    def reserve(self, max_length: int) -> None:
        """Makes room for this many positions."""
        for layer in self.layers:
            layer.reserve(max_length)

    def select_rows(self, rows: Tensor) -> None:
        """Replaces the rows by these, which are indices [B] of the present ones; one may be repeated."""
        self.lengths = self.lengths[rows]
        for layer in self.layers:
            layer.select_rows(rows)
