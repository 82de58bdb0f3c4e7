"""Text generation with a key-value cache. Must not know files, tokenizers, training or any model family."""

from ligermodels.generation.decoding import generate, stream

__all__ = ["generate", "stream"]
