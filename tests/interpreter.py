"""Triton's interpreter, faster: the same operations on the same numbers, without what it does anew for each of them.

Triton 3.7 patches `triton.language` at every call of a device function, builds a table of dtypes for every tensor, the
type of every block from its shape and name, two wrappers' arguments for every operation, computes for every sum,
difference and product of integers an assertion that it then does not make, and reduces by a function that is not one
of its own element after element. Together these were most of the kernels' time.
Knows Triton's private names, of the version that constraints.txt pins; knows no op.
"""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def hasten() -> None:
    """For the rest of the process, which can then compile no Triton kernel."""
    interpreter._patch_attr = patch_by_one_call
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = remember_by_name(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = reduce_by_slices
    core.block_type.__init__ = init_block_type
    core.block_type.name = property(lambda block: f"<{block.shape}, {block.element_ty}>")
    core.block_type.with_element_ty = copy_with_element_ty
    core.block_type.to_ir = lambda block, builder: block
    core.tensor.__init__ = init_tensor
    core._unwrap_if_constexpr = unwrap_most_first(core._unwrap_if_constexpr)
    TritonSemantic.broadcast_impl_value = broadcast_if_unequal(TritonSemantic.broadcast_impl_value)


def patch_by_one_call(owner, name, member, builder, scope):
    """Triton's own goes through a function that takes `_semantic` away and one that looks for it."""
    function = getattr(member, "__wrapped__", member)
    scope.set_attr(owner, name, lambda *args, **kwargs: function(*args, **(kwargs | SEMANTIC)))


SEMANTIC = {"_semantic": interpreter.interpreter_semantic}


@cache
def known_shape(sizes: tuple[int, ...]):
    """Of a block: its type's shape and size, and its tensors' shape and size."""
    size = validate_block_shape(sizes)
    return core.tuple(sizes), size, (core.tuple([core.constexpr(each) for each in sizes]), core.constexpr(size))


NO_SHAPE = core.tuple([]), core.constexpr(1)


def init_block_type(self, element_ty, shape):
    sizes = tuple([core._unwrap_if_constexpr(size) for size in core._unwrap_if_constexpr(shape)])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel, self.of_tensors = known_shape(sizes)


def copy_with_element_ty(self, element_ty):
    copy = object.__new__(core.block_type)
    copy.__dict__ = self.__dict__ | {"element_ty": element_ty}
    return copy


def init_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else NO_SHAPE


def unwrap_most_first(unwrap):
    """unwrap: asks whether it is given a list, a tuple, …; most often it is a number, a tensor or one constant."""

    def unwrap_if_constexpr(value):
        if type(value) is core.constexpr:
            return value.value
        return value if type(value) in (int, float, core.tensor) else unwrap(value)

    return unwrap_if_constexpr


def broadcast_if_unequal(broadcast):
    def broadcast_impl_value(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return broadcast_impl_value


def remember_by_name(get_np_dtype):
    known = {}

    def look_up(dtype):
        name = dtype.scalar.name  # of pointers too, which cannot be hashed
        if name not in known:
            known[name] = get_np_dtype(dtype)
        return known[name]

    return look_up


def reduce_by_slices(self, tensors):
    """Along an axis from first to last, as `generic_reduce` does, with all that lies across it in one operation."""
    assert self.axis is not None

    def slices(index):
        return [self.to_tensor(x.handle.data.take([index], self.axis), x.dtype) for x in tensors]

    total = slices(0)
    for index in range(1, tensors[0].shape[self.axis]):
        total = self.combine_fn.fn(*total, *slices(index))
    data = [x.handle.data if self.keep_dims else x.handle.data.squeeze(self.axis) for x in total]
    return [self.to_tensor(x, tensor.dtype) for x, tensor in zip(data, tensors, strict=True)]
