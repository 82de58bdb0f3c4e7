"""The decoder (embedding, blocks, final norm) and the causal language model with its fused loss."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from ligermodels.configs.base import Config as AnyConfig
from ligermodels.configs.features import MoEConfig
from ligermodels.generation.cache import Cache, Kept, PerToken
from ligermodels.generation.decoding import generate
from ligermodels.generation.image_features import CrossFeatures, ImageFeatures
from ligermodels.generation.sampling import Sampling
from ligermodels.generation.texts import TextTokenizer
from ligermodels.kernels.attention.shared_keys import SharedKeys
from ligermodels.kernels.losses.linear_divergence import DivergenceOutput
from ligermodels.kernels.losses.linear_logprobs import LogProbs
from ligermodels.layers.block import Block
from ligermodels.layers.checkpointing.kept_tensors import choose_kept
from ligermodels.layers.checkpointing.offloaded_inputs import OffloadedInputs
from ligermodels.layers.checkpointing.offloaded_weights import OffloadedWeights
from ligermodels.layers.context_parallel import ContextGroup
from ligermodels.layers.fused import add_then_norm
from ligermodels.layers.hub_interface import AdaptableModule, HubInterface, take_documents
from ligermodels.layers.initialization import initialize
from ligermodels.layers.inputs import Inputs, KeysReadLater, Positions, Sequences
from ligermodels.layers.lm_head import LMHead, divergence_from, logprobs_from, logprobs_loss_from, loss_of, select_rows
from ligermodels.layers.moe import load_balancing_loss
from ligermodels.layers.norm import hidden_norm
from ligermodels.layers.packed import name_parts
from ligermodels.layers.rope import query_scale, rotary_embedding
from ligermodels.layers.row_layout import AlignedRows, PackedRows
from ligermodels.weights.mapping import Rule, packed_projections
from ligermodels.weights.module import HubModule, quantised_bytes

IGNORE_INDEX = -100


class CausalLMOutput(NamedTuple):
    """What a causal language model returns.

    Fields are read by name, `out.loss` or `out["loss"]`, or by index among those that are not None.
    """

    loss: Tensor | None  # scalar, fp32
    logits: Tensor | None  # [B, T, V]
    hidden_states: tuple[Tensor, ...] | None = None  # num_hidden_layers + 1 of [B, T, H]
    aux_loss: Tensor | None = None  # scalar, fp32: the routers' load-balancing loss, before its coefficient
    logprobs: LogProbs | None = None  # each field [B, T], or [N] of N rows
    divergence: DivergenceOutput | None = None  # from a teacher; its fields but the loss [B, T], or [N] of N rows

    def __getitem__(self, key):
        if isinstance(key, str):
            return self._asdict()[key]
        return tuple(value for value in self if value is not None)[key]


# Under this name torch.export.save writes the type of a program's output.
_register_namedtuple(CausalLMOutput, serialized_type_name="ligermodels.CausalLMOutput")


class DecoderOutput(NamedTuple):
    hidden: Tensor  # [B, T, H], after the final norm
    router_logits: list[Tensor]  # [B * T, E] of every router
    hidden_states: list[Tensor]  # if requested: the input of every block, then `hidden`


class Decoded(NamedTuple):
    """A batch behind the decoder, as the decoder has seen it: with a layout, tokens are where that has put them."""

    output: DecoderOutput
    labels: Tensor | None
    cu_seqlens: Tensor | None
    layout: PackedRows | AlignedRows | None

    def unpack(self, tokens: Tensor) -> Tensor:
        """What the decoder returned for tokens -> [B, T, ...], at their places in the batch."""
        return tokens if self.layout is None else self.layout.unpack(tokens)

    def router_logits(self) -> tuple[Tensor, ...]:
        """[B * T, E] of every router, at the tokens' places in the batch."""
        rows = self.output.hidden.shape[:2]
        return tuple(self.unpack(x.unflatten(0, rows)).flatten(0, 1) for x in self.output.router_logits)


class Decoder(nn.Module):
    """Embedding, blocks, final norm: token ids [B, T] -> hidden states [B, T, H]."""

    def __init__(self, config: AnyConfig, layers: list[Block]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.embedded_tokens, config.hidden_size, padding_idx=config.pad_token_id)
        self.embedding_scale = config.embedding_scale
        self.layers = nn.ModuleList(layers)
        self.norm = hidden_norm(config)
        self.query_scale = config.query_scale
        self.keys_are_shared = any(layer.mixer.source is not None for layer in layers)
        self.rotary_emb = nn.ModuleDict(
            {
                name: rotary_embedding(rope, config.rope_head_dim(name), config.max_position_embeddings)
                for name, rope in config.ropes.items()
            }
        )

    def forward(self, inputs: Inputs, output_hidden_states: bool = False) -> DecoderOutput:
        """inputs: without a mask: see `Inputs.rearranged`. Other arguments as those of `CausalLM.forward`."""
        input_ids, cache, features = inputs.input_ids, inputs.cache, inputs.features
        position_ids = inputs.positions()
        lengths = None if cache is None else cache.sequence_lengths
        context = inputs.context
        if context is not None and input_ids is not None:
            lengths = position_ids.amax(-1, keepdim=True) + 1
            input_ids, position_ids = context.part(input_ids), context.part(position_ids)
            if isinstance(features, ImageFeatures):
                features = features.part(context.rank * input_ids.shape[1], input_ids.shape[1])
        x = self.scale(self.embed_tokens(input_ids) if inputs.inputs_embeds is None else inputs.inputs_embeds)
        if features is not None:
            x = features.insert(x)
        positions = self.positions(inputs, position_ids, lengths, x)
        layer_inputs = self.layer_inputs(input_ids, x)
        residual, routers, states = None, [], []
        for index, layer in enumerate(self.layers):
            if output_hidden_states:
                states.append(x if residual is None else x + residual)
            source = cast(Block, layer).mixer.source
            layer_cache = None if cache is None else cache.layers[index if source is None else source]
            if layer_inputs:
                positions = replace(positions, layer_input=layer_inputs[index])
            x, residual, router_logits = layer(x, residual, positions, layer_cache)
            if router_logits is not None:
                routers.append(router_logits)
            if isinstance(features, ImageFeatures) and index < len(features.deepstack):
                x, residual = features.add(index, x + residual), None
        if cache is not None:
            cache.advance(x.shape[1] if inputs.padding is None else x.shape[1] - inputs.padding)
        hidden, _ = add_then_norm(self.norm, x, residual)
        return DecoderOutput(hidden, routers, [*states, hidden] if output_hidden_states else states)

    def positions(self, inputs: Inputs, position_ids: Tensor, lengths: Tensor | None, x: Tensor) -> Positions:
        """What all blocks read of the positions of x [B, T, H].

        lengths: of each token's sequence, [B or 1, T or 1]; None for what the positions say.
        """
        cache, features, rope_ids = inputs.cache, inputs.features, inputs.rope_ids
        if rope_ids is None:
            rope_ids = position_ids
            if cache is not None and cache.rope_offsets is not None:
                rope_ids = position_ids + cache.rope_offsets
        elif inputs.context is not None:
            rope_ids = inputs.context.part(rope_ids, -1)
        return Positions(
            position_ids,
            {name: rotary(rope_ids, lengths) for name, rotary in self.rotary_emb.items()},
            Sequences(
                inputs.cu_seqlens, inputs.max_seqlen, inputs.shared_keys, padding=inputs.padding, context=inputs.context
            ),
            None if self.query_scale is None else query_scale(self.query_scale, position_ids).to(x.dtype),
            ahead=features.seen_ahead(inputs.tokens.shape[:2]) if isinstance(features, ImageFeatures) else None,
            cross=features if isinstance(features, CrossFeatures) else None,
            read_later=KeysReadLater() if self.keys_are_shared else None,
        )

    def layer_inputs(self, input_ids: Tensor | None, embeddings: Tensor) -> tuple[Tensor, ...]:
        """What each layer reads beside the residual stream, [B, T, size]; empty for nothing.

        embeddings: [B, T, H], scaled.
        """
        return ()

    def scale(self, embeddings: Tensor) -> Tensor:
        """Embeddings [B, T, H] times the family's scale, which is rounded to their dtype as in the models' training."""
        if self.embedding_scale == 1.0:
            return embeddings
        return embeddings * embeddings.new_full((), self.embedding_scale)


class CausalLM(HubInterface, AdaptableModule, HubModule, ABC):
    """A decoder with a language-model head. Subclasses are the architectures."""

    Config: ClassVar[type[AnyConfig]] = AnyConfig
    SIZES: ClassVar[dict[str, dict[str, Any]]]  # presets: name -> content of a config.json
    takes_images: ClassVar[bool] = False
    pixel_inputs: ClassVar[tuple[str, ...]] = ()  # arguments of `forward` that a processor makes of images

    def __init__(self, config: AnyConfig) -> None:
        super().__init__(config)
        self.model = self.decoder(config, [self.layer(config, index) for index in range(config.num_hidden_layers)])
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        name_parts(self, self.weight_rules())

    @classmethod
    def of_config(cls, raw: Mapping[str, Any]) -> "type[CausalLM]":
        """The architecture of this config.json, whose model_type is that of this class."""
        return cls

    def tie_weights(self) -> None:
        """Makes head and embedding one parameter, if the config ties them and neither was wrapped or replaced."""
        embedding, head = self.model.embed_tokens, self.lm_head
        if self.config.tie_word_embeddings and isinstance(embedding, nn.Embedding) and isinstance(head, LMHead):
            head.weight = embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, embeddings: nn.Embedding) -> None:
        self.model.embed_tokens = embeddings
        self.tie_weights()

    @property
    def blocks(self) -> list[Block]:
        """All blocks through which gradients flow, in the order of the forward pass."""
        return [cast(Block, block) for block in self.model.layers]

    def checkpoint_activations(
        self, count: int | None = None, kept_tensors: int | None = 0, sequence_length: int = 1
    ) -> None:
        """Enables activation checkpointing in the first `count` blocks; None for all.

        It takes the first blocks because their backward runs last, when the other blocks have freed their activations.
        kept_tensors: how many results these blocks keep; None for all that `choose_kept` finds, with sequences of
        sequence_length tokens.
        """
        blocks = self.blocks[:count]
        for block, kept in zip(blocks, choose_kept(blocks, kept_tensors, sequence_length), strict=True):
            block.checkpoint_activations({tensor.size for tensor in kept})

    def offload_inputs(self, count: int | None = None, every: int = 1) -> None:
        """Keeps the inputs of every k-th of the first `count` blocks, which are checkpointed, in pinned host memory.

        count: None for all blocks. every: k.
        """
        offloaded = OffloadedInputs()
        for block in self.blocks[:count][::every]:
            block.offloaded_inputs = offloaded

    def offload_weights(self, device: int | str | torch.device) -> None:
        """Gives the quantised weights of the blocks pinned host memory, which is not set, and buffers on the device.

        All blocks are checkpointed, or the model only generates. `to_empty` then leaves these weights where they are.
        """
        blocks = self.blocks
        weights = OffloadedWeights(blocks, torch.device(device))
        for index, block in enumerate(blocks):
            block.offloaded_weights = weights, index

    def replicated_parameters(self, quantised: bool = False) -> list[nn.Parameter]:
        """Parameters that every rank keeps whole where the others are sharded. Those in fp32: FSDP2 shards and gathers
        parameters of one dtype together.

        quantised: whether the bytes of quantised weights are among them.
        """
        return [*self.fp32_parameters(), *(quantised_bytes(self) if quantised else ())]

    @property
    def head(self) -> nn.Linear:
        """What reads the decoder's output: the language-model head, of a reward model its score head."""
        return self.lm_head

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.lm_head = cast(LMHead, head)

    def kept_by_layers(self) -> list[Kept]:
        """What a cache keeps for each layer."""
        return [cast(Block, block).mixer.kept() for block in self.model.layers]

    @property
    def shares_keys(self) -> bool:
        """Whether documents can share the keys of a prefix; of states each document would need its own copy."""
        return all(isinstance(kept, PerToken) for kept in self.kept_by_layers())

    def attention_implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        """What computes attention and what stands for it there, for reports."""
        blocks = (cast(Block, block) for block in self.model.layers)
        return ", ".join(dict.fromkeys(block.mixer.implementation(device, dtype) for block in blocks))

    @abstractmethod
    def layer(self, config: Any, index: int) -> Block:
        """Builds block number `index`."""

    def decoder(self, config: Any, layers: list[Block]) -> Decoder:
        """Embeddings and the final norm around the blocks."""
        return Decoder(config, layers)

    def weight_rules(self) -> tuple[Rule, ...]:
        """How parameters are built from checkpoint tensors; by default q, k, v and gate, up are separate there."""
        return packed_projections(self.config)

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, *, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
        shared_keys: SharedKeys | None = None, cache: Cache | None = None, inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None, logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None, output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None, rows: Tensor | None = None, logprobs: Mapping[str, Any] | None = None,
        divergence: Mapping[str, Any] | None = None, features: ImageFeatures | CrossFeatures | None = None,
        rope_ids: Tensor | None = None, context: ContextGroup | None = None, row_lengths: Tensor | None = None,
        balance_share: Tensor | float | None = None, **options: Any,
    ) -> CausalLMOutput:  # fmt: skip
        """input_ids [B, T] -> loss and logits [B, T, V].

        labels: [B, T], aligned with input_ids (shifted inside), -100 where unsupervised. The loss is the mean over
        supervised tokens. With num_items_in_batch it is their sum divided by that number: the count of supervised
        tokens over all micro-batches and ranks.
        attention_mask: [B, T], 0 for padding on either side of a row, 1 for tokens. Padding is removed before the first
        layer and its labels are ignored; its logits and hidden states are 0. With a cache the mask may be that of all
        tokens so far, and the outputs at padding mean nothing.
        position_ids: [B or 1, T], positions for RoPE. Without a mask and a cache, a document begins wherever they do
        not continue, as padding-free collators mean it.
        cu_seqlens: int32 [documents + 1], offsets of the documents packed into one row. Documents do not attend to each
        other, and the last token of a document is not supervised. max_seqlen: the longest document's length, if known.
        shared_keys: with cu_seqlens and position_ids, the keys of documents that share a prefix; the positions of a
        document then begin where those of its prefix end.
        cache: keys and values of earlier tokens; those of input_ids are added to it.
        inputs_embeds: [B, T, H], in place of input_ids: what `get_input_embeddings()` returns, before the family's
        embedding scale.
        logits_to_keep: compute the logits of only this many last positions, 0 for all; or of these positions, int64.
        skip_logits: do not compute logits; None skips them in training mode with labels, where the fused loss never
        holds those of many tokens.
        output_hidden_states: also return the embeddings, the output of every block but the last, and the normed output
        of the last.
        output_router_logits: compute the routers' load-balancing loss, which the loss then includes; None for what
        config.json says. No effect without routers.
        rows: int64 [N], places in the flattened batch: the only tokens of which the head computes the loss or the
        log-probabilities. All places whose next token is supervised, each once; others add nothing.
        logprobs: options of `ops.linear_logprobs`. The log-probabilities of the labels are then computed in place of
        the loss and the logits: see `CausalLM.logprobs`. With `row_loss`, options of `ops.linear_logprobs_loss`: the
        loss too, its gradients formed in the forward. It needs rows [N]; row_loss gets some of them at a time, or all.
        divergence: options of `ops.linear_divergence`, with `teacher`. The loss is then the divergence from the teacher
        over the tokens whose labels are supervised, divided as the loss without it.
        features: of images, in place of the embeddings at their places in the batch, which are not scaled.
        rope_ids: [B or 1, T] or [axes, B or 1, T], the positions for RoPE where they are not those of the tokens.
        context: the ranks that share this row, which all of them pass whole, as input_ids [1, T], with the labels and
        the offsets of its documents. Each computes its part of the tokens: the outputs are those of its part, `rows`
        are places in it, and the loss is its share of a sum, which num_items_in_batch divides.
        row_lengths: int64 [R], the tokens that the load-balancing loss counts: so many at the beginning of each of R
        equal parts of the flattened batch, where the others are padding without an attention mask; None for all.
        balance_share: what the load-balancing loss is multiplied by in the loss, besides its coefficient: the part of
        this micro-batch in the tokens of its step. None for that in the supervised tokens, by num_items_in_batch.
        Micro-batches with shares in proportion to the tokens that routers see have the loss and the gradients of one
        batch of them all wherever they choose experts equally often; else the sum of the micro-batches' products of
        fraction and probability differs from the product of the sums.
        options: cu_seqlens and max_seqlen under the names of the Hub's collators, see `take_documents`; return_dict,
        output_attentions and use_cache, as long as they ask for nothing else than what is done.

        An attention mask, or position_ids without cu_seqlens, is read on the host.
        Raises ValueError for arguments that contradict each other; TypeError for options that have no effect here.
        """
        cu_seqlens, max_seqlen = take_documents(options, cu_seqlens, max_seqlen)
        if labels is None and not (rows is logprobs is divergence is None):
            raise ValueError("forward: rows, logprobs and divergence need labels")
        inputs = Inputs(
            input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids,
            rope_ids=rope_ids, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, shared_keys=shared_keys, features=features,
            cache=cache, context=context,
        )  # fmt: skip
        decoded = self.decode(inputs, labels, bool(output_hidden_states))
        output, labels = decoded.output, decoded.labels
        if decoded.layout is not None and not (rows is divergence is None):
            raise ValueError(
                "forward: rows and a teacher's states are places in the batch as it is given, but its padding or "
                "position_ids rearrange it: leave them out, or pass cu_seqlens"
            )
        balance = self.balance(decoded, output_router_logits, context, inputs.tokens.shape[:2], row_lengths)
        loss, token_logprobs, from_teacher = None, None, None
        if labels is not None:
            hidden, targets = output.hidden, next_tokens(labels, decoded.cu_seqlens)
            if context is not None:  # behind the shift, which brings the label of a part's last token from the next
                targets = context.part(targets)
            if rows is not None:
                hidden, targets = select_rows(hidden, targets, rows)
            if divergence is not None:
                from_teacher = divergence_from(self.lm_head, hidden, targets, **self.logit_options, **divergence)
                items = (targets != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
                loss = from_teacher.loss / items
            elif logprobs is None:
                loss = self.loss(hidden, targets, num_items_in_batch)
            elif "row_loss" in logprobs:
                if rows is None:
                    raise ValueError("forward: row_loss needs rows, the places of the tokens that it reads")
                loss, token_logprobs = logprobs_loss_from(
                    self.lm_head, hidden, targets, **self.logit_options, **logprobs
                )
            else:
                token_logprobs = logprobs_from(self.lm_head, hidden, targets, **self.logit_options, **logprobs)
                if rows is None:  # copied, because FSDP2 warns of outputs that are views
                    token_logprobs = token_logprobs.map(lambda x: decoded.unpack(x).clone())
            if loss is not None and balance is not None and logprobs is None:
                loss = self.with_balance(loss, targets, num_items_in_batch, balance, balance_share)
        if skip_logits is None:
            skip_logits = labels is not None and (self.training or not (logprobs is divergence is None))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = None if skip_logits else self.logits(decoded.unpack(output.hidden)[:, kept])
        states = tuple(decoded.unpack(state) for state in output.hidden_states)
        return CausalLMOutput(loss, logits, states or None, balance, token_logprobs, from_teacher)

    def logprobs(
        self, input_ids: Tensor | None, labels: Tensor, *, temperature: float = 1.0, entropy: bool = False,
        extras: Sequence[str] = (), low_memory: bool = False, **inputs: Any,
    ) -> LogProbs:  # fmt: skip
        """Log-probabilities of the labels: what the losses in `ligermodels.losses` read.

        labels: [B, T] as those of `forward` -> `LogProbs` with fields [B, T], fp32. At position t is the
        log-probability of the label at t + 1; 0 where that is not supervised.
        temperature, entropy, extras, low_memory: as those of `ops.linear_logprobs`.
        inputs: other arguments of `forward`. With rows [N], of the supervised positions, the fields are [N], and no
        other token meets the head. Under a wrapper of the model, as DDP, call `forward` with `logprobs={…}`.
        """
        options = {"temperature": temperature, "entropy": entropy, "extras": extras, "low_memory": low_memory}
        return self(input_ids, labels, logprobs=options, **inputs).logprobs

    def final_hidden(self, input_ids: Tensor, *, rows: Tensor | None = None, **inputs: Any) -> Tensor:
        """What the head reads, as a teacher's states: [B, T, H], or [N, H] of the places `rows` [N].

        inputs: cu_seqlens, max_seqlen, position_ids and shared_keys, as those of `forward`.
        """
        hidden = self.decode(Inputs(input_ids, **inputs)).output.hidden
        return hidden if rows is None else hidden.flatten(0, 1).index_select(0, rows)

    def decode(self, inputs: Inputs, labels: Tensor | None = None, output_hidden_states: bool = False) -> Decoded:
        """Runs the decoder on a batch. labels, output_hidden_states: as those of `forward`."""
        layout = inputs.layout()
        if layout is not None:
            inputs, labels = inputs.rearranged(layout), None if labels is None else layout.pack(labels)
        return Decoded(self.model(inputs, output_hidden_states), labels, inputs.cu_seqlens, layout)

    def balance(
        self, decoded: Decoded, requested: bool | None, context: ContextGroup | None, shape: torch.Size,
        row_lengths: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """The routers' load-balancing loss if it is requested; requested: None for what config.json says.

        context: the ranks whose tokens count together, None for this one. shape: that of the batch, [B, T].
        row_lengths: as that of `forward`.
        """
        config, router_logits, mask = self.config, decoded.output.router_logits, None
        if requested is None:
            requested = isinstance(config, MoEConfig) and config.output_router_logits
        if not requested or not router_logits or not isinstance(config, MoEConfig):
            return None
        mean = context.mean if context is not None else lambda share: share
        if row_lengths is not None:
            places = torch.arange(shape.numel() // len(row_lengths), device=row_lengths.device)
            mask = (places < row_lengths[:, None]).view(shape)
            mask = mask if decoded.layout is None else decoded.layout.pack(mask)
            mask = (mask if context is None else context.part(mask)).flatten()
        return load_balancing_loss(router_logits, config.num_experts_per_tok, mean, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, T, H] -> logits [B, T, V], scaled and softcapped."""
        logits, softcap = self.lm_head(hidden), self.config.logit_softcap
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def loss(self, hidden: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """The loss of hidden [..., H] against shifted targets [...]."""
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = loss_of(self.lm_head, hidden, targets, reduction=reduction, **self.logit_options)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def with_balance(
        self, loss: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None, balance: Tensor,
        share: Tensor | float | None,
    ) -> Tensor:  # fmt: skip
        """A loss of targets [...] plus that of the routers; share: `balance_share` of `forward`."""
        config = self.config
        assert isinstance(config, MoEConfig)
        if share is None:  # all micro-batches together count once
            share = 1.0 if num_items_in_batch is None else (targets != IGNORE_INDEX).sum() / num_items_in_batch
        return loss + share * config.router_aux_loss_coef * balance

    @property
    def logit_options(self) -> dict[str, Any]:
        return {"softcap": self.config.logit_softcap, "logit_scale": self.config.logit_scale}

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, max_new_tokens: int,
        tokenizer: TextTokenizer | None = None, stop_tokens: Collection[int] | None = None,
        images: Sequence[Mapping[str, Any] | None] | None = None, **sampling: Unpack[Sampling],
    ) -> Tensor:  # fmt: skip
        """input_ids [B, T] with padding as attention_mask says -> [B n, T + new tokens], padded behind a stop token.

        The convention of the Hub's `generate`; the n samples of a prompt are consecutive rows. Options and errors are
        those of `ligermodels.generate`, which returns the new tokens alone.
        """
        tokens = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, tokens, strict=True)]
        rows = generate(
            self, prompts, max_new_tokens=max_new_tokens, tokenizer=tokenizer, stop_tokens=stop_tokens, images=images,
            **sampling,
        )  # fmt: skip
        padding = self.config.pad_token_id if self.config.pad_token_id is not None else 0
        new = input_ids.new_full((len(rows), max(map(len, rows), default=0)), padding)
        for row, generated in enumerate(rows):
            new[row, : len(generated)] = input_ids.new_tensor(generated)
        return torch.cat([input_ids.repeat_interleave(sampling.get("n", 1), 0), new], 1)

    def initialize(self, seed: int) -> None:
        """Random weights, on all ranks the same: see layers/initialization.py."""
        initialize(self, self.config.initializer_range, self.model.embed_tokens.weight.device, seed)


def next_tokens(labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Targets [B, T]: the label of the next token; IGNORE_INDEX at the last position of each row and document."""
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if cu_seqlens is not None:
        targets = targets.index_fill(1, cu_seqlens[1:].long() - 1, IGNORE_INDEX)  # index_put would synchronise the host
    return targets
