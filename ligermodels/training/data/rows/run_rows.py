"""The rows of a run, shuffled and mixed for training, in order for validation, and the batches collated of them ahead.

The order depends only on the seed, the sizes of the sources and their weights. The rows of a step, over all ranks and
micro-batches, depend only on the order and on the cursor, the number of rows taken before the step. Any part of the
order is computed without the parts before it, so a run can resume anywhere.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from ligermodels.distributed import World, raise_on_all
from ligermodels.errors import InputError
from ligermodels.layers.decoder import IGNORE_INDEX, next_tokens
from ligermodels.training.data.rows.image_documents import ImageDecoder, images_of
from ligermodels.training.data.rows.packing import Concatenated, ConcatenatedRows, Segment
from ligermodels.units import counted

PROMPT_TOKENS = 16  # of a text, as the prompt of a sample
MIXTURE_BLOCK = 10_000  # entries; weights hold exactly within each block, so 1 / MIXTURE_BLOCK is the smallest weight
ROWS_MULTIPLE = 128  # a GEMM tile: the head's products are slower with other numbers of rows
OFFSETS_MULTIPLE = 32

PrefetchRequest = TypeVar("PrefetchRequest")
Prefetched = TypeVar("Prefetched")
Sequenced = TypeVar("Sequenced", bound=Concatenated[Any])


class Mixture:
    """An endless sequence of entries (source, row). Each source is shuffled anew for each of its epochs.

    sizes: the number of rows of each source. weights: the share of each source, in any unit.
    Raises InputError if a weight is too small.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.sizes, self.shares, self.seed = tuple(sizes), integer_shares(weights), seed % 2**64
        self.permutations: dict[int, tuple[int, np.ndarray]] = {}  # source -> (epoch, the order of its rows)

    @property
    def rows_per_epoch(self) -> list[float]:
        """Returns for each source after how many entries of the mixture all of its rows were taken once."""
        return [size * MIXTURE_BLOCK / share for size, share in zip(self.sizes, self.shares, strict=True)]

    def entries(self, start: int, count: int) -> list[tuple[int, int]]:
        """Returns the entries (source, row) number start, start + 1, … of the sequence."""
        return [self.entry(number) for number in range(start, start + count)]

    def entry(self, number: int) -> tuple[int, int]:
        block, place = divmod(number, MIXTURE_BLOCK)
        sources, counts_before = mixture_block(self.shares, self.seed, block)
        source = int(sources[place])
        return source, self.row(source, block * self.shares[source] + int(counts_before[place]))

    def row(self, source: int, taken: int) -> int:
        """Returns the next row of a source from which `taken` rows were taken before."""
        epoch, place = divmod(taken, self.sizes[source])
        current, order = self.permutations.get(source, (None, np.empty(0)))
        if current != epoch:
            generator = np.random.default_rng([self.seed, epoch, source])
            order = generator.permutation(np.arange(self.sizes[source], dtype=np.uint32))
            self.permutations[source] = epoch, order
        return int(order[place])


def integer_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the number of entries that each source has in a block, rounded by the largest-remainder method."""
    exact = np.array(weights, np.float64) / sum(weights) * MIXTURE_BLOCK
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: MIXTURE_BLOCK - shares.sum()]] += 1
    if not shares.all():
        smallest = weights[int(np.argmin(shares))]
        raise InputError(
            f"--data: the weight {smallest} is less than one row in {MIXTURE_BLOCK:,}: raise it or remove that source"
        )
    return tuple(shares.tolist())


@functools.lru_cache(maxsize=4)
def mixture_block(shares: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each entry of a block [MIXTURE_BLOCK] its source, and how many earlier entries of the block have it.

    The n entries of a source are spread evenly, one at a random place in each n-th part of the block (stratified
    sampling), so that any stretch of the sequence has the given weights to within a few rows.
    """
    generator = np.random.default_rng([seed, block])
    places = np.concatenate([(np.arange(share) + generator.random(share)) / share for share in shares])
    sources = np.repeat(np.arange(len(shares)), shares)
    numbers = np.concatenate([np.arange(share) for share in shares])
    order = np.argsort(places, kind="stable")
    return sources[order], numbers[order]


class DataError(InputError):
    """Data that cannot be read at their turn in a run. All ranks raise it at the same place, between two steps."""


class Prefetcher(Generic[PrefetchRequest, Prefetched]):
    """Calls `make` with requests, each ahead of its turn where the one before has named it.

    reads_files: whether `make` reads files of the user, and so may raise an InputError on one rank alone. All ranks
    then call `take` together, and if there is an error, all raise it as a DataError.
    """

    def __init__(self, make: Callable[[PrefetchRequest], Prefetched], name: str, *, reads_files: bool = False) -> None:
        self.make, self.thread, self.reads_files = make, ThreadPoolExecutor(1, name), reads_files
        # Messages of gloo do not wait for a GPU, as those of nccl would.
        shared = reads_files and distributed.is_initialized()
        self.group = distributed.new_group(backend="gloo") if shared else None
        self.prefetched: tuple[PrefetchRequest, Future[Prefetched]] | None = None

    def take(self, request: PrefetchRequest, following: PrefetchRequest | None) -> Prefetched:
        """`make(request)`, which may have been prefetched. Prefetches `following`, if any. Raises what `make` does."""
        result = self.made_on_all(request) if self.reads_files else self.made(request)
        if following is not None:
            self.prefetched = following, self.thread.submit(self.make, following)
        return result

    def made(self, request: PrefetchRequest) -> Prefetched:
        prefetched, self.prefetched = self.prefetched, None
        return prefetched[1].result() if prefetched and prefetched[0] == request else self.make(request)

    def made_on_all(self, request: PrefetchRequest) -> Prefetched:
        """Returns what `made` returns. Raises a DataError on all ranks if `make` raises an InputError on one."""
        error = None
        try:
            result = self.made(request)
        except InputError as raised:
            error = DataError(str(raised))
        raise_on_all(error, self.group)
        return result

    def take_all(self, requests: Sequence[PrefetchRequest]) -> Iterator[Prefetched]:
        """Yields the results of requests, in order; one is prefetched while the one before is used."""
        for request, following in zip_longest(requests, requests[1:]):
            yield self.take(request, following)


class MixedRows(Generic[Sequenced, Prefetched]):
    """The rows that a run trains on, packed documents or groups, in the endless order of a mixture of sources.

    rows: of all sources, one source after the other. decoder: decodes their images; None if they have none. collate:
    makes this rank's part of a step, in host memory, of the numbers of its rows in `rows` and of further options.
    """

    collate: Callable[..., Prefetched]

    def __init__(
        self, rows: Sequenced, sizes: Sequence[int], weights: Sequence[float], seed: int, decoder: ImageDecoder | None
    ) -> None:
        self.rows, self.decoder = rows, decoder
        self.firsts = list(itertools.accumulate(sizes, initial=0))
        self.mixture = Mixture(sizes, weights, seed)
        self.prefetcher = Prefetcher(self.collate_step, "batches", reads_files=decoder is not None)

    def __len__(self) -> int:
        """Returns the number of rows of all sources."""
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """A hash of all rows: a cursor has the same meaning only for rows with the same fingerprint."""
        return self.rows.fingerprint

    def numbers(self, cursor: int, count: int) -> list[int]:
        """Returns the rows of the step that takes `count` rows starting at `cursor`, by their numbers in `rows`."""
        return [self.firsts[source] + row for source, row in self.mixture.entries(cursor, count)]

    def places(self, cursor: int, count: int) -> list[str]:
        """Returns where the documents of a step's rows were read."""
        return [place for number in self.numbers(cursor, count) for place in self.rows.places(number)]

    def prefetched(self, cursor: int, count: int, *options: Any) -> Prefetched:
        """Returns what `collate` makes of a step. A thread collates the next step while this one is computed."""
        return self.prefetcher.take((cursor, count, *options), (cursor + count, count, *options))

    def collate_step(self, request: tuple[Any, ...]) -> Prefetched:
        cursor, count, *options = request
        return self.collate(self.numbers(cursor, count), *options)


class HeldOutRows(Generic[Sequenced, Prefetched]):
    """The rows of the validation split, packed documents or groups, in their order.

    decoder: as in `MixedRows`. collate: makes this rank's part of some rows, in host memory, of their numbers, the last
    of which may be beyond the end, and of further options.
    """

    collate: Callable[..., Prefetched]

    def __init__(self, rows: Sequenced, decoder: ImageDecoder | None) -> None:
        self.rows, self.decoder = rows, decoder
        self.prefetcher = Prefetcher(self.collate_range, "validation", reads_files=decoder is not None)

    def __len__(self) -> int:
        return len(self.rows)

    def prefetched(self, size: int, *options: Any) -> Iterator[Prefetched]:
        """Returns what `collate` makes of every row once, `size` at a time.

        A thread collates the next part, as in training.
        """
        return self.prefetcher.take_all([(start, size, *options) for start in range(0, len(self), size)])

    def collate_range(self, request: tuple[Any, ...]) -> Prefetched:
        start, size, *options = request
        return self.collate(range(start, start + size), *options)


class Batch(NamedTuple):
    """B rows of T tokens, as `CausalLM.forward` takes them.

    With packing: input_ids, labels int64 [1, B * T], cu_seqlens int32 [documents + 1] for document masking, in which
    the padding of a row counts as a document, and max_seqlen = T. Without packing: input_ids, labels int64 [B, T], and
    None. labels: -100 for tokens that are not supervised. row_lengths: int64 [B], tokens without padding.
    rows: int64 [N], the places in the flattened batch whose next token is supervised, and padding: see
    `supervised_rows`. None where documents have no mask. Where ranks share rows, each has those of its part alone.
    images: those of the rows, in order, under the names of arguments of `forward`; empty if there are none. Each has a
    method `to`, as tensors have.
    teacher_states: what a teacher has stored for the rows (`StoredStates.of_rows`); they stay in host memory.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    row_lengths: Tensor
    rows: Tensor | None = None
    images: Mapping[str, Any] = {}  # never changed
    teacher_states: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Copies the batch to a device; copies from pinned memory do not block the host."""
        copied = self.input_ids, self.labels, self.row_lengths
        input_ids, labels, lengths = (x.to(device, non_blocking=True) for x in copied)
        offsets, rows = (None if x is None else x.to(device, non_blocking=True) for x in (self.cu_seqlens, self.rows))
        images = {name: values.to(device, non_blocking=True) for name, values in self.images.items()}
        return Batch(input_ids, labels, offsets, self.max_seqlen, lengths, rows, images, self.teacher_states)

    def with_padded_offsets(self) -> "Batch":
        """Returns the batch with further documents, at its end and without tokens: their number is then a multiple of
        OFFSETS_MULTIPLE, so that few batches differ in it."""
        if self.cu_seqlens is None:
            return self
        missing = -(self.cu_seqlens.shape[0] - 1) % OFFSETS_MULTIPLE
        return self._replace(cu_seqlens=F.pad(self.cu_seqlens, (0, missing), value=self.input_ids.numel()))

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `forward`."""
        fields = self._asdict()
        del fields["teacher_states"]
        return fields | fields.pop("images")


def count_supervised(batch: Batch) -> Tensor:
    """Returns the number of supervised tokens of whole rows: a scalar on the batch's device."""
    return (next_tokens(batch.labels, batch.cu_seqlens) != IGNORE_INDEX).sum()


def collate(
    rows: Sequence[Sequence[Segment]], length: int, packing: bool, world: World,
    decoder: ImageDecoder | None = None,
) -> Batch:  # fmt: skip
    """Returns a batch in host memory, pinned if the device is a GPU.

    rows: the segments of each row; an empty row is padding. decoder: decodes the images of documents; None if none has
    any. Raises InputError as `ImageDecoder.prepare` does.
    """
    pinned = world.device.type == "cuda"
    input_ids = torch.zeros(len(rows), length, dtype=torch.int64, pin_memory=pinned)
    labels = torch.full((len(rows), length), IGNORE_INDEX, dtype=torch.int64, pin_memory=pinned)
    lengths = torch.zeros(len(rows), dtype=torch.int64, pin_memory=pinned)
    ids, targets, offsets = input_ids.numpy(), labels.numpy(), [0]
    for number, row in enumerate(rows):
        end = 0
        for store, start, size in row:
            begin, end = end, end + size
            ids[number, begin:end] = store.tokens[start : start + size]
            targets[number, begin + 1 : end] = ids[number, begin + 1 : end]
            if store.supervised is not None:
                targets[number, begin:end][~store.supervised[start : start + size]] = IGNORE_INDEX
            offsets.append(number * length + end)
        lengths[number] = end
        if end < length:
            offsets.append((number + 1) * length)
    masked = any(store.supervised is not None for row in rows for store, _, _ in row)
    places = supervised_rows(labels, pinned, world.context_rank, world.context) if masked else None
    if not packing:
        images = decoder.arguments([*map(images_of, rows)], input_ids, labels, None, pinned) if decoder else {}
        return Batch(input_ids, labels, None, None, lengths, places, images)
    input_ids, labels = input_ids.view(1, -1), labels.view(1, -1)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, pin_memory=pinned)
    images = (
        decoder.arguments([images_of(itertools.chain(*rows))], input_ids, labels, cu_seqlens, pinned) if decoder else {}
    )
    return Batch(input_ids, labels, cu_seqlens, length, lengths, places, images)


def supervised_rows(labels: Tensor, pinned: bool, part: int = 0, parts: int = 1) -> Tensor | None:
    """Returns the places of labels [B, T] whose next token is supervised: int64 [N], N a multiple of ROWS_MULTIPLE.

    Of the batch in equal parts, the places in number `part`. The padding is the last place whose next token is not
    supervised. None where N would not be smaller than the part. The head then computes these rows alone, and the host
    does not have to ask the device where they are. A document's first label is IGNORE_INDEX, so that no place is
    supervised by the next row or document.
    """
    supervised = np.split(is_supervised(labels), parts)[part]
    places = np.flatnonzero(supervised)
    count = max(1, -(-len(places) // ROWS_MULTIPLE)) * ROWS_MULTIPLE
    if count >= len(supervised):
        return None
    rows = torch.full((count,), np.flatnonzero(~supervised)[-1], dtype=torch.int64, pin_memory=pinned)
    rows.numpy()[: len(places)] = places
    return rows


def is_supervised(labels: Tensor) -> np.ndarray:
    """Returns whether the next token of each place of flattened labels is supervised. A row's first label never is."""
    return np.append(labels.numpy().reshape(-1)[1:], IGNORE_INDEX) != IGNORE_INDEX


def split_global_batch(batch_size: int, micro_batch_size: int | None, world: World) -> tuple[int, int]:
    """Returns (gradient accumulation steps, micro-batch size) of each rank, for a global batch of `batch_size` rows.

    micro_batch_size: None for a single micro-batch per rank and step. Raises InputError if the global batch cannot be
    divided equally.
    """
    size = micro_batch_size or max(1, batch_size // world.data_size)
    accumulation_steps, remainder = divmod(batch_size, world.data_size * size)
    if remainder or not accumulation_steps:
        given = "" if micro_batch_size is None else f" x --micro-batch-size {size}"
        ranks = counted(world.size, "rank") + ("" if world.context == 1 else f" / --context-parallel {world.context}")
        raise InputError(f"--batch-size {batch_size} is not a multiple of {ranks}{given}: change one of them")
    return accumulation_steps, size


# Adds a teacher's states to a batch, given the numbers of its rows; None for one of padding.
StatesBeside: TypeAlias = Callable[[Batch, Sequence[int | None], World], Batch]


class TrainingRows(MixedRows[ConcatenatedRows, list[Batch]]):
    """Rows of documents. states_beside: adds what a teacher has stored for these rows; None without."""

    states_beside: StatesBeside | None = None

    def __init__(
        self, sources: Sequence[ConcatenatedRows], weights: Sequence[float], seed: int, packing: bool,
        decoder: ImageDecoder | None = None,
    ) -> None:  # fmt: skip
        rows = ConcatenatedRows([part for source in sources for part in source.parts])
        super().__init__(rows, [len(source) for source in sources], weights, seed, decoder)
        self.sources, self.packing = sources, packing

    @property
    def tokens(self) -> int:
        """The number of tokens of all rows, without padding."""
        return self.rows.tokens

    @property
    def image_tokens(self) -> np.ndarray:
        """The number of image tokens of each row, int64 [rows]."""
        return np.concatenate([part.image_tokens for part in self.rows.parts])

    @property
    def length(self) -> int:
        """The number of tokens of a row, with padding."""
        return self.rows.length

    @property
    def completion_only(self) -> bool:
        """Whether any document has a mask, as chats and prompts with completions do."""
        return any(part.store.supervised is not None for part in self.rows.parts)

    def micro_batches(self, cursor: int, batch_size: int, micro_batch_size: int | None, world: World) -> list[Batch]:
        """Returns this rank's micro-batches, on its device, of a step.

        The step takes `batch_size` rows starting at `cursor`. Raises InputError as `split_global_batch` does.
        """
        batches = self.prefetched(cursor, batch_size, micro_batch_size, world)
        return [batch.to(world.device) for batch in batches]

    def collate(self, numbers: Sequence[int], micro_batch_size: int | None, world: World) -> list[Batch]:
        accumulation_steps, size = split_global_batch(len(numbers), micro_batch_size, world)
        starts = [(number * world.data_size + world.data_rank) * size for number in range(accumulation_steps)]
        return [self.batch(numbers[start : start + size], world) for start in starts]

    def batch(self, numbers: Sequence[int], world: World) -> Batch:
        rows = [self.rows.segments(number) for number in numbers]
        batch = collate(rows, self.length, self.packing, world, self.decoder)
        return batch if self.states_beside is None else self.states_beside(batch, numbers, world)


class ValidationRows(HeldOutRows[ConcatenatedRows, Batch]):
    """Rows of documents.

    states_beside: as in `TrainingRows`; first: the number that the first row has there.
    """

    states_beside: StatesBeside | None = None
    first = 0

    def __init__(self, rows: ConcatenatedRows, packing: bool, decoder: ImageDecoder | None = None) -> None:
        super().__init__(rows, decoder)
        self.packing = packing

    @property
    def completion_only(self) -> bool:
        """Whether the first document has a mask, as chats and prompts with completions do."""
        return self.rows.segments(0)[0].store.supervised is not None

    def batches(self, micro_batch_size: int, world: World) -> Iterator[Batch]:
        """Returns every row once over all ranks, in as many batches on each rank; the last are padded with rows."""
        batches = self.prefetched(world.data_size * micro_batch_size, micro_batch_size, world)
        return (batch.to(world.device) for batch in batches)

    def collate(self, numbers: range, micro_batch_size: int, world: World) -> Batch:
        mine = numbers[world.data_rank * micro_batch_size :][:micro_batch_size]
        rows = [self.rows.segments(row) if row < len(self) else [] for row in mine]
        batch = collate(rows, self.rows.length, self.packing, world, self.decoder)
        if self.states_beside is None:
            return batch
        return self.states_beside(batch, [self.first + row if row < len(self) else None for row in mine], world)

    def sample_prompt(self) -> list[int]:
        """Returns a prompt to generate a sample from: the first that has more than one token."""
        return prompt(self.sample_segment())

    def sample_images(self) -> Mapping[str, Tensor]:
        """Returns the images in that prompt, under the names of arguments of `forward`; empty if it has none."""
        store, start, _ = self.sample_segment()
        ids = self.sample_prompt()
        images = images_of([Segment(store, start, len(ids))])
        return self.decoder.pixel_inputs([images], torch.tensor([ids])) if self.decoder else {}

    def sample_segment(self) -> Segment:
        segments = (segment for row in range(len(self)) for segment in self.rows.segments(row))
        return next((segment for segment in segments if len(prompt(segment)) > 1), self.rows.segments(0)[0])


def prompt(segment: Segment) -> list[int]:
    """Returns the tokens before the first supervised one, at least one; of a text without a mask, its first few."""
    store, start, size = segment
    if store.supervised is None:
        size = min(size, PROMPT_TOKENS)
    else:
        size = 1 + int(np.argmax(store.supervised[start + 1 : start + size]))
    return store.tokens[start : start + size].tolist()
