"""What models and generation see of each other: a model of its cache, generation of a model.

`KVCache` (kv_cache.py) is a plain cache for calls of a model's forward; the views of the paged cache that the steps of
the engine have (prefill.py, rows.py) are the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ligermodels.configs.base import Config
from ligermodels.generation.image_features import EarlierImages
from ligermodels.kernels.decoding.cache_write import CacheSlots


class PerToken(NamedTuple):
    """A layer keeps something of every token, as attention its keys and values: `elements` in the model's dtype.

    window: how many tokens a token looks back on, its own included; None for all.
    """

    elements: int
    window: int | None


class PerRow(NamedTuple):
    """A layer keeps states of a whole row, however long it is: `elements` in the model's dtype, and `fp32_elements`.

    grows: the states are those of the row's images, and `elements` is their usual number.
    """

    elements: int
    fp32_elements: int = 0
    grows: bool = False


Kept = PerToken | PerRow


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
    """The cache of a layer that keeps something of every token.

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
        """Attends over the keys and values of the `attend` of this call of the model, by queries of another layer."""
        ...

    def attend_latents(
        self, q: Tensor, latents: Tensor, position_ids: Tensor, heads: LatentHeads, *, scale: float
    ) -> Tensor:
        """Does the same for latent attention, whose keys and values the cache keeps as latents [B, T, 1, L + R]."""
        ...


class StateStep(NamedTuple):
    """A call with one token of each row, which updates the states in place.

    pools: by the layer's number of the state, [R, ...]. rows: int64 [B], the place of each row in them.
    """

    pools: Mapping[int, Tensor]
    rows: Tensor


class StateCall(Protocol):
    """A call with tokens of sequences: the states after them follow from those before.

    cu_seqlens: int32 [sequences + 1], the sequences' offsets in the flattened batch; None if every row is one.
    """

    @property
    def cu_seqlens(self) -> Tensor | None: ...

    def before(self, number: int) -> Tensor | None:
        """A state of every sequence before the call, [sequences, ...]; None for zeros."""
        ...

    def store(self, number: int, states: Tensor) -> None:
        """Keeps a state of every sequence after the call."""
        ...


class LayerStates(Protocol):
    """The states of a layer."""

    def begin(self, shape: tuple[int, int], padding: Tensor | None) -> StateStep | StateCall:
        """What a call of shape (B, T) does. padding: int64 [B], how many places at the end of each row are no tokens;
        None for none."""
        ...

    def earlier_images(self) -> EarlierImages | None:
        """Returns the keys and values of images that each row saw last; None if no row saw any."""
        ...

    def keep_images(self, images: EarlierImages) -> None:
        """Replaces them."""
        ...

    def pass_images_by(self) -> None:
        """The call has no images."""
        ...


BlockCache = LayerCache | LayerStates | None  # of a block; None without a cache


class Cache(Protocol):
    """The cache of a model."""

    @property
    def layers(self) -> Sequence[LayerCache | LayerStates]: ...

    @property
    def sequence_lengths(self) -> Tensor | None:
        """The length of each token's sequence, [B, T], on which scalings of RoPE may depend; None for what the
        positions of the call say."""
        ...

    @property
    def rope_offsets(self) -> Tensor | None:
        """[B, 1], added to each row's positions for RoPE: images take fewer positions than tokens. None for 0."""
        ...

    def next_positions(self, count: int) -> Tensor:
        """Positions [B, count] of the next tokens of every row."""
        ...

    def advance(self, count: int | Tensor) -> None:
        """Counts the tokens of a call, after its last layer; count: of all rows, or of each, [B]."""
        ...


class GenerativeModel(Protocol):
    """What generation uses of a model; a `CausalLM` has it, also inside PEFT's wrapper.

    One that takes images also has `prepare_images`, of ids [1, T] and pixel inputs, and `encode_prompt` of its result,
    which returns `PromptImages`.
    """

    config: Config
    generation_config: dict[str, Any]

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def takes_images(self) -> bool: ...

    def kept_by_layers(self) -> list[Kept]:
        """What each layer keeps of the tokens before."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]: ...

    def __call__(self, *args: Any, **options: Any) -> Any: ...
