import pytest
import torch
import triton
import triton.language as tl

from ligermodels.kernels.philox import (
    draw_bits,
    draw_bits_reference,
    multiply_high,
    multiply_high_reference,
    philox_reference,
)
from tests.conftest import DEVICE

# Random123, kat_vectors: counter, key, result of Philox 4x32-10.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
NUMBERS = [0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 5, 2**63 - 1, -(2**63)]


@triton.jit
def _draw_kernel(seeds_ptr, counters_ptr, sums_ptr, bits_ptr, products_ptr):
    row = tl.program_id(0)
    counters = counters_ptr + 2 * row
    bits = draw_bits(tl.load(seeds_ptr + row), tl.load(counters), tl.load(counters + 1))
    tl.store(bits_ptr + row, bits)
    tl.store(products_ptr + row, multiply_high(bits, tl.load(sums_ptr + row)))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, expected):
    words = philox_reference([torch.tensor([x]) for x in counter], [torch.tensor([x]) for x in key])
    assert [x.item() for x in words] == expected


def test_bits_have_the_documented_counter_key_and_order():
    counter, key, words = KNOWN_ANSWERS[2]

    def join(low, high):  # as a signed number of 64 bits
        return ((high << 32 | low) ^ 1 << 63) - (1 << 63)

    request, position = join(*counter[2:]), join(*counter[:2])
    bits = draw_bits_reference(torch.tensor([join(*key)]), torch.tensor([[request, position]]))
    assert bits.item() == (words[0] >> 1) << 31 | words[1] >> 1


def test_the_kernels_bits_and_products_equal_the_reference(kernels):
    drawn = torch.randint(-(2**63), 2**63 - 1, (20, 3))
    triples = torch.cat([torch.tensor([NUMBERS, NUMBERS[::-1], NUMBERS]).T, drawn])
    seeds, counters = (x.contiguous().to(DEVICE) for x in triples.split([1, 2], 1))
    sums = torch.randint(2**62, (len(triples),), device=DEVICE)
    bits, products = torch.empty_like(sums), torch.empty_like(sums)
    _draw_kernel[len(triples),](seeds, counters, sums, bits, products)
    expected = draw_bits_reference(seeds.cpu()[:, 0], counters.cpu())
    assert torch.equal(bits.cpu(), expected)
    assert torch.equal(products.cpu(), multiply_high_reference(expected, sums.cpu()))


def test_multiply_high_is_exact():
    a = [0, 1, 2**31 - 1, 2**31, 2**61 + 12345, 2**62 - 1]
    for x in a:
        products = multiply_high_reference(torch.full((len(a),), x), torch.tensor(a))
        assert products.tolist() == [x * y >> 62 for y in a]
