"""Counter-based random numbers: Philox 4x32-10. A number depends on its key and counter, and on no earlier number.

    draw_bits_reference   seed [B] int64, counter [B, 2] int64 -> [B] int64, uniform in [0, 2^62)
    draw_bits             the same of one row, for kernels; equal to the bit
The key is the seed's 64 bits. The counter's four words of 32 bits are its second number, low word first, then its first
number: (request, position) gives (position, request). The result is the first word without its lowest bit, followed by
the second word without its lowest bit.
Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405; test vectors: Random123, kat_vectors.
"""

import triton
import triton.language as tl
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
HALF_BITS = 31  # of a random number
KERNEL_HALF_BITS, KERNEL_MASK = tl.constexpr(HALF_BITS), tl.constexpr(2**HALF_BITS - 1)


def philox_reference(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Four random words of 32 bits. counter: four words, key: two; int64 of equal shapes, in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # modulo 2^64: the sign bit is bit 63 of the product
        c0, c1, c2, c3 = ((b >> 32) & WORD) ^ c1 ^ k0, b & WORD, ((a >> 32) & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return [c0, c1, c2, c3]


def draw_bits_reference(seeds: Tensor, counters: Tensor) -> Tensor:
    """One random number of 62 bits for each row; shapes above."""
    first, second = counters.unbind(-1)
    high, low, _, _ = philox_reference([*_split_words(second), *_split_words(first)], _split_words(seeds))
    return ((high >> 1) << HALF_BITS) | (low >> 1)


def _split_words(x: Tensor) -> list[Tensor]:
    """The low and the high 32 bits of int64 numbers."""
    return [x & WORD, (x >> 32) & WORD]


def multiply_high_reference(a: Tensor, b: Tensor) -> Tensor:
    """floor(a b / 2^62) of int64 numbers in [0, 2^62): the fraction a / 2^62 of b."""
    mask = (1 << HALF_BITS) - 1
    a_high, a_low, b_high, b_low = a >> HALF_BITS, a & mask, b >> HALF_BITS, b & mask
    middle = a_high * b_low + a_low * b_high + ((a_low * b_low) >> HALF_BITS)  # below 2^63
    return a_high * b_high + (middle >> HALF_BITS)


@triton.jit
def draw_bits(seed, first, second):
    """A random number of 62 bits, int64, from three int64 numbers."""
    high, low, _, _ = tl.philox(
        seed, second.to(tl.int32), (second >> 32).to(tl.int32), first.to(tl.int32), (first >> 32).to(tl.int32)
    )
    return ((high >> 1).to(tl.int64) << KERNEL_HALF_BITS) | (low >> 1).to(tl.int64)


@triton.jit
def multiply_high(a, b):
    """`multiply_high_reference` of int64 scalars or tiles."""
    a_high, a_low, b_high, b_low = a >> KERNEL_HALF_BITS, a & KERNEL_MASK, b >> KERNEL_HALF_BITS, b & KERNEL_MASK
    middle = a_high * b_low + a_low * b_high + ((a_low * b_low) >> KERNEL_HALF_BITS)
    return a_high * b_high + (middle >> KERNEL_HALF_BITS)
