"""Attention with an output gate, as Qwen3.5 has it: what is done to its packed projection, and to its output.

gated_qk_norm_rope. Shape: [batch, length, query heads, key and value heads, head size]. The RMSNorm of query and key
heads and RoPE of a quarter of their dimensions, on a projection that has behind each query head its gate.
sigmoid_gate. Shape: [batch, length, heads, head size].
"""

import torch
import torch.nn.functional as F

from benchmarks.ops import Op, random_input, work_per_pass
from benchmarks.rope import angles, duplicated, rotate
from ligermodels.kernels.attention.qk_norm_rope import qk_norm_rope_reference
from ligermodels.kernels.attention.qkv_heads import split_gated_heads
from ligermodels.kernels.attention.sigmoid_gate import sigmoid_gate_reference

EPS = 1e-6
QWEN = (4, 2048, 16, 4, 256)
MAIN = [QWEN, (1, 64, 16, 4, 256)]  # the time of the last is bound by the host


def norm_inputs(batch, length, num_heads, num_kv_heads, head_size):
    qkv = random_input(batch, length, 2 * (num_heads + num_kv_heads) * head_size)
    return [qkv, random_input(head_size), random_input(head_size), *angles(length, head_size // 4)]


def norm_reference(qkv, q_weight, k_weight, cos, sin):
    """The heads of queries and of keys and values have the ratio of all shapes."""
    heads = qkv.shape[-1] // len(q_weight) // 2
    return qk_norm_rope_reference(qkv, q_weight, k_weight, cos, sin, heads * 4 // 5, heads // 5, EPS, 0.0, True)


def norm_work(batch, length, num_heads, num_kv_heads, head_size):
    head_bytes = 2 * batch * length * head_size
    return work_per_pass(2 * head_bytes * (num_heads + num_kv_heads), head_bytes * (5 * num_heads + 5 * num_kv_heads))


norm = Op("gated_qk_norm_rope", [(1, 32768, 16, 4, 256), *MAIN], norm_inputs, norm_reference, norm_work)


@norm.provider("pytorch", layout=duplicated)
def norm_pytorch(batch, length, num_heads, num_kv_heads, head_size):
    """As transformers composes it."""

    def rotate_part(x, cos, sin):
        rotated, rest = x.split((head_size // 4, head_size - head_size // 4), -1)
        return torch.cat((rotate(rotated, cos, sin), rest), -1)

    def call(qkv, q_weight, k_weight, cos, sin):
        q, k, v, gate = split_gated_heads(qkv, num_heads, num_kv_heads)
        q, k = F.rms_norm(q, q_weight.shape, q_weight, EPS), F.rms_norm(k, k_weight.shape, k_weight, EPS)
        return rotate_part(q, cos, sin), rotate_part(k, cos, sin), v, gate

    return call


@norm.provider("ligermodels")
def norm_ours(batch, length, num_heads, num_kv_heads, head_size):
    from ligermodels.kernels.attention.qk_norm_rope import qk_norm_rope

    return lambda *inputs: qk_norm_rope(*inputs, num_heads, num_kv_heads, EPS, 0.0, True)


norm.add_compiled(MAIN)


def gate_inputs(*shape):
    return [random_input(*shape), random_input(*shape)]


def gate_work(batch, length, heads, head_size):
    elements = batch * length * heads * head_size
    return work_per_pass(6 * elements, 10 * elements)


gate = Op("sigmoid_gate", [(4, 2048, 16, 256), (1, 64, 16, 256)], gate_inputs, sigmoid_gate_reference, gate_work)


@gate.provider("pytorch")
def gate_pytorch(*shape):
    return lambda x, z: x * torch.sigmoid(z)


@gate.provider("ligermodels")
def gate_ours(*shape):
    from ligermodels.kernels.attention.sigmoid_gate import sigmoid_gate

    return sigmoid_gate


gate.add_compiled([(4, 2048, 16, 256)])
