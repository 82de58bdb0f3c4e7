import pytest
import torch
import torch.nn.functional as F
from bitsandbytes import functional

from ligermodels.kernels.decoding.few_rows_linear import few_rows_gated_linear, few_rows_linear, few_rows_norm_linear
from ligermodels.kernels.dispatch import autocast
from ligermodels.kernels.linear.linear import LowRank, gated_linear, low_rank_linear, norm_linear
from ligermodels.kernels.quant.nf4 import Nf4, Nf4Part, nf4_dequantize_reference, nf4_quantize, nf4_weight
from ligermodels.kernels.quant.quantised_weight import QuantisedWeight, frozen_linear
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES
from tests.kernels.linear.test_linear import saved_bytes

SHAPES = (3, 64), (64, 64), (300, 320), (128, 2880)


def draw_weight(shape, dtype):
    weight = torch.randn(shape, device=DEVICE).to(dtype)
    weight[1] = 0  # blocks of zeros
    return weight


def quantised_by_bitsandbytes(weight) -> tuple[Nf4Part, torch.Tensor]:
    """The tensors of bitsandbytes, and what it dequantises from them.

    On a CPU in its own implementation of PyTorch, which has the comparisons of its CUDA kernels: its C++ for CPUs finds
    a neighbouring code for one in a thousand of the nested scales.
    """
    codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    codes = codes.view(len(weight), -1)
    if weight.is_cuda:  # for row 1, of zeros, its CUDA kernels divide by 0; its others find 7, the code of 0
        codes[1] = 0x77
    else:
        absmax = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")[1].absmax
        portable = torch.ops.bitsandbytes.quantize_blockwise.default._op_dk
        key = torch._C.DispatchKey.CompositeExplicitAutograd
        state.absmax, nested = portable(key, absmax - state.offset, state.state2.code, 256)
        assert torch.equal(nested, state.state2.absmax)
    part = Nf4Part(codes, state.absmax, state.state2.absmax, state.offset, state.code, state.state2.code)
    return part, dequantised_by_bitsandbytes(codes, state)


def dequantised_by_bitsandbytes(codes, state):
    """By way of fp32, and rounded once: its C++ for fp16 has other bits on processors with AVX-512."""
    dtype, state.dtype = state.dtype, torch.float32
    return functional.dequantize_4bit(codes.view(-1, 1), state).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["kernels", "reference"])
def test_bits_are_those_of_bitsandbytes(path, dtype, request):
    if path == "kernels":
        request.getfixturevalue("kernels")
    elif DEVICE != "cpu":
        pytest.skip("references run on CPU tensors")
    for shape in SHAPES:
        weight = draw_weight(shape, dtype)
        expected, values = quantised_by_bitsandbytes(weight)
        got = nf4_quantize(weight)
        for name in Nf4Part._fields:
            assert torch.equal(getattr(got, name), getattr(expected, name)), f"{name} of {shape}"
        assert torch.equal(nf4_weight(weight).dequantize(), values), f"values of {shape}"


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter computes bf16 wrongly, so the reference runs instead")
def test_bits_in_bfloat16_are_those_of_bitsandbytes():
    weight = draw_weight((300, 320), torch.bfloat16)
    expected, values = quantised_by_bitsandbytes(weight)
    assert all(torch.equal(a, b) for a, b in zip(nf4_quantize(weight), expected, strict=True))
    assert torch.equal(nf4_weight(weight).dequantize(), values)


@pytest.mark.usefixtures("kernels", "poisoned")
def test_parts_are_quantised_as_if_each_were_alone():
    """Their scales are no multiple of a group, so that the groups of the second begin where those of the first end."""
    layout = Nf4((37, 192), (21, 1, 15), torch.float32)
    parts = [draw_weight((rows + 1, 192), torch.float32)[1:] for rows in layout.parts]
    data = layout.quantize(torch.cat(parts))
    together = layout.dequantize(data)
    assert torch.equal(together, torch.cat([nf4_weight(part).dequantize() for part in parts]))
    assert torch.equal(together, nf4_dequantize_reference(data, layout))
    for got, part in zip(layout.unpack(data), parts, strict=True):
        assert all(torch.equal(got[name], value) for name, value in nf4_quantize(part)._asdict().items())


def test_the_bytes_of_an_element():
    layout = Nf4((4096, 4096), (4096,), torch.bfloat16)
    tables_and_rows = 4 * (16 + 256 + 4096)
    assert layout.nbytes == 4096 * 4096 * (1 / 2 + 1 / 64 + 8 / (64 * 256)) + tables_and_rows


@pytest.mark.parametrize("shape", [(4, 100), (64,)])
def test_shapes_without_whole_blocks_are_refused(shape):
    with pytest.raises(ValueError, match="multiple of 64"):
        nf4_quantize(torch.ones(shape))


def test_parts_that_are_not_all_rows_are_refused():
    with pytest.raises(ValueError, match=r"parts of \(3,\) rows"):
        Nf4((4, 64), (3,), torch.float32)


def draw_operands():
    x, bias = torch.randn(2, 3, 128, device=DEVICE), torch.randn(20, device=DEVICE)
    a, b = torch.randn(4, 128, device=DEVICE), torch.randn(20, 4, device=DEVICE)
    return nf4_weight(torch.randn(20, 128, device=DEVICE)), x, bias, LowRank(a, b, ((0, 20),), 0.5)


def nodes():
    """Every op that takes a quantised weight, as a function of the weight, its input and the rest."""
    norm = torch.randn(128, device=DEVICE)
    return {
        "frozen_linear": lambda weight, x, bias, _: (
            frozen_linear(x, weight, bias) if isinstance(weight, QuantisedWeight) else F.linear(x, weight, bias)
        ),
        "low_rank_linear": lambda weight, x, bias, update: low_rank_linear(x, weight, bias, update),
        "norm_linear": lambda weight, x, bias, update: norm_linear(x, None, norm, weight, bias, 1e-6, 0.0, update)[0],
        "gated_linear": lambda weight, x, bias, update: gated_linear(
            torch.cat([x, x.sin()], -1), weight, bias, "silu", update
        ),
    }


@pytest.mark.parametrize("name", nodes())
@pytest.mark.parametrize("path", ["kernels", "reference"])
def test_results_and_gradients_are_those_of_the_dequantised_weight(name, path, request):
    if path == "kernels":
        request.getfixturevalue("kernels")
    elif DEVICE != "cpu":
        pytest.skip("references run on CPU tensors")
    weight, x, bias, update = draw_operands()
    leaves = [y.requires_grad_() for y in (x, bias, *(update[:2] if name != "frozen_linear" else ()))]
    node = nodes()[name]
    results = []
    for operand in (weight, weight.dequantize()):
        y = node(operand, x, bias, update)
        results.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_under_autocast_a_weight_is_dequantised_in_its_dtype():
    weight, *others = draw_operands()
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        cast, x, bias, update = autocast(weight, *others)
    assert {y.dtype for y in (cast, cast.dequantize(), x, bias, update.a)} == {torch.bfloat16}
    assert cast.data is weight.data and torch.equal(cast.dequantize(), weight.dequantize().bfloat16())
    assert update.columns == others[-1].columns and autocast(weight)[0] is weight


@pytest.mark.parametrize("path", ["kernels", "reference"])
def test_backward_keeps_the_bytes_of_the_weight_alone(path, request):
    if path == "kernels":
        request.getfixturevalue("kernels")
    elif DEVICE != "cpu":
        pytest.skip("references run on CPU tensors")
    weight, x, _, _ = draw_operands()
    x.requires_grad_()
    assert saved_bytes(lambda x, data: frozen_linear(x, QuantisedWeight(data, weight.layout)), x, weight.data) == 0


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_few_rows_read_the_weight_that_many_read(rows):
    """The depth is no multiple of a program's step, and the second part's scales begin within a group."""
    layout = Nf4((37, 192), (21, 16), torch.float32)
    weight = QuantisedWeight(layout.quantize(draw_weight((37, 192), torch.float32)), layout)
    dense, norm, bias = weight.dequantize(), torch.randn(192, device=DEVICE), torch.randn(37, device=DEVICE)
    x, residual = torch.randn(2, rows, 192, device=DEVICE)
    gate_up = torch.randn(rows, 384, device=DEVICE)
    for got, expected in (
        (few_rows_linear(x, weight, bias), F.linear(x, dense, bias)),
        (few_rows_norm_linear(x, residual, norm, weight)[0], few_rows_norm_linear(x, residual, norm, dense)[0]),
        (few_rows_gated_linear(gate_up, weight, bias), few_rows_gated_linear(gate_up, dense, bias)),
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # fp32 sums of 192 in another order
