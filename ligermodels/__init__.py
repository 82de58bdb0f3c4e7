"""Decoder language models on fused Triton kernels: load any Hub checkpoint, train it, write it back.

A name is imported when it is first used, so that `import ligermodels` and `ligermodels list` wait for no other package.
`__init__.pyi` has the names.
"""

from ligermodels.lazy_imports import import_on_first_use

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = import_on_first_use(__name__, __file__)
