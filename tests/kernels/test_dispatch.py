import functools

import pytest
import torch
import triton.language as tl

from ligermodels.kernels import launch as launch_module
from ligermodels.kernels.dispatch import Node, is_traced, register_op, runs_kernels
from ligermodels.kernels.launch import Variants, _specializations_of, kernel
from tests.conftest import DEVICE


@kernel(do_not_specialize=["count"])
def double(x_ptr, y_ptr, count, scale, TILE: tl.constexpr, OFFSET: tl.constexpr):
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = column < count
    tl.store(y_ptr + column, tl.load(x_ptr + column, mask) * scale + OFFSET, mask)


def doubled(x, tile=16, offset=1):
    y = torch.empty_like(x)
    double.bind(TILE=tile, OFFSET=offset, num_warps=1)(-(-len(x) // tile), x, y, len(x), 2.0)
    return y


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 16, 17, 64, 1000])
def test_later_launches_compute_the_same_as_the_first(count):
    x = torch.randn(count, device=DEVICE)
    for _ in range(3):
        assert torch.equal(doubled(x), 2 * x + 1)


@pytest.mark.gpu
def test_counts_share_one_compiled_kernel_and_misaligned_addresses_do_not():
    double.bind.cache_clear()
    double.jit.device_caches.clear()
    x = torch.randn(1000, device=DEVICE)
    for count in (2, 16, 17, 64, 1000):
        doubled(x[:count])
    (cache, *_), *_ = double.jit.device_caches.values()
    assert len(cache) == 1
    assert torch.equal(doubled(x[1:]), 2 * x[1:] + 1)
    assert len(cache) == 2


@pytest.mark.gpu
def test_a_number_may_be_an_integer_and_then_a_float():
    x, y = torch.randn(16, device=DEVICE), torch.empty(16, device=DEVICE)
    for scale in (3, 3, 3.0, 3.0):
        double.bind(TILE=16, OFFSET=0, num_warps=1)(1, x, y, 16, scale)
        assert torch.equal(y, 3 * x)


@pytest.mark.gpu
def test_dtypes_and_constants_do_not_share_a_kernel():
    x = torch.randn(64, device=DEVICE)
    for tile in (16, 32):
        for offset in (0, 3):
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(doubled(x.to(dtype), tile, offset), 2 * x.to(dtype) + offset)


def test_numbers_that_triton_specializes_for_have_different_keys():
    keys = _specializations_of(0, 1, 2, 16, -2, 2**31, 0.5)
    assert len(set(keys)) == len(keys)
    assert _specializations_of(2, 16, 0.5) == _specializations_of(17, 48, 1e9)
    variants = Variants(double.jit, {"TILE": 16, "OFFSET": 0})
    find = functools.partial(variants.find, 0, None, torch.float32, torch.float32)
    assert find(2, 0.5) is find(17, 1e9)
    # Python takes 1 and 1.0 for equal; the compiler does not.
    assert find(16, 1) is not find(16, 1.0)


def test_a_launcher_passes_addresses_and_numbers_and_compiles_each_variant_once(monkeypatch):
    compiled, launched = [], []

    def compile_(variants, programs, *args):
        compiled.append((programs, *args))
        return lambda *args: launched.append(args), ("leading",), ["trailing"]

    monkeypatch.setattr(launch_module, "interpreting", False)
    monkeypatch.setattr(launch_module.Variants, "compile", compile_)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    launch = kernel()(double.jit.fn).bind(TILE=16, OFFSET=0)
    x, y = torch.empty(2, 64)
    arguments = [(2, x, y, 18, 0.5), (3, y, x, 33, 2.0), (1, x[1:], y, 18, 0.5), (1, y[5:], x, 18, 0.5)]
    for args in arguments:
        launch(*args)
    assert [args[0] for args in compiled] == [2, 1]  # programs of the first launch and of the first misaligned one
    assert launched == [
        (programs, 1, 1, "stream", "leading", a.data_ptr(), b.data_ptr(), *numbers, "trailing")
        for programs, a, b, *numbers in arguments[1::2]
    ]
    with pytest.raises(TypeError):
        launch(2, x, y, 18)


class Subclass(torch.Tensor):
    pass


def test_fake_meta_and_subclassed_tensors_are_traced_and_plain_ones_are_not():
    x = torch.ones(2)
    assert not is_traced((x, torch.nn.Parameter(x), 1.0))
    assert is_traced((x.to("meta"), 1.0))
    assert is_traced((x, 1.0, x.as_subclass(Subclass)))
    with torch._subclasses.FakeTensorMode():
        assert is_traced((torch.ones(2),))


def test_float64_runs_as_the_reference_on_a_gpu(monkeypatch):
    monkeypatch.setattr(launch_module, "interpreting", False)
    assert runs_kernels(torch.empty(1, device="meta"))  # as a GPU's, it is not on the CPU
    assert not runs_kernels(torch.empty(1, device="meta", dtype=torch.float64))


class Twice(Node):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return factor * x

    @staticmethod
    def backward(ctx, dy):
        return ctx.factor * dy, None


def test_the_schema_of_an_op_is_its_launchers_signature():
    """Its fake implementation without one: of an output like the first argument, or of none."""

    def like(x: torch.Tensor, n: int, eps: float | None = None, *, inplace: bool = False) -> torch.Tensor:
        return x + n

    def written(x: torch.Tensor, y: torch.Tensor | None, dtype: torch.dtype, kind: str) -> None:
        pass

    def several(x: torch.Tensor, flag: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x, None

    register_op("schema_like", like)
    register_op("schema_written", written, writes=("x", "y"))
    register_op("schema_several", several, lambda x, flag: (x, x), outputs=("y", "z"))
    found = [getattr(torch.ops.ligermodels, f"schema_{name}").default for name in ("like", "written", "several")]
    assert [str(op._schema).removeprefix("ligermodels::schema_") for op in found] == [
        "like(Tensor x, int n, float? eps=None) -> Tensor",
        "written(Tensor(a!) x, Tensor(b!)? y, ScalarType dtype, str kind) -> ()",
        "several(Tensor x, bool flag) -> (Tensor y, Tensor z)",
    ]
    x = torch.empty(2, 3, dtype=torch.bfloat16, device="meta")
    assert found[0](x, 1).shape == x.shape and found[1](x, None, x.dtype, "") is None


def test_a_node_has_a_gradient():
    x = torch.randn(3, requires_grad=True)
    (dx,) = torch.autograd.grad(Twice.apply(x, 2.0), x, torch.ones(3))
    assert torch.equal(dx, torch.full((3,), 2.0))
