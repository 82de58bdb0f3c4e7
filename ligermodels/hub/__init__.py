"""Loads and creates models by name (Hub id, folder, architecture or configuration), and exports them to folders."""

from ligermodels.hub.adapters import (
    add_lora_of_adapter,
    base_of_adapter,
    export_adapter,
    load_adapter,
    resolve_with_adapter,
)
from ligermodels.hub.download import adapter_folder
from ligermodels.hub.gguf import export_gguf
from ligermodels.hub.models import (
    create,
    export,
    list_architectures,
    load,
    load_processor,
    load_tokenizer,
    quantise_on_meta,
    resolve,
)

__all__ = [
    "adapter_folder",
    "add_lora_of_adapter",
    "base_of_adapter",
    "create",
    "export",
    "export_adapter",
    "export_gguf",
    "list_architectures",
    "load",
    "load_adapter",
    "load_processor",
    "load_tokenizer",
    "quantise_on_meta",
    "resolve",
    "resolve_with_adapter",
]
