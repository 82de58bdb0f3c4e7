"""FP8 weights: values, blocks at the ends of matrices, and the kernel against PyTorch's own conversion."""

import pytest
import torch

from ligermodels.kernels.moe.grouped_gemm import (
    Projection,
    low_rank_grouped_gemm,
    low_rank_grouped_input_gradient,
)
from ligermodels.kernels.quant.fp8 import LARGEST, Float8, fp8_dequantize_reference, fp8_quantize
from ligermodels.kernels.quant.fp8_products import MultipliedFloat8, quantize_rows, transposed
from ligermodels.kernels.quant.quantised_weight import QuantisedWeight, frozen_linear
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, relative_error


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


PRODUCTS = {"rows": (1, 256), "blocks": (128, 128)}


@pytest.mark.parametrize("block", PRODUCTS.values(), ids=PRODUCTS)
def test_both_factors_of_a_product_are_rounded_to_fp8(block):
    """Forward and backward equal the product of what was quantised, and differ from the exact one by its rounding."""
    torch.manual_seed(0)
    layout = MultipliedFloat8((384, 256), (256, 128), torch.bfloat16, block)
    weight = layout.quantize(torch.randn(384, 256, device=DEVICE) * torch.rand(384, 1, device=DEVICE))
    x, bias = torch.randn(3, 27, 256, device=DEVICE), torch.randn(384, device=DEVICE)
    leaves = [y.bfloat16().requires_grad_() for y in (x, bias)]
    y = frozen_linear(leaves[0], QuantisedWeight(weight, layout), leaves[1])
    dy = torch.randn_like(y)
    y.backward(dy)
    dense = layout.with_dtype(torch.float32).dequantize(weight).double()
    of_row = layout.view(weight)[1] if layout.has_row_scales else torch.ones(384, 1, device=DEVICE)
    group = layout.columns_of_scale
    expected = rounded(leaves[0], group) @ dense.mT + leaves[1].double()
    assert relative_error(y.flatten(0, 1), expected) < 3e-3
    scaled = rounded(dy.float() * of_row.mT, 384 if layout.has_row_scales else group)
    assert relative_error(leaves[0].grad.flatten(0, 1), scaled @ (dense / of_row)) < 3e-3
    exact = leaves[0].double() @ dense.mT + leaves[1].double()
    assert 0.02 < relative_error(y, exact) < 0.05
    assert 0.02 < relative_error(leaves[0].grad, dy.double() @ dense) < 0.05


def rounded(x, group):
    """x after FP8, with a scale for each group of a row; float64."""
    x = x.detach().flatten(0, -2)
    codes, scale = fp8_quantize(x, (1, group))
    return codes.double() * scale.double().repeat_interleave(group, 1)


@pytest.mark.parametrize(
    ("shape", "parts", "dtype", "block"),
    [
        ((40, 32), (40,), torch.bfloat16, (1, 32)),
        ((32, 40), (32,), torch.bfloat16, (1, 40)),
        ((192, 256), (192,), torch.bfloat16, (128, 128)),
        ((128, 128), (128,), torch.float32, (128, 128)),
    ],
)
def test_a_weight_that_fp8_products_do_not_take_is_dequantised(shape, parts, dtype, block):
    layouts = [kind(shape, parts, dtype, block) for kind in (Float8, MultipliedFloat8)]
    data = layouts[0].quantize(torch.randn(shape, device=DEVICE))
    x = torch.randn(3, shape[1], dtype=dtype, device=DEVICE)
    first, second = (frozen_linear(x, QuantisedWeight(data, layout)) for layout in layouts)
    assert not layouts[1].is_multiplied and torch.equal(first, second)


def test_groups_of_rows_are_multiplied_in_fp8_each_by_its_weight():
    torch.manual_seed(0)
    layout = MultipliedFloat8((3, 64, 128), (32, 32) * 3, torch.bfloat16, (1, 128))
    data = layout.quantize(torch.randn(3, 64, 128, device=DEVICE) * torch.rand(3, 64, 1, device=DEVICE))
    offsets = torch.tensor([70, 70, 200], dtype=torch.int32, device=DEVICE)
    x, dy = torch.randn(200, 128, device=DEVICE).bfloat16(), torch.randn(200, 64, device=DEVICE).bfloat16()
    projection = Projection(data, None, None, None, layout, 1.0)
    y, _ = low_rank_grouped_gemm(x, offsets, projection)
    dx = low_rank_grouped_input_gradient(dy, offsets, None, projection)
    dense = layout.with_dtype(torch.float32).dequantize(data).double()
    of_row = layout.view(data)[1].view(3, 64, 1).double()
    for rows, group in ((slice(70), 0), (slice(70, 200), 2)):
        assert relative_error(y[rows], rounded(x[rows], 128) @ dense[group].mT) < 3e-3
        scaled = rounded(dy[rows].double() * of_row[group].mT, 64)
        assert relative_error(dx[rows], scaled @ (dense[group] / of_row[group])) < 3e-3
        assert relative_error(y[rows], x[rows].double() @ dense[group].mT) > 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(7, 28672, 28672), (513, 576, 576), (130, 4096, 128), (9, 200, 128)]
)
def test_rows_are_quantised_as_by_pytorch(rows, columns, group, dtype):
    """The interpreter truncates where a GPU rounds."""
    x = torch.randn(rows, columns, device=DEVICE, dtype=dtype) * torch.rand(rows, 1, device=DEVICE)
    x[2] = 0
    factors, of_row = torch.rand(3, columns, device=DEVICE), torch.arange(rows, device=DEVICE) % 3
    for given, factor in (((), 1.0), ((factors,), factors[:1]), ((factors, of_row), factors[of_row])):
        codes, scale = quantize_rows(x, group, *given)
        scaled = x.float() * factor
        expected, of_groups = fp8_quantize(scaled, (1, group))
        assert torch.equal(scale, of_groups) and scale.stride(0) == 1
        # Triton divides to 2 ulp: of numbers with few bits some lie halfway between two codes.
        assert (codes.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 1e-3
        assert relative_error(codes.float(), expected.double()) < 5e-3


@pytest.mark.gpu
def test_codes_are_transposed():
    codes = torch.randint(256, (2, 300, 530), device=DEVICE, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(transposed(codes).view(torch.uint8), codes.view(torch.uint8).mT)
    assert torch.equal(transposed(codes[0]).view(torch.uint8), codes[0].view(torch.uint8).t())
