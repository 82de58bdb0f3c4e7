"""The shortened operations of Triton's interpreter give what its own give: the same numbers, dtypes and shapes."""

import itertools
from inspect import unwrap

import numpy as np
import pytest
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter

from tests import interpreter
from tests.conftest import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled on a GPU")
SEMANTIC = triton_interpreter.interpreter_semantic
SHAPES = ((), (4,), (4, 1), (1, 8), (4, 8))
DTYPES = (core.int32, core.int64, core.float32, core.float16, core.int1)


def tensor(shape, dtype, seed):
    """Numbers of both signs, without zero; a tensor without a shape is a scalar, whose array has one element."""
    numbers = np.random.default_rng(seed).integers(1, 9, shape or 1) * np.random.default_rng(9).choice(
        [-1, 1], shape or 1
    )
    data = numbers.astype(triton_interpreter._get_np_dtype(dtype))
    of = interpreter.block_of(dtype, shape) if shape else dtype
    return core.tensor(triton_interpreter.TensorHandle(data, dtype), of)


def outcome(operator, *operands):
    try:
        result = operator(*operands)
    except Exception as error:
        return type(error)
    return result.handle.data.tolist(), result.handle.data.shape, str(result.dtype), str(result.type)


OTHERS = [3, -2, 0.5, core.constexpr(2), *(tensor(*each, 1) for each in itertools.product(SHAPES, DTYPES))]


@pytest.mark.parametrize("name", interpreter.OPERATORS)
def test_operators(name):
    shortened = getattr(core.tensor, name)
    slow = unwrap(shortened)
    compared = 0
    for each, other in itertools.product(itertools.product(SHAPES, DTYPES), OTHERS):
        x = tensor(*each, 0)
        expected = outcome(slow, x, other)
        if isinstance(expected, tuple):
            assert outcome(shortened, x, other) == expected, (each, other)
            compared += 1
    assert compared > 100


def test_choices():
    masks = [tensor(shape, core.int1, 0) for shape in SHAPES]
    values = [0.5, float("-inf"), 2, *(tensor(*each, 1) for each in itertools.product(SHAPES, DTYPES))]
    compared = 0
    for operands in itertools.product(masks, values, values):
        expected = outcome(unwrap(TritonSemantic.where), SEMANTIC, *operands)
        if isinstance(expected, tuple):
            assert outcome(TritonSemantic.where, SEMANTIC, *operands) == expected
            compared += 1
    assert compared > 1000


@pytest.mark.parametrize("dtype", [core.float32, core.int64, core.float16, core.int1])
def test_sums_of_pointers_and_loads(dtype):
    numbers = np.arange(1, 99).astype(triton_interpreter._get_np_dtype(dtype))
    pointer = core.pointer_type(dtype)
    masks = [None, *(tensor(shape, core.int32, 0) > 0 for shape in SHAPES)]
    others = [None, *(SEMANTIC.to_tensor(value) for value in (0.0, 3))]
    offsets = [1, *(tensor(*each, 0) for each in itertools.product(SHAPES, (core.int32, core.int64)))]
    compared = 0
    for shape, offset in itertools.product(SHAPES, offsets):
        places = np.full(shape or 1, numbers[40:].ctypes.data, np.uint64)
        of = interpreter.block_of(pointer, shape) if shape else pointer
        pointers = core.tensor(triton_interpreter.TensorHandle(places, pointer), of)
        expected = outcome(unwrap(core.tensor.__add__), pointers, offset)
        if isinstance(expected, type):
            continue
        assert outcome(core.tensor.__add__, pointers, offset) == expected
        for mask, other in itertools.product(masks, others):
            settings = SEMANTIC, pointers + offset, mask, other, (), None, None, None, False
            expected = outcome(unwrap(TritonSemantic._load_legacy), *settings)
            if isinstance(expected, tuple):
                assert outcome(TritonSemantic._load_legacy, *settings) == expected
                compared += 1
    assert compared > 100


@pytest.mark.parametrize("dtype", [core.float32, core.int64, core.float16])
def test_stores(dtype):
    pointer = core.pointer_type(dtype)
    masks = [None, *(tensor(shape, core.int32, 0) > 0 for shape in SHAPES)]
    values = [tensor(*each, 1) for each in itertools.product(SHAPES, DTYPES)]
    compared = 0

    def stored(store, shape, value, mask):
        numbers = np.zeros(32, triton_interpreter._get_np_dtype(dtype))
        places = numbers.ctypes.data + numbers.itemsize * np.arange(np.prod(shape or 1), dtype=np.uint64)
        of = interpreter.block_of(pointer, shape) if shape else pointer
        pointers = core.tensor(triton_interpreter.TensorHandle(places.reshape(shape or 1), pointer), of)
        try:
            assert store(SEMANTIC, pointers, value, mask, (), None, None).type is core.void
        except Exception as error:
            return type(error)
        return numbers.tolist()

    for case in itertools.product(SHAPES, values, masks):
        expected = stored(unwrap(TritonSemantic._store_legacy), *case)
        if isinstance(expected, list):
            assert stored(TritonSemantic._store_legacy, *case) == expected, case
            compared += 1
    assert compared > 100


def test_conversions():
    for x in (tensor(*each, 0) for each in itertools.product(SHAPES, DTYPES)):
        for dtype in DTYPES:
            expected = outcome(unwrap(TritonSemantic.cast), SEMANTIC, x, dtype)
            assert outcome(TritonSemantic.cast, SEMANTIC, x, dtype) == expected


def test_dimensions():
    x = tensor((4, 8), core.float32, 0)
    every = slice(None)
    for index in [(every, None, every), (None, every, every, None), (every, every, None)]:
        expanded = x[index]
        assert expanded.handle.data.tolist() == x.handle.data[index].tolist()
        assert [size.value for size in expanded.shape] == list(x.handle.data[index].shape)
