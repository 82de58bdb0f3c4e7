"""Triton's interpreter, faster: the same operations on the same numbers, without what it does anew for each of them.

Triton 3.7 patches `triton.language` at every call of a device function, builds a table of dtypes for every tensor,
computes for every sum, difference and product of integers an assertion that it then does not make, and reduces by a
function that is not one of its own element after element. Together these were most of the kernels' time.
Knows Triton's private names, of the version that constraints.txt pins; knows no op.
"""

from dataclasses import replace
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """For the rest of the process, which can then compile no Triton kernel."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = remember_by_name(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = reduce_by_slices


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
