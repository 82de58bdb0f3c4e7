"""What the images of a run add to its plan: patches, FLOPs of the tower. Must not know processors."""

from typing import NamedTuple

from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.multimodal import VisionLanguageModel
from ligermodels.layers.vision_positions import Grid
from ligermodels.training.data import Data
from ligermodels.training.data.preferences import PreferenceData
from ligermodels.training.reporting.flops import flops_per_patch


class ImageLoad(NamedTuple):
    """tokens: of images, among all tokens of the rows. most_patches: of a row. flops: of images, per token of a row."""

    tokens: int = 0
    most_patches: int = 0
    flops: float = 0.0


NO_IMAGES = ImageLoad()


def image_load(model: CausalLM, data: Data | PreferenceData) -> ImageLoad:
    """model: it may be on the meta device; frozen parts are frozen already."""
    if not isinstance(model, VisionLanguageModel) or not isinstance(data, Data) or not data.picture_sizes:
        return NO_IMAGES
    vision, counts = model.config.vision, data.training.image_tokens
    grids = [Grid(1, height // vision.patch_size, width // vision.patch_size) for height, width in data.picture_sizes]
    tokens, patches = int(counts.sum()), vision.patches_per_feature
    share = tokens / (len(counts) * data.training.length)
    return ImageLoad(tokens, int(counts.max()) * patches, flops_per_patch(model, grids) * patches * share)
