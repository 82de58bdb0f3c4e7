"""Text generation with a paged key-value cache."""

from ligermodels.lazy_imports import import_on_first_use

__getattr__, __dir__, __all__ = import_on_first_use(__name__, __file__)
