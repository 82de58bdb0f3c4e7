"""Packages that only some data need, each imported when it is needed first."""

import importlib
from types import ModuleType

from ligermodels.errors import InputError


def needs(module: str, place: str) -> ModuleType:
    """The module. Raises InputError, naming what is at `place`, where its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(f"{place}: needs the package {package}: pip install {package}") from error
