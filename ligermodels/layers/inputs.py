"""What a decoder reads: a batch as a call of the model gives it, and what all blocks read of it, computed once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ligermodels.generation.cache import Cache
from ligermodels.generation.image_features import CrossFeatures, ImageFeatures
from ligermodels.kernels.attention.attention import DocumentRun, attention, attention_by_run
from ligermodels.kernels.attention.attention_mask import document_ids
from ligermodels.kernels.attention.shared_keys import SharedKeys, gather_keys
from ligermodels.layers.context_parallel import ContextGroup
from ligermodels.layers.row_layout import AlignedRows, PackedRows, row_layout

KeysAndValues = tuple[Tensor, Tensor]  # each [B, T, Hkv, D]


@dataclass(frozen=True)
class Inputs:
    """A batch, with the arguments of `CausalLM.forward` that the decoder reads; their names and meanings are the same.

    padding: int64 [B], with a cache: how many places at the end of each row are no tokens; None for none.
    """

    input_ids: Tensor | None = None  # [B, T]
    inputs_embeds: Tensor | None = None  # [B, T, H]
    attention_mask: Tensor | None = None  # [B, T]
    position_ids: Tensor | None = None  # [B or 1, T]
    rope_ids: Tensor | None = None  # [B or 1, T] or [axes, B or 1, T]
    cu_seqlens: Tensor | None = None  # int32 [documents + 1]
    max_seqlen: int | None = None
    shared_keys: SharedKeys | None = None
    features: ImageFeatures | CrossFeatures | None = None
    cache: Cache | None = None
    context: ContextGroup | None = None
    padding: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """The ids [B, T] or the embeddings [B, T, H]. Raises ValueError unless one of the two is given."""
        given = [x for x in (self.input_ids, self.inputs_embeds) if x is not None]
        if len(given) != 1:
            raise ValueError("forward: pass either input_ids or inputs_embeds")
        return given[0]

    def layout(self) -> PackedRows | AlignedRows | None:
        """How the rows must be rearranged for the decoder; None if they can stay.

        Raises ValueError for fields that contradict each other.
        """
        batch, length = self.tokens.shape[:2]
        if self.context is not None:
            self.context.check(self.input_ids)
            others = self.attention_mask, self.cache, self.inputs_embeds
            if any(other is not None for other in others) or isinstance(self.features, CrossFeatures):
                raise ValueError(
                    "forward: context goes with packed input_ids, without attention_mask, cache, inputs_embeds and "
                    "images that cross-attention reads"
                )
        if self.shared_keys is not None and (self.cu_seqlens is None or self.position_ids is None):
            raise ValueError("forward: shared_keys need cu_seqlens and position_ids")
        cached = self.cache is not None
        return row_layout((batch, length), self.attention_mask, self.position_ids, self.cu_seqlens, cached=cached)

    def rearranged(self, layout: PackedRows | AlignedRows) -> "Inputs":
        """The batch with its tokens where the layout puts them; it needs no mask."""
        rows = self.input_ids, self.inputs_embeds, self.position_ids
        input_ids, inputs_embeds, position_ids = (None if x is None else layout.pack(x) for x in rows)
        rope_ids = self.rope_ids
        if rope_ids is not None:  # the axes are last while the tokens move
            rope_ids = layout.pack(rope_ids.movedim((-2, -1), (0, 1))).movedim((0, 1), (-2, -1))
        return replace(
            self, input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=None, position_ids=position_ids,
            rope_ids=rope_ids, cu_seqlens=layout.cu_seqlens, max_seqlen=layout.max_seqlen,
            features=None if self.features is None else self.features.moved(layout.new_places),
            padding=layout.padding if isinstance(layout, AlignedRows) else None,
        )  # fmt: skip

    def positions(self) -> Tensor:
        """`position_ids` [B or 1, T]; by default they begin at 0 in each row and packed document, or continue the
        cache."""
        if self.position_ids is not None:
            return self.position_ids
        length = self.tokens.shape[1]
        if self.cache is not None:
            return self.cache.next_positions(length)
        position = torch.arange(length, device=self.tokens.device)
        if self.cu_seqlens is not None:
            position = position - self.cu_seqlens[document_ids(position, self.cu_seqlens)]
        return position[None]


@dataclass(frozen=True)
class Sequences:
    """Which tokens attend to each other: those of a row, or of a document that is packed into it.

    causal: whether a token attends to earlier tokens alone. Other fields as those of `Inputs`.
    """

    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    shared_keys: SharedKeys | None = None  # where packed documents share prefixes: the keys that each one reads
    causal: bool = True
    padding: Tensor | None = None
    context: ContextGroup | None = None  # the ranks that share the row, whose offsets cu_seqlens are; None for one
    runs: tuple[DocumentRun, ...] | None = None  # the packed documents, where their lengths are known on the host

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **options: Any) -> Tensor:
        """Attention within the sequences. sinks, options: as those of `attention`."""
        shared, context, heads = self.shared_keys, self.context, q.shape[2]
        if context is not None:
            q, k, v = context.take_heads(q, k, v)
            sinks = None if sinks is None else context.of_own_heads(sinks)
        documents: dict[str, Any] = {"cu_seqlens": self.cu_seqlens, "max_seqlen": self.max_seqlen}
        documents["causal"] = self.causal
        if shared is not None:
            k, v = (gather_keys(x, shared.offsets, shared.places) for x in (k, v))
            documents |= {"cu_seqlens_k": shared.cu_seqlens, "max_seqlen_k": shared.max_seqlen}
        if self.runs is not None and not torch.compiler.is_compiling():  # which would compile again for other runs
            return attention_by_run(q, k, v, self.runs, causal=self.causal, sinks=sinks, **options)
        out = attention(q, k, v, sinks=sinks, **documents, **options)
        return out if context is None else context.take_tokens(out, heads)


class KeysReadLater:
    """Keys and values that later layers read, by layer type, written by the layer that computes them. Neither a dict
    nor a dataclass: of those FSDP2 passes copies to a block."""

    def __init__(self) -> None:
        self.of_type: dict[str, KeysAndValues] = {}


@dataclass(frozen=True)
class Positions:
    """Where the tokens of a batch stand, with what depends on that alone; the same for all blocks but `layer_input`."""

    position_ids: Tensor  # [B or 1, T]
    angles: Mapping[str, tuple[Tensor, Tensor]]  # layer type -> (cos, sin), each [B * T or T, R / 2] fp32
    sequences: Sequences = Sequences()
    query_scale: Tensor | None = None  # [B or 1, T, 1, 1] in the queries' dtype; None if queries are not scaled
    layer_input: Tensor | None = None  # [B, T, size], what the present block reads beside the residual stream
    ahead: Tensor | None = None  # int64 [B, T], how many tokens behind it a token sees; None where all see none
    cross: CrossFeatures | None = None  # images that cross-attention reads; None without
    read_later: KeysReadLater | None = None  # None where no layer reads the keys of another
