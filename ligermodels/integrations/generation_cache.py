"""Our key-value cache as a `Cache` of transformers, and what `generate` may ask of it."""

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from ligermodels.errors import InputError
from ligermodels.generation.kv_cache import KVCache, StateLayer
from ligermodels.layers.decoder import CausalLM

CACHES_OF_OTHER_NUMBERS = ("offloaded", "offloaded_static", "quantized")


class GenerationCache(Cache):
    """Our key-value cache under the interface of transformers. It grows when it is full.

    length: the number of columns of the batch that it has seen, padding included.
    """

    def __init__(self, max_length: int = 0) -> None:
        super().__init__(layers=[])
        self.max_length = max_length
        self.length = 0
        self.kv: KVCache | None = None

    def extend(self, model: CausalLM, batch: int, length: int) -> KVCache:
        """The cache with room for `length` more columns, which now count as seen."""
        self.length += length
        if self.kv is None:
            self.kv = KVCache(model.kept_by_layers(), batch, self.max_length, model.device)
        if self.length > self.max_length:
            self.max_length = max(self.length, 2 * self.max_length)
            self.kv.reserve(self.max_length)
        return self.kv

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    @property
    def batch_size(self) -> int:
        return -1 if self.kv is None else len(self.kv.lengths)

    def reset(self) -> None:
        self.kv, self.length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove columns."""
        if tokens_to_remove > 0:
            raise ValueError("crop: pass the number of tokens to remove as a negative number")
        if self.kv is not None:
            if any(isinstance(layer, StateLayer) for layer in self.kv.layers):
                raise ValueError("crop: the states of this model cannot go back to an earlier token")
            self.length += tokens_to_remove
            self.kv.lengths += tokens_to_remove

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.kv is not None:
            self.kv.select_rows(indices.to(self.kv.lengths.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.kv is not None:
            self.kv.select_rows(torch.arange(self.batch_size, device=self.kv.lengths.device).repeat_interleave(repeats))


def refuse_other_caches(generation_config: GenerationConfig) -> None:
    """Raises InputError for a cache that would not hold the numbers that ours holds."""
    implementation = generation_config.cache_implementation
    if implementation in CACHES_OF_OTHER_NUMBERS:
        raise InputError(f"generate: cache_implementation {implementation!r} is not supported; leave it out")


def refuse_other_positions(
    position_ids: Tensor | None, cache: KVCache, attention_mask: Tensor | None, length: int
) -> None:
    """Raises ValueError if the positions of the tokens are not those with which they continue the cache."""
    if position_ids is None:
        return
    expected, tokens = cache.next_positions(length), torch.ones_like(position_ids, dtype=torch.bool)
    if attention_mask is not None:
        tokens = attention_mask[:, -length:].bool()
        expected = cache.lengths[:, None] + tokens.cumsum(1) - 1
    if ((position_ids != expected) & tokens).any():
        raise ValueError("forward: position_ids do not continue those of the cache; leave them out")
