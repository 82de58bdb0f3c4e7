"""The size of an exported checkpoint's files, as a number of bytes or in words."""

import re

from ligermodels.errors import InputError

MAX_SHARD_SIZE = "5GB"
SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", re.IGNORECASE)


def size_in_bytes(size: int | str) -> int:
    """A number of bytes: the number itself, or parsed from "500MB" (10⁶) or "2GiB" (2³⁰). Raises InputError."""
    found = SIZE_PATTERN.fullmatch(size.strip()) if isinstance(size, str) else None
    if found:
        number, unit, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit.upper()) + 1))
    if isinstance(size, str) or size <= 0:
        raise InputError(f"max_shard_size is {size!r}; must be a number of bytes above zero, such as 5GB or 2GiB")
    return size
