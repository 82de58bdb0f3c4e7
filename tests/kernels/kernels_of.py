"""Every Triton kernel of the package, and what has been compiled of it."""

import importlib
import pkgutil
from types import ModuleType

import triton

import ligermodels.kernels


def import_all() -> list[ModuleType]:
    names = [m.name for m in pkgutil.iter_modules(ligermodels.kernels.__path__)]
    return [importlib.import_module(f"ligermodels.kernels.{name}") for name in names]


def kernels() -> list:
    """Triton's functions, and what launches one (and has it as `jit`), each once."""
    values = {id(x): x for module in import_all() for x in vars(module).values()}
    return [x for x in values.values() if isinstance(getattr(x, "jit", x), triton.JITFunction)]


def compiled_kernels() -> list:
    """(name, compiled variant) of all variants so far, on all devices."""
    functions = {getattr(x, "jit", x) for x in kernels()}
    return [
        (f"{f.__module__}.{f.__name__}", variant)
        for f in functions
        for cache in f.device_caches.values()
        for variant in cache[0].values()
    ]
