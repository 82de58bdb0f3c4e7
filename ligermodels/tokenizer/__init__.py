"""Encodes and decodes text and renders chats, with the `tokenizers` library and the files of a checkpoint folder."""

from ligermodels.tokenizer.tokenizer import Tokenizer, check_vocabulary

__all__ = ["Tokenizer", "check_vocabulary"]
