"""Every Triton kernel of the package, and the variants that have been compiled of it."""

import importlib
import pkgutil
from types import ModuleType

import triton

import ligermodels.kernels


def import_all() -> list[ModuleType]:
    modules = pkgutil.walk_packages(ligermodels.kernels.__path__, "ligermodels.kernels.")
    return [importlib.import_module(module.name) for module in modules]


def kernels() -> list:
    """Triton's functions, and the `Kernel`s that launch one (their `jit`), each once."""
    values = {id(x): x for module in import_all() for x in vars(module).values()}
    return [x for x in values.values() if isinstance(getattr(x, "jit", x), triton.JITFunction)]


def name_of(function) -> str:
    return f"{function.__module__}.{function.__name__}"


def compiled_kernels() -> list:
    """(name, compiled variant) of all variants so far, on all devices."""
    functions = {getattr(x, "jit", x) for x in kernels()}
    return [
        (name_of(f), variant) for f in functions for cache in f.device_caches.values() for variant in cache[0].values()
    ]


def assert_all_compiled() -> None:
    """Fails if a kernel was never launched, so that a check of the compiled kernels covers all of them."""
    missing = {name_of(x.jit) for x in kernels() if hasattr(x, "jit")} - {name for name, _ in compiled_kernels()}
    assert not missing, f"no case launches {', '.join(sorted(missing))}"
