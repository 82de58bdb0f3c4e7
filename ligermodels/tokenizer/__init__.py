"""Text to token ids and back, and chats: the `tokenizers` library over the files of a checkpoint folder."""

from ligermodels.tokenizer.tokenizer import Tokenizer, check_vocabulary

__all__ = ["Tokenizer", "check_vocabulary"]
