"""Gemma 2: Gemma with RMSNorm before and after each branch, softcaps on attention scores and logits, and a sliding
window in every other layer.
"""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.text_models import Gemma2Config
from ligermodels.layers.block import SandwichLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.gemma import gemma2_block

BASE = {"model_type": "gemma2"}
HUB = BASE | {"vocab_size": 256000, "head_dim": 256, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


class Gemma2(CausalLM):
    Config = Gemma2Config
    hub_class = "Gemma2ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 128},
        "2b": preset(HUB, 2304, 9216, 26, 8, 4),
        "9b": preset(HUB, 3584, 14336, 42, 16, 8),
    }

    def layer(self, config: Gemma2Config, index: int) -> SandwichLayer:
        return gemma2_block(config, index)
