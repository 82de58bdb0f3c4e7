"""The decoder (embedding, blocks, final norm) and the causal language model with its fused loss.

Must not know any architecture: each one subclasses `CausalLM` and builds its blocks in `layer`.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.configs.base import Config as AnyConfig
from ligermodels.configs.features import MoEConfig
from ligermodels.kernels.attention import document_ids
from ligermodels.kernels.linear_cross_entropy import linear_cross_entropy
from ligermodels.layers.attention import Positions
from ligermodels.layers.block import Block
from ligermodels.layers.kv_cache import KVCache
from ligermodels.layers.lora import initialize_lora
from ligermodels.layers.moe import load_balancing_loss
from ligermodels.layers.norm import hidden_norm
from ligermodels.layers.rope import rotary_embedding
from ligermodels.weights.mapping import Rule, is_lora_parameter, packed_projections
from ligermodels.weights.module import HubModule
from ligermodels.weights.sharding import copy_local_shard

IGNORE_INDEX = -100


class CausalLMOutput(NamedTuple):
    loss: Tensor | None  # scalar, fp32
    logits: Tensor | None  # [B, T, V]; None with labels: the loss never materialises all logits


class Decoder(nn.Module):
    """Embedding, blocks, final norm: token ids [B, T] -> hidden states [B, T, H]."""

    def __init__(self, config: AnyConfig, layers: list[Block]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.embedding_scale = config.embedding_scale
        self.layers = nn.ModuleList(layers)
        self.norm = hidden_norm(config)
        self.rotary_emb = nn.ModuleDict(
            {
                name: rotary_embedding(rope, config.head_dim, config.max_position_embeddings)
                for name, rope in config.ropes.items()
            }
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the hidden states [B, T, H] and the logits [B * T, E] of every router."""
        if position_ids is None:
            position_ids = default_positions(input_ids, cu_seqlens, cache)
        angles = {name: rotary(position_ids) for name, rotary in self.rotary_emb.items()}
        positions = Positions(position_ids, angles, cu_seqlens, max_seqlen)
        x, residual, routers = self.embed(input_ids), None, []
        for index, layer in enumerate(self.layers):
            x, residual, router_logits = layer(x, residual, positions, None if cache is None else cache.layers[index])
            if router_logits is not None:
                routers.append(router_logits)
        if cache is not None:
            cache.lengths += input_ids.shape[1]
        return self.norm(x, residual)[0], routers

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings [B, T, H], times the scale, which is rounded to their dtype as in the models' training."""
        x = self.embed_tokens(input_ids)
        return x if self.embedding_scale == 1.0 else x * x.new_full((), self.embedding_scale)


def default_positions(input_ids: Tensor, cu_seqlens: Tensor | None, cache: KVCache | None) -> Tensor:
    """Positions [B or 1, T], counted from 0, from the start of each packed document, or from the end of the cache."""
    length = input_ids.shape[1]
    if cache is not None:
        return cache.next_positions(length)
    position = torch.arange(length, device=input_ids.device)
    if cu_seqlens is not None:
        position = position - cu_seqlens[document_ids(position, cu_seqlens)]
    return position[None]


class LMHead(nn.Linear):
    """The language-model head: hidden states [..., H] -> logits [..., V].

    It computes the fused linear cross-entropy itself, because FSDP gathers a weight only when the module that owns it
    is called.
    """

    def loss(self, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Cross-entropy of hidden [B, T, H] against targets [B, T]; options as in `linear_cross_entropy`."""
        return linear_cross_entropy(hidden, self.weight, targets, **options)


class CausalLM(HubModule, ABC):
    """A decoder with a language-model head. Subclasses are the architectures."""

    accepts_loss_kwargs = True  # Hugging Face's Trainer then passes num_items_in_batch
    Config: ClassVar[type[AnyConfig]] = AnyConfig
    SIZES: ClassVar[dict[str, dict[str, Any]]]  # presets: name -> content of a config.json

    def __init__(self, config: AnyConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config, [self.layer(config, index) for index in range(config.num_hidden_layers)])
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes head and embedding one parameter, if the config ties them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn, recurse=True):
        """Ties the weights again: to_empty() from the meta device creates a separate parameter for each name."""
        super()._apply(fn, recurse)
        self.tie_weights()
        return self

    @abstractmethod
    def layer(self, config: Any, index: int) -> Block:
        """Builds block number `index`."""

    def weight_rules(self) -> tuple[Rule, ...]:
        """How parameters are built from checkpoint tensors; by default q, k, v and gate, up are separate there."""
        return packed_projections(self.config)

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
        """input_ids [B, T] -> logits [B, T, V]; with labels [B, T], the loss only.

        If config.json sets output_router_logits, the loss includes the routers' load-balancing loss.

        labels: aligned with input_ids (shifted inside), -100 where unsupervised. The loss is the mean over supervised
        tokens. With num_items_in_batch it is their sum divided by that number: the count of supervised tokens over all
        micro-batches and ranks.
        position_ids: [B, T], positions for RoPE. They do not separate documents; cu_seqlens does.
        cu_seqlens: int32 [documents + 1], offsets of the documents packed into one row. Documents do not attend to each
        other, and the last token of a document is not supervised. max_seqlen: the longest document's length, if known.
        cache: keys and values of earlier tokens; those of input_ids are added to it.
        logits_to_keep: compute the logits of only this many last positions; 0 for all.
        """
        hidden, routers = self.model(input_ids, position_ids, cu_seqlens, max_seqlen, cache)
        if labels is None:
            return CausalLMOutput(None, self.logits(hidden[:, -logits_to_keep:]))
        targets, config = next_tokens(labels, cu_seqlens), self.config
        loss = self.loss(hidden, targets, num_items_in_batch)
        if isinstance(config, MoEConfig) and config.output_router_logits:
            # Weighted by the micro-batch's share of supervised tokens, so that all micro-batches together count once.
            share = 1.0 if num_items_in_batch is None else (targets != IGNORE_INDEX).sum() / num_items_in_batch
            balance = load_balancing_loss(routers, config.num_experts_per_tok)
            loss = loss + share * config.router_aux_loss_coef * balance
        return CausalLMOutput(loss, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, T, H] -> logits [B, T, V], scaled and softcapped."""
        logits, softcap = self.lm_head(hidden), self.config.logit_softcap
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def loss(self, hidden: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Cross-entropy of hidden [B, T, H] against targets [B, T], already shifted."""
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = self.lm_head.loss(
            hidden, targets, softcap=self.config.logit_softcap, logit_scale=self.config.logit_scale, reduction=reduction
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def checkpoint_activations(self, count: int | None = None) -> None:
        """Enables activation checkpointing in the first `count` blocks; None for all.

        It takes the first blocks because their backward runs last, when the other blocks have freed their activations.
        """
        for block in list(self.model.layers)[:count]:
            cast(Block, block).checkpoint_activations()

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Random weights: normal with the config's initializer_range; norms act as weight 1, biases and LoRA B are 0.

        Every rank draws every whole parameter and keeps its shard, so that the weights do not depend on the sharding.
        The weights of the base do not depend on LoRA either.
        """
        device = self.model.embed_tokens.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if is_lora_parameter(name):
                continue
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if name.endswith("bias"):
                value.zero_()
            elif parameter.ndim == 1:
                value.fill_(1.0 - getattr(self.get_submodule(name.rpartition(".")[0]), "offset", 0.0))
            else:
                value.normal_(0.0, self.config.initializer_range, generator=generator)
            copy_local_shard(parameter, value)
        initialize_lora(self, generator)


def next_tokens(labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Targets [B, T]: the label of the next token; IGNORE_INDEX at the last position of each row and document."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if cu_seqlens is not None:
        targets = targets.index_fill(1, cu_seqlens[1:].long() - 1, IGNORE_INDEX)  # index_put would synchronise the host
    return targets
