"""What an export copies byte for byte from the checkpoint that a model was loaded from.

Two kinds of tensors: those that the model does not compute, and those that are stored in another dtype than most, as
long as the parameter still has their values. Quantised tensors are of the second kind: their scales are not unique, so
a changed one cannot be quantised as before. If one of them has changed, none is copied, because readers expect one
format for a whole model.
"""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ligermodels.configs.quantisation import Scaled
from ligermodels.distributed import from_first, is_first, raise_on_all
from ligermodels.errors import CheckpointError, InputError, printable
from ligermodels.weights.files import open_checkpoint
from ligermodels.weights.loading import read_scales
from ligermodels.weights.mapping import Piece
from ligermodels.weights.quantised import Scale, by_element, companions, needs_scale, quantised
from ligermodels.weights.stored import StoredTensor
from ligermodels.weights.streaming import BUFFER_BYTES, Transfer, open_data_files, run_transfers
from ligermodels.weights.writing import Blocks, Entry, failure


def source_tensors(source: str | Path | None, names: Iterable[str]) -> dict[str, StoredTensor]:
    """The tensors `names` of the folder `source`, in order, and those that belong to quantised ones among them. Raises
    InputError without a folder, CheckpointError if it does not hold them."""
    names = list(names)
    if not names:
        return {}
    if source is None:
        raise InputError(f"{names[0]} is copied from the folder that the model was loaded from: pass it as source")
    tensors = open_checkpoint(source).tensors
    missing = next((name for name in names if name not in tensors), None)
    if missing is not None:
        raise CheckpointError(f"{source}: tensor {missing}, which an export copies, is missing; restore the folder")
    return with_companions({name: tensors[name] for name in names}, tensors)


def with_companions(chosen: Mapping[str, StoredTensor], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The chosen ones of the tensors, and the scales of those that are quantised."""
    belonging = (name for tensor in quantised(chosen) for name in companions(tensor) if name in tensors)
    return {**chosen, **{name: tensors[name] for name in belonging}}


def unchanged_tensors(
    pieces: Sequence[Piece], blocks: Iterator[Blocks], stored: Mapping[str, StoredTensor], scheme: Scaled | None,
    sharded: bool,
) -> dict[str, StoredTensor]:  # fmt: skip
    """Finds the stored tensors whose values the model still has; quantised ones only if all of them are unchanged.

    pieces, blocks: the pieces of the stored tensors, and the model's values of each; an iterator of collectives if the
    parameters are sharded, so that every rank must call. Warns if quantised tensors have changed.
    """
    unchanged: list[str] = []

    def compare() -> None:
        scales, elements = read_scales(stored, scheme), by_element(stored, scheme)
        for piece, value in zip(pieces, blocks, strict=False):
            if is_unchanged(piece.tensor, elements[piece.tensor], scales.get(piece.tensor), value):
                unchanged.append(piece.tensor)

    error = failure(compare) if is_first() or not sharded else None
    deque(blocks, maxlen=0)  # takes part in the remaining gathers
    if sharded:
        raise_on_all(error)
        unchanged = from_first(unchanged)
    elif error is not None:
        raise error
    changed = [name for name in quantised(stored) if name not in unchanged]
    if changed and is_first():
        file = stored[changed[0]].file
        warnings.warn(printable(f"{file}: {changed[0]} has changed: no weight is written quantised"), stacklevel=3)
    copied = [name for name in unchanged if not changed or not needs_scale(name, stored[name])]
    return with_companions({name: stored[name] for name in copied}, stored)


def with_copies(
    planned: Iterable[tuple[Entry, StoredTensor | Tensor | None]], gathered: Iterator[Blocks]
) -> Iterator[Blocks]:
    """The tensors of `planned` in order: stored ones from their files, given ones, and the others from the iterator."""
    for entry, stored in planned:
        if isinstance(stored, Tensor):
            yield (stored,)
        else:
            yield next(gathered) if stored is None else stored_blocks(stored, entry.name)


def is_unchanged(name: str, stored: StoredTensor, scale: Scale | None, blocks: Blocks) -> bool:
    """Whether a parameter's blocks of rows have the values of a stored tensor, each rounded to the blocks' dtype."""
    start = 0
    for block in blocks:
        rows = block.shape[0] if block.dim() else 1
        sides = (slice(start, start + rows), *(slice(0, size) for size in stored.shape[1:])) if stored.shape else ()
        value = torch.empty(block.shape, dtype=block.dtype, device="cpu")
        run_transfers([Transfer(name, stored, sides, value, scale)], "", quiet=True)
        if not torch.equal(bits(value), bits(block)):
            return False
        start += rows
    return True


def bits(block: Tensor) -> Tensor:
    return block.cpu().flatten().view(torch.uint8)


def stored_blocks(stored: StoredTensor, name: str) -> Blocks:
    """The bytes of a stored tensor, block by block."""
    with open_data_files({stored.file}) as files:
        for start in range(0, stored.nbytes, BUFFER_BYTES):
            block = torch.empty(min(BUFFER_BYTES, stored.nbytes - start), dtype=torch.uint8, device="cpu")
            files[stored.file].read(name, [(stored.begin + start, block.numel())], block)
            yield block
