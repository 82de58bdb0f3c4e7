"""EXAONE 4.0: OLMo 2's post-norm blocks with QK-norm per head; where some layers have a sliding window, only those have
RoPE.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SlidingWindowConfig
from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION
from ligermodels.layers.attention import QKNormAttention
from ligermodels.layers.block import PostNormLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP

PATTERN = "sliding_window_pattern"


@dataclass(kw_only=True)
class Exaone4Config(SlidingWindowConfig):
    vocab_size: int = 102400
    intermediate_size: int = 16384
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: str | int | None = 4  # one full layer in so many, or a letter for each: "LLLG"

    @classmethod
    def fields_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """transformers 5 writes a pattern of 0 where no layer has a window."""
        return super().fields_of(dict(raw) | ({} if raw.get(PATTERN, 1) else {PATTERN: None}))

    def is_sliding(self, layer: int) -> bool:
        pattern = self.sliding_window_pattern
        if not self.sliding_window or not pattern:
            return False
        return pattern[layer % len(pattern)] == "L" if isinstance(pattern, str) else (layer + 1) % pattern != 0

    def has_rope(self, layer: int) -> bool:
        return not self.sliding_window or self.layer_type(layer) == SLIDING_ATTENTION


BASE = {"model_type": "exaone4", "rms_norm_eps": 1e-5}
HUB = BASE | {"vocab_size": 102400, "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 361, "pad_token_id": 0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


class Exaone4(CausalLM):
    Config = Exaone4Config
    hub_class = "Exaone4ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"sliding_window": 128},
        "1.2b": preset(HUB, 2048, 4096, 30, 32, 8)
        | {"max_position_embeddings": 65536, "rope_scaling": LLAMA3, "tie_word_embeddings": True}
        | {"sliding_window": None, "layer_types": [FULL_ATTENTION] * 30},
        "32b": preset(HUB, 5120, 27392, 64, 40, 8)
        | {"max_position_embeddings": 131072, "rope_scaling": LLAMA3, "sliding_window": 4096},
    }

    def layer(self, config: Exaone4Config, index: int) -> PostNormLayer:
        rope = FULL_ATTENTION if config.has_rope(index) else None
        return PostNormLayer(config, QKNormAttention(config, window=config.window(index), rope=rope), GatedMLP(config))
