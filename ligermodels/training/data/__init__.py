"""The data of a training run."""

from ligermodels.training.data.rows import (
    CORPUS_VOCABULARY,
    IGNORED,
    Data,
    Rows,
    corpus,
    micro_batches,
    supervised,
    synthetic,
    text_file,
    validation_batches,
)

__all__ = [
    "CORPUS_VOCABULARY",
    "IGNORED",
    "Data",
    "Rows",
    "corpus",
    "micro_batches",
    "supervised",
    "synthetic",
    "text_file",
    "validation_batches",
]
