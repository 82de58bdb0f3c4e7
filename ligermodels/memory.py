"""The number of parameters of a model, and the memory to train it and to generate with it, computed from its modules.

Weights, gradients, optimizer states and the key-value cache are exact, also for one of several ranks. Activations are
the tensors that the blocks save for backward on a GPU (ARCHITECTURE.md, "The life of a token"). The memory of the
libraries themselves (the CUDA context takes about half a GiB) and the fragmentation of the allocator are not included.
The model may be on the meta device. Must not know any family or file.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ligermodels.generation.capacity import cache_bytes
from ligermodels.generation.engine import PREFILL_TOKENS
from ligermodels.generation.paged_cache import PAGE_SIZE, pages_for
from ligermodels.kernels.document_chunks import SPAN
from ligermodels.kernels.logits_chunks import chunk_rows, keeps_logits, round_up_to_tile
from ligermodels.layers.attention import Attention, GatedQKNormAttention, QKNormAttention
from ligermodels.layers.block import Block, LayerInputLayer, ParallelLayer, PostNormLayer
from ligermodels.layers.context_parallel import copies_of_keys
from ligermodels.layers.cross_attention import CrossAttention
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.gated_delta import GatedDeltaNet
from ligermodels.layers.kept_tensors import choose_kept
from ligermodels.layers.latent_attention import LatentAttention
from ligermodels.layers.lora import LoRALinear, lora_modules
from ligermodels.layers.mamba2 import Mamba2
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.mlp import MLP, GatedMLP
from ligermodels.layers.moe import LoRAExperts, MoE
from ligermodels.layers.multimodal import VisionLanguageModel, is_trained
from ligermodels.layers.norm import LayerNorm, RMSNorm
from ligermodels.layers.normed_heads import NormedHeadsAttention, ReadingAttention
from ligermodels.layers.packed import PackedLinear
from ligermodels.layers.quantised import QuantisedLinear
from ligermodels.layers.short_conv import ShortConv
from ligermodels.layers.siglip import PooledProjector
from ligermodels.layers.wrapped import LinearProjector
from ligermodels.weights.module import QuantisedModule, named_weights

FP32_BYTES, INT64_BYTES = 4, 8  # bytes


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    active: those used for one token: all except the experts that the token is not routed to.
    """

    total: int
    active: int
    embedding: int


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step on one device; for sharded tensors, the bytes of its shard.

    activations: tensors that all blocks save for backward.
    loss: additional memory at the start of backward: both gradients of the head in fp32 and a chunk of logits, or the
    recomputation of the last block, whichever is larger.
    block: additional memory at the end of backward: the largest block while it is recomputed or runs backward, and a
    quantised weight of it while it is dequantised.
    beside: what stays beside the model: weights of a reference or a teacher, the cache of an engine.
    unsharded_at_start, unsharded_at_end: memory that sharding takes besides the shards, at the start and the end of
    backward: unsharded parameters and gradients, and communication buffers.
    """

    weights: int
    gradients: int
    optimizer_states: int
    activations: int
    loss: int
    block: int
    unsharded_at_start: int = 0
    unsharded_at_end: int = 0
    beside: int = 0

    @property
    def backward_start(self) -> int:
        """Memory at the start of backward, without weights and optimizer states."""
        return self.activations + self.loss + self.unsharded_at_start

    @property
    def backward_end(self) -> int:
        """Memory at the end of backward, without weights and optimizer states."""
        return self.gradients + self.block + self.unsharded_at_end

    @property
    def peak(self) -> int:
        """The largest amount of memory in use at any time.

        At the start of backward all activations exist and no gradient of a block; at the end it is the reverse. The
        peak is never between: the backward of a block frees its activations and adds its gradients, and the blocks with
        activation checkpointing come last.
        """
        return self.weights + self.beside + self.optimizer_states + max(self.backward_start, self.backward_end)

    @property
    def forward_peak(self) -> int:
        """The peak of a pass without gradients, before the optimizer has states."""
        return self.weights + self.beside + self.loss + self.block + self.unsharded_at_start

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name, in the order in which they are printed; "unsharded" is the value at the peak."""
        at_start = self.backward_start >= self.backward_end
        return {
            "weights": self.weights,
            "beside the model": self.beside,
            "gradients": self.gradients,
            "optimizer states": self.optimizer_states,
            "activations": self.activations,
            "loss": self.loss,
            "block": self.block,
            "unsharded": self.unsharded_at_start if at_start else self.unsharded_at_end,
        }


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes of generation. prompt: approximate size of the intermediate results of one block for a prefill."""

    weights: int
    cache: int
    prompt: int

    @property
    def peak(self) -> int:
        """The largest amount of memory in use at any time."""
        return self.weights + self.cache + self.prompt


def count_parameters(model: CausalLM) -> Parameters:
    """Tied parameters count once."""
    total = elements(named_weights(model).values())
    inactive = 0
    for module in model.modules():
        if isinstance(module, MoE):
            num_experts, weights = module.gate.num_experts, named_weights(module.experts).values()
            inactive += elements(weights) * (num_experts - module.experts_per_token) // num_experts
    return Parameters(total, total - inactive, model.model.embed_tokens.weight.numel())


def training_memory(
    model: CausalLM,
    batch_size: int,
    sequence_length: int,
    dtype: torch.dtype,
    *,
    checkpointed_blocks: int = 0,
    kept_tensors: int | None = 0,
    shards: int = 1,
    optimizer_states: int | None = None,
    keep_unsharded: bool = False,
    beside: int = 0,
    patches: int = 0,
    context: int = 1,
    expert_ranks: int = 1,
    fp32_logits: bool = False,
    step_in_backward: bool = False,
) -> TrainingMemory:
    """The memory of a training step with micro-batches of [batch_size, sequence_length] tokens, computed in `dtype`.

    model: unsharded, with its parameters in the dtype in which they are stored; frozen parameters are not trained.
    checkpointed_blocks: number of blocks, from the first one on, with activation checkpointing.
    kept_tensors: how many results these keep, in the order of `choose_kept`; None for all.
    shards: number of ranks over which the parameters are sharded.
    optimizer_states: bytes of the optimizer states of the whole model; None for AdamW's in the parameters' dtypes.
    keep_unsharded: blocks keep their unsharded parameters from forward to backward (FSDP2's reshard_after_forward is
    False).
    beside: bytes of a rank that stay beside the model.
    patches: of the images of a micro-batch.
    context: number of ranks that share the tokens of a micro-batch (context parallelism).
    expert_ranks: number of ranks over which routed experts are distributed (expert parallelism).
    fp32_logits: the loss reads log-probabilities, whose logits are in fp32, and no cross-entropy.
    step_in_backward: parameters are updated, and their gradients freed, during backward.
    """
    tokens, size = batch_size * sequence_length // context, dtype.itemsize
    text, trained, head = decoder_blocks(model), trained_parameters(model), model.head.weight
    tower = model.blocks[: -len(text)]
    hidden = tokens * model.config.hidden_size * size
    vision = model.config.vision if isinstance(model, VisionLanguageModel) else None
    rows = [patches if vision is None else vision.rows_of(patches)] * len(tower) + [tokens] * len(text)
    saved = [
        count * (saved_by_block(block, size) + saved_by_exchanges(block, size, context, expert_ranks))
        for block, count in zip(model.blocks, rows, strict=True)
    ]
    largest, last = max(saved), saved[-1]
    checkpointed = model.blocks[:checkpointed_blocks]
    for index, kept in enumerate(choose_kept(checkpointed, kept_tensors, sequence_length)):
        stream = checkpointed[index].mixer.hidden_size * size
        saved[index] = rows[index] * (stream + sum(tensor.nbytes(size) for tensor in kept))
    loss = loss_bytes(model, tokens, dtype, torch.float32 if fp32_logits else None)
    if checkpointed_blocks == len(saved):
        head_gradient = head.numel() * head.itemsize if head.requires_grad else 0
        if step_in_backward:  # the head's is freed by then, those of the last block are not
            head_gradient = largest_gradients_of_block(model)
        loss = max(loss, head_gradient + last - saved[-1])
    experts = distributed_experts(model) if expert_ranks > 1 else set()
    owned: dict[Tensor, int] = {p: shard_bytes(p, expert_ranks if p in experts else shards) for p in model.parameters()}
    if optimizer_states is None:
        states = sum(2 * owned[p] + FP32_BYTES for p in trained)  # AdamW's: two moments and a step count
    else:  # those of the experts are their part of the trained elements
        of_experts = optimizer_states * elements(p for p in trained if p in experts) // max(1, elements(trained))
        states = (optimizer_states - of_experts) // shards + of_experts // expert_ranks
    unsharded_at_start, unsharded_at_end = unsharded_bytes(model, size, shards, trained, keep_unsharded, experts)
    not_recomputed = [p for block in model.blocks[checkpointed_blocks:] for p in block.parameters() if p in experts]
    cast = elements(p for p in not_recomputed if p.itemsize != size) * size // expert_ranks
    return TrainingMemory(
        weights=sum(owned.values()),
        gradients=gradients_in_backward(model) if step_in_backward else sum(owned[p] for p in trained),
        optimizer_states=states,
        # The final norm saves its input and rstd.
        activations=sum(saved) + hidden + tokens * FP32_BYTES + patches * saved_by_patch(model, size),
        loss=loss,
        block=largest + largest_dequantised(model),
        unsharded_at_start=unsharded_at_start + cast,
        unsharded_at_end=unsharded_at_end,
        beside=beside,
    )


def largest_gradients_of_block(model: CausalLM) -> int:
    """Bytes of the gradients of that block which has most, and of a tied head, which exists as long as any block's."""
    blocks = (sum(p.nbytes for p in block.parameters() if p.requires_grad) for block in model.blocks)
    return max(blocks) + gradient_of_tied_head(model)


def gradient_of_tied_head(model: CausalLM) -> int:
    head = model.head.weight
    return head.nbytes if head is model.model.embed_tokens.weight and head.requires_grad else 0


def gradients_in_backward(model: CausalLM) -> int:
    """Bytes of the gradients that exist at a time at the end of backward, where each is freed when it has been used.

    These are the gradients of a block, or of the embedding; a tied one has a second gradient, the head's.
    """
    inside = {id(parameter) for block in model.blocks for parameter in block.parameters()}
    outside = (p.nbytes for p in trained_parameters(model) if id(p) not in inside)
    return max(largest_gradients_of_block(model), max(outside, default=0) + gradient_of_tied_head(model))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states of an optimizer, which may be on the meta device."""
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(tensor.nbytes for tensor in tensors)


def distributed_experts(model: nn.Module) -> set[Tensor]:
    """The parameters that expert parallelism distributes."""
    layers = (module.experts for module in model.modules() if isinstance(module, MoE))
    return {parameter for experts in layers for parameter in experts.parameters()}


def shard_bytes(parameter: Tensor, shards: int) -> int:
    """Bytes of the first rank's shard: FSDP2 shards rows evenly, so that the last ranks may have fewer."""
    rows = -(-parameter.shape[0] // shards)
    return rows * (parameter.numel() // parameter.shape[0]) * parameter.itemsize


def unsharded_bytes(
    model: CausalLM, size: int, shards: int, trained: list[Tensor], keep_unsharded: bool, experts: Collection[Tensor]
) -> tuple[int, int]:
    """Bytes that sharding takes besides the shards, at the start and at the end of backward.

    These are unsharded parameters, gradients before their reduction, and buffers of all-gather and reduce-scatter.
    experts: parameters that are distributed instead.
    """
    if shards == 1 and all(parameter.dtype.itemsize == size for parameter in trained):
        return 0, 0
    layers = model.blocks
    copies = 2 if shards > 1 else 1  # the last all-gather exists twice: as its buffer and as parameters
    kept = layers if keep_unsharded else layers[-1:]  # FSDP2 keeps the last block unsharded in any case
    start = copies * model.head.weight.numel() * size + sum(gathered_bytes(block, size, experts) for block in kept)
    ids = {id(parameter) for parameter in trained if parameter not in experts}
    end = 0
    for block in layers:
        # The next all-gather is prefetched meanwhile; gradients are reduced in the wider dtype of the two.
        gradients = sum(p.numel() * (size + max(size, p.itemsize)) for p in block.parameters() if id(p) in ids)
        end = max(end, 2 * gathered_bytes(block, size, experts) + gradients)
    return start, end


def gathered_bytes(module: nn.Module, size: int, left_out: Collection[Tensor] = ()) -> int:
    """Bytes of a module's whole parameters as they are gathered: floats with `size` bytes each, others as they are."""
    gathered = [p for p in module.parameters() if p not in left_out]
    return sum(p.numel() * (size if p.is_floating_point() else p.itemsize) for p in gathered)


def largest_dequantised(model: CausalLM) -> int:
    """Bytes of the largest quantised weight in the dtype in which it is used."""
    quantised = (module for module in model.modules() if isinstance(module, QuantisedModule))
    weights = (weight for module in quantised for weight in module.quantised_weights().values())
    return max((math.prod(weight.shape) * weight.dtype.itemsize for weight in weights), default=0)


def inference_memory(model: CausalLM, batch_size: int, sequence_length: int, dtype: torch.dtype) -> InferenceMemory:
    """The memory to generate batch_size rows of sequence_length tokens in total, nearly all of them in the prompt.

    The cache is that of the engine: whole pages, and of layers with a window the pages of the window alone. Prompts are
    computed up to PREFILL_TOKENS tokens at a time.
    """
    paged = batch_size * pages_for(sequence_length) * PAGE_SIZE
    largest = max(saved_by_block(block, dtype.itemsize) for block in decoder_blocks(model))
    return InferenceMemory(
        weights=gathered_bytes(model, dtype.itemsize),
        cache=cache_bytes(model, paged, batch_size, sequence_length, dtype),
        prompt=min(batch_size * sequence_length, PREFILL_TOKENS) * largest + largest_dequantised(model),
    )


def decoder_blocks(model: CausalLM) -> list[Block]:
    """The blocks of the text model, from the first to the last."""
    return [cast(Block, block) for block in model.model.layers]


def trained_parameters(model: CausalLM) -> list[Tensor]:
    """The parameters that get a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def saved_by_block(block: Block, size: int) -> int:
    """Bytes per token that a block saves for backward; elements have `size` bytes."""
    hidden = block.mixer.hidden_size
    children = list(block.children())
    norms = sum(isinstance(child, RMSNorm | LayerNorm) for child in children)
    layer_norms = sum(isinstance(child, LayerNorm) for child in children)
    statistics = norms + layer_norms  # rstd, of a LayerNorm the mean too
    # Attention and MLP save their inputs, where no norm is fused with them; parallel branches have the same one.
    inputs = 2 if isinstance(block, PostNormLayer) else 1 if isinstance(block, ParallelLayer) else layer_norms
    masks = 2 * hidden if block.dropout else 0  # one byte per element of each branch
    low_rank = sum(update.lora_A.shape[0] for update in lora_modules(block) if isinstance(update, LoRALinear))
    saved = (norms + inputs) * hidden * size + statistics * FP32_BYTES + low_rank * size + masks
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
        return saved_by_mamba2(mixer, size)
    if isinstance(mixer, ShortConv):
        return 6 * mixer.hidden_size * size  # the projection; what is behind its gate, the convolution, and both
    if isinstance(mixer, NormedHeadsAttention | ReadingAttention):
        return saved_by_normed_heads(mixer, size)
    if isinstance(mixer, CrossAttention):
        # Queries before and after their norm, the output, its log-sum-exp, and rstd. What images save is not counted.
        return 3 * mixer.num_heads * mixer.head_dim * size + 2 * mixer.num_heads * FP32_BYTES
    return saved_by_attention(cast(Attention, mixer), size)


def saved_by_attention(attention: Attention, size: int) -> int:
    """Bytes per token: queries, keys and values, the output, its log-sum-exp.

    With QK-norm also queries and keys before the norm, of scaled queries also the unscaled ones; with an output gate
    the gate, the gated output, and values where queries and keys are normed.
    """
    heads, key_value_heads = attention.num_heads, attention.num_key_value_heads
    rows = 2 * (heads + key_value_heads)
    if isinstance(attention, QKNormAttention):
        rows += heads + key_value_heads
    if isinstance(attention, GatedQKNormAttention):
        rows += 2 * heads + key_value_heads
    if attention.scales_queries:
        rows += heads
    return rows * attention.head_dim * size + heads * FP32_BYTES


def saved_by_exchanges(block: Block, size: int, context: int, expert_ranks: int) -> int:
    """Bytes per token that a block saves beside, where ranks share rows or experts: attention's output for all tokens
    of this rank's heads and copies of key-value heads; of a token's k experts the rows, and their places."""
    saved, mixer = 0, block.mixer
    if context > 1:
        heads = getattr(mixer, "num_key_value_heads", mixer.num_heads)
        copied = (copies_of_keys(heads, context) - 1) * mixer.kept().elements
        saved += (mixer.output_size + copied) * size
    if expert_ranks > 1:
        slots = sum(module.experts_per_token for module in block.modules() if isinstance(module, MoE))
        saved += slots * (mixer.hidden_size * size + 2 * INT64_BYTES + FP32_BYTES)
    return saved


def saved_by_delta_rule(mixer: GatedDeltaNet, size: int) -> int:
    """Bytes per token: the projection, queries, keys and values behind the convolution, the output before and after its
    norm, and of each value head a row of a chunk's inverse. In fp32 of each value head g, three steps to it and beta;
    the norms of queries and keys."""
    values = mixer.value_heads * mixer.value_size
    wide = width(mixer.in_proj) + mixer.channels + 2 * values + mixer.value_heads * SPAN.value
    return wide * size + (5 * mixer.value_heads + 2 * mixer.key_heads) * FP32_BYTES


def saved_by_mamba2(mixer: Mamba2, size: int) -> int:
    """Bytes per token: the projection, what is behind the convolution, the scan's output before and after its norm. In
    fp32 of each head the step size, and two steps to it."""
    return (width(mixer.in_proj) + mixer.channels + 2 * mixer.size) * size + 3 * mixer.heads * FP32_BYTES


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


def saved_by_patch(model: CausalLM, size: int) -> int:
    """Bytes per patch outside of the blocks: of the patch embedding its input, of the projector its norm's input and
    output, which fc1 reads, and fc1's output; the features, which insertion keeps. A projector that pools keeps what it
    pools before and after its norm, the tower's own norm its input."""
    if not isinstance(model, VisionLanguageModel):
        return 0
    vision = model.config.vision
    embedding = vision.pixels_per_patch * size if model.visual.patch_embed.weight.requires_grad else 0
    if not (is_trained(model.projector) or is_trained(model.visual)):
        return 0
    features = model.config.hidden_size * size // vision.patches_per_feature
    if isinstance(model.projector, LinearProjector):  # the states' sum, which linear_1 reads, and its output
        normed = vision.hidden_size * size + 2 * FP32_BYTES if is_trained(model.visual) else 0
        return embedding + normed + vision.hidden_size * size + 2 * features
    if isinstance(model.projector, PooledProjector):
        pooled = (2 * vision.hidden_size * size + FP32_BYTES) // vision.patches_per_feature
        normed = vision.hidden_size * size + 2 * FP32_BYTES if is_trained(model.visual) else 0
        return embedding + normed + pooled + features
    return embedding + (1 + len(model.deepstack)) * (3 * vision.hidden_size * size + features)


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


def loss_bytes(model: CausalLM, tokens: int, dtype: torch.dtype, wider: torch.dtype | None = None) -> int:
    """Bytes of the fused linear cross-entropy; of a loss of log-probabilities, whose logits are in a `wider` dtype.

    Both gradients in fp32 and a chunk of logits or, later, the weight's gradient in `dtype`. For few tokens: all logits
    and, later, that gradient.
    """
    logits = wider or dtype
    (vocab, hidden), trained = model.head.weight.shape, model.head.weight.requires_grad
    gradient = vocab * hidden * dtype.itemsize if trained else 0
    if keeps_logits(tokens, hidden, vocab, logits, True, trained):
        return tokens * vocab * logits.itemsize + gradient
    sums = (tokens + vocab * trained) * hidden
    rows = chunk_rows(tokens, vocab, 0 if wider else sums, logits)  # log-probabilities have equal chunks in all passes
    chunk = min(rows, tokens) * round_up_to_tile(vocab) * logits.itemsize
    return sums * FP32_BYTES + max(chunk, gradient)


def width(projection: nn.Module) -> int:
    """Output features of a linear, with or without LoRA."""
    base = projection.base_layer if isinstance(projection, LoRALinear) else projection
    assert isinstance(base, nn.Linear | PackedLinear | QuantisedLinear)
    return base.out_features


def elements(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
