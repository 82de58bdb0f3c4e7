"""Text generation with a key-value cache. Must not know files, training or any model family."""

from ligermodels.generation.decoding import generate, stream

__all__ = ["generate", "stream"]
