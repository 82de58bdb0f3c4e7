"""Speeds up Triton's interpreter: the same operations on the same numbers, with less overhead for each.

Triton 3.7 repeats much of its work. It patches `triton.language` at every call of a device function. For every tensor
it builds a table of dtypes, for every block a type from its shape and name, and for every operation the arguments of
two wrappers. For every sum, difference and product of integers it computes an overflow check that it then discards. A
reduction or scan by a custom function runs one element at a time. Together these took most of the kernels' time.
Uses private names of Triton, in the version that constraints.txt pins. Must not know any particular op.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up_interpreter() -> None:
    """Takes effect for the rest of the process, which can then no longer compile Triton kernels."""
    interpreter._patch_attr = patch_by_one_call
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = cache_by_name(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = reduce_by_slices
    interpreter.ScanOps.generic_scan = scan_by_doubling
    core.block_type.__init__ = init_block_type
    core.block_type.name = property(lambda block: f"<{block.shape}, {block.element_ty}>")
    core.block_type.with_element_ty = copy_with_element_ty
    core.block_type.to_ir = lambda block, builder: block
    core.tensor.__init__ = init_tensor
    core.dtype.__eq__ = equal_names_first(core.dtype.__eq__)
    core._unwrap_if_constexpr = unwrap_common_types_first(core._unwrap_if_constexpr)
    TritonSemantic.binary_op_type_checking_impl = equal_types_first(TritonSemantic.binary_op_type_checking_impl)
    TritonSemantic.broadcast_impl_value = broadcast_if_unequal(TritonSemantic.broadcast_impl_value)


def patch_by_one_call(owner, name, member, builder, scope):
    """Triton's own version goes through one wrapper that removes `_semantic` and one that looks it up."""
    function = getattr(member, "__wrapped__", member)
    scope.set_attr(owner, name, lambda *args, **kwargs: function(*args, **(kwargs | SEMANTIC)))


SEMANTIC = {"_semantic": interpreter.interpreter_semantic}


@cache
def shape_and_size(sizes: tuple[int, ...]):
    """The shape and size of a block type, and the shape and size of its tensors."""
    size = validate_block_shape(sizes)
    return core.tuple(sizes), size, (core.tuple([core.constexpr(each) for each in sizes]), core.constexpr(size))


NO_SHAPE = core.tuple([]), core.constexpr(1)


def init_block_type(self, element_ty, shape):
    sizes = tuple([core._unwrap_if_constexpr(size) for size in core._unwrap_if_constexpr(shape)])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel, self.of_tensors = shape_and_size(sizes)


def copy_with_element_ty(self, element_ty):
    copy = object.__new__(core.block_type)
    copy.__dict__ = self.__dict__ | {"element_ty": element_ty}
    return copy


def init_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else NO_SHAPE


def unwrap_common_types_first(unwrap):
    """`unwrap`, which tests for lists, tuples and so on, after the common cases: a number, a tensor or a constexpr."""

    def unwrap_if_constexpr(value):
        if type(value) is core.constexpr:
            return value.value
        return value if type(value) in (int, float, core.tensor) else unwrap(value)

    return unwrap_if_constexpr


def broadcast_if_unequal(broadcast):
    """`broadcast`, skipped if both operands share one shape object."""

    def broadcast_impl_value(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return broadcast_impl_value


def equal_types_first(check):
    """`check`, skipped if both operands are tensors of one dtype: only a division of halves would change it."""

    def binary_op_type_checking_impl(self, lhs, rhs, left=False, right=False, arithmetic=True, divide=False):
        equal = type(lhs) is type(rhs) is core.tensor and lhs.dtype is rhs.dtype
        if equal and not divide and type(lhs.dtype) is core.dtype:  # not a pointer
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, left, right, arithmetic, divide)

    return binary_op_type_checking_impl


def equal_names_first(equal):
    """`equal` of a dtype, after the common case: another dtype."""

    def __eq__(self, other):
        return self.name == other.name if type(other) is core.dtype else equal(self, other)

    return __eq__


def cache_by_name(get_np_dtype):
    """`get_np_dtype` with a cache."""
    dtypes = {}

    def look_up(dtype):
        name = dtype.scalar.name  # the key, because pointer types cannot be hashed
        if name not in dtypes:
            dtypes[name] = get_np_dtype(dtype)
        return dtypes[name]

    return look_up


def reduce_by_slices(self, tensors):
    """Reduces along the axis from first to last, as `generic_reduce` does, but a whole slice in one operation."""
    assert self.axis is not None

    def slices(index):
        return [self.to_tensor(x.handle.data.take([index], self.axis), x.dtype) for x in tensors]

    total = slices(0)
    for index in range(1, tensors[0].shape[self.axis]):
        total = self.combine_fn.fn(*total, *slices(index))
        total = total if isinstance(total, tuple | core.tuple) else (total,)  # of one tensor it may be that tensor
    data = [x.handle.data if self.keep_dims else x.handle.data.squeeze(self.axis) for x in total]
    return [self.to_tensor(x, tensor.dtype) for x, tensor in zip(data, tensors, strict=True)]


def scan_by_doubling(self, tensors):
    """Scans along the axis by adding to all elements those 1, 2, 4, ... before them, as the kernels do on a GPU."""

    def as_tensors(data):
        return [self.to_tensor(x, tensor.dtype) for x, tensor in zip(data, tensors, strict=True)]

    data, step = [x.handle.data for x in tensors], 1
    place = np.expand_dims(np.arange(data[0].shape[self.axis]), tuple(range(1, data[0].ndim - self.axis)))
    while step < tensors[0].shape[self.axis]:
        before = [np.roll(x, step, self.axis) for x in data]  # of the first elements these are the last, and not used
        total = self.combine_fn.fn(*as_tensors(before), *as_tensors(data))
        total = total if isinstance(total, tuple | core.tuple) else (total,)
        data = [np.where(place < step, x, y.handle.data) for x, y in zip(data, total, strict=True)]
        step *= 2
    return as_tensors(data)
