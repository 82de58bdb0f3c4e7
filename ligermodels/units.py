"""Numbers as people write and read them."""

import re

from ligermodels.errors import InputError

MAX_SHARD_SIZE = "5GB"
MAX_DIGITS = 18  # of a number that is parsed: Python refuses thousands of them, and a float overflows at 309
SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(I?)B", re.IGNORECASE)


def counted(count: int, noun: str) -> str:
    """1 -> "1 row"; 1536 -> "1,536 rows". Only for nouns whose plural ends in s."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def byte_size(count: int) -> str:
    """1536 -> "1.5 KB": powers of 1000, as for files and disks."""
    return with_unit(count, 1000, ("B", "KB", "MB", "GB", "TB"))


def memory_size(count: int) -> str:
    """1536 -> "1.5 KiB": powers of 1024, as for memory."""
    return with_unit(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def with_unit(count: float, step: int, units: tuple[str, ...]) -> str:
    """`count` in the largest of `units` that it reaches; each unit is `step` times the one before."""
    for unit in units[:-1]:
        if count < step:
            return f"{count:.{0 if unit == 'B' else 1}f} {unit}"
        count /= step
    return f"{count:.1f} {units[-1]}"


def parameter_count(count: int) -> str:
    """8030261248 -> "8.0B"."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def loss_text(loss: float) -> str:
    """A loss as it is printed, never as -0.000."""
    return f"{loss:z.3f}"


def duration(seconds: float) -> str:
    """4000 -> "1:06:40"; 100 -> "1:40"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def is_whole_number(text: str) -> bool:
    """Whether a text is a whole number from 0 on in at most MAX_DIGITS digits."""
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


def size_in_bytes(size: int | str) -> int:
    """A number of bytes: the number itself, or parsed from "500MB" (10⁶) or "2GiB" (2³⁰). Raises InputError."""
    found = SIZE_PATTERN.fullmatch(size.strip()) if isinstance(size, str) else None
    if found and len(found[1]) <= MAX_DIGITS:
        number, unit, binary = found.groups()
        size = int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit.upper()) + 1))
    if isinstance(size, str) or size <= 0:
        raise InputError(f"max_shard_size is {size!r}; must be a number of bytes above zero, such as 5GB or 2GiB")
    return size
