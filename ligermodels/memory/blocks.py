"""What blocks, images and the head save for backward in a training step; part of the plan of `model.py`.

These are the tensors that they save on a GPU (ARCHITECTURE.md, "A token: forward and backward"). Of the head and its
loss they are bytes beside the weights, at the start of backward, from the sizes that the ops choose for their chunks:
gradients of the head's input [N, H] and of its weight [V, H], and logits. An op has its name in `ligermodels.ops`.
"""

from typing import NamedTuple, cast

import torch
from torch import nn

from ligermodels.kernels.launch import cdiv
from ligermodels.kernels.linear_attention.document_chunks import SPAN
from ligermodels.kernels.losses.logits_chunks import (
    chunk_rows,
    keeps_logits,
    low_memory_buffer,
    piece_rows,
    ring_of,
    ring_of_units,
    round_up_to_tile,
    rows_of_pieces,
    vocabulary_buffer,
)
from ligermodels.kernels.losses.logprob_chunks import MAX_BACKWARD_ROWS
from ligermodels.layers.attention import Attention, GatedQKNormAttention, QKNormAttention
from ligermodels.layers.block import Block, ParallelLayer, PostNormLayer
from ligermodels.layers.checkpointing.kept_tensors import FP32_BYTES
from ligermodels.layers.context_parallel import copies_of_heads
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.gated_delta import GatedDeltaNet
from ligermodels.layers.gemma import LayerInputLayer, NormedHeadsAttention, ReadingAttention
from ligermodels.layers.latent_attention import LatentAttention
from ligermodels.layers.lora import GroupedUpdate, LoRALinear, lora_modules
from ligermodels.layers.mamba2 import Mamba2
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.mlp import MLP, GatedMLP
from ligermodels.layers.moe import LoRAExperts, MoE
from ligermodels.layers.norm import LayerNorm, RMSNorm
from ligermodels.layers.packed import PackedLinear
from ligermodels.layers.quantised import QuantisedLinear
from ligermodels.layers.states import ShortConv
from ligermodels.vision.mllama import CrossAttention, GatedLayer
from ligermodels.vision.multimodal import VisionLanguageModel, is_trained
from ligermodels.vision.pixtral import MergingProjector
from ligermodels.vision.siglip import PatchProjector, PooledProjector
from ligermodels.vision.siglip_tiles import SquareProjector
from ligermodels.vision.tiled_model import TiledVisionLanguageModel
from ligermodels.vision.tower import LinearProjector

INT64_BYTES = 8


def saved_by_block(block: Block, size: int) -> int:
    """Bytes per token that a block saves for backward; elements have `size` bytes."""
    hidden = block.mixer.hidden_size
    children = list(block.children())
    norms = sum(isinstance(child, RMSNorm | LayerNorm) for child in children)
    statistics = norms + sum(isinstance(child, LayerNorm) for child in children)  # rstd, of a LayerNorm the mean too
    # Attention and MLP save their inputs, where no norm is fused with them; parallel branches have the same one.
    inputs = 2 if isinstance(block, PostNormLayer) else 1 if isinstance(block, ParallelLayer) else 0
    masks = 2 * hidden if block.dropout else 0  # one byte per element of each branch
    low_rank = sum(update.lora_A.shape[0] for update in lora_modules(block) if isinstance(update, LoRALinear))
    saved = (norms + inputs) * hidden * size + statistics * FP32_BYTES + low_rank * size + masks
    if isinstance(block, GatedLayer) and block.gate_attn.requires_grad:
        saved += 2 * hidden * size  # both branches before their gates
    if isinstance(block, LayerInputLayer):
        saved += saved_beside_mlp(block, hidden, size)
    return saved + saved_by_mixer(block.mixer, size) + saved_by_mlp(block.mlp, hidden, size)


def saved_beside_mlp(block: LayerInputLayer, hidden: int, size: int) -> int:
    """Bytes per token of a block's experts and its layer input."""
    saved = 0
    if block.moe is not None:  # its norm and its router read what the MLP's norm has saved; the router saves its input
        saved += saved_by_mlp(block.moe, hidden, size) + FP32_BYTES
    if block.has_layer_input:  # the stream, and the gate beside the input, then their product
        saved += (hidden + 3 * block.per_layer_projection.in_features) * size
    return saved


def saved_by_mixer(mixer: Mixer, size: int) -> int:
    """Bytes per token that attention, or what stands for it, saves."""
    if isinstance(mixer, LatentAttention):
        return saved_by_latent_attention(mixer, size)
    if isinstance(mixer, GatedDeltaNet):
        return saved_by_delta_rule(mixer, size)
    if isinstance(mixer, Mamba2):
        # The projection, what is behind the convolution, the scan's output before and after its norm; in fp32 of each
        # head the step size, and two steps to it.
        return (width(mixer.in_proj) + mixer.channels + 2 * mixer.size) * size + 3 * mixer.heads * FP32_BYTES
    if isinstance(mixer, ShortConv):
        return 6 * mixer.hidden_size * size  # the projection; what is behind its gate, the convolution, and both
    if isinstance(mixer, NormedHeadsAttention | ReadingAttention):
        return saved_by_normed_heads(mixer, size)
    if isinstance(mixer, CrossAttention):
        # Queries before and after their norm, the output, its log-sum-exp, and rstd.
        return 3 * mixer.num_heads * mixer.head_dim * size + 2 * mixer.num_heads * FP32_BYTES
    return saved_by_attention(cast(Attention, mixer), size)


def saved_by_attention(attention: Attention, size: int) -> int:
    """Bytes per token: queries, keys and values, the output, its log-sum-exp. With QK-norm also queries and keys before
    the norm, of scaled queries also the unscaled ones; with an output gate the gate and the gated output."""
    heads, key_value_heads = attention.num_heads, attention.num_key_value_heads
    rows = 2 * (heads + key_value_heads)
    if isinstance(attention, QKNormAttention):
        rows += heads + key_value_heads
    if isinstance(attention, GatedQKNormAttention):
        rows += 2 * heads
    if attention.scales_queries:
        rows += heads
    return rows * attention.head_dim * size + heads * FP32_BYTES


def beside_recomputed(block: Block, tokens: int, size: int) -> int:
    """Bytes in the backward pass of a checkpointed block beside what the block saves and the gradient of its output.

    Where its feed-forward layer runs over tiles of tokens, what the layer saves of a tile takes the place of what it
    saves of all tokens, and the mixer may take more than the layer: its gradients are then the larger part.
    """
    mlp, mixer = block.mlp, block.mixer
    if not isinstance(mlp, GatedMLP | MLP) or (tiles := mlp.tiles(tokens)) == 1:
        return tokens * recomputed_by_mlp(mlp, size)
    hidden, of_all_tokens = mixer.hidden_size * size, saved_by_mlp(mlp, mixer.hidden_size, size)
    of_tile = -(-tokens // tiles) * (of_all_tokens + recomputed_by_mlp(mlp, size) + hidden)  # and its output
    sums = FP32_BYTES * sum(p.numel() for p in mlp.parameters() if p.requires_grad)
    sums += sum(p.nbytes for p in mlp.down_proj.parameters() if p.requires_grad)
    in_mlp = tokens * hidden + of_tile + sums  # the gradient of the layer's input; sums over tiles, and one by a tile
    in_mixer = tokens * (gradients_in_mixer(mixer, size) - hidden)  # the layer's input is gone
    return max(in_mlp, in_mixer) - tokens * of_all_tokens


def beside_saved(block: Block, tokens: int, size: int) -> int:
    """Bytes in the backward pass of a block's mixer beside what the block saves: its gradients, where they are more
    than what its feed-forward layer has saved, which is free by then."""
    of_mlp = saved_by_mlp(block.mlp, block.mixer.hidden_size, size)
    return tokens * max(0, gradients_in_mixer(block.mixer, size) - of_mlp)


def gradients_in_mixer(mixer: Mixer, size: int) -> int:
    """Bytes per token of the gradients of all that a mixer saves, and of what attention sums: those of queries in fp32;
    those of keys and values in fp32 too, or, as cuDNN does, for each of the query heads that share them."""
    summed = 0
    if mixer.score_width:
        queries = mixer.num_heads * cast(Attention, mixer).head_dim
        keys = cast(Attention, mixer).kept().elements
        summed = queries * FP32_BYTES + max(keys * FP32_BYTES, 2 * queries * size)
    return saved_by_mixer(mixer, size) + summed


def recomputed_by_mlp(mlp: GatedMLP | MLP | MoE, size: int) -> int:
    """Bytes per token in the backward pass of a checkpointed block's down projection, beside what the block saves: its
    input, which is saved because it is not fused with the activation, and the gradient of the input."""
    if isinstance(mlp, GatedMLP):
        return width(mlp.gate_up_proj) * size
    return 2 * width(mlp.up_proj) * size if isinstance(mlp, MLP) else 0


def saved_by_exchanges(block: Block, size: int, context: int, expert_ranks: int) -> int:
    """Bytes per token that a block saves beside, where ranks share rows or experts: of a token's k experts the rows and
    their places."""
    saved, mixer = 0, block.mixer
    if context > 1:
        saved += saved_by_shared_rows(mixer, size, context)
    if expert_ranks > 1:
        slots = sum(module.experts_per_token for module in block.modules() if isinstance(module, MoE))
        saved += slots * (mixer.hidden_size * size + 2 * INT64_BYTES + FP32_BYTES)
    return saved


def saved_by_shared_rows(mixer: Mixer, size: int, ranks: int) -> int:
    """Bytes per token that a mixer saves beside: copies of heads, and of attention its output for all tokens of this
    rank's heads; of the gated delta rule beta, fp32, as it was before the exchange."""

    def copied(heads: int) -> int:
        return copies_of_heads(heads, ranks) - 1

    if isinstance(mixer, ShortConv):
        return 0
    if isinstance(mixer, GatedDeltaNet):
        values = copied(mixer.value_heads) * mixer.value_heads * (mixer.value_size + SPAN.value)
        keys = copied(mixer.key_heads) * 2 * mixer.key_heads * mixer.key_size
        return (keys + values) * size + mixer.value_heads * FP32_BYTES
    if isinstance(mixer, Mamba2):
        shared = copied(mixer.groups) * 2 * mixer.groups * mixer.state_size
        return (shared + copied(mixer.heads) * mixer.size) * size
    keys = mixer.score_width if isinstance(mixer, LatentAttention) else mixer.kept().elements
    keys *= copied(getattr(mixer, "num_key_value_heads", mixer.num_heads))
    return (mixer.output_size + keys + copied(mixer.num_heads) * mixer.score_width) * size


def saved_of_updates(block: nn.Module, size: int) -> int:
    """Bytes, of any number of tokens: copies of the updates of routed experts, in the order that the products read."""
    return sum(update.lora_B.numel() * size for update in block.modules() if isinstance(update, GroupedUpdate))


def saved_by_delta_rule(mixer: GatedDeltaNet, size: int) -> int:
    """Bytes per token: the projection, queries, keys and values behind the convolution, the output before and after its
    norm, and of each value head a row of a chunk's inverse. In fp32 of each value head g, three steps to it and beta;
    the norms of queries and keys."""
    values = mixer.value_heads * mixer.value_size
    wide = width(mixer.in_proj) + mixer.channels + 2 * values + mixer.value_heads * SPAN.value
    return wide * size + (5 * mixer.value_heads + 2 * mixer.key_heads) * FP32_BYTES


def saved_by_latent_attention(attention: LatentAttention, size: int) -> int:
    """Bytes per token: the latents and rstd of their norms; queries, keys, what the values are a part of, the output
    and its log-sum-exp."""
    norms = 1 if attention.q_b_proj is None else 2
    heads = 2 * attention.head_dim + (attention.nope_size + attention.value_size) + attention.value_size
    saved = width(attention.qkv_a_proj) + attention.num_heads * heads
    return saved * size + (norms + attention.num_heads) * FP32_BYTES


def saved_by_normed_heads(attention: NormedHeadsAttention | ReadingAttention, size: int) -> int:
    """Bytes per token: the heads before and after their norms, the output, rstd and log-sum-exp."""
    heads, others = attention.num_heads, 0
    if isinstance(attention, NormedHeadsAttention):
        others = 2 * attention.num_key_value_heads
    saved = (2 * (heads + others) + heads) * attention.head_dim
    return saved * size + (heads + others // 2) * FP32_BYTES


def saved_by_mlp(mlp: GatedMLP | MLP | MoE, hidden: int, size: int) -> int:
    """Bytes per token: gate_up, without a gate the activation's input; for experts gate_up of each of a token's k
    experts, their input and the routing."""
    if isinstance(mlp, GatedMLP | MLP):
        return width(mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj) * size
    experts, low_rank = mlp.experts, 0
    if isinstance(experts, LoRAExperts):
        experts, low_rank = experts.base_layer, experts.gate_up_proj.rank + experts.down_proj.rank
    slots, (num_experts, gate_up, _) = mlp.experts_per_token, experts.gate_up_proj.shape
    # Probabilities and the sum of the top k; for each slot three indices and its weight, as routed and as sorted.
    routing = (num_experts + 1) * FP32_BYTES + slots * (3 * INT64_BYTES + 2 * FP32_BYTES)
    saved = (hidden + slots * (gate_up + low_rank)) * size + routing
    if mlp.shared_expert is not None:
        saved += width(mlp.shared_expert.gate_up_proj) * size
    if mlp.shared_expert_gate is not None:
        saved += (hidden + 1) * size  # the shared expert's output and its gate, which are multiplied
    return saved


def width(projection: nn.Module) -> int:
    """Output features of a linear, with or without LoRA."""
    base = projection.base_layer if isinstance(projection, LoRALinear) else projection
    assert isinstance(base, nn.Linear | PackedLinear | QuantisedLinear)
    return base.out_features


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


FP32 = torch.float32


class HeadOp(NamedTuple):
    """The op of a head and its loss: "linear_cross_entropy", "linear_logprobs" or "linear_logprobs_loss".

    unit: the most rows of a unit of the last one; 1 for a loss of rows.
    """

    name: str = "linear_cross_entropy"
    unit: int = 1


CROSS_ENTROPY = HeadOp()


def loss_bytes(
    op: HeadOp, tokens: int, hidden: int, vocab: int, dtype: torch.dtype, trained: bool, low_memory: bool = False
) -> int:
    """Bytes of `op`. low_memory is for "linear_cross_entropy" alone.

    tokens: N, those that have a target. trained: whether the weight has a gradient. Raises ValueError for another op.
    For few tokens, all logits and, later, the weight's gradient. Otherwise, where the forward computes the gradients,
    both in fp32 and a chunk of logits or, later, the weight's gradient in `dtype`; see `formed_bytes`.
    """
    if op.name not in ("linear_cross_entropy", "linear_logprobs", "linear_logprobs_loss"):
        raise ValueError(f"loss_bytes: unknown op {op.name!r}")
    cross_entropy, gradient = op.name == "linear_cross_entropy", vocab * hidden * dtype.itemsize * trained
    logits = dtype if cross_entropy else FP32
    if cross_entropy and low_memory:
        return low_memory_bytes(tokens, hidden, vocab, dtype, trained)
    if not trained and (op.name == "linear_logprobs" or op.unit > 1):  # the rows' gradient, in `dtype`
        return tokens * hidden * dtype.itemsize + multiplied_bytes(tokens, hidden, vocab)
    if keeps_logits(tokens, hidden, vocab, logits, True, trained):
        return tokens * vocab * logits.itemsize + gradient
    if op.name == "linear_logprobs":
        return recomputed_bytes(tokens, hidden, vocab, dtype)
    if op.name == "linear_logprobs_loss":
        return formed_bytes(tokens, hidden, vocab, dtype, trained, op.unit)
    sums = (tokens + vocab * trained) * hidden
    chunk = logits_bytes(min(chunk_rows(tokens, vocab, sums, dtype), tokens), vocab, dtype)
    return sums * FP32.itemsize + max(chunk, gradient)


def formed_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, trained: bool, unit: int) -> int:
    """Counts what a loss of log-probabilities takes that forms the gradients in the forward: these, and a ring of fp32
    logits or, later, the weight's gradient in `dtype`. Where the longest unit may be too long, and the logits are then
    computed again, the larger of both."""
    size = tokens, hidden, vocab, FP32
    piece = piece_rows(*size)
    spans = range(1, min(cdiv(unit - 1, piece) + 1, cdiv(tokens, piece)) + 1)  # pieces of a unit that begins anywhere
    rings = [ring_of(*size, None)] if unit == 1 else [ring_of_units(pieces, *size) for pieces in spans]
    found = [recomputed_bytes(tokens, hidden, vocab, dtype)] if None in rings else []
    for ring in filter(None, rings):
        of_hidden, of_weight = ring.sums_dtypes(tokens, dtype)
        rounded = vocab * hidden * dtype.itemsize * (trained and of_weight != dtype)
        sums = tokens * hidden * of_hidden.itemsize + vocab * hidden * of_weight.itemsize * trained
        found.append(sums + max(logits_bytes(min(ring.rows, tokens), vocab, FP32), rounded))
    return max(found)


def low_memory_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, trained: bool) -> int:
    """Counts both gradients in `dtype` and a buffer of logits."""
    inputs, weight = (torch.empty(rows, hidden, dtype=dtype, device="meta") for rows in (tokens, vocab))
    return inputs.nbytes + weight.nbytes * trained + low_memory_buffer(inputs, weight)[0] * dtype.itemsize


def recomputed_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> int:
    """Counts what log-probabilities take whose backward computes the logits again: both gradients in `dtype`, fp32 sums
    of the rows' and a part of the fp32 logits, or those of the forward."""
    rows, gradient = min(tokens, MAX_BACKWARD_ROWS), vocab * hidden * dtype.itemsize
    summed = vocab * hidden * FP32.itemsize if tokens > rows else gradient
    beside = (rows * hidden + vocabulary_buffer(rows, vocab, FP32)) * FP32.itemsize
    forward = logits_bytes(min(piece_rows(tokens, hidden, vocab, FP32), tokens), vocab, FP32)
    return max(forward, tokens * hidden * dtype.itemsize + summed + max(beside, gradient * (tokens > rows)))


def multiplied_bytes(tokens: int, hidden: int, vocab: int) -> int:
    """A chunk of fp32 logits whose gradient is multiplied with the weight."""
    rows = rows_of_pieces(piece_rows(tokens, hidden, vocab, FP32), vocab, FP32)
    return logits_bytes(min(rows, tokens), vocab, FP32)


def logits_bytes(rows: int, vocab: int, dtype: torch.dtype) -> int:
    return rows * round_up_to_tile(vocab) * dtype.itemsize
