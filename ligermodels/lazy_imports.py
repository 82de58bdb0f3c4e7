"""What is imported when it is first used: the names of packages, so that importing a package does not import torch, and
optional packages.

`__init__.pyi` says where each name comes from, to type checkers and here (as scientific Python's SPEC 1 does it).
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ligermodels.errors import InputError, exhausted_memory, first_line


def names_of_stub(file: str) -> dict[str, str]:
    """The names that the `__init__.pyi` beside a package's `__init__.py` imports, each with its module. A submodule, as
    in `from ligermodels import ops as ops`, has the package as its module."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def import_on_first_use(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package. package, file: its `__name__` and `__file__`. `dir` shows
    the public names alone; a submodule is not among those of `__all__`."""
    homes = names_of_stub(file)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = import_module(f"{package}.{name}") if home == package else getattr(import_module(home), name)
        setattr(import_module(package), name, value)
        return value

    public = [name for name, home in homes.items() if home != package]
    return get, lambda: sorted(homes), public


def import_package(module: str, needed_by: str) -> ModuleType:
    """Returns the imported module.

    needed_by: the file or the flag that needs it. Raises InputError, which names it, if the import fails.
    """
    package = module.partition(".")[0]
    try:
        imported = import_module(module)
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
