"""The fields of Gemma and of Gemma 2, which are also the text models of PaliGemma."""

from dataclasses import dataclass

from ligermodels.configs.base import KERNEL_ACTIVATIONS
from ligermodels.configs.features import SoftcapConfig, UnitOffsetConfig


@dataclass(kw_only=True)
class GemmaConfig(UnitOffsetConfig):
    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    max_position_embeddings: int = 8192
    hidden_act: str = "gelu_pytorch_tanh"

    @property
    def activation(self) -> str:
        """In Gemma's files "gelu" means the tanh approximation."""
        return "gelu_tanh" if self.hidden_act == "gelu" else KERNEL_ACTIVATIONS[self.hidden_act]


@dataclass(kw_only=True)
class Gemma2Config(SoftcapConfig):
    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    max_position_embeddings: int = 8192
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0
