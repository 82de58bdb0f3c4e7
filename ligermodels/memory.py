"""What a model needs: parameters, and bytes to train it and to generate with it, counted from its modules alone.

Weights, gradients, optimizer states and the cache are exact. Activations are what the blocks keep for backward on a GPU
(ARCHITECTURE.md, "The life of a token"). What the libraries take for themselves, a CUDA context of about half a GiB
among it, comes on top, and so does what the allocator cannot fill. The model may be on the meta device. Knows layers;
no family and no file.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ligermodels.kernels.linear_cross_entropy import chunk_rows, round_up
from ligermodels.layers.attention import Attention, NormedAttention
from ligermodels.layers.block import Block, PostNormLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import LoRALinear, updates
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
    """Bytes of a training step on one device, AdamW's states in the parameters' dtype.

    activations: kept by all blocks for backward. block: those of the largest block, while it is recomputed or goes
    backward. loss: both gradients of the head in fp32 and a chunk of logits.
    """

    weights: int
    gradients: int
    states: int
    activations: int
    block: int
    loss: int

    @property
    def peak(self) -> int:
        """At the loss all activations are there and no gradient of a block yet; at the end it is the other way."""
        return self.weights + self.states + max(self.activations + self.loss, self.gradients + self.block)


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
    model: CausalLM, batch_size: int, sequence_length: int, dtype: torch.dtype, *, recompute: bool = False
) -> TrainingMemory:
    """Of a step on [batch_size, sequence_length] tokens of a model in `dtype`, whose frozen parameters stay so.

    recompute: whether only each block's inputs are kept.
    """
    tokens, size = batch_size * sequence_length, dtype.itemsize
    blocks = [tokens * kept_by_block(block, size) for block in blocks_of(model)]
    trained = trained_parameters(model)
    hidden = tokens * model.config.hidden_size
    inputs = (2 * len(blocks) - 1) * hidden * size  # the pair (x, residual), of which the first block has but x
    return TrainingMemory(
        weights=elements(model.parameters()) * size,
        gradients=elements(trained) * size,
        states=2 * elements(trained) * size + len(trained) * FP32,  # a number of steps for each
        activations=(inputs if recompute else sum(blocks)) + hidden * size + tokens * FP32,  # and the final norm's
        block=max(blocks),
        loss=loss_bytes(model, tokens, dtype),
    )


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
    low_rank = sum(update.lora_A.shape[0] for update in updates(block))
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
    slots, (num_experts, gate_up, _) = mlp.experts_per_token, mlp.experts.gate_up_proj.shape
    # Probabilities and the sum of the chosen; of each slot three indices and its weight, as routed and as sorted.
    routing = (num_experts + 1) * FP32 + slots * (3 * INT64 + 2 * FP32)
    kept = (hidden + slots * gate_up) * size + routing
    if mlp.shared_expert is not None:
        kept += (width(mlp.shared_expert.gate_up_proj) + hidden + 1) * size  # its output and gate are multiplied
    return kept


def loss_bytes(model: CausalLM, tokens: int, dtype: torch.dtype) -> int:
    """The gradients in fp32, and with them a chunk of logits or, later, the weight's gradient in `dtype`."""
    vocab, hidden = model.lm_head.weight.shape
    chunk = min(chunk_rows(tokens, vocab, dtype), tokens) * round_up(vocab) * dtype.itemsize
    if not model.lm_head.weight.requires_grad:
        return tokens * hidden * FP32 + chunk
    return (tokens + vocab) * hidden * FP32 + max(chunk, vocab * hidden * dtype.itemsize)


def width(projection: nn.Module) -> int:
    """Elements of a linear's output, with or without LoRA over it."""
    base = projection.base_layer if isinstance(projection, LoRALinear) else projection
    assert isinstance(base, nn.Linear)
    return base.out_features


def elements(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
