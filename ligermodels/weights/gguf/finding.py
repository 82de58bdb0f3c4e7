"""Which GGUF files of a folder are a model: one, or all parts of a split one (name-00001-of-00003.gguf); the types that
matrices can be written in."""

import re
from pathlib import Path

from ligermodels.errors import CheckpointError

# Those that the package `gguf` encodes.
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4", "tq2_0", "tq1_0")
SUFFIX = ".gguf"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of the one model that a folder has; none if it has no such files. Raises CheckpointError if they
    are of several models, or if a part is missing."""
    files = sorted(file for file in folder.glob("*") if is_gguf(file))
    if not files:
        return []
    parts = all_parts(files[0])
    others = [file.name for file in files if file not in parts]
    if others:
        raise CheckpointError(
            f"{folder}: has several GGUF models, {', '.join([files[0].name, *others])}: pass the path of one of them"
        )
    return parts


def all_parts(file: Path) -> list[Path]:
    """The files of the model that a GGUF file belongs to, in order. Raises CheckpointError if one is missing."""
    parts = [file.with_name(name) for name in names_of_parts(file.name)]
    missing = next((part for part in parts if part != file and not part.exists()), None)
    if missing is not None:
        raise CheckpointError(f"{missing}: is missing, a part of the model of {file.name}; download all parts")
    return parts


def names_of_parts(name: str) -> list[str]:
    """The names of all parts of the model that a file of this name belongs to, in order."""
    found = PART.fullmatch(name)
    if not found or found[2] > found[3]:
        return [name]
    stem, _, count = found.groups()
    return [f"{stem}-{number:05d}-of-{count}{SUFFIX}" for number in range(1, int(count) + 1)]
