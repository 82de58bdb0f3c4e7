"""The image side of Qwen3-VL: learned positions, 2-D RoPE, LayerNorms, and features at several depths (DeepStack).

Also the names that the towers of all Qwen-VL models share.
"""

from collections.abc import Sequence

from torch import Tensor

from ligermodels.configs.qwen_vl import Qwen3VisionConfig
from ligermodels.layers.mlp import MLP
from ligermodels.vision.hub_names import NamesBesideText
from ligermodels.vision.image_placer import GridPlacer
from ligermodels.vision.patch_positions import Grid, PatchLayout, patch_layout
from ligermodels.vision.tower import VisionTower, vision_blocks

BLOCK, MERGER = "visual.blocks.{}", "visual.merger"
# Ours -> those on the Hub, without the feed-forward layers.
QWEN_TOWER = {
    "visual.patch_embed": "visual.patch_embed.proj",
    f"{BLOCK}.input_layernorm": f"{BLOCK}.norm1",
    f"{BLOCK}.post_attention_layernorm": f"{BLOCK}.norm2",
    f"{BLOCK}.self_attn.qkv_proj": f"{BLOCK}.attn.qkv",
    f"{BLOCK}.self_attn.o_proj": f"{BLOCK}.attn.proj",
    "projector.norm": f"{MERGER}.ln_q",
    "projector.fc1": f"{MERGER}.mlp.0",
    "projector.fc2": f"{MERGER}.mlp.2",
}
# Name of the text model, and what is before those of the image side: in files of Qwen2-VL, and in transformers 5.
QWEN_FILES, QWEN_IN_MEMORY = ("model", ""), ("model.language_model", "model.")
QWEN3_NAMES = NamesBesideText(
    {
        **QWEN_TOWER,
        "visual.pos_embed": "visual.pos_embed",
        f"{BLOCK}.mlp.up_proj": f"{BLOCK}.mlp.linear_fc1",
        f"{BLOCK}.mlp.down_proj": f"{BLOCK}.mlp.linear_fc2",
        "projector.norm": f"{MERGER}.norm",
        "projector.fc1": f"{MERGER}.linear_fc1",
        "projector.fc2": f"{MERGER}.linear_fc2",
        "deepstack.{}.norm": "visual.deepstack_merger_list.{}.norm",
        "deepstack.{}.fc1": "visual.deepstack_merger_list.{}.linear_fc1",
        "deepstack.{}.fc2": "visual.deepstack_merger_list.{}.linear_fc2",
    },
    (QWEN_IN_MEMORY,),
)


class Qwen3Placer(GridPlacer):
    splits_videos = True

    def layout(self, grids: Sequence[Grid]) -> tuple[PatchLayout, Tensor | None]:
        vision = self.config.vision
        return patch_layout(grids, vision.spatial_merge_size, table=vision.table_side)


def qwen3_tower(config: Qwen3VisionConfig) -> VisionTower:
    table, tapped = config.num_position_embeddings, config.deepstack_visual_indexes
    return VisionTower(config, vision_blocks(config, MLP, bias=True), patch_bias=True, table=table, tapped=tapped)
