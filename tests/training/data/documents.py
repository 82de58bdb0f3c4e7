"""Documents made for tests, and what a run has of them."""

from typing import NamedTuple

import torch

from ligermodels.training.data.batches import Training, Validation
from ligermodels.training.data.packing import JoinedRows, rows_of
from ligermodels.training.data.split import all_of
from ligermodels.training.data.store import in_memory
from ligermodels.training.scaling.parallel import World

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


def rows(documents, length, packing=True):
    return JoinedRows([rows_of(all_of(in_memory(documents, VOCABULARY)), length, packing)])


def training(documents, length, packing=True, seed=0):
    return Training([rows(documents, length, packing)], [1.0], seed, packing)


def validation(documents, length, packing=True):
    return Validation(rows(documents, length, packing), packing)
