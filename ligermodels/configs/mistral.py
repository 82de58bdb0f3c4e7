"""The fields of Mistral, which is also the text model of multimodal checkpoints. Must not know any architecture."""

from dataclasses import dataclass

from ligermodels.configs.features import SlidingWindowConfig


@dataclass(kw_only=True)
class MistralConfig(SlidingWindowConfig):
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096
