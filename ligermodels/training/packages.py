"""Packages that only some runs need, each imported when it is needed first."""

import importlib
from types import ModuleType

from ligermodels.errors import InputError, first_line


def needs(module: str, user: str) -> ModuleType:
    """The module. Raises InputError, naming the `user`, a file or a flag, where its package cannot be imported."""
    package = module.partition(".")[0]
    try:
        imported = importlib.import_module(module)
        if imported.__file__ is None:  # a folder of that name beside the script, which Python takes for a package
            raise ImportError(f"no module named {package!r}, but the folder {imported.__path__[0]}")
    except ImportError as error:
        said = first_line(error)
        raise InputError(f"{user}: needs {package}, of which Python says: {said}; pip install {package}") from error
    return imported
