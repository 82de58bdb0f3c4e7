"""MXFP4 weights: every code and every scale has the value of the format, by the kernel and in PyTorch."""

import pytest
import torch

from ligermodels.kernels.quant.mxfp4 import E2M1, Mxfp4Layout
from tests.conftest import DEVICE


@pytest.fixture
def stored():
    """Rows with all exponents but those at which fp32 ends; each block has all codes in both halves of a byte."""
    exponents = torch.arange(250, dtype=torch.uint8, device=DEVICE).view(50, 5)
    code = torch.arange(16, dtype=torch.uint8, device=DEVICE)
    return exponents, (code | code.flip(0) << 4).repeat(50, 5)


@pytest.mark.parametrize("path", ["kernels", "reference"])
@pytest.mark.usefixtures("poisoned")
def test_every_code_and_scale_has_its_value(path, stored, request):
    if path == "kernels":
        request.getfixturevalue("kernels")
    elif DEVICE != "cpu":
        pytest.skip("references run on CPU tensors")
    exponents, codes = stored
    layout = Mxfp4Layout((2, 25, 160), (10, 40), torch.float32)
    rows = slice(10), slice(10, 50)
    data = layout.pack([{"codes": codes[part], "exponents": exponents[part]} for part in rows])
    values = torch.tensor([E2M1, E2M1[::-1]], dtype=torch.float64).T.flatten()
    expected = values * 2.0 ** (exponents.flatten()[:, None].cpu().double() - 127)  # a GPU's powers of two are inexact
    got = layout.dequantize(data)
    assert torch.equal(got.view(-1, 32).cpu().double(), expected)
    assert got.shape == (2, 25, 160) and torch.equal(layout.pack(layout.unpack(data)), data)
    assert len(data) == layout.nbytes == 50 * 160 // 2 + 256  # the exponents, 250, end at a multiple of 16


def test_what_is_no_whole_block_is_refused():
    with pytest.raises(ValueError, match="whole blocks of 32"):
        Mxfp4Layout((4, 48), (4,), torch.bfloat16)
    with pytest.raises(ValueError, match="not quantised"):
        Mxfp4Layout((4, 64), (4,), torch.bfloat16).quantize(torch.zeros(4, 64))
