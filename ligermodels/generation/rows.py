"""The state of the rows that are being generated, on the device, and the step that moves all of them on by a token.

All shapes are fixed and nothing is read on the host, so that the step can be captured as a CUDA graph: once for each
number of rows, then replayed without the host's work.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ligermodels.generation.cache import GenerativeModel, LatentHeads, PerRow, StateStep
from ligermodels.generation.image_features import EarlierImages
from ligermodels.generation.paged_cache import (
    PAGE_SIZE,
    LayerGroup,
    PagedCache,
    PagedLayer,
    StateGroup,
    StatePool,
    Tables,
)
from ligermodels.generation.sampling import SamplingRow
from ligermodels.kernels.decoding.cache_write import CacheSlots
from ligermodels.kernels.decoding.decode_attention import (
    VisibleKeys,
    attend_visible_reference,
    decode_attention,
    visible_keys,
)
from ligermodels.kernels.decoding.sample import sample
from ligermodels.kernels.decoding.sample_filters import count_tokens, penalize, start_penalty_row
from ligermodels.kernels.dispatch import runs_kernels
from ligermodels.kernels.launch import RecordedGraphs

NO_TOKEN = -1


@dataclass(frozen=True)
class NewRow:
    """What a row begins with, behind its prompt; fields as those of `RowStates`. tables: its pages in each group.

    rope_offset: what its positions for RoPE are ahead of the number of its tokens.
    """

    prompt: Sequence[int]
    ends: int
    seeds: int
    streams: int
    sampling: SamplingRow
    stop_tokens: Collection[int]
    tables: Tables
    rope_offset: int = 0


class Drawing(NamedTuple):
    """What drawing the rows' tokens needs besides temperatures: whether a row has filters, or penalties."""

    filters: bool
    penalties: bool


@dataclass(frozen=True)
class RowStates:
    """What each row [R] is at. The first rows are those in use.

    tokens: int64, the last token, which the next step feeds. positions: int64, its position. ends: int64, the position
    at which the row has its last token. running: bool. stops: bool [R, V], the tokens that end the row. temperature,
    top_k, top_p, min_p, seeds, streams: arguments of `kernels.sample.sample`, whose counters are (stream, position).
    repetition_penalty, presence_penalty, frequency_penalty, history: those of `kernels.penalties.penalize`; history is
    [R, 0] until a row has penalties. drawn: int64, what the last step drew, NO_TOKEN for a row that had ended.
    logprobs: fp32, its log-probability. rope_offsets: int64 [R, 1], see `Cache`; [R, 0] of a model without images.
    tables: int32 [R, width] of each group of the cache.
    """

    tokens: Tensor
    positions: Tensor
    ends: Tensor
    running: Tensor
    stops: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    history: Tensor
    seeds: Tensor
    streams: Tensor
    drawn: Tensor
    logprobs: Tensor
    rope_offsets: Tensor
    tables: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls, cache: PagedCache, count: int, vocab_size: int, device: torch.device, takes_images: bool = False
    ) -> "RowStates":
        """RowStates that are not in use."""

        def zeros(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(count, *width, dtype=dtype, device=device)

        whole = ("tokens", "positions", "ends", "seeds", "streams", "drawn")
        values = {name: zeros(torch.int64) for name in whole}
        values |= {name: zeros(torch.float32) for name in (*SamplingRow._fields, "logprobs")}
        values |= {"top_k": zeros(torch.int32), "running": zeros(torch.bool), "stops": zeros(torch.bool, vocab_size)}
        values |= {"history": zeros(torch.int32, 0), "rope_offsets": zeros(torch.int64, int(takes_images))}
        return cls(**values, tables=tuple(zeros(torch.int32, group.width) for group in cache.groups))

    def with_history(self) -> "RowStates":
        """The same, with room for the tokens that penalties depend on."""
        return replace(self, history=torch.zeros_like(self.stops, dtype=torch.int32))

    def tensors(self) -> Iterator[Tensor]:
        for field in fields(self):
            value = getattr(self, field.name)
            yield from (value if isinstance(value, tuple) else [value])

    def view(self, start: int, stop: int) -> "RowStates":
        """Some rows, sharing memory with these."""
        if stop - start == len(self.tokens):
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tables = tuple(table[start:stop] for table in values.pop("tables"))
        return RowStates(tables=tables, **{name: value[start:stop] for name, value in values.items()})

    def assign(self, rows: Sequence["NewRow"]) -> None:
        """Begins as many rows as there are, behind their prompts."""
        numbers = {name: [getattr(row, name) for row in rows] for name in ("ends", "seeds", "streams")}
        numbers |= {name: [getattr(row.sampling, name) for row in rows] for name in SamplingRow._fields}
        numbers["positions"] = [len(row.prompt) - 1 for row in rows]
        for name, values in numbers.items():
            target = getattr(self, name)
            target.copy_(torch.tensor(values, dtype=target.dtype))
        for group, table in enumerate(self.tables):
            pages = [row.tables[group] for row in rows]
            table.copy_(torch.tensor([[*own, *[0] * (table.shape[1] - len(own))] for own in pages]))
        if self.rope_offsets.shape[1]:
            self.rope_offsets.copy_(torch.tensor([[row.rope_offset] for row in rows]))
        self.running.fill_(True)
        for index, row in enumerate(rows if self.history.shape[1] else ()):
            predicted = [token for token in row.prompt if token < self.history.shape[1]]
            start_penalty_row(self.history, index, torch.tensor(predicted).to(self.history.device))
        self.stops.zero_()
        places = [(index, token) for index, row in enumerate(rows) for token in row.stop_tokens]
        if places:
            self.stops[tuple(torch.tensor(places).T.to(self.stops.device))] = True

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies rows to the places of others."""
        places = torch.tensor([sources, targets]).to(self.tokens.device)
        for tensor in self.tensors():
            tensor[places[1]] = tensor[places[0]]

    def append(self, logits: Tensor, drawing: Drawing) -> None:
        """Draws the next token of every row that runs, from logits [R, V]."""
        if drawing.penalties:
            penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
            logits = penalize(logits, self.history, *penalties)
        top_k, top_p, min_p = (self.top_k, self.top_p, self.min_p) if drawing.filters else (None, None, None)
        counters = torch.stack([self.streams, self.positions + 1], -1)
        tokens, logprobs = sample(logits, self.temperature, top_k, top_p, min_p, self.seeds, counters)
        if drawing.penalties:
            count_tokens(self.history, tokens, self.running)
        self.drawn.copy_(tokens.where(self.running, NO_TOKEN))
        self.logprobs.copy_(logprobs)
        self.tokens.copy_(tokens)
        self.positions.add_(self.running)
        stopped = self.stops.gather(1, tokens[:, None])[:, 0] | (self.positions >= self.ends)
        self.running.logical_and_(~stopped)


class DecodeLayer:
    """A layer of the cache during a decode step.

    slots: of the tokens that are fed, int64 [B]; table: int32 [B, width]; lengths: of the rows with them, int64 [B].
    seen: the keys that the rows see, where no kernel looks them up.
    """

    def __init__(
        self, layer: PagedLayer, slots: Tensor, table: Tensor, lengths: Tensor, seen: VisibleKeys | None
    ) -> None:
        self.layer, self.new, self.table = layer, slots, table
        self.lengths, self.seen = lengths, seen

    @property
    def slots(self) -> CacheSlots:
        keys, values = self.layer.stored  # since the prefill
        return CacheSlots(keys, values, self.new)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, *, is_read: bool = False, **options: Any
    ) -> Tensor:
        return self.attend_again(q, position_ids, **options)

    def attend_again(self, q: Tensor, position_ids: Tensor, *, window: int | None, **options: Any) -> Tensor:
        query, (keys, values, _) = q[:, 0], self.slots
        if self.seen is not None:
            return attend_visible_reference(query, keys, values, self.seen, **options)[:, None]
        options |= {"window": window, "page_size": PAGE_SIZE}
        return decode_attention(query, keys, values, self.table, self.lengths, **options)[:, None]

    def attend_latents(
        self, q: Tensor, latents: Tensor, position_ids: Tensor, heads: LatentHeads, *, scale: float
    ) -> Tensor:
        query, (pool, _, slots) = heads.absorb(q)[:, 0], self.slots
        pool.index_copy_(0, slots, latents[:, 0])
        if self.seen is not None:
            out = attend_visible_reference(query, pool, pool[..., : heads.latent_size], self.seen, scale=scale)
        else:
            out = decode_attention(
                query, pool, None, self.table, self.lengths, scale=scale, page_size=PAGE_SIZE,
                value_size=heads.latent_size,
            )  # fmt: skip
        return heads.restore(out[:, None])


class DecodeStates:
    """The states of a layer during a decode step. rows: int64 [B], the page of each row."""

    def __init__(self, layer: StatePool, rows: Tensor) -> None:
        self.layer, self.rows = layer, rows

    def begin(self, shape: tuple[int, int], padding: Tensor | None) -> StateStep:
        return StateStep(self.layer.states, self.rows)

    def earlier_images(self) -> EarlierImages | None:
        states = self.layer.states
        return EarlierImages(*(states[number][self.rows] for number in range(3))) if states else None

    def keep_images(self, images: EarlierImages) -> None:
        raise NotImplementedError("a step of generation has no new images")

    def pass_images_by(self) -> None:
        """No row has images."""


class DecodeCache:
    """The paged cache as a model sees it in a decode step of these rows: a token of each, at `positions`.

    A row that does not run writes to page 0 and attends to nothing.
    """

    sequence_lengths = None

    def __init__(self, cache: PagedCache, rows: RowStates) -> None:
        self.positions = rows.positions[:, None]
        self.rope_offsets = rows.rope_offsets if rows.rope_offsets.shape[1] else None
        self.lengths = (rows.positions + 1).where(rows.running, 0)
        views = [self.view_of_group(*pair, rows) for pair in zip(cache.groups, rows.tables, strict=True)]
        self.layers = [views[group](layer) for layer, group in zip(cache.layers, cache.group_of, strict=True)]

    def view_of_group(
        self, group: LayerGroup | StateGroup, table: Tensor, rows: RowStates
    ) -> Callable[[Any], DecodeLayer | DecodeStates]:
        """What makes a layer of a group into what the model sees. table: of the group, int32 [R, width]."""
        if isinstance(group, StateGroup):
            pages = table[:, 0].long().where(rows.running, 0)
            return lambda layer: DecodeStates(layer, pages)
        slots, lengths = next_slots(table, rows.positions).where(rows.running, 0), self.lengths
        seen = None if runs_kernels(lengths) else visible_keys(table, lengths, group.window, PAGE_SIZE)
        return lambda layer: DecodeLayer(layer, slots, table, lengths, seen)

    def next_positions(self, count: int) -> Tensor:
        return self.positions

    def advance(self, count: int | Tensor) -> None:
        pass


def next_slots(table: Tensor, positions: Tensor) -> Tensor:
    """The slot of each row's position, int64 [R]. table: int32 [R, width]."""
    pages = table.gather(1, (positions // PAGE_SIZE % table.shape[1])[:, None])[:, 0]
    return pages.long() * PAGE_SIZE + positions % PAGE_SIZE


def decode_step(
    model: Callable[..., Any], cache: PagedCache, rows: RowStates, drawing: Drawing, vocab_size: int | None = None
) -> None:
    """Feeds the last token of every row, and draws the next, below `vocab_size`."""
    view = DecodeCache(cache, rows)
    logits = model(rows.tokens[:, None], position_ids=view.positions, cache=view).logits[:, -1]
    rows.append(only_first(logits, vocab_size), drawing)


def only_first(logits: Tensor, vocab_size: int | None) -> Tensor:
    """The logits [R, V], of which all but the first `vocab_size` of each row are minus infinity; None for as they are.
    Writes into them."""
    if vocab_size is not None:
        logits[:, vocab_size:] = -torch.inf
    return logits


ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # of the graphs; beyond, multiples of 64
COARSE = 64


def rows_of_graph(count: int, limit: int) -> int:
    """The number of rows of the graph that runs `count` rows, where there are `limit`."""
    larger = next((rows for rows in ROWS if rows >= count), -(-count // COARSE) * COARSE)
    return min(larger, limit)


def uses_graphs(model: GenerativeModel) -> bool:
    """Whether a model's steps can be captured: its weights lie on one GPU, it gathers none while it runs, no state of
    a row grows, and kernels compute, which float64 has not."""
    if any(isinstance(kept, PerRow) and kept.grows for kept in model.kept_by_layers()):
        return False
    weights = list(model.parameters())
    return all(weight.is_cuda and weight.dtype != torch.float64 for weight in weights) and not any(
        isinstance(weight, DTensor) for weight in weights
    )


def ranks_of(model: GenerativeModel) -> int:
    """Over how many ranks the weights are distributed, which all have to run the same steps."""
    return max(weight.device_mesh.size() if isinstance(weight, DTensor) else 1 for weight in model.parameters())


StepFunction = Callable[[int, Drawing], None]


class StepGraphs(RecordedGraphs):
    """The CUDA graphs of a step, one for each number of rows and way of drawing.

    The first step of a kind runs as it is, which compiles the kernels and does what must not be captured; later ones
    are replayed.
    """

    graphs: dict[tuple[int, Drawing], Callable[[], Any] | None]  # None: has run once

    def run(self, step: StepFunction, rows: int, drawing: Drawing) -> None:
        """step(rows, drawing), or its replay. The step is not kept: it belongs to an engine, whose memory it holds."""
        key = rows, drawing
        if key not in self.graphs:
            step(rows, drawing)
            self.graphs[key] = None
            return
        replay = self.graphs[key]
        if replay is None:
            replay = self.graphs[key] = self.record(partial(step, rows, drawing))
        replay()
