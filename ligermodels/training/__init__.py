"""Training: TrainConfig holds a run's settings, train makes the run, plan says beforehand what it will do and need."""

from ligermodels.lazy_imports import import_on_first_use

__getattr__, __dir__, __all__ = import_on_first_use(__name__, __file__)
