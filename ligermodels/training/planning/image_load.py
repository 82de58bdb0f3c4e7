"""What the images of a run add to its plan: patches, model FLOPs of towers, projectors and cross-attention,
counted as in `reporting/flops.py`."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import decoder_blocks
from ligermodels.training.data import Data
from ligermodels.training.data.preferences import PreferenceData
from ligermodels.vision.mllama import CrossAttention, tile_layout
from ligermodels.vision.multimodal import ImageParts, VisionLanguageModel, is_trained
from ligermodels.vision.patch_positions import Grid
from ligermodels.vision.tiled_model import TiledVisionLanguageModel
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


class ImageLoad(NamedTuple):
    """tokens counts those of images; share is their part of the tokens of all rows. most_patches bounds those of a
    row. flops are those of images, per token."""

    tokens: int = 0
    share: float = 0.0
    most_patches: int = 0
    flops: float = 0.0


NO_IMAGES = ImageLoad()


def image_load(model: CausalLM, data: Data | PreferenceData) -> ImageLoad:
    """Counts what the images add. The model may be on the meta device; frozen parts are frozen already."""
    if not isinstance(model, ImageParts) or not data.picture_sizes:
        return NO_IMAGES
    if isinstance(data, Data):
        counts = data.training.image_tokens
        sizes, most = np.full(len(counts), data.training.length), int(counts.max())
    else:
        sizes, counts = data.training.groups.laid_out
        most = most_of_a_row(sizes, counts, data.training.groups.options.tokens_per_row)
    tokens, of_all_tokens = int(counts.sum()), int(sizes.sum())
    share = tokens / of_all_tokens
    if isinstance(model, TiledVisionLanguageModel):
        vision = model.config.vision
        tiles = [height * width // vision.image_size**2 for height, width in data.picture_sizes]
        flops = flops_per_tiled_image(model, tiles) * share
        flops += flops_per_seeing_token(model, sum(tiles) / len(tiles)) * int(sizes[counts > 0].sum()) / of_all_tokens
        return ImageLoad(tokens, share, most * vision.max_num_tiles * vision.patches_per_tile, flops)
    assert isinstance(model, VisionLanguageModel)
    vision = model.config.vision
    grids = [Grid(1, height // vision.patch_size, width // vision.patch_size) for height, width in data.picture_sizes]
    patches = vision.patches_per_feature
    return ImageLoad(tokens, share, most * patches, flops_per_patch(model, grids) * patches * share)


def most_of_a_row(sizes: np.ndarray, counts: np.ndarray, length: int) -> int:
    """An upper bound of the image tokens of a row of at most `length` tokens, or of one group alone.

    sizes, counts: tokens and image tokens of each group, int64 [U]. A row has most where it is filled with those groups
    whose tokens are most often of images, and with a part of the next one.
    """
    order = np.argsort(-counts / sizes)
    before = np.cumsum(sizes[order]) - sizes[order]
    parts = np.clip((length - before) / sizes[order], 0.0, 1.0)
    return max(int(counts.max()), math.ceil(float(parts @ counts[order])))
