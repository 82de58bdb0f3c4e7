"""Text generation with a paged key-value cache. Must not know files, training or any model family."""

from ligermodels.generation.decoding import generate, stream
from ligermodels.generation.engine import Engine
from ligermodels.generation.requests import GeneratedSample
from ligermodels.generation.sampling import Sampling

__all__ = ["Engine", "GeneratedSample", "Sampling", "generate", "stream"]
