"""Decoder language models on fused Triton kernels: load any Hub checkpoint, train it fast and lean, write it back."""

from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.generate import generate
from ligermodels.hub import create, export, list_architectures, load, load_tokenizer

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "ConfigError",
    "InputError",
    "create",
    "export",
    "generate",
    "list_architectures",
    "load",
    "load_tokenizer",
]
