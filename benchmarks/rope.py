"""RoPE of queries and keys. Shape: [batch, length, query heads, key and value heads, head size].

ligermodels rotates in place in the packed QKV projection, and its backward writes the packed gradient, values included.
These are the bytes counted. The other providers get separate queries, keys and values, the outputs of unpacked
projections, and need not touch the values; a provider with "packed" in its name gets the packed tensor.
"""

import torch

from benchmarks.ops import Op, random_input, work_per_pass
from ligermodels.kernels.attention.qkv_heads import split_heads
from ligermodels.kernels.attention.rope import rope_reference

MAIN = [(4, 4096, 32, 8, 128), (1, 64, 4, 2, 128)]  # the time of the last is bound by the host
SHAPES = [(1, 2048, 32, 8, 128), *MAIN]


def angles(length, head_size):
    phase = torch.arange(length)[:, None] * 5e5 ** -(torch.arange(0, head_size, 2) / head_size)
    return phase.cos(), phase.sin()


def heads(batch, length, num_heads, num_kv_heads, head_size):
    """Queries, keys and values."""
    return [random_input(batch, length, number, head_size) for number in (num_heads, num_kv_heads, num_kv_heads)]


def inputs(*shape):
    return [*heads(*shape), *angles(shape[1], shape[-1])]


def packed(q, k, v, *rest):
    return torch.cat([x.flatten(2) for x in (q, k, v)], -1), *rest


def duplicated(*inputs):
    """The inputs with cos and sin in the form of transformers: [1, length, head size], both halves equal, bf16."""
    *others, cos, sin = inputs
    return *others, *(torch.cat((x, x), -1).bfloat16()[None] for x in (cos, sin))


def reference(q, k, v, cos, sin):
    return rope_reference(*packed(q, k, v), cos, sin, q.shape[2], k.shape[2])


def work(batch, length, num_heads, num_kv_heads, head_size):
    head_bytes = 2 * 2 * batch * length * head_size  # one read and one write
    return work_per_pass(head_bytes * (num_heads + num_kv_heads), head_bytes * (num_heads + 2 * num_kv_heads))


rope = Op("rope", SHAPES, inputs, reference, work)


def rotate(x, cos, sin):
    """The formula of transformers. x: [batch, length, heads, head size]."""
    first, second = x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]


@rope.provider("pytorch", layout=duplicated)
def pytorch(*shape):
    return lambda q, k, v, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin), v)


@rope.provider("liger", layout=duplicated)
def liger(*shape):
    from liger_kernel.transformers.functional import liger_rope

    def rotated(q, k, v, cos, sin):
        q, k = liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v

    return rotated


@rope.provider("liger, packed", layout=lambda *inputs: duplicated(*packed(*inputs)))
def liger_packed(batch, length, num_heads, num_kv_heads, head_size):
    """On views of the packed projection. Autograd assembles the packed gradient."""
    rotated = liger()
    return lambda qkv, cos, sin: rotated(*split_heads(qkv, num_heads, num_kv_heads), cos, sin)


@rope.provider("ligermodels", layout=packed)
def ours(batch, length, num_heads, num_kv_heads, head_size):
    from ligermodels.kernels.attention.rope import rope_

    return lambda qkv, cos, sin: rope_(qkv, cos, sin, num_heads, num_kv_heads)


rope.add_compiled(MAIN)
