"""GPUs that a run is planned for and that this machine need not have, by their name or their memory."""

from dataclasses import dataclass

from ligermodels.errors import InputError
from ligermodels.units import is_whole_number, size_in_bytes

# GiB that torch reports, a little less than on the package, by short names; and the driver's device names.
KNOWN = {
    "t4": (14.5, "Tesla T4"),
    "l4": (22.0, "NVIDIA L4"),
    "a10g": (22.0, "NVIDIA A10G"),
    "l40s": (44.3, "NVIDIA L40S"),
    "3090": (23.5, "NVIDIA GeForce RTX 3090"),
    "4090": (23.5, "NVIDIA GeForce RTX 4090"),
    "5090": (31.3, "NVIDIA GeForce RTX 5090"),
    "a100-40gb": (39.3, "NVIDIA A100-SXM4-40GB"),
    "a100": (79.1, "NVIDIA A100-SXM4-80GB"),
    "h100": (79.1, "NVIDIA H100 80GB HBM3"),
    "h200": (139.8, "NVIDIA H200"),
}
RULE = f"a memory such as 24GB or one of {', '.join(KNOWN)}; behind a comma how many there are, as in h100,4"


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: its device name, "GPU" where only its memory is known, and the bytes of that."""

    name: str
    memory: int


def parse_gpus(text: str) -> tuple[Gpu, int]:
    """A kind of GPU and how many of them, from a text such as "24GB" or "h100,4". Raises InputError."""
    name, comma, number = text.partition(",")
    if comma and (not is_whole_number(number) or int(number) == 0):
        raise InputError(f"is {text!r}; must be {RULE}")
    return parse_gpu(name.lower(), text), int(number or 1)


def parse_gpu(name: str, text: str) -> Gpu:
    """The GPU of a short name or of a memory, which is a part of `text`. Raises InputError."""
    if name in KNOWN:
        size, device = KNOWN[name]
        return Gpu(device, round(size * 2**30))
    try:
        memory = size_in_bytes(name)
    except InputError as error:
        raise InputError(f"is {text!r}; must be {RULE}") from error
    return Gpu("GPU", memory)
