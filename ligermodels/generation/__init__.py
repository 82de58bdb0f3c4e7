"""Text generation with a key-value cache."""

from ligermodels.generation.decoding import generate, stream

__all__ = ["generate", "stream"]
