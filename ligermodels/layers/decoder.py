"""The decoder: the stack of blocks, and the causal language model with its fused loss.

Must not know any architecture; each one subclasses `CausalLM` and says in `layer` what its blocks are made of.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.configs.base import Config as AnyConfig
from ligermodels.configs.shared import MoEConfig
from ligermodels.kernels.attention import document_ids
from ligermodels.kernels.linear_cross_entropy import linear_cross_entropy
from ligermodels.layers.attention import Positions
from ligermodels.layers.block import Block
from ligermodels.layers.kv_cache import KVCache
from ligermodels.layers.lora import initialize_lora
from ligermodels.layers.moe import load_balancing_loss
from ligermodels.layers.norm import hidden_norm
from ligermodels.layers.rope import rotary_embedding
from ligermodels.weights.mapping import Rule, is_update, packed_projections
from ligermodels.weights.sharding import keep_part

IGNORE_INDEX = -100


class CausalLMOutput(NamedTuple):
    loss: Tensor | None  # scalar, fp32
    logits: Tensor | None  # [B, T, V]; None where a loss was computed: logits are never materialised for it


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
        """The hidden states, and the logits [B * T, E] of every router."""
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
        """The scale is rounded to the embedding's dtype: so the models that have one were trained."""
        x = self.embed_tokens(input_ids)
        return x if self.embedding_scale == 1.0 else x * x.new_full((), self.embedding_scale)


def default_positions(input_ids: Tensor, cu_seqlens: Tensor | None, cache: KVCache | None) -> Tensor:
    """Counts from 0, from the start of each packed document, or on from what the cache holds: [B or 1, T]."""
    length = input_ids.shape[1]
    if cache is not None:
        return cache.next_positions(length)
    position = torch.arange(length, device=input_ids.device)
    if cu_seqlens is not None:
        position = position - cu_seqlens[document_ids(position, cu_seqlens)]
    return position[None]


class Head(nn.Linear):
    """The language-model head: hidden states [..., H] -> logits [..., V].

    It takes the loss of its own logits, which are not all made where they are many, so that what wraps modules (FSDP)
    sees its weight read.
    """

    def loss(self, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Cross-entropy of hidden [B, T, H] against targets [B, T]; options as in `linear_cross_entropy`."""
        return linear_cross_entropy(hidden, self.weight, targets, **options)


class CausalLM(nn.Module, ABC):
    """A decoder with a language-model head. Subclasses are the architectures."""

    accepts_loss_kwargs = True  # tells Hugging Face's Trainer to pass num_items_in_batch
    Config: ClassVar[type[AnyConfig]] = AnyConfig
    hub_class: ClassVar[str]  # the reference implementation's name, for config.json's `architectures`
    SIZES: ClassVar[dict[str, dict[str, Any]]]  # presets by name, each the content of a config.json

    def __init__(self, config: AnyConfig) -> None:
        super().__init__()
        self.config = config
        self.source: Path | None = None  # the folder the model was loaded from
        self.generation_config: dict[str, Any] = {}  # its generation_config.json
        self.model = Decoder(config, [self.layer(config, index) for index in range(config.num_hidden_layers)])
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
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
    def layer(self, config: Any, index: int) -> Block:
        """The block at this depth."""

    def weight_rules(self) -> tuple[Rule, ...]:
        """How parameters are made from the checkpoint's tensors: those of all layers packed, which most store apart."""
        return packed_projections(self.config)

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """Further layouts of the checkpoint that loading accepts; an export writes that of `weight_rules`."""
        return ()

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
        """input_ids [B, T] -> logits [B, T, V]; with labels [B, T], the loss alone. The routers' load-balancing loss is
        part of it where config.json asks for that by output_router_logits.

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
        hidden, routers = self.model(input_ids, position_ids, cu_seqlens, max_seqlen, cache)
        if labels is None:
            return CausalLMOutput(None, self.logits(hidden[:, -logits_to_keep:]))
        targets, config = next_tokens(labels, cu_seqlens), self.config
        loss = self.loss(hidden, targets, num_items_in_batch)
        if isinstance(config, MoEConfig) and config.output_router_logits:
            # Of several micro-batches each adds its part: all of them together weigh what one batch would.
            part = 1.0 if num_items_in_batch is None else (targets != IGNORE_INDEX).sum() / num_items_in_batch
            balance = load_balancing_loss(routers, config.num_experts_per_tok)
            loss = loss + part * config.router_aux_loss_coef * balance
        return CausalLMOutput(loss, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, V]."""
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

    def recompute_in_backward(self, count: int | None = None) -> None:
        """Keeps only the inputs of the first `count` blocks for backward, and computes these again there; None: of all.

        The first ones, because they go backward last, when the others have freed what they kept.
        """
        for block in list(self.model.layers)[:count]:
            cast(Block, block).recompute_in_backward()

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Random weights: normal with the config's initializer_range, norms such that they only norm, biases zero; LoRA
        such that it adds nothing yet.

        Every rank draws every parameter whole and keeps its shard, so that the weights do not depend on the sharding;
        nor do those of the base on LoRA.
        """
        device = self.model.embed_tokens.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if is_update(name):
                continue
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if name.endswith("bias"):
                value.zero_()
            elif parameter.ndim == 1:
                value.fill_(1.0 - getattr(self.get_submodule(name.rpartition(".")[0]), "offset", 0.0))
            else:
                value.normal_(0.0, self.config.initializer_range, generator=generator)
            keep_part(parameter, value)
        initialize_lora(self, generator)


def next_tokens(labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Targets [B, T]: each position's label is the next token's; the last position of a row or document has none."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if cu_seqlens is not None:
        targets = targets.index_fill(1, cu_seqlens[1:].long() - 1, IGNORE_INDEX)  # by index_put the host would wait
    return targets
