"""Decoder language models on fused Triton kernels: load any Hub checkpoint, train it, write it back.

A name is imported when it is first used, so that `import ligermodels` and `ligermodels list` wait for no other package.
`__init__.pyi` has the same names for type checkers.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
HOMES = {
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "Engine": "generation",
    "GeneratedSample": "generation",
    "HubError": "errors",
    "InputError": "errors",
    "add_lora": "layers.lora_targets",
    "create": "hub",
    "export": "hub",
    "export_adapter": "hub",
    "export_gguf": "hub",
    "generate": "generation",
    "list_architectures": "hub",
    "load": "hub",
    "load_adapter": "hub",
    "load_processor": "hub",
    "load_tokenizer": "hub",
    "stream": "generation",
}
MODULES = ("losses", "nn", "ops", "training")
__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name in HOMES:
        value = getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    elif name in MODULES:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES, *MODULES})
