"""The image side of Qwen3-VL: learned positions, 2-D RoPE, LayerNorms, and features at several depths (DeepStack).

Must not know the text model.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ligermodels.configs.qwen3_vl import Qwen3VisionConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.mlp import MLP
from ligermodels.vision.multimodal import BLOCK, MERGER, QWEN_NAMES, VisionLanguageModel
from ligermodels.vision.patch_positions import Grid, PatchLayout, patch_layout
from ligermodels.vision.tower import VisionTower
from ligermodels.weights.mapping import Rule


class Qwen3VisionLanguageModel(VisionLanguageModel):
    """Subclasses build the blocks of the text model."""

    splits_videos = True
    hub_names: ClassVar = {
        **QWEN_NAMES,
        "visual.pos_embed": "visual.pos_embed",
        f"{BLOCK}.mlp.up_proj": f"{BLOCK}.mlp.linear_fc1",
        f"{BLOCK}.mlp.down_proj": f"{BLOCK}.mlp.linear_fc2",
        "projector.norm": f"{MERGER}.norm",
        "projector.fc1": f"{MERGER}.linear_fc1",
        "projector.fc2": f"{MERGER}.linear_fc2",
        "deepstack.{}.norm": "visual.deepstack_merger_list.{}.norm",
        "deepstack.{}.fc1": "visual.deepstack_merger_list.{}.linear_fc1",
        "deepstack.{}.fc2": "visual.deepstack_merger_list.{}.linear_fc2",
    }

    def tower(self, config: Qwen3VisionConfig) -> VisionTower:
        blocks = [
            DecoderLayer(config, Attention(config, qkv_bias=True, o_bias=True), MLP(config, bias=True))
            for _ in range(config.num_hidden_layers)
        ]
        table, tapped = config.num_position_embeddings, config.deepstack_visual_indexes
        return VisionTower(config, blocks, patch_bias=True, table=table, tapped=tapped)

    def patch_layout(self, grids: Sequence[Grid]) -> tuple[PatchLayout, Tensor | None]:
        vision = self.config.vision
        return patch_layout(grids, vision.spatial_merge_size, table=vision.table_side)

    def weight_rules(self) -> tuple[Rule, ...]:
        return self.rules("model.language_model", "model.", self.text_rules())

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        return ()
