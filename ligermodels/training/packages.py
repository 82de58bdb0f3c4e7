"""Packages that only some runs need, each imported when it is needed first."""

import importlib
from types import ModuleType

from ligermodels.errors import InputError, first_line


def needs(module: str, user: str) -> ModuleType:
    """The module. Raises InputError, naming the `user`, a file or a flag, where its package cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        said = first_line(error)
        raise InputError(f"{user}: needs {package}, of which Python says: {said}; pip install {package}") from error
