"""How an optimizer step rounds an updated parameter from fp32 to bf16: stochastically, or with a compensation.

To nearest, an update below half a unit in the last place of a bf16 weight is lost. Stochastic rounding goes to either
neighbour with a probability that makes the mean exact. Kahan's compensation is a second bf16 tensor: what rounding left
over, a part of the weight in its next update.

Random bits are words of Philox 4x32-10 (philox.py), one a weight. Word i of the counter (n, step, stream) is that of
the weight 4 n + i; the key is the seed; the stream is the parameter's number. They depend neither on the sharding nor
on earlier steps. `first` is the number of a shard's first weight in the whole parameter.
Sources: Zamirai et al. 2020, https://arxiv.org/abs/2010.06192. Must not know the optimizer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.philox import WORD, philox_reference

NEAREST, STOCHASTIC, KAHAN = (tl.constexpr(i) for i in range(3))
UPPER = -65536  # the upper 16 bits of an fp32 number, which are a bf16 number


def round_param_reference(
    p: Tensor, dtype: torch.dtype, step: Tensor, compensation: Tensor | None, seed: int | None, stream: int, first: int
) -> tuple[Tensor, Tensor | None]:
    """`p`, fp32, in `dtype`, and the new compensation; the old one is a part of `p` already."""
    if compensation is not None:
        rounded = p.to(dtype)
        return rounded, (p - rounded.to(p.dtype)).to(compensation.dtype)
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
def round_to_nearest(param):
    """The same to nearest, ties to even."""
    bits = param.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & -65536).to(tl.float32, bitcast=True)


def mode_of(compensation: Tensor | None, seed: int | None) -> tl.constexpr:
    return KAHAN if compensation is not None else NEAREST if seed is None else STOCHASTIC


def check_rounding(op: str, param: Tensor, compensation: Tensor | None, seed: int | None) -> None:
    """Raises ValueError for arguments that do not go together."""
    if compensation is not None and seed is not None:
        raise ValueError(f"{op}: compensation and seed are two ways to round; give one of them")
    if (compensation is not None or seed is not None) and param.dtype != torch.bfloat16:
        raise ValueError(f"{op}: param is {param.dtype}; compensation and seed are for torch.bfloat16")
    if compensation is not None and compensation.shape != param.shape:
        raise ValueError(f"{op}: compensation {list(compensation.shape)} must have the shape {list(param.shape)}")
