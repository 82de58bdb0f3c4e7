"""Loads and creates models by name (Hub id, folder, architecture or configuration), and exports them to folders."""

from ligermodels.lazy_imports import import_on_first_use

__getattr__, __dir__, __all__ = import_on_first_use(__name__, __file__)
