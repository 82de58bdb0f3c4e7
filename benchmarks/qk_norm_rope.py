"""Per-head RMSNorm of queries and keys, then RoPE. Shape: [batch, length, query heads, key and value heads, head size].

The tensors are packed or separate as in rope.py. The other providers compose a norm and a rotation.
"""

import torch.nn.functional as F

from benchmarks import rope
from benchmarks.ops import Op, random_input, work_per_pass
from ligermodels.kernels.attention.qk_norm_rope import qk_norm_rope_reference

EPS = 1e-6


def inputs(*shape):
    q, k, v, cos, sin = rope.inputs(*shape)
    return [q, k, v, random_input(shape[-1]), random_input(shape[-1]), cos, sin]


def reference(q, k, v, q_weight, k_weight, cos, sin):
    qkv, *_ = rope.packed(q, k, v)
    return qk_norm_rope_reference(qkv, q_weight, k_weight, cos, sin, q.shape[2], k.shape[2], EPS)


def work(batch, length, num_heads, num_kv_heads, head_size):
    head_bytes = 2 * batch * length * head_size
    return work_per_pass(2 * head_bytes * (num_heads + num_kv_heads), head_bytes * (3 * num_heads + 5 * num_kv_heads))


qk_norm_rope = Op("qk_norm_rope", rope.SHAPES, inputs, reference, work)


@qk_norm_rope.provider("pytorch", layout=rope.duplicated)
def pytorch(*shape):
    def norm(x, weight):
        return F.rms_norm(x, weight.shape, weight, EPS)

    rotated = rope.pytorch(*shape)
    return lambda q, k, v, q_weight, k_weight, *angles: rotated(norm(q, q_weight), norm(k, k_weight), v, *angles)


@qk_norm_rope.provider("liger", layout=rope.duplicated)
def liger(*shape):
    from liger_kernel.transformers.functional import liger_rms_norm as norm

    rotated = rope.liger(*shape)
    return lambda q, k, v, q_weight, k_weight, *angles: rotated(
        norm(q, q_weight, EPS), norm(k, k_weight, EPS), v, *angles
    )


@qk_norm_rope.provider("ligermodels", layout=rope.packed)
def ours(batch, length, num_heads, num_kv_heads, head_size):
    from ligermodels.kernels.attention.qk_norm_rope import qk_norm_rope

    return lambda *inputs: qk_norm_rope(*inputs, num_heads, num_kv_heads, EPS)


qk_norm_rope.add_compiled(rope.MAIN)
