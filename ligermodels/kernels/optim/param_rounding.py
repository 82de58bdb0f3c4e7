"""How an optimizer step keeps an updated fp32 parameter in bf16: exactly, rounded to nearest, or stochastically.

Exactly: the fp32 number, the master, is the bf16 weight and 16 more bits, low_bits, int16 in the weight's shape:

    bits of the master = (bits of the weight << 16) + low_bits
The weight is the master rounded to nearest, ties away from zero, (bits + 0x8000) & 0xFFFF0000: then low_bits is in
[-0x8000, 0x7FFF]. Ties to even would need one value more, 0x8000, for the ties that are rounded down. The bits of a
number are its sign and its magnitude, so that the same holds below zero. A master beyond the largest bf16 number has
an infinite weight, and stays finite itself. NaN stays NaN, with other bits. With low_bits 0 the master is the weight.

To nearest, an update below half a unit in the last place of the weight is lost. Stochastic rounding goes to either
neighbour with a probability that makes the mean exact: updates far below one unit become noise of whole units.

Random bits are words of Philox 4x32-10 (philox.py), one a weight. Word i of the counter (n, step, stream) is that of
the weight 4 n + i; the key is the seed; the stream is the parameter's number. They depend neither on the sharding nor
on earlier steps. `first` is the number of a shard's first weight in the whole parameter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import widen
from ligermodels.kernels.philox import WORD, philox_reference

NEAREST, STOCHASTIC, EXACT = (tl.constexpr(i) for i in range(3))
UPPER = -65536  # the upper 16 bits of an fp32 number, which are a bf16 number
HALF_UNIT = 0x8000  # in the last place of a bf16 number


def master_reference(param: Tensor, low_bits: Tensor | None) -> Tensor:
    """The fp32 number of which `param` and `low_bits` are the parts; without low_bits, `param` in fp32 or wider.

    Where something else has set a weight to zero, the bits below it must not make it a NaN.
    """
    if low_bits is None:
        return widen(param)
    low = torch.where(param == 0, low_bits.clamp_min(0), low_bits)
    return (param.float().view(torch.int32) + low).view(torch.float32)


def split_reference(master: Tensor) -> tuple[Tensor, Tensor]:
    """A master, fp32, as its weight, bf16, and its low_bits, int16."""
    bits = master.view(torch.int32)
    rounded = (bits + HALF_UNIT * (~master.isnan()).int()) & UPPER
    return rounded.view(torch.float32).bfloat16(), (bits - rounded).to(torch.int16)


def round_param_reference(
    p: Tensor, dtype: torch.dtype, step: Tensor, low_bits: Tensor | None, seed: int | None, stream: int, first: int
) -> tuple[Tensor, Tensor | None]:
    """`p`, fp32, in `dtype`, and the new low_bits if there are old ones."""
    if low_bits is not None:
        return split_reference(p.float())  # a scalar has become fp64 by the fp64 step count
    if seed is None or p.dtype != torch.float32:
        return p.to(dtype), None
    bits = p.view(torch.int32) + (words_reference(p.numel(), step, seed, stream, first).view(p.shape) & 0xFFFF)
    return (bits.to(torch.int32) & UPPER).view(torch.float32).to(dtype), None


def words_reference(numel: int, step: Tensor, seed: int, stream: int, first: int) -> Tensor:
    """The random words of `numel` weights from number `first` on: int64 in [0, 2^32)."""
    number = torch.arange(first, first + numel, device=step.device)
    group, zero = number >> 2, torch.zeros_like(number)
    counter = [group & WORD, group >> 32, zero + step.long(), zero + stream]
    words = philox_reference(counter, [zero + (seed & WORD), zero + (seed >> 32 & WORD)])
    return torch.stack(words, -1).gather(-1, (number & 3)[:, None])[:, 0]


@triton.jit
def random_words(seed, group, step, stream):
    """Four words for each of a row's groups of four weights [..., GROUPS], as [..., GROUPS, 2, 2] in their order."""
    zero = tl.zeros_like(group).to(tl.int32)
    low, high = group.to(tl.int32), (group >> 32).to(tl.int32)
    a, b, c, d = tl.philox(seed, low, high, zero + step.to(tl.int32), zero + stream)
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def round_stochastically(param, words):
    """param: fp32; words: random, of its shape. Returns fp32 numbers that bf16 can represent."""
    bits = param.to(tl.int32, bitcast=True) + (words.to(tl.int32, bitcast=True) & 0xFFFF)
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def join_master(param, low_bits):
    """`master_reference` of a bf16 weight as fp32."""
    bits, low = param.to(tl.int32, bitcast=True), low_bits.to(tl.int32)
    low = tl.where((bits & 0x7FFFFFFF) == 0, tl.maximum(low, 0), low)
    return (bits + low).to(tl.float32, bitcast=True)


@triton.jit
def split_master(master):
    """`split_reference`; the weight is a fp32 number that bf16 can represent."""
    bits = master.to(tl.int32, bitcast=True)
    rounded = (bits + tl.where(master == master, 0x8000, 0)) & -65536
    return rounded.to(tl.float32, bitcast=True), (bits - rounded).to(tl.int16)


def mode_of(low_bits: Tensor | None, seed: int | None) -> tl.constexpr:
    return EXACT if low_bits is not None else NEAREST if seed is None else STOCHASTIC


def check_rounding(op: str, param: Tensor, low_bits: Tensor | None, seed: int | None) -> None:
    """Raises ValueError for arguments that do not go together."""
    if low_bits is not None and seed is not None:
        raise ValueError(f"{op}: low_bits and seed are two ways to round; give one of them")
    if (low_bits is not None or seed is not None) and param.dtype != torch.bfloat16:
        raise ValueError(f"{op}: param is {param.dtype}; low_bits and seed are for torch.bfloat16")
    if low_bits is not None and (low_bits.shape != param.shape or low_bits.dtype != torch.int16):
        raise ValueError(
            f"{op}: low_bits is {low_bits.dtype} {list(low_bits.shape)}; it must be int16 {list(param.shape)}"
        )
