"""A tensor in a file, and the tensors of a checkpoint folder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

FP4_DTYPE = torch.float4_e2m1fn_x2  # of tensors with two elements a byte, whose shape counts elements


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. begin: its offset in bytes from the start of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return self.bytes_of(math.prod(self.shape))

    def bytes_of(self, elements: int) -> int:
        """The size of so many elements."""
        return elements // 2 if self.dtype == FP4_DTYPE else elements * self.dtype.itemsize

    @property
    def files(self) -> set[Path]:
        """The files that reading it opens."""
        return {self.file}


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, by their Hub names. It keeps no file open.

    folder: or the GGUF file. converted: whether the files store them otherwise than the Hub does, so that an export
    copies no bytes of them.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    converted: bool = False

    @property
    def description(self) -> str:
        """Where the model is described, for errors."""
        return "metadata" if self.converted else "config.json"
