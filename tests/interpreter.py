"""Speeds up Triton's interpreter: the same operations on the same numbers, with less overhead for each.

Triton 3.7 repeats much of its work. It patches `triton.language` at every call of a device function. For every tensor
it builds a table of dtypes, for every block a type from its shape and name, and for every operation the arguments of
two wrappers. For every sum, difference and product of integers it computes an overflow check that it then discards. An
operation on a block and a number first makes a block of that number. A reduction or scan by a custom function runs one
element at a time. Together these took most of the kernels' time. Uses private names of Triton, in the version that
constraints.txt pins.
"""

import inspect
import itertools
from dataclasses import replace
from functools import cache, wraps
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
    for name, (operation, dtypes, compares) in OPERATORS.items():
        slow = getattr(core.tensor, name)
        setattr(core.tensor, name, on_arrays_first(slow, operation, dtypes, compares))
    core.tensor.__add__ = add_to_pointer_first(core.tensor.__add__)
    core.tensor.__getitem__ = expand_at_once
    core.tensor.to = keep_dtype_first(core.tensor.to)
    TritonSemantic.where = choose_floats_first(TritonSemantic.where)
    TritonSemantic._load_legacy = load_numbers_first(TritonSemantic._load_legacy)
    TritonSemantic._store_legacy = store_numbers_first(TritonSemantic._store_legacy)
    TritonSemantic.cast = convert_numbers_first(TritonSemantic.cast)
    interpreter.GridExecutor.__call__ = run_grid
    core.dtype.__eq__ = equal_names_first(core.dtype.__eq__)
    core._unwrap_if_constexpr = unwrap_common_types_first(core._unwrap_if_constexpr)
    TritonSemantic.binary_op_type_checking_impl = equal_types_first(TritonSemantic.binary_op_type_checking_impl)
    TritonSemantic.broadcast_impl_value = broadcast_if_unequal(TritonSemantic.broadcast_impl_value)


def patch_by_one_call(owner, name, member, builder, scope):
    """Triton's own version goes through one wrapper that removes `_semantic` and one that looks it up."""
    function = getattr(member, "__wrapped__", member)
    scope.set_attr(owner, name, lambda *args, **kwargs: function(*args, **(kwargs | SEMANTIC)))


SEMANTIC = {"_semantic": interpreter.interpreter_semantic}


def run_grid(self, *args, **kwargs):
    """Runs every program on tensors that are on the CPU. Triton's own copies them there and back."""
    signature = signature_of(self.fn)
    bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name in signature.parameters})
    bound.apply_defaults()
    values = {
        name: value if name in self.constexprs else interpreter._implicit_cvt(value)
        for name, value in bound.arguments.items()
    }
    grid = self.grid(values) if callable(self.grid) else self.grid
    sizes = *grid, *(1,) * (3 - len(grid))
    interpreter.interpreter_builder.set_grid_dim(*sizes)
    for place in itertools.product(*map(range, sizes)):
        interpreter.interpreter_builder.set_grid_idx(*place)
        try:
            self.fn(**values)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error


signature_of = cache(inspect.signature)


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


UNWRAPPED = {int, float, bool, str, type(None), core.tensor, core.dtype}


def unwrap_common_types_first(unwrap):
    """`unwrap`, which tests for lists, tuples and so on, after the common cases: what is none, or a constexpr."""

    def unwrap_if_constexpr(value):
        if type(value) is core.constexpr:
            return value.value
        return value if type(value) in UNWRAPPED else unwrap(value)

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


def reversed_(operation):
    return lambda x, y: operation(y, x)


INTEGERS, NUMBERS = ("int32", "int64"), ("int32", "int64", "fp32")  # a half is not what its array holds
MASKS, LOADED = ("int1", *INTEGERS), (*NUMBERS, "fp16", "bf16")
OPERATORS = {  # of a tensor: the operation on arrays, the dtypes for which it is that, whether it compares
    "__add__": (np.add, NUMBERS, False),
    "__radd__": (np.add, NUMBERS, False),
    "__sub__": (np.subtract, NUMBERS, False),
    "__rsub__": (reversed_(np.subtract), NUMBERS, False),
    "__mul__": (np.multiply, NUMBERS, False),
    "__rmul__": (np.multiply, NUMBERS, False),
    "__truediv__": (np.divide, ("fp32",), False),
    "__rtruediv__": (reversed_(np.divide), ("fp32",), False),
    "__floordiv__": (lambda x, y: (x - np.fmod(x, y)) // y, INTEGERS, False),  # rounded to zero
    "__mod__": (np.fmod, INTEGERS, False),
    "__and__": (np.bitwise_and, MASKS, False),
    "__or__": (np.bitwise_or, MASKS, False),
    "__lt__": (np.less, NUMBERS, True),
    "__le__": (np.less_equal, NUMBERS, True),
    "__gt__": (np.greater, NUMBERS, True),
    "__ge__": (np.greater_equal, NUMBERS, True),
}


def on_arrays_first(slow, operation, dtypes, compares):
    """`slow`, an operator of tensors, after the common cases: a number, or a tensor of the same rank."""

    @wraps(slow)
    def operator(self, other):
        dtype = self.dtype
        if type(other) is core.constexpr:
            other = other.value
        if dtype.name not in dtypes:
            return slow(self, other)
        if type(other) is core.tensor:
            if other.dtype is not dtype:
                if dtype.name not in INTEGERS or other.dtype.name not in INTEGERS:
                    return slow(self, other)
                dtype = core.int64
            of, value = broadcast_type(self, other, core.int1 if compares else dtype), other.handle.data
        elif dtype is core.int1:
            return slow(self, other)
        elif (type(other) is int and -(2**31) <= other < 2**31) or (type(other) is float and dtype is core.float32):
            of, value = with_elements(self.type, core.int1 if compares else dtype), other
        else:
            return slow(self, other)
        return slow(self, other) if of is None else tensor_of(operation(self.handle.data, value), dtype, of)

    return operator


def add_to_pointer_first(slow):
    """`slow`, the sum of two tensors, after the common case: pointers, and a number or offsets of the same rank."""

    @wraps(slow)
    def add(self, other):
        pointer = self.dtype
        if type(pointer) is not core.pointer_type:
            return slow(self, other)
        if type(other) is int:
            of, offsets = self.type, np.int64(other)
        elif type(other) is core.tensor and other.dtype.name in INTEGERS:
            of, offsets = broadcast_type(self, other, pointer), other.handle.data
        else:
            return slow(self, other)
        if of is None:
            return slow(self, other)
        size = max(1, pointer.element_ty.primitive_bitwidth // 8)
        return tensor_of(self.handle.data + size * offsets.astype(np.uint64), pointer, of)

    return add


def broadcast_type(x, y, element):
    """The type, with such elements, to which two tensors are broadcast; None if they are blocks of other ranks."""
    if x.shape is y.shape or y.shape is NO_SHAPE[0]:
        return with_elements(x.type, element)
    if x.shape is NO_SHAPE[0]:
        return with_elements(y.type, element)
    if x.handle.data.ndim != y.handle.data.ndim:
        return None
    return block_of(element, np.broadcast_shapes(x.handle.data.shape, y.handle.data.shape))


def block_of(element, sizes):
    block = object.__new__(core.block_type)
    block.element_ty = element
    block.shape, block.numel, block.of_tensors = shape_and_size(sizes)
    return block


def with_elements(of, element):
    if type(of) is not core.block_type:
        return element
    return of if of.element_ty is element else of.with_element_ty(element)


WHOLE = slice(None)


def expand_at_once(self, index):
    """x[:, None] and the like, which is all that kernels can write."""
    index = tuple([core._unwrap_if_constexpr(each) for each in (index if isinstance(index, tuple) else [index])])
    assert index.count(None) + index.count(WHOLE) == len(index)
    data = self.handle.data[index]
    return tensor_of(data, self.dtype, block_of(self.dtype, data.shape))


def keep_dtype_first(slow):
    """`slow`, the cast of a tensor, after the common case: it has the dtype."""

    @wraps(slow)
    def to(self, dtype, *args, **kwargs):
        return self if dtype is self.dtype and not args and not kwargs else slow(self, dtype, *args, **kwargs)

    return to


CONVERTED = {  # from, to: conversions that are NumPy's
    *itertools.permutations(("int32", "int64", "fp32"), 2), ("fp16", "fp32"), ("fp32", "fp16"),
    *itertools.product(("int1",), NUMBERS),
}  # fmt: skip


def convert_numbers_first(slow):
    """`slow`, the conversion to another dtype, after the common cases."""

    @wraps(slow)
    def cast(self, input, dst_ty, fp_downcast_rounding=None):
        dtype = dst_ty.scalar
        if (input.dtype.name, dtype.name) not in CONVERTED or fp_downcast_rounding is not None:
            return slow(self, input, dst_ty, fp_downcast_rounding)
        data = input.handle.data.astype(interpreter._get_np_dtype(dtype))
        return tensor_of(data, dtype, with_elements(input.type, dtype))

    return cast


def choose_floats_first(slow):
    """`slow`, the choice by a mask, after the common case: fp32 in blocks of one rank, scalars and numbers."""

    @wraps(slow)
    def where(self, condition, x, y):
        tensors = [each for each in (condition, x, y) if type(each) is core.tensor]
        ranks = {each.handle.data.ndim for each in tensors if each.shape is not NO_SHAPE[0]}
        fp32 = all(type(each) is float or getattr(each, "dtype", None) is core.float32 for each in (x, y))
        if condition.dtype is not core.int1 or not fp32 or len(tensors) == 1 or len(ranks) > 1:
            return slow(self, condition, x, y)
        values = (each.handle.data if type(each) is core.tensor else np.float32(each) for each in (x, y))
        data = np.where(condition.handle.data, *values)
        of = block_of(core.float32, data.shape) if ranks else core.float32
        return tensor_of(data, core.float32, of)

    return where


def load_numbers_first(slow):
    """`slow`, which loads from pointers, after the common case: numbers, with zeros where the mask is false."""

    @wraps(slow)
    def load(self, ptr, mask, other, boundary_check, padding, *options):
        places, pointer = ptr.handle.data, ptr.dtype
        if type(pointer) is not core.pointer_type or pointer.element_ty.name not in LOADED or boundary_check or padding:
            return slow(self, ptr, mask, other, boundary_check, padding, *options)
        loaded = mask_of(mask, places)
        if loaded is None or (other is not None and other.handle.data.any()):
            return slow(self, ptr, mask, other, boundary_check, padding, *options)
        dtype = interpreter._get_np_dtype(pointer.element_ty)
        data = interpreter._interpreter.load(places, loaded, np.zeros(places.shape, dtype), dtype)
        return tensor_of(data, pointer.element_ty, with_elements(ptr.type, pointer.element_ty))

    return load


def store_numbers_first(slow):
    """`slow`, which stores at pointers, after the common case: a block of numbers of the pointers' dtype and rank."""

    @wraps(slow)
    def store(self, ptr, val, mask, boundary_check, *options):
        places, pointer = ptr.handle.data, ptr.dtype
        if type(pointer) is not core.pointer_type or pointer.element_ty is not val.dtype or boundary_check:
            return slow(self, ptr, val, mask, boundary_check, *options)
        stored, data = mask_of(mask, places), val.handle.data
        if val.dtype.name not in LOADED or stored is None or val.shape is not ptr.shape:
            return slow(self, ptr, val, mask, boundary_check, *options)
        return core.tensor(interpreter._interpreter.store(places, data, stored), core.void)

    return store


def mask_of(mask, places):
    """The mask's array in the shape of `places`; None if it is no mask, or is not broadcast to that shape."""
    shape = places.shape
    if mask is None:
        return np.ones(shape, np.bool_)
    if mask.dtype is not core.int1:
        return None
    data = mask.handle.data
    if data.shape == shape:
        return data
    fits = len(data.shape) == len(shape) and all(size in (1, of) for size, of in zip(data.shape, shape, strict=True))
    return np.logical_and(data, np.ones(shape, np.bool_)) if fits or data.size == 1 else None


def tensor_of(data, dtype, of):
    """A tensor of data that has the size of its dtype."""
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    tensor = object.__new__(core.tensor)
    tensor.handle, tensor.type = handle, of
    if type(of) is core.block_type:
        tensor.dtype, (tensor.shape, tensor.numel) = of.element_ty, of.of_tensors
    else:
        tensor.dtype, (tensor.shape, tensor.numel) = of, NO_SHAPE
    return tensor


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
