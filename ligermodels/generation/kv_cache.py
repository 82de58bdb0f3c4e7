"""A cache for a batch whose rows may differ in length, for calls of a model's forward: keys and values, and states.

Generation uses the paged cache instead.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.generation.cache import Kept, LatentHeads, PerRow, StateStep
from ligermodels.generation.image_features import EarlierImages
from ligermodels.kernels.attention.attention import attention


class KVLayer:
    """stored: keys and values of one layer, [B, S, Hkv, D] each: position p of row b is at [b, p]. Allocated on first
    use.

    Of latent attention the keys are the latents, and the values have no columns.
    """

    slots = None

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.stored: tuple[Tensor, ...] = ()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, *, is_read: bool = False, **options: Any
    ) -> Tensor:
        self.update(k, v, position_ids)
        return self.attend_again(q, position_ids, **options)

    def attend_again(self, q: Tensor, position_ids: Tensor, **options: Any) -> Tensor:
        keys, values = self.stored
        return attention(q, keys, values, position_ids=position_ids, **options)

    def attend_latents(
        self, q: Tensor, latents: Tensor, position_ids: Tensor, heads: LatentHeads, *, scale: float
    ) -> Tensor:
        self.update(latents, latents[..., :0], position_ids)
        keys, _ = self.stored
        values = keys[..., : heads.latent_size]
        return heads.restore(attention(heads.absorb(q), keys, values, scale=scale, position_ids=position_ids))

    def update(self, k: Tensor, v: Tensor, position_ids: Tensor) -> None:
        """Writes k, v [B, T, Hkv, D] at position_ids [B, T]. What is behind a row's last position is not valid."""
        if not self.stored:
            self.stored = tuple(x.new_zeros(len(x), self.max_length, *x.shape[2:]) for x in (k, v))
        row = torch.arange(k.shape[0], device=k.device)[:, None]
        for stored, new in zip(self.stored, (k, v), strict=True):
            stored[row, position_ids] = new

    def reserve(self, max_length: int) -> None:
        """Makes room for this many positions."""
        if max_length > self.max_length:
            more = (0, 0, 0, 0, 0, max_length - self.max_length)
            self.stored, self.max_length = tuple(F.pad(x, more) for x in self.stored), max_length

    def select_rows(self, rows: Tensor) -> None:
        """Replaces the rows by these, which are indices [B] of the present ones."""
        self.stored = tuple(x[rows] for x in self.stored)


class StateLayer:
    """States of one layer, [B, ...] each by their number."""

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}

    def begin(self, shape: tuple[int, int], padding: Tensor | None) -> "StateStep | RowSequences":
        batch, length = shape
        if padding is None and length == 1 and self.states and not torch.is_grad_enabled():
            return StateStep(self.states, torch.arange(batch, device=self.states[0].device))
        return RowSequences(self.states, None if padding is None else offsets_with_padding(length, padding))

    def earlier_images(self) -> EarlierImages | None:
        return EarlierImages(*(self.states[number] for number in range(3))) if self.states else None

    def keep_images(self, images: EarlierImages) -> None:
        self.states = dict(enumerate(images))

    def pass_images_by(self) -> None:
        """The rows see what they saw."""

    def reserve(self, max_length: int) -> None:
        """States need no more room for more positions."""

    def select_rows(self, rows: Tensor) -> None:
        """Replaces the rows by these, which are indices [B] of the present ones."""
        self.states = {number: states[rows] for number, states in self.states.items()}


class RowSequences(NamedTuple):
    """A call in which every row is a sequence; with `cu_seqlens`, its tokens are one and its padding is another."""

    states: dict[int, Tensor]
    cu_seqlens: Tensor | None

    def before(self, number: int) -> Tensor | None:
        states = self.states.get(number)
        if states is None or self.cu_seqlens is None:
            return states
        return torch.stack([states, torch.zeros_like(states)], 1).flatten(0, 1)

    def store(self, number: int, states: Tensor) -> None:
        self.states[number] = states if self.cu_seqlens is None else states[::2].contiguous()


def offsets_with_padding(length: int, padding: Tensor) -> Tensor:
    """Offsets of the tokens and of the padding behind them of each row, int32 [2 B + 1]. padding: int64 [B]."""
    ends = torch.arange(1, len(padding) + 1, device=padding.device) * length
    return F.pad(torch.stack([ends - padding, ends], 1).flatten(), (1, 0)).int()


class KVCache:
    """A KVLayer or a StateLayer for each layer, and the number of tokens of each row: `lengths`, int64 [B].

    kept: what each layer keeps, as a model's `kept_by_layers` says.
    rope_offsets: int64 [B, 1], see `Cache`; None as long as no row has images.
    """

    sequence_lengths = None

    def __init__(self, kept: Sequence[Kept], batch_size: int, max_length: int, device: torch.device) -> None:
        self.layers = [StateLayer() if isinstance(each, PerRow) else KVLayer(max_length) for each in kept]
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.rope_offsets: Tensor | None = None

    def next_positions(self, count: int) -> Tensor:
        """Positions [B, count] of the next tokens of every row."""
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    def advance(self, count: int | Tensor) -> None:
        self.lengths += count

    def extend_rope(self, rope_ids: Tensor, offsets: Tensor) -> Tensor:
        """Positions for RoPE of the next tokens, as if they began a sequence -> those that continue the rows.

        rope_ids [axes, B, T]; offsets [B, 1]: what they change `rope_offsets` by, for all tokens after them.
        """
        before = torch.zeros_like(offsets) if self.rope_offsets is None else self.rope_offsets
        self.rope_offsets = before + offsets
        return rope_ids + self.lengths[:, None] + before

    def reserve(self, max_length: int) -> None:
        """Makes room for this many positions."""
        for layer in self.layers:
            layer.reserve(max_length)

    def select_rows(self, rows: Tensor) -> None:
        """Replaces the rows by these, which are indices [B] of the present ones; one may be repeated."""
        self.lengths = self.lengths[rows]
        if self.rope_offsets is not None:
            self.rope_offsets = self.rope_offsets[rows]
        for layer in self.layers:
            layer.select_rows(rows)
