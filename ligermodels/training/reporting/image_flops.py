"""Model FLOPs of images: of vision towers, projectors and cross-attention. Counted as in `flops.py`."""

from collections.abc import Iterable, Sequence

from torch import nn

from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import decoder_blocks
from ligermodels.vision.cross_attention import CrossAttention
from ligermodels.vision.multimodal import VisionLanguageModel, is_trained
from ligermodels.vision.patch_positions import Grid
from ligermodels.vision.tiled_model import TiledVisionLanguageModel
from ligermodels.vision.tiled_vision import tile_layout
from ligermodels.weights.module import named_weights


def flops_per_patch(model: VisionLanguageModel, grids: Sequence[Grid]) -> float:
    """Returns the model FLOPs per patch of a training step on images with these grids: of the tower and the projector.

    A tower of which nothing is trained has no backward pass.
    """
    tower, backward = model.visual, is_trained(model.visual)
    vision, patches = model.config.vision, sum(grid.patches for grid in grids)
    mergers = nn.ModuleList([model.projector, *model.deepstack])
    flops = product_flops([tower.patch_embed], to_input=False) + product_flops([mergers], backward) / (
        tower.patches_per_feature
    )
    flops += product_flops([tower.blocks], backward) * vision.rows_of(patches) / patches
    layout, _ = model.placer.layout(grids)
    for index in range(len(tower.blocks)):
        spans = layout.windows if index in tower.windowed and layout.windows is not None else layout.frames
        keys = float(spans.cu_seqlens.diff().double().square().sum()) / patches
        flops += (12 if backward else 4) * vision.hidden_size * keys
    return flops


def flops_per_tiled_image(model: TiledVisionLanguageModel, counts: Sequence[int]) -> float:
    """Returns the mean model FLOPs of an image in a training step: of the tower, the projector, and the keys and values
    of cross-attention. counts: of the tiles of each image.

    The tower reads rows for the most tiles. A tower of which nothing is trained has no backward pass.
    """
    tower, backward, vision = model.visual, is_trained(model.visual), model.config.vision
    patches = vision.max_num_tiles * vision.patches_per_tile
    states = vision.tokens_per_tile * sum(counts) / len(counts)
    layout = tile_layout(counts, vision)
    pairs = layout.cu_seqlens.diff().double() @ layout.keys.cu_seqlens.diff().double() / len(counts)
    flops = float(patches) * product_flops([tower.patch_embedding], to_input=False)
    flops += vision.rows_of(patches) * product_flops(model.tower_blocks, backward)
    flops += len(model.tower_blocks) * (12 if backward else 4) * vision.hidden_size * float(pairs)
    flops += states * product_flops([model.projector], backward)
    keys = (mixer.kv_proj for mixer in cross_attention(model))
    return flops + states * product_flops(keys, backward or is_trained(model.projector))


def flops_per_seeing_token(model: TiledVisionLanguageModel, tiles: float) -> float:
    """Returns the model FLOPs of the blocks of cross-attention per token that sees so many tiles."""
    blocks = [block for block in decoder_blocks(model) if isinstance(block.mixer, CrossAttention)]
    keys = product_flops((mixer.kv_proj for mixer in cross_attention(model)), to_input=True)
    states = tiles * model.config.vision.tokens_per_tile
    scores = sum(12 * mixer.num_heads * mixer.head_dim * states for mixer in cross_attention(model))
    return product_flops(blocks, to_input=True) - keys + scores


def cross_attention(model: CausalLM) -> list[CrossAttention]:
    return [block.mixer for block in decoder_blocks(model) if isinstance(block.mixer, CrossAttention)]


def product_flops(modules: Iterable[nn.Module], to_input: bool) -> int:
    """The FLOPs per row of the products with all matrices of these modules. to_input: inputs have a gradient."""
    weights = (weight for module in modules for weight in named_weights(module).values() if weight.ndim >= 2)
    return sum(weight.numel() * (2 + 2 * to_input + 2 * weight.requires_grad) for weight in weights)
