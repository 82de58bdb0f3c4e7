"""The data of a training run, from what names it to batches on a device."""

from ligermodels.training.data.batches import Batch, Training, Validation, supervised
from ligermodels.training.data.opening import Data, open_data

__all__ = ["Batch", "Data", "Training", "Validation", "open_data", "supervised"]
