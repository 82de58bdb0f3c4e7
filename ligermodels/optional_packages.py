"""Import of optional packages, when a run first needs one."""

import importlib
from types import ModuleType

from ligermodels.errors import InputError, exhausted_memory, first_line


def import_package(module: str, needed_by: str) -> ModuleType:
    """Returns the imported module.

    needed_by: the file or the flag that needs it. Raises InputError, which names it, if the import fails.
    """
    package = module.partition(".")[0]
    try:
        imported = importlib.import_module(module)
        if imported.__file__ is None:  # a folder of that name beside the script, imported as a namespace package
            raise ImportError(f"no module named {package!r}, but the folder {imported.__path__[0]}")
    except Exception as error:  # a broken installation raises anything
        if exhausted_memory(error):
            raise
        reason = first_line(error)
        raise InputError(
            f"{needed_by}: needs {package}, but cannot import it: {reason}; pip install {package}"
        ) from error
    return imported
