"""What the images of a run add to its plan: patches, FLOPs of the tower."""

import math
from typing import NamedTuple

import numpy as np

from ligermodels.layers.decoder import CausalLM
from ligermodels.training.data import Data
from ligermodels.training.data.preferences import PreferenceData
from ligermodels.training.reporting.image_flops import (
    flops_per_patch,
    flops_per_seeing_token,
    flops_per_tiled_image,
)
from ligermodels.vision.multimodal import ImageParts, VisionLanguageModel
from ligermodels.vision.patch_positions import Grid
from ligermodels.vision.tiled_model import TiledVisionLanguageModel


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
