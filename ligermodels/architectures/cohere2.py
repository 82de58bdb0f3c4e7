"""Command R7B, Command A: parallel attention and feed-forward layer on one LayerNorm, scaled logits, tied embeddings;
three sliding-window layers with interleaved RoPE to one full-attention layer without RoPE.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SlidingWindowConfig
from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import ParallelLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP


@dataclass(kw_only=True)
class Cohere2Config(SlidingWindowConfig):
    vocab_size: int = 256000
    hidden_size: int = 8192
    intermediate_size: int = 22528
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 4

    layer_norms = True
    only_values: ClassVar = {
        "use_qk_norm": False, "use_parallel_block": True, "use_gated_activation": True, "rotary_pct": 1.0,
        "position_embedding_type": "rope_gptj", "order_of_interleaved_layers": "local_attn_first",
    }  # fmt: skip

    @property
    def norm_eps(self) -> float:
        return self.layer_norm_eps

    def is_sliding(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0


BASE = {"model_type": "cohere2", "layer_norm_eps": 1e-5}
HUB = BASE | {"rope_theta": 50000.0, "logit_scale": 0.25, "bos_token_id": 5, "eos_token_id": 255001}


class Cohere2(CausalLM):
    Config = Cohere2Config
    hub_class = "Cohere2ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"sliding_window": 128, "pad_token_id": None, "logit_scale": 1.0},
        "7b": preset(HUB, 4096, 14336, 32, 32, 8) | {"vocab_size": 256000, "max_position_embeddings": 132096},
        "111b": preset(HUB, 12288, 36864, 64, 96, 8) | {"vocab_size": 256000, "max_position_embeddings": 131072},
    }

    def layer(self, config: Cohere2Config, index: int) -> ParallelLayer:
        rope = FULL_ATTENTION if config.layer_type(index) == SLIDING_ATTENTION else None
        attention = Attention(
            config, **config.attention_biases, window=config.window(index), rope=rope, interleaved=True
        )
        return ParallelLayer(config, attention, GatedMLP(config))
