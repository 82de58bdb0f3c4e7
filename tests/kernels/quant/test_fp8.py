"""FP8 weights: values, blocks at the ends of matrices, and the kernel against PyTorch's own conversion."""

import pytest
import torch

from ligermodels.kernels.quant.fp8 import LARGEST, Float8, fp8_dequantize_reference, fp8_quantize
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_every_code_is_dequantised_to_its_value(dtype):
    """All finite codes, in blocks with scales of any size: the product in fp32, rounded once."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes[[127, 255]] = 0  # those that are not finite
    layout = Float8((6, 256), (6,), dtype, (4, 64))
    scale = torch.randn(2, 4, device=DEVICE) / 64
    data = layout.pack([{"codes": codes.view(torch.float8_e4m3fn).expand(6, 256), "scale": scale}])
    of_element = scale.repeat_interleave(4, 0)[:6].repeat_interleave(64, 1)
    expected = (codes.view(torch.float8_e4m3fn).float() * of_element).to(dtype)
    got = layout.dequantize(data)
    assert torch.equal(got, expected) and torch.equal(fp8_dequantize_reference(data, layout), expected)


def test_a_block_is_scaled_so_that_its_largest_element_is_the_largest_of_the_format():
    matrix = torch.randn(130, 200, device=DEVICE) * torch.rand(200, device=DEVICE)
    matrix[:128, :128] = 0
    codes, scale = fp8_quantize(matrix)
    assert scale.shape == (2, 2) and scale[0, 0] == 1
    for rows, columns, number in ((slice(128), slice(128, 200), (0, 1)), (slice(128, 130), slice(128), (1, 0))):
        block = matrix[rows, columns]
        assert scale[number] == block.abs().max() / LARGEST
        assert codes[rows, columns].float().abs().max() == LARGEST
        # e4m3 rounds to 3 bits behind the first: by 1 / 16 at most, of numbers that are not tiny.
        error = (codes[rows, columns].float() * scale[number] - block).abs()
        assert (error <= (block.abs() / 16).clamp(min=scale[number] * 2**-10) * 1.0001).all()


@pytest.mark.usefixtures("kernels")
def test_every_matrix_has_blocks_of_its_own():
    """Parts and experts have no whole number of blocks; each is quantised as if it were alone."""
    weight = torch.randn(3, 300, 72, device=DEVICE)
    for parts in ((300 * 3,), (140, 160) * 3):
        layout = Float8((3, 300, 72), parts, torch.float32)
        data = layout.quantize(weight)
        matrices = weight.view(900, 72).split([300] * 3 if len(parts) == 1 else parts)
        alone = [Float8(tuple(m.shape), (len(m),), torch.float32) for m in matrices]
        expected = [single.dequantize(single.quantize(m)) for single, m in zip(alone, matrices, strict=True)]
        assert torch.equal(layout.dequantize(data).view(900, 72), torch.cat(expected))
        assert torch.equal(layout.pack(layout.unpack(data)), data)
        assert data.numel() == layout.nbytes


def test_another_number_of_rows_is_refused():
    with pytest.raises(ValueError, match=r"fp8: \[3, 100, 72\] in parts of \(299,\) rows"):
        Float8((3, 100, 72), (299,), torch.float32)
