"""What images keep for the backward pass of a training step, beside the blocks; part of the plan of `model.py`."""

from ligermodels.layers.block import Block
from ligermodels.layers.checkpointing.kept_tensors import FP32_BYTES
from ligermodels.layers.decoder import CausalLM
from ligermodels.vision.cross_attention import CrossAttention
from ligermodels.vision.multimodal import VisionLanguageModel, is_trained
from ligermodels.vision.pixtral import MergingProjector
from ligermodels.vision.siglip import PatchProjector, PooledProjector
from ligermodels.vision.siglip_tiles import SquareProjector
from ligermodels.vision.tiled_model import TiledVisionLanguageModel
from ligermodels.vision.tower import LinearProjector


def saved_by_patch(model: CausalLM, size: int) -> int:
    """Bytes per patch outside of the blocks; elements have `size` bytes."""
    if isinstance(model, TiledVisionLanguageModel):
        return saved_by_patch_of_tiles(model, size)
    return saved_by_patch_of_features(model, size) if isinstance(model, VisionLanguageModel) else 0


def saved_by_patch_of_features(model: VisionLanguageModel, size: int) -> int:
    """Counts the patch embedding's input, the input and output of the projector's norm, which fc1 reads, fc1's output,
    and the features, which insertion keeps. A projector that pools keeps what it pools before and after its norm, the
    tower's own norm its input."""
    vision = model.config.vision
    embedding = vision.pixels_per_patch * size if model.visual.patch_embed.weight.requires_grad else 0
    if not (is_trained(model.projector) or is_trained(model.visual)):
        return 0
    features = model.config.hidden_size * size // vision.patches_per_feature
    if isinstance(model.projector, LinearProjector):  # the states' sum, which linear_1 reads, and its output
        normed = vision.hidden_size * size + 2 * FP32_BYTES if is_trained(model.visual) else 0
        merged = 0
        if isinstance(model.projector, MergingProjector):  # its rstd, its norm's output, what becomes of a square
            merged = FP32_BYTES + vision.hidden_size * size + vision.hidden_size * size // vision.patches_per_feature
        return embedding + normed + merged + model.projector.linear_1.in_features * size + 2 * features
    if isinstance(model.projector, SquareProjector | PatchProjector):  # what the norm makes, which proj reads
        normed = vision.hidden_size * size + 2 * FP32_BYTES if is_trained(model.visual) else 0
        return embedding + normed + vision.hidden_size * size + features
    if isinstance(model.projector, PooledProjector):
        pooled = (2 * vision.hidden_size * size + FP32_BYTES) // vision.patches_per_feature
        normed = vision.hidden_size * size + 2 * FP32_BYTES if is_trained(model.visual) else 0
        return embedding + normed + pooled + features
    return embedding + (1 + len(model.deepstack)) * (3 * vision.hidden_size * size + features)


def saved_by_patch_of_tiles(model: TiledVisionLanguageModel, size: int) -> int:
    """Counts a tower's pixels, learned positions before their gate, and the inputs of both norms around the blocks; the
    projector's input, if it is trained, and the states that cross-attention reads."""
    vision, saved = model.config.vision, model.config.hidden_size * size
    if is_trained(model.visual):
        saved += vision.pixels_per_patch * size + 3 * vision.hidden_size * size + 4 * FP32_BYTES
    return saved + (vision.vision_output_dim * size if model.projector.weight.requires_grad else 0)


def saved_beside_rows(model: CausalLM, block: Block, patches: int, size: int) -> int:
    """Bytes that a block saves of so many patches of images in tiles, beside what it saves of each row that it reads.

    In the tower all keys and values as they are gathered, at most twice; in cross-attention the keys and values of the
    states, as they are projected and as they are gathered, and rstd.
    """
    if not (isinstance(model, TiledVisionLanguageModel) and patches):
        return 0
    vision, mixer = model.config.vision, block.mixer
    key_values = 2 * mixer.num_key_value_heads * mixer.head_dim * size
    if isinstance(mixer, CrossAttention):
        return vision.states_of(patches) * (2 * key_values + mixer.num_key_value_heads * FP32_BYTES)
    return 2 * vision.rows_of(patches) * key_values if block in model.tower_blocks else 0
