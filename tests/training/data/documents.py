"""Documents made for tests, and what a run has of them."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from ligermodels.distributed import World
from ligermodels.training.data.batches import Training, Validation
from ligermodels.training.data.packing import rows_of
from ligermodels.training.data.split import all_of
from ligermodels.training.data.store import open_store, write

CPU = World(torch.device("cpu"))
VOCABULARY = 10_000


class Document(NamedTuple):
    ids: list[int]
    supervised: list[bool] | None = None
    place: str = "somewhere"


def distinct(*lengths):
    """Documents in which every token occurs once, so that targets can be counted; nowhere 0, which padding is."""
    numbers = iter(range(1, VOCABULARY))
    return [Document([next(numbers) for _ in range(n)], None, f"d:{i}") for i, n in enumerate(lengths)]


def stored(documents, vocab_size=VOCABULARY):
    """Mapped files, of which the names are gone."""
    with TemporaryDirectory() as folder:
        write(documents, vocab_size, Path(folder))
        return open_store(Path(folder))


def rows(documents, length, packing=True):
    return rows_of([all_of(stored(documents))], length, packing)


def training(documents, length, packing=True, seed=0):
    return Training([rows(documents, length, packing)], [1.0], seed, packing)


def validation(documents, length, packing=True):
    return Validation(rows(documents, length, packing), packing)
