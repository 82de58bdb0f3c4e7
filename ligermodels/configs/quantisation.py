"""The quantization_config of a config.json: FP8 weights with one scale or a scale for each block; MXFP4 weights; NF4
weights of bitsandbytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.errors import ConfigError

FORMATS = ("nf4", "fp8", "mxfp4")  # in which a model keeps quantised weights
FIELD = "quantization_config"
BITSANDBYTES = {
    "load_in_4bit": (True,),
    "bnb_4bit_quant_type": ("nf4",),
    "bnb_4bit_use_double_quant": (True,),
    "bnb_4bit_quant_storage": ("uint8", None),
}
SUPPORTED = {
    "quant_method": ("fp8", "mxfp4", "bitsandbytes"),
    "fmt": ("e4m3", None),
    "activation_scheme": ("static", "dynamic", None),
}


@dataclass(frozen=True)
class Fp8:
    """FP8 weights. block: rows and columns that share a scale; None for one scale of the whole tensor."""

    block: tuple[int, int] | None
    scheme: ClassVar = "fp8"


@dataclass(frozen=True)
class Mxfp4:
    """4-bit weights in blocks of 32 columns with a power of two as scale (OCP microscaling)."""

    scheme: ClassVar = "mxfp4"


@dataclass(frozen=True)
class Nf4Weights:
    """4-bit weights of bitsandbytes with double quantisation."""

    scheme: ClassVar = "nf4"


Scaled = Fp8 | Mxfp4
Quantisation = Scaled | Nf4Weights


def read_quantisation(raw: Mapping[str, Any]) -> Quantisation | None:
    """How the weights of a config.json are quantised; None if they are not. Raises ConfigError."""
    fields = raw.get(FIELD)
    if not fields:
        return None
    if not isinstance(fields, Mapping):
        raise ConfigError(f"config.json: {FIELD} is {fields!r}; must be an object or null")
    if fields.get("quant_method") == "bitsandbytes":
        for name, values in BITSANDBYTES.items():
            if fields.get(name) not in values:
                raise ConfigError(
                    f"config.json: {FIELD}: {name} is {fields.get(name)!r}; of bitsandbytes only NF4 with double "
                    "quantisation is supported: load the original with quantize='nf4'"
                )
        return Nf4Weights()
    for name, values in SUPPORTED.items():
        if fields.get(name) not in values:
            raise ConfigError(
                f"config.json: {FIELD}: {name} {fields.get(name)!r} is not supported, only "
                f"{' and '.join(map(repr, filter(None, values)))}; load the original"
            )
    if fields["quant_method"] == "mxfp4":
        return Mxfp4()
    block = fields.get("weight_block_size")
    if block is None:
        return Fp8(None)
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ConfigError(f"config.json: {FIELD}: weight_block_size is {block!r}; must be null or two positive numbers")
    return Fp8((block[0], block[1]))


def scheme_of(raw: Mapping[str, Any]) -> str | None:
    """The name of the format in which the weights of a config.json are quantised. Raises ConfigError."""
    found = read_quantisation(raw)
    return None if found is None else found.scheme


def read_scaled(raw: Mapping[str, Any]) -> Scaled | None:
    """Reads what `read_quantisation` does, of weights that are stored as values and their scales alone."""
    found = read_quantisation(raw)
    return None if isinstance(found, Nf4Weights) else found
