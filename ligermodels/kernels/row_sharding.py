"""How an op over independent rows runs on DTensors: every rank computes the rows that it has.

Rows are sharded along any batch dimension, weights are replicated, and the gradient of a weight is the sum over the
ranks (`Partial`). An input with another placement, a row split between ranks for example, is redistributed first.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch._ops import OpOverload
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


class RowSharding(NamedTuple):
    """Which tensors of an op have its rows.

    rows: arguments and outputs by name, each with the first of its batch dimensions. The other arguments are weights,
        the other outputs their gradients.
    columns: an argument; where it is given, the columns are independent too: the last dimension may be sharded.
    """

    rows: Mapping[str, int]
    columns: str = ""


def register_row_sharding(op: OpOverload, sharding: RowSharding) -> None:
    """Registers how DTensor runs `op`. Of its flags, those that change the outputs' shapes must be `int`: DTensor
    caches what it decides for a call by the tensors, and by the arguments from the first `int` on."""
    schema = op._schema
    arguments = [argument.name if "Tensor" in str(argument.type) else None for argument in schema.arguments]
    outputs = [output.name for output in schema.returns]

    @register_sharding(op)
    def placements(*values: Any) -> list[tuple[list[Any], list[Any]]]:
        tensors = [None if value is None else name for name, value in zip(arguments, values, strict=False)]
        ndim = next(value.ndim for name, value in zip(tensors, values, strict=True) if name in sharding.rows)

        def shard(dim: int) -> tuple[list[Any], list[Any]]:
            placed = {name: Shard(first + dim) for name, first in sharding.rows.items()}
            inputs = [None if name is None else placed.get(name, Replicate()) for name in tensors]
            return [placed.get(name, Partial()) for name in outputs], inputs

        replicated = [Replicate() for _ in outputs], [None if name is None else Replicate() for name in tensors]
        return [replicated, *map(shard, range(ndim if sharding.columns in tensors else ndim - 1))]
