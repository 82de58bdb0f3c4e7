"""The decoder: blocks, the stack of them, and the causal language model with its fused loss.

The residual stream travels as a pair (x, residual) whose sum it is: the addition happens inside the next norm. Must not
know any architecture; each one subclasses `CausalLM` and says in `layer` what its blocks are made of.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from ligermodels.kernels.attention import document_of
from ligermodels.kernels.linear_cross_entropy import linear_cross_entropy
from ligermodels.layers.attention import Attention, Positions
from ligermodels.layers.config import Config as AnyConfig
from ligermodels.layers.kv_cache import KVCache, LayerCache
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.rope import rotary_embedding

IGNORE_INDEX = -100


class CausalLMOutput(NamedTuple):
    loss: Tensor | None  # scalar, fp32
    logits: Tensor | None  # [B, T, V]; None where a loss was computed: logits are never materialised for it


class DecoderLayer(nn.Module):
    """Pre-norm block: x = x + attention(norm(x)); x = x + mlp(norm(x))."""

    def __init__(self, config: AnyConfig, attention: Attention, mlp: GatedMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp
        self.recompute = False

    def recompute_in_backward(self) -> None:
        """Keeps only the block's inputs for backward. The down projection is then better not fused with its activation:
        recomputation stops at the last tensor kept, which a linear of its own keeps before its matrix product."""
        self.recompute = True
        self.mlp.fused = False

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.recompute and torch.is_grad_enabled():
            random = self.self_attn.dropout > 0
            inputs = x, residual, positions, cache
            return checkpoint(self.block, *inputs, use_reentrant=False, preserve_rng_state=random)
        return self.block(x, residual, positions, cache)

    def block(
        self, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.self_attn(self.input_layernorm, x, residual, positions, cache)
        x, residual, _ = self.mlp(self.post_attention_layernorm, x, residual)
        return x, residual


class Decoder(nn.Module):
    """Embedding, blocks, final norm: token ids [B, T] -> hidden states [B, T, H]."""

    def __init__(self, config: AnyConfig, layers: list[DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = rotary_embedding(config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        if position_ids is None:
            position_ids = default_positions(input_ids, cu_seqlens, cache)
        cos, sin = self.rotary_emb(position_ids)
        positions = Positions(position_ids, cos, sin, cu_seqlens, max_seqlen)
        x, residual = self.embed_tokens(input_ids), None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, positions, None if cache is None else cache.layers[index])
        if cache is not None:
            cache.lengths += input_ids.shape[1]
        return self.norm(x, residual)[0]


def default_positions(input_ids: Tensor, cu_seqlens: Tensor | None, cache: KVCache | None) -> Tensor:
    """Counts from 0, from the start of each packed document, or on from what the cache holds: [B or 1, T]."""
    length = input_ids.shape[1]
    if cache is not None:
        return cache.next_positions(length)
    position = torch.arange(length, device=input_ids.device)
    if cu_seqlens is not None:
        position = position - cu_seqlens[document_of(position, cu_seqlens)]
    return position[None]


class CausalLM(nn.Module, ABC):
    """A decoder with a language-model head. Subclasses are the architectures."""

    accepts_loss_kwargs = True  # tells Hugging Face's Trainer to pass num_items_in_batch
    Config: ClassVar[type[AnyConfig]]
    hub_class: ClassVar[str]  # the reference implementation's name, for config.json's `architectures`
    SIZES: ClassVar[dict[str, dict[str, Any]]]  # presets by name, each the content of a config.json

    def __init__(self, config: AnyConfig) -> None:
        super().__init__()
        self.config = config
        self.source: Path | None = None  # the folder the model was loaded from
        self.generation_config: dict[str, Any] = {}  # its generation_config.json
        self.model = Decoder(config, [self.layer(config, index) for index in range(config.num_hidden_layers)])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn, recurse=True):
        """Ties again: to_empty() from the meta device gives every name a parameter of its own."""
        super()._apply(fn, recurse)
        self.tie_weights()
        return self

    @abstractmethod
    def layer(self, config: Any, index: int) -> DecoderLayer:
        """The block at this depth."""

    @abstractmethod
    def weight_rules(self) -> tuple[Any, ...]:
        """How packed parameters are made from the checkpoint's tensors: rules of weights.mapping."""

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: KVCache | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int = 0,
    ) -> CausalLMOutput:
        """input_ids [B, T] -> logits [B, T, V]; with labels [B, T], the loss alone.

        labels: at the positions of input_ids (the shift happens here), -100 where unsupervised. The loss is the mean
        over supervised tokens or, given num_items_in_batch, their sum divided by it: the count over all micro-batches
        and ranks.
        position_ids: [B, T], RoPE's positions; they do not separate documents, cu_seqlens does.
        cu_seqlens: int32 [documents + 1], offsets of documents packed into one row; none sees another, and no
        document's last token is asked to predict the next one's first. max_seqlen: the longest of them, where the
        caller knows it.
        cache: keys and values of earlier tokens; those of input_ids are added.
        logits_to_keep: compute the logits of this many last positions only; 0 for all.
        """
        hidden = self.model(input_ids, position_ids, cu_seqlens, max_seqlen, cache)
        if labels is None:
            return CausalLMOutput(None, self.lm_head(hidden[:, -logits_to_keep:]))
        return CausalLMOutput(self.loss(hidden, next_tokens(labels, cu_seqlens), num_items_in_batch), None)

    def loss(self, hidden: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Cross-entropy of hidden [B, T, H] against targets [B, T], already shifted."""
        if num_items_in_batch is None:
            return linear_cross_entropy(hidden, self.lm_head.weight, targets)
        return linear_cross_entropy(hidden, self.lm_head.weight, targets, reduction="sum") / num_items_in_batch

    def recompute_in_backward(self) -> None:
        """Keeps only each block's inputs for backward, and computes the block again there."""
        for block in self.model.layers:
            cast(DecoderLayer, block).recompute_in_backward()

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Random weights: normal with the config's initializer_range, norms one, biases zero.

        Every rank draws every parameter whole and keeps its shard, so that the weights do not depend on the sharding.
        """
        device = self.model.embed_tokens.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if name.endswith("bias"):
                value.zero_()
            elif parameter.ndim == 1:
                value.fill_(1.0)
            else:
                value.normal_(0.0, self.config.initializer_range, generator=generator)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(value)


def next_tokens(labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Targets [B, T]: each position's label is the next token's; the last position of a row or document has none."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if cu_seqlens is not None:
        targets[:, cu_seqlens[1:].long() - 1] = IGNORE_INDEX
    return targets
