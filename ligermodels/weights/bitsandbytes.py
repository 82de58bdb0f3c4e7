"""Weights of bitsandbytes in 4 bits: the tensors by which a checkpoint stores one, read and written byte for byte.

    X.weight                                     uint8 [elements / 2, 1], two codes a byte
    X.weight.absmax                              uint8 [elements / 64], of each block of 64 elements
    X.weight.nested_absmax                       fp32, of each 256 of these
    X.weight.quant_map, X.weight.nested_quant_map     fp32 [16] and [256]: the values of the codes
    X.weight.quant_state.bitsandbytes__nf4       JSON, as uint8: shape, dtype, sizes of blocks, the offset of absmax
Only NF4 with double quantisation and these sizes is supported. Experts that a checkpoint stacks in one tensor X are
stored as X, X.absmax, ... (`bitsandbytes.nn.parametrize`). Source of the format: bitsandbytes 0.50,
`QuantState.as_dict`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import CheckpointError
from ligermodels.weights.config_file import CONFIG_FILE
from ligermodels.weights.stored import FP4_DTYPE, StoredTensor
from ligermodels.weights.streaming import read_tensors

STATE = ".quant_state.bitsandbytes__"  # before the name of the format
NF4_STATE = STATE + "nf4"
FIXED = {"quant_type": "nf4", "blocksize": 64, "nested_blocksize": 256, "nested_dtype": "float32"}
BLOCK_SIZE, NESTED_BLOCK_SIZE = 64, 256
MAX_STATE_BYTES = 4096
REMEDY = "load the original model with quantize='nf4' instead"


@dataclass(frozen=True)
class StoredNf4:
    """The tensors of one weight. shape: of the weight. offset: of its absmax."""

    codes: StoredTensor
    tensors: Mapping[str, StoredTensor]  # by the end of their names: absmax, nested_absmax, ...
    shape: tuple[int, ...]  # [rows, columns], or [experts, rows, columns]
    offset: float

    def read(self) -> dict[str, Tensor]:
        """Their values by the end of their names, "codes" and "nested_offset", on the host. Raises CheckpointError."""
        values = read_tensors({"codes": self.codes, **self.tensors})
        codes = values["codes"].view(-1, self.shape[-1] // 2)
        return values | {"codes": codes, "nested_offset": torch.tensor(self.offset)}


def largest_value(part: Mapping[str, Tensor]) -> Tensor:
    """The largest absolute value that a weight can have; NaN if a scale is. part: as `StoredNf4.read` returns it."""
    scales = part["nested_quant_map"][part["absmax"].int()]
    groups = part["nested_absmax"].repeat_interleave(NESTED_BLOCK_SIZE)[: len(scales)]
    return (scales * groups + part["nested_offset"]).abs().amax() * part["quant_map"].abs().amax()


def expected_tensors(shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors beside the codes of a weight of this shape, by the end of their names."""
    blocks = math.prod(shape) // BLOCK_SIZE
    return {
        "absmax": (torch.uint8, (blocks,)),
        "quant_map": (torch.float32, (16,)),
        "nested_absmax": (torch.float32, (-(-blocks // NESTED_BLOCK_SIZE),)),
        "nested_quant_map": (torch.float32, (256,)),
    }


def split_off(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, StoredNf4]]:
    """The tensors of a checkpoint, of each weight in 4 bits one alone, with the shape of its elements; these weights.
    Raises CheckpointError for another layout."""
    for name in tensors:
        if STATE in name and not name.endswith(NF4_STATE):
            raise CheckpointError(f"{tensors[name].file}: {name}: only NF4 is supported; {REMEDY}")
    names = [name.removesuffix(NF4_STATE) for name in tensors if name.endswith(NF4_STATE)]
    for name in names:
        state = tensors[name + NF4_STATE]
        if state.dtype != torch.uint8 or state.nbytes > MAX_STATE_BYTES:
            size = f"{state.nbytes:,} bytes of {state.dtype}"
            raise CheckpointError(f"{state.file}: {name + NF4_STATE} has {size}, and is no description; {REMEDY}")
    states = read_tensors({name: tensors[name + NF4_STATE] for name in names})
    found = {name: stored_nf4(name, tensors, states[name]) for name in names}
    belonging = {f"{name}.{part}" for name in names for part in found[name].tensors} | {n + NF4_STATE for n in names}
    rest = {name: stored for name, stored in tensors.items() if name not in belonging}
    for name, weight in found.items():
        rest[name] = replace(rest[name], dtype=FP4_DTYPE, shape=weight.shape)
    return rest, found


def refuse_undeclared(tensors: Mapping[str, StoredTensor]) -> None:
    """Raises CheckpointError for weights in 4 bits, of a folder whose config.json does not say that it has any."""
    name = next((name for name in tensors if STATE in name), None)
    if name is not None:
        file = tensors[name].file
        raise CheckpointError(
            f"{file.parent / CONFIG_FILE}: has no quantization_config of bitsandbytes, but {file.name} has "
            f"{name.partition(STATE)[0]} in 4 bits; download config.json again, or {REMEDY}"
        )


def stored_nf4(name: str, tensors: Mapping[str, StoredTensor], state: Tensor) -> StoredNf4:
    """The weight `name`. state: its JSON, as bytes. Raises CheckpointError."""
    file = tensors[name + NF4_STATE].file
    fields = parse_state(file, name, state)
    wrong = [field for field, value in FIXED.items() if fields.get(field) != value]
    if wrong:
        raise CheckpointError(
            f"{file}: {name}: {wrong[0]} is {fields.get(wrong[0])!r}; only {FIXED[wrong[0]]!r} is supported: {REMEDY}"
        )
    shape, offset = fields.get("shape"), fields.get("nested_offset")
    if not (isinstance(shape, list) and len(shape) in (2, 3) and all(type(n) is int and n > 0 for n in shape)):
        raise CheckpointError(f"{file}: {name}: shape is {shape!r}; must be two or three positive numbers")
    if not isinstance(offset, float) or not math.isfinite(offset):
        raise CheckpointError(f"{file}: {name}: nested_offset is {offset!r}; must be a finite number")
    if shape[-1] % BLOCK_SIZE:
        raise CheckpointError(
            f"{file}: {name} has {shape[-1]} columns, no multiple of {BLOCK_SIZE}; load the original model with "
            "quantize='fp8', or without quantize"
        )
    wanted = expected_tensors(tuple(shape))
    for part, (dtype, size) in {"": (torch.uint8, (math.prod(shape) // 2, 1)), **wanted}.items():
        full = f"{name}.{part}".removesuffix(".")
        stored = tensors.get(full)
        if stored is None or (stored.dtype, stored.shape) != (dtype, size):
            found = "is missing" if stored is None else f"is {stored.dtype} {list(stored.shape)}"
            raise CheckpointError(f"{file}: {full} {found}; its weight needs {dtype} {list(size)}; {REMEDY}")
    return StoredNf4(tensors[name], {part: tensors[f"{name}.{part}"] for part in wanted}, tuple(shape), offset)


def parse_state(file: Path, name: str, state: Tensor) -> dict[str, Any]:
    try:
        fields = json.loads(state.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {name}{NF4_STATE} is not JSON: {error}; {REMEDY}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: {name}{NF4_STATE} is not a JSON object")
    return fields


def state_json(shape: tuple[int, ...], dtype: torch.dtype, offset: Tensor) -> Tensor:
    """The JSON of a weight, as bytes."""
    name = str(dtype).removeprefix("torch.")
    fields = {"quant_type": "nf4", "blocksize": BLOCK_SIZE, "dtype": name, "shape": list(shape)}
    nested = {"nested_blocksize": NESTED_BLOCK_SIZE, "nested_dtype": "float32", "nested_offset": offset.item()}
    return torch.frombuffer(bytearray(json.dumps(fields | nested).encode()), dtype=torch.uint8)


def tensors_of(name: str, part: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors by which a checkpoint stores a weight. part: as `StoredNf4.read` returns it. shape: of the weight.

    dtype: the one in which the weight is used.
    """
    stored = {f"{name}.{key}": part[key] for key in expected_tensors(shape)}
    state = state_json(shape, dtype, part["nested_offset"])
    return {name: part["codes"].reshape(-1, 1), **stored, name + NF4_STATE: state}


def quantisation_config(dtype: torch.dtype, skipped: list[str]) -> dict[str, Any]:
    """The quantization_config of a config.json. skipped: the linears that are not quantised, by their Hub names."""
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": skipped,
    }  # fmt: skip
