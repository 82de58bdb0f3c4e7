"""Decoder language models on fused Triton kernels: load any Hub checkpoint, train it, write it back."""

from ligermodels.errors import CheckpointError, ConfigError, HubError, InputError
from ligermodels.generation import generate, stream
from ligermodels.hub import create, export, export_adapter, list_architectures, load, load_adapter, load_tokenizer
from ligermodels.layers.lora_targets import add_lora

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "ConfigError",
    "HubError",
    "InputError",
    "add_lora",
    "create",
    "export",
    "export_adapter",
    "generate",
    "list_architectures",
    "load",
    "load_adapter",
    "load_tokenizer",
    "stream",
]
