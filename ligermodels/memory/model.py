"""The number of parameters of a model, and the memory to train it and to generate with it, computed from its modules.

Weights, gradients, optimizer states and the key-value cache are exact, also for one of several ranks. Activations are
those of `blocks.py`. The memory of the libraries themselves (the CUDA context takes about
half a GiB) and the fragmentation of the allocator are not included. The model may be on the meta device.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ligermodels.generation.capacity import cache_bytes
from ligermodels.generation.engine import PREFILL_TOKENS
from ligermodels.generation.paged_cache import PAGE_SIZE, pages_for
from ligermodels.layers.block import Block
from ligermodels.layers.checkpointing.kept_tensors import FP32_BYTES, choose_kept
from ligermodels.layers.checkpointing.offloaded_inputs import blocks_between
from ligermodels.layers.checkpointing.offloaded_weights import offloaded_bytes
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.moe import LoRAExperts, MoE
from ligermodels.memory.blocks import (
    CROSS_ENTROPY,
    HeadOp,
    beside_recomputed,
    beside_saved,
    loss_bytes,
    saved_beside_rows,
    saved_by_block,
    saved_by_exchanges,
    saved_by_patch,
    saved_of_updates,
)
from ligermodels.vision.mllama import CrossAttention
from ligermodels.vision.multimodal import ImageParts
from ligermodels.weights.mapping import is_lora_parameter
from ligermodels.weights.module import QuantisedModule, named_weights


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
    loss: additional memory at the start of backward: both gradients of the head and a chunk of logits, or the
    recomputation of the last block, whichever is larger.
    block: additional memory at the end of backward: the largest block while it is recomputed or runs backward, the
    gradient of the residual stream, a quantised weight of the block while it is dequantised, and, where gradients are
    accumulated, a new gradient beside the sum.
    accumulated: additional memory at the start of backward: the gradients of the micro-batches before.
    offloaded_states: optimizer states in host memory, which are not in `optimizer_states`.
    offloaded_inputs: inputs of every k-th checkpointed block in host memory, which are not in `activations`.
    offloads_every: that k; 0 where no input is offloaded.
    offloaded_weights: quantised weights in host memory; of those of two blocks a copy is in `weights`.
    gathered: additional memory while all weights are gathered at once, as for generation.
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
    gathered: int = 0
    beside: int = 0
    offloaded_states: int = 0
    offloaded_inputs: int = 0
    offloads_every: int = 0
    offloaded_weights: int = 0
    accumulated: int = 0

    @property
    def host(self) -> int:
        """Pinned host memory."""
        return self.offloaded_states + self.offloaded_inputs + self.offloaded_weights

    @property
    def backward_start(self) -> int:
        """Memory at the start of backward, without weights and optimizer states."""
        return self.activations + self.loss + self.unsharded_at_start + self.accumulated

    @property
    def backward_end(self) -> int:
        """Memory at the end of backward, without weights and optimizer states."""
        return self.gradients + self.block + self.unsharded_at_end

    @property
    def peak(self) -> int:
        """The largest amount of memory in use at any time.

        At the start of backward all activations exist and, of the first micro-batch, no gradient of a block; at the end
        it is the reverse. The peak is never between: the backward of a block frees its activations and adds its
        gradients, and the blocks with activation checkpointing come last.
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
            "weights": self.weights, "beside the model": self.beside, "gradients": self.gradients,
            "optimizer states": self.optimizer_states, "activations": self.activations, "loss": self.loss,
            "block": self.block, "unsharded": self.unsharded_at_start if at_start else self.unsharded_at_end,
        }  # fmt: skip


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
    model: CausalLM, batch_size: int, sequence_length: int, dtype: torch.dtype, *, checkpointed_blocks: int = 0,
    kept_tensors: int | None = 0, shards: int = 1, optimizer_states: int | None = None, offloaded_states: int = 0,
    room_for_inputs: float = 0, keep_unsharded: bool = False, replicate_quantised: bool = False, beside: int = 0,
    patches: int = 0, context: int = 1, expert_ranks: int = 1, head_op: HeadOp = CROSS_ENTROPY,
    low_memory_loss: bool = False, step_in_backward: bool = False, micro_batches: int = 1,
    offload_weights: bool = False,
) -> TrainingMemory:  # fmt: skip
    """The memory of a training step with micro-batches of [batch_size, sequence_length] tokens, computed in `dtype`.

    model: unsharded, with its parameters in the dtype in which they are stored; frozen parameters are not trained.
    checkpointed_blocks: number of blocks, from the first one on, with activation checkpointing.
    kept_tensors: how many results these keep, in the order of `choose_kept`; None for all.
    shards: number of ranks over which the parameters are sharded.
    optimizer_states: bytes of the optimizer states of the whole model; None for AdamW's in the parameters' dtypes.
    offloaded_states: bytes of them that are in host memory instead.
    room_for_inputs: bytes of host memory for the inputs of checkpointed blocks.
    keep_unsharded: blocks keep their unsharded parameters from forward to backward (FSDP2's reshard_after_forward is
    False).
    replicate_quantised: as that of `fsdp.shard`.
    beside: bytes of a rank that stay beside the model.
    patches: of the images of a micro-batch.
    context: number of ranks that share the tokens of a micro-batch (context parallelism).
    expert_ranks: number of ranks over which routed experts are distributed (expert parallelism).
    head_op: the op of the head and its loss.
    low_memory_loss: as that of `LMHead`.
    step_in_backward: parameters are updated, and their gradients freed, during backward.
    micro_batches: of a step of one rank. From the second one on, all gradients exist beside all activations.
    offload_weights: quantised weights are in host memory, as those of `CausalLM.offload_weights`.
    """
    tokens, size = batch_size * sequence_length // context, dtype.itemsize
    text, trained, head = decoder_blocks(model), trained_parameters(model), model.head.weight
    tower = model.blocks[: -len(text)]
    hidden = tokens * model.config.hidden_size * size
    of_images = model.config.vision.rows_of(patches) if isinstance(model, ImageParts) else 0
    left_out = [not patches and isinstance(block.mixer, CrossAttention) for block in text]  # without images
    rows = [of_images] * len(tower) + [0 if out else tokens for out in left_out]
    saved = [
        count * (saved_by_block(block, size) + saved_by_exchanges(block, size, context, expert_ranks))
        + saved_of_updates(block, size) // expert_ranks
        + saved_beside_rows(model, block, patches, size)
        for block, count in zip(model.blocks, rows, strict=True)
    ]
    checkpointed = model.blocks[:checkpointed_blocks]
    running = [*saved]  # what a block takes while it runs backward: one that is checkpointed, from its recomputation on
    for index, block in enumerate(model.blocks):
        beside_block = beside_recomputed if index < checkpointed_blocks else beside_saved
        running[index] += beside_block(block, rows[index], size)
    largest, last = max(running), running[-1]
    inputs = [count * block.mixer.hidden_size * size for count, block in zip(rows, checkpointed, strict=False)]
    every = blocks_between(inputs, room_for_inputs)
    offloaded = inputs[::every] if every else []
    arriving = max(offloaded, default=0)  # beside the input of the block that computes
    for index, kept in enumerate(choose_kept(checkpointed, kept_tensors, sequence_length)):
        on_device = 0 if every and index % every == 0 else inputs[index]
        saved[index] = on_device + rows[index] * sum(tensor.nbytes(size) for tensor in kept)
    vocab, columns = head.shape
    loss = loss_bytes(head_op, tokens, columns, vocab, dtype, head.requires_grad, low_memory_loss)
    accumulates = micro_batches > 1
    beside_last = last - saved[-1] if checkpointed_blocks == len(saved) else 0
    if step_in_backward or accumulates:  # the head's is freed by then, and so are those of the block that are complete
        loss = max(loss, beside_last + largest_gradient_of_block(model))
    elif beside_last:
        loss = max(loss, beside_last + head.nbytes * head.requires_grad)
    experts = distributed_experts(model) if expert_ranks > 1 else set()
    replicated: set[Tensor] = set(model.replicated_parameters(replicate_quantised))
    ranks: dict[Tensor, int] = dict.fromkeys(model.parameters(), shards)  # over which each one is distributed
    ranks |= dict.fromkeys(experts, expert_ranks) | dict.fromkeys(replicated, 1)
    owned: dict[Tensor, int] = {p: shard_bytes(p, count) for p, count in ranks.items()}
    if optimizer_states is None:
        # AdamW's: two moments, the low bits of a bf16 parameter, and a step count.
        states = sum((3 if p.dtype == torch.bfloat16 else 2) * owned[p] + FP32_BYTES for p in trained)
    else:  # those of some parameters are their part of the trained elements
        total, by_ranks = elements(trained), Counter[int]()
        for parameter in trained:
            by_ranks[ranks[parameter]] += parameter.numel()
        states = sum(optimizer_states * part // total // count for count, part in by_ranks.items())
    unsharded_at_start, unsharded_at_end = unsharded_bytes(
        model, size, shards, trained, keep_unsharded, experts | replicated
    )
    gradients = sum(owned[p] for p in trained)
    at_end = largest + hidden + arriving + largest_dequantised(model)
    embedding = hidden + gradients_at_embedding(model)  # behind the last block
    if step_in_backward:  # those of one block are gradients, and there are no others
        gradients = largest_gradients_of_block(model)
        at_end = max(at_end, embedding - gradients)
    elif accumulates:
        sharded = unsharded_at_end > 0  # FSDP2 adds the shards of a block's gradients at once
        new = max(sum(owned[p] for p in trained_parameters(block)) for block in model.blocks)
        at_end = max(at_end + (new if sharded else largest_gradient_of_block(model)), embedding)
    elif tied := gradient_of_tied_head(model):
        at_end = max(at_end, embedding - tied)
    not_recomputed = [p for block in model.blocks[checkpointed_blocks:] for p in block.parameters() if p in experts]
    buffers, on_host = offloaded_bytes(model.blocks) if offload_weights else (0, 0)
    widened = elements(p for p in not_recomputed if p.itemsize != size) * size // expert_ranks
    return TrainingMemory(
        weights=sum(owned.values()) + buffers - on_host,
        gradients=gradients,
        optimizer_states=states,
        # The final norm saves its input and rstd.
        activations=sum(saved) + arriving + hidden + tokens * FP32_BYTES + patches * saved_by_patch(model, size),
        loss=loss,
        block=at_end,
        unsharded_at_start=unsharded_at_start + widened,
        unsharded_at_end=unsharded_at_end,
        gathered=gathered_bytes(model, size, experts | replicated),
        beside=beside,
        offloaded_states=offloaded_states,
        offloaded_inputs=sum(offloaded),
        offloads_every=every,
        offloaded_weights=on_host,
        accumulated=gradients if accumulates else 0,
    )


def largest_gradient_of_block(model: CausalLM) -> int:
    """Bytes of the largest gradient in a block, beside that of a tied head, which exists as long as any block's."""
    parameters = (p.nbytes for block in model.blocks for p in block.parameters() if p.requires_grad)
    return max(parameters, default=0) + gradient_of_tied_head(model)


def largest_gradients_of_block(model: CausalLM) -> int:
    """Bytes of the gradients of that block which has most, and of a tied head, which exists as long as any block's."""
    blocks = (sum(p.nbytes for p in block.parameters() if p.requires_grad) for block in model.blocks)
    return max(blocks) + gradient_of_tied_head(model)


def gradient_of_tied_head(model: CausalLM) -> int:
    head = model.head.weight
    return head.nbytes if head is model.model.embed_tokens.weight and head.requires_grad else 0


def gradients_at_embedding(model: CausalLM) -> int:
    """Bytes of the largest new gradient outside of the blocks, the embedding's as a rule; of a tied one those of the
    embedding, of the head, and their sum."""
    inside = {id(parameter) for block in model.blocks for parameter in block.parameters()}
    outside = (p.nbytes for p in trained_parameters(model) if id(p) not in inside)
    return max(outside, default=0) + 2 * gradient_of_tied_head(model)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states of an optimizer, which may be on the meta device."""
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(tensor.nbytes for tensor in tensors)


def distributed_experts(model: nn.Module) -> set[Tensor]:
    layers = (module.experts for module in model.modules() if isinstance(module, MoE))
    bases = (experts.base_layer if isinstance(experts, LoRAExperts) else experts for experts in layers)
    return {parameter for experts in bases for parameter in experts.parameters()}


def shard_bytes(parameter: Tensor, shards: int) -> int:
    """Bytes of the first rank's shard: FSDP2 shards rows evenly, so that the last ranks may have fewer."""
    rows = -(-parameter.shape[0] // shards)
    return rows * (parameter.numel() // parameter.shape[0]) * parameter.itemsize


def held_bytes(parameters: Iterable[Tensor], shards: int, replicated: Collection[Tensor]) -> int:
    """Bytes of the first rank's parameters: the whole of replicated ones, and shards of the others."""
    return sum(
        parameter.nbytes if parameter in replicated else shard_bytes(parameter, shards) for parameter in parameters
    )


def unsharded_bytes(
    model: CausalLM, size: int, shards: int, trained: list[Tensor], keep_unsharded: bool, left_out: Collection[Tensor]
) -> tuple[int, int]:
    """Bytes that sharding takes besides the shards, at the start and at the end of backward.

    These are unsharded parameters, gradients before their reduction, and buffers of all-gather and reduce-scatter; of a
    single process that does not shard, the low-rank updates in the dtype in which they are multiplied.
    left_out: parameters that are distributed or replicated instead.
    """
    others = [p for p in trained if p not in left_out and p.itemsize != size]
    if shards == 1 and lora_parameters(model).issuperset(others):
        return sum(p.numel() * size for p in others), 0
    layers = model.blocks
    copies = 2 if shards > 1 else 1  # the last all-gather exists twice: as its buffer and as parameters
    kept = layers if keep_unsharded else layers[-1:]  # FSDP2 keeps the last block unsharded in any case
    start = copies * model.head.weight.numel() * size + sum(gathered_bytes(block, size, left_out) for block in kept)
    ids = {id(parameter) for parameter in trained if parameter not in left_out}
    end = 0
    for block in layers:
        # The next all-gather is prefetched meanwhile; gradients are reduced in the wider dtype of the two.
        gradients = sum(p.numel() * (size + max(size, p.itemsize)) for p in block.parameters() if id(p) in ids)
        end = max(end, 2 * gathered_bytes(block, size, left_out) + gradients)
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
    fp32 = set(model.fp32_parameters())
    return InferenceMemory(
        weights=gathered_bytes(model, dtype.itemsize, fp32) + sum(parameter.nbytes for parameter in fp32),
        cache=cache_bytes(model, paged, batch_size, sequence_length, dtype),
        prompt=min(batch_size * sequence_length, PREFILL_TOKENS) * largest + largest_dequantised(model),
    )


def decoder_blocks(model: CausalLM) -> list[Block]:
    """The blocks of the text model, from the first to the last."""
    return [cast(Block, block) for block in model.model.layers]


def trained_parameters(module: nn.Module) -> list[Tensor]:
    """The parameters that get a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def lora_parameters(module: nn.Module) -> set[Tensor]:
    """The parameters of LoRA."""
    return {parameter for name, parameter in module.named_parameters() if is_lora_parameter(name)}


def elements(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
