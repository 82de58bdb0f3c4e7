"""Models by name: from a Hub id, a folder, an architecture or a configuration, and back to a folder."""

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
