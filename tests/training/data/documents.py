"""Documents for tests, and the rows that a run makes of them."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ligermodels.distributed import World
from ligermodels.training.data.rows.packing import all_documents, pack_documents
from ligermodels.training.data.rows.run_rows import TrainingRows, ValidationRows
from ligermodels.training.data.rows.store import Document, open_store, write_store

CPU = World(torch.device("cpu"))
VOCABULARY = 10_000


def document(ids, supervised=None, place="somewhere"):
    return Document(ids, supervised, place)


def distinct(*lengths):
    """Documents of these lengths. Every token occurs once, so that targets can be counted; 0 is padding only."""
    numbers = iter(range(1, VOCABULARY))
    return [document([next(numbers) for _ in range(n)], place=f"d:{i}") for i, n in enumerate(lengths)]


def stored(documents, vocab_size=VOCABULARY):
    """A store, memory-mapped from files that are deleted again."""
    with TemporaryDirectory() as folder:
        write_store(documents, vocab_size, Path(folder))
        return open_store(Path(folder))


def rows(documents, length, packing=True):
    return pack_documents([all_documents(stored(documents))], length, packing)


def training(documents, length, packing=True, seed=0):
    return TrainingRows([rows(documents, length, packing)], [1.0], seed, packing)


def validation(documents, length, packing=True):
    return ValidationRows(rows(documents, length, packing), packing)
