"""Llama 3.2 Vision: Llama with gated blocks of cross-attention to the tiles of images."""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.mllama import MllamaConfig
from ligermodels.configs.rope import LLAMA3_ROPE
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.mlp import GatedMLP
from ligermodels.vision.mllama import CrossAttention, CrossAttentionLayer
from ligermodels.vision.tiled_model import TiledVisionLanguageModel
from ligermodels.weights.mapping import Concat, Rename, Rule, packed_projections

BASE = {"model_type": "mllama"}
HUB = BASE | {"image_token_index": 128256, "vision_config": {"image_size": 560}}
TEXT = {"vocab_size": 128256, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "max_position_embeddings": 131072}
TEXT |= {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "pad_token_id": 128004}
TINY_VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_global_layers": 1, "attention_heads": 4,
    "image_size": 56, "patch_size": 14, "intermediate_layers_indices": [1, 2], "vision_output_dim": 192,
}  # fmt: skip


class Mllama(TiledVisionLanguageModel):
    Config = MllamaConfig
    hub_class = "MllamaForConditionalGeneration"
    SIZES: ClassVar = {
        "tiny": BASE
        | {
            "image_token_index": 1024,
            "text_config": tiny({}) | {"cross_attention_layers": [1, 3], "pad_token_id": 0},
            "vision_config": TINY_VISION,
        },
        "11b": HUB | {"text_config": preset(TEXT, 4096, 14336, 40, 32, 8)},
        "90b": HUB
        | {"text_config": preset(TEXT, 8192, 28672, 100, 64, 8) | {"cross_attention_layers": list(range(3, 100, 5))}},
    }

    def layer(self, config: MllamaConfig, index: int) -> DecoderLayer:
        if index not in config.cross_attention_layers:
            return DecoderLayer(config, Attention(config), GatedMLP(config))
        return CrossAttentionLayer(config, CrossAttention(config, config.states_per_image), GatedMLP(config))

    def weight_rules(self) -> tuple[Rule, ...]:
        text = Rename("language_model.model", "model", self.text_rules())
        return text, Rename("language_model.lm_head", "lm_head"), *tower_rules("")

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The names that transformers 5 has in memory."""
        return ((Rename("model.language_model", "model", self.text_rules()), *tower_rules("model.")),)

    def text_rules(self) -> tuple[Rule, ...]:
        layer = "model.layers.{}."
        cross = layer + "cross_attn."
        return (
            *packed_projections(self.config),
            Concat(cross + "kv_proj", (cross + "k_proj", cross + "v_proj")),
            Rename(layer + "cross_attn_attn_gate", layer + "gate_attn"),
            Rename(layer + "cross_attn_mlp_gate", layer + "gate_ffn"),
        )


def tower_rules(outer: str) -> tuple[Rule, ...]:
    """Returns the rules of the tower and the projector, with `outer` before the Hub's names."""
    vision = outer + "vision_model"
    blocks = {"blocks": "transformer", "global_blocks": "global_transformer"}
    return (
        *(
            Rename(f"{vision}.{hub}.layers.{{}}", f"visual.{ours}.{{}}", block_rules(f"visual.{ours}.{{}}."))
            for ours, hub in blocks.items()
        ),
        Rename(vision, "visual"),
        Rename(outer + "multi_modal_projector", "projector"),
    )


def block_rules(block: str) -> tuple[Rule, ...]:
    attention = block + "self_attn."
    parts = tuple(attention + part for part in ("q_proj", "k_proj", "v_proj"))
    return (
        Concat(attention + "qkv_proj", parts),
        Rename(block + "mlp.fc1", block + "mlp.up_proj"),
        Rename(block + "mlp.fc2", block + "mlp.down_proj"),
    )
