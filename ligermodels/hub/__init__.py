"""Loads and creates models by name (Hub id, folder, architecture or configuration), and exports them to folders."""

from ligermodels.hub.models import (
    adapter_folder,
    create,
    export,
    export_adapter,
    list_architectures,
    load,
    load_adapter,
    load_tokenizer,
    resolve,
)

__all__ = [
    "adapter_folder",
    "create",
    "export",
    "export_adapter",
    "list_architectures",
    "load",
    "load_adapter",
    "load_tokenizer",
    "resolve",
]
