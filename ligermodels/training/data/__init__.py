"""Training data: from the names given to --data to batches on a device."""

from ligermodels.training.data.batches import Batch, TrainingRows, ValidationRows, count_supervised
from ligermodels.training.data.opening import Data, open_data, refuse_short_epoch
from ligermodels.training.data.prefetching import DataError

__all__ = [
    "Batch", "Data", "DataError", "TrainingRows", "ValidationRows", "count_supervised", "open_data",
    "refuse_short_epoch",
]  # fmt: skip
