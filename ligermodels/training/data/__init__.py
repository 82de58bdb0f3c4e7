"""Training data: from the names given to --data to batches on a device."""

from ligermodels.lazy_imports import import_on_first_use

__getattr__, __dir__, __all__ = import_on_first_use(__name__, __file__)
