"""What a model needs: parameters, and bytes to train it and to generate with it, counted from its modules alone.

Weights, gradients, optimizer states and the cache are exact, also of one rank of several. Activations are what the
blocks keep for backward on a GPU (ARCHITECTURE.md, "The life of a token"). What the libraries take for themselves, a
CUDA context of about half a GiB among it, comes on top, and so does what the allocator cannot fill. The model may be on
the meta device. Knows layers; no family and no file.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ligermodels.kernels.linear_cross_entropy import chunk_rows, keeps_logits, round_up_to_tile
from ligermodels.layers.attention import Attention, NormedAttention
from ligermodels.layers.block import Block, PostNormLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import LoRAExperts, LoRALinear, updates
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.moe import MoE
from ligermodels.layers.norm import RMSNorm

FP32, INT64 = 4, 8  # bytes


@dataclass(frozen=True)
class Parameters:
    """active: those that one token is multiplied by, all but the experts it is not routed to."""

    total: int
    active: int
    embedding: int


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step on one device; of what is sharded, its share.

    states: the optimizer's. activations: kept by all blocks for backward.
    loss: on top of them where backward begins: both gradients of the head in fp32 and a chunk of logits or, if that is
    more, the last block computed again. block: on top of all gradients where backward ends: the largest block, while it
    is computed again or goes backward. gathered_at_loss, gathered_at_block: beside each of the two what sharding takes
    besides the shards.
    """

    weights: int
    gradients: int
    states: int
    activations: int
    loss: int
    block: int
    gathered_at_loss: int = 0
    gathered_at_block: int = 0

    @property
    def at_loss(self) -> int:
        """On top of weights and states where backward begins."""
        return self.activations + self.loss + self.gathered_at_loss

    @property
    def at_block(self) -> int:
        """The same where it ends."""
        return self.gradients + self.block + self.gathered_at_block

    @property
    def peak(self) -> int:
        """At the loss all activations are there and no gradient of a block yet; at the end it is the other way. Between
        them it is never more: each block frees what it kept and leaves gradients, and those computed again come last.
        """
        return self.weights + self.states + max(self.at_loss, self.at_block)

    @property
    def parts(self) -> dict[str, int]:
        """By name, in the order in which they are told; `gathered` is what is gathered at the peak."""
        gathered = self.gathered_at_loss if self.at_loss >= self.at_block else self.gathered_at_block
        names = ("weights", "gradients", "states", "activations", "loss", "block")
        return {name: getattr(self, name) for name in names} | {"gathered": gathered}


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes of generating. prompt: about what its longest-lived intermediate results take, in one block."""

    weights: int
    cache: int
    prompt: int

    @property
    def peak(self) -> int:
        return self.weights + self.cache + self.prompt


def count_parameters(model: CausalLM) -> Parameters:
    total = elements(model.parameters())
    idle = 0
    for module in model.modules():
        if isinstance(module, MoE):
            num_experts = module.gate.out_features
            idle += elements(module.experts.parameters()) * (num_experts - module.experts_per_token) // num_experts
    return Parameters(total, total - idle, model.model.embed_tokens.weight.numel())


def training_memory(
    model: CausalLM,
    batch_size: int,
    sequence_length: int,
    dtype: torch.dtype,
    *,
    recomputed: int = 0,
    shards: int = 1,
    states: int | None = None,
    keep_gathered: bool = False,
) -> TrainingMemory:
    """Of a step that computes [batch_size, sequence_length] tokens at a time in `dtype`. Parameters have the dtype that
    they are stored in, are whole, and those that are frozen stay so.

    recomputed: how many blocks, the first ones, keep only their inputs. shards: how many ranks share the parameters.
    states: bytes of the optimizer's states for all of the model; None for AdamW's in the parameters' dtypes.
    keep_gathered: whether blocks keep their gathered weights between forward and backward.
    """
    tokens, size = batch_size * sequence_length, dtype.itemsize
    blocks, trained, head = blocks_of(model), trained_parameters(model), model.lm_head.weight
    hidden = tokens * model.config.hidden_size * size
    kept = [tokens * kept_by_block(block, size) for block in blocks]
    largest, last = max(kept), kept[-1]
    kept[:recomputed] = [2 * hidden for _ in kept[:recomputed]]  # the pair (x, residual)
    if recomputed:
        kept[0] = hidden  # where there is but x
    loss = loss_bytes(model, tokens, dtype)
    if recomputed == len(blocks):
        head_gradient = head.numel() * head.itemsize if head.requires_grad else 0
        loss = max(loss, head_gradient + last - kept[-1])
    gathered_at_loss, gathered_at_block = gathered_bytes(model, size, shards, trained, keep_gathered)
    return TrainingMemory(
        weights=sum(shard_bytes(parameter, shards) for parameter in model.parameters()),
        gradients=sum(shard_bytes(parameter, shards) for parameter in trained),
        states=adamw_states(trained, shards) if states is None else states // shards,
        activations=sum(kept) + hidden + tokens * FP32,  # and the final norm's
        loss=loss,
        block=largest,
        gathered_at_loss=gathered_at_loss,
        gathered_at_block=gathered_at_block,
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of all states that an optimizer has, which may be on the meta device."""
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(tensor.nbytes for tensor in tensors)


def adamw_states(trained: list[Tensor], shards: int) -> int:
    """Two moments of each parameter, and a number of steps."""
    return sum(2 * shard_bytes(parameter, shards) + FP32 for parameter in trained)


def shard_bytes(parameter: Tensor, shards: int) -> int:
    """Of the part that the first rank has: rows are split evenly, the last ranks may have fewer."""
    rows = -(-parameter.shape[0] // shards)
    return rows * (parameter.numel() // parameter.shape[0]) * parameter.itemsize


def gathered_bytes(
    model: CausalLM, size: int, shards: int, trained: list[Tensor], keep_gathered: bool
) -> tuple[int, int]:
    """What sharding takes beside the shards, where backward begins and where it ends: gathered weights, gradients that
    are not reduced yet, and what they are gathered and reduced through."""
    if shards == 1 and all(parameter.dtype.itemsize == size for parameter in trained):
        return 0, 0
    layers = blocks_of(model)
    through = 2 if shards > 1 else 1  # what was gathered last is there twice: as it came, and by parameters
    kept = layers if keep_gathered else layers[-1:]  # the last one is kept in any case
    begins = through * model.lm_head.weight.numel() + sum(elements(block.parameters()) for block in kept)
    ids = {id(parameter) for parameter in trained}
    ends = 0
    for block in layers:
        # With the weights of the block before, as they come; gradients are summed in the wider dtype of the two.
        gradients = sum(p.numel() * (size + max(size, p.itemsize)) for p in block.parameters() if id(p) in ids)
        ends = max(ends, 2 * elements(block.parameters()) * size + gradients)
    return begins * size, ends


def inference_memory(model: CausalLM, batch_size: int, sequence_length: int, dtype: torch.dtype) -> InferenceMemory:
    """Of batch_size rows that are sequence_length tokens long in the end, the prompt taken for nearly all of it."""
    tokens, size, config = batch_size * sequence_length, dtype.itemsize, model.config
    per_token = 2 * config.num_hidden_layers * config.key_value_size
    largest = max(kept_by_block(block, size) for block in blocks_of(model))
    return InferenceMemory(elements(model.parameters()) * size, tokens * per_token * size, tokens * largest)


def blocks_of(model: CausalLM) -> list[Block]:
    return [block for block in model.model.layers if isinstance(block, Block)]


def trained_parameters(model: CausalLM) -> list[Tensor]:
    """Those that get a gradient: the image side of a multimodal model is not computed."""
    text = {id(parameter) for part in (model.model, model.lm_head) for parameter in part.parameters()}
    return [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) in text]


def kept_by_block(block: Block, size: int) -> int:
    """Bytes a token that a block keeps for backward, elements being `size` bytes large."""
    hidden = width(block.self_attn.o_proj)
    norms = sum(isinstance(child, RMSNorm) for child in block.children())
    unnormed = 2 if isinstance(block, PostNormLayer) else 0  # there attention and MLP keep what they read
    low_rank = sum(update.lora_A.shape[0] for update in updates(block) if isinstance(update, LoRALinear))
    kept = (norms + unnormed) * hidden * size + norms * FP32 + low_rank * size
    return kept + kept_by_attention(block.self_attn, size) + kept_by_mlp(block.mlp, hidden, size)


def kept_by_attention(attention: Attention, size: int) -> int:
    """Queries, keys and values, where QK-norm is also from before it; the output and its log-sum-exp."""
    head_dim = width(attention.qkv_proj) // (attention.num_heads + 2 * attention.num_key_value_heads)
    kept = width(attention.qkv_proj) + attention.num_heads * head_dim
    if isinstance(attention, NormedAttention):
        kept += (attention.num_heads + attention.num_key_value_heads) * head_dim
    return kept * size + attention.num_heads * FP32


def kept_by_mlp(mlp: GatedMLP | MoE, hidden: int, size: int) -> int:
    """gate_up; of experts that of each slot, their input and the routing."""
    if isinstance(mlp, GatedMLP):
        return width(mlp.gate_up_proj) * size
    experts, low_rank = mlp.experts, 0
    if isinstance(experts, LoRAExperts):
        experts, low_rank = experts.base_layer, experts.gate_up_proj.rank + experts.down_proj.rank
    slots, (num_experts, gate_up, _) = mlp.experts_per_token, experts.gate_up_proj.shape
    # Probabilities and the sum of the chosen; of each slot three indices and its weight, as routed and as sorted.
    routing = (num_experts + 1) * FP32 + slots * (3 * INT64 + 2 * FP32)
    kept = (hidden + slots * (gate_up + low_rank)) * size + routing
    if mlp.shared_expert is not None:
        kept += (width(mlp.shared_expert.gate_up_proj) + hidden + 1) * size  # its output and gate are multiplied
    return kept


def loss_bytes(model: CausalLM, tokens: int, dtype: torch.dtype) -> int:
    """The gradients in fp32, and with them a chunk of logits or, later, the weight's gradient in `dtype`; of few tokens
    all logits and, later, that gradient."""
    (vocab, hidden), trained = model.lm_head.weight.shape, model.lm_head.weight.requires_grad
    gradient = vocab * hidden * dtype.itemsize if trained else 0
    if keeps_logits(tokens, hidden, vocab, dtype, True, trained):
        return tokens * vocab * dtype.itemsize + gradient
    sums = (tokens + vocab * trained) * hidden
    chunk = min(chunk_rows(tokens, vocab, sums, dtype), tokens) * round_up_to_tile(vocab) * dtype.itemsize
    return sums * FP32 + max(chunk, gradient)


def width(projection: nn.Module) -> int:
    """Elements of a linear's output, with or without LoRA over it."""
    base = projection.base_layer if isinstance(projection, LoRALinear) else projection
    assert isinstance(base, nn.Linear)
    return base.out_features


def elements(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
