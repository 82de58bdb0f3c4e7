"""Encodes and decodes text and renders chats, with the `tokenizers` library and the files of a checkpoint folder."""

from ligermodels.lazy_imports import import_on_first_use

__getattr__, __dir__, __all__ = import_on_first_use(__name__, __file__)
