"""Attention, and what is done to queries and keys before it."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.attention.attention import attention, attention_reference
from ligermodels.kernels.attention.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from ligermodels.kernels.attention.rope import rope_, rope_reference
from ligermodels.kernels.attention.shared_keys import gather_keys, gather_keys_reference
from ligermodels.kernels.attention.sigmoid_gate import sigmoid_gate, sigmoid_gate_reference
from tests.conftest import DEVICE
from tests.kernels.ops.base import EPS, HEADS, Case, Op, normal


def angles(rows: int, rotated: int) -> list[Tensor]:
    phases = 100 * torch.rand(rows, rotated // 2, device=DEVICE)
    return [phases.cos(), phases.sin()]


def rope_case(batch, length, heads, kv_heads, head_size, interleaved=False) -> Case:
    def rotate(function, qkv, cos, sin):
        consumed = qkv.clone(memory_format=torch.contiguous_format)
        return function(consumed, cos, sin, heads, kv_heads, interleaved)

    rotated = head_size // 2 if interleaved else head_size
    qkv = normal(batch, length, (heads + 2 * kv_heads) * head_size)
    return Case(partial(rotate, rope_), partial(rotate, rope_reference), [qkv], angles(length, rotated))


def qk_norm_rope_case(batch, length, heads, kv_heads, head_size, whole_row=False, gated=False) -> Case:
    def norm_and_rotate(function, qkv, q_weight, k_weight, cos, sin):
        return function(qkv, q_weight, k_weight, cos, sin, heads, kv_heads, EPS, 0.0, gated)

    qkv = normal(batch, length, ((1 + gated) * heads + 2 * kv_heads) * head_size)
    weights = [normal(head_size * (h if whole_row else 1)) for h in (heads, kv_heads)]
    ours, reference = (partial(norm_and_rotate, f) for f in (qk_norm_rope, qk_norm_rope_reference))
    return Case(ours, reference, [qkv, *weights], angles(length, head_size // 4 if gated else head_size))


def sigmoid_gate_case(batch, length, heads, head_size) -> Case:
    """Gates that lie between queries."""

    def gate(function, x, packed):
        return function(x, packed[..., head_size:])

    leaves = [normal(batch, length, heads, size) for size in (head_size, 2 * head_size)]
    return Case(partial(gate, sigmoid_gate), partial(gate, sigmoid_gate_reference), leaves, [])


def attention_case(batch, length, heads, kv_heads, head_size, window) -> Case:
    settings = {"scale": head_size**-0.5, "window": window}
    leaves = [normal(batch, length, h, head_size) for h in (heads, kv_heads, kv_heads)]
    return Case(partial(attention, **settings), partial(attention_reference, **settings), leaves, [])


def gather_keys_case(batch, length, heads, head_size) -> Case:
    """Tokens with three copies and with one in turns."""

    def gather(function, x, ends, places):
        return function(x.flatten(0, 1)[None], F.pad(ends.flatten(), (1, 0)), places.flatten())

    token = torch.arange(batch * length, dtype=torch.int32, device=DEVICE).view(batch, length)
    ends = (2 * token + 3 - token % 2).clamp(max=2 * batch * length)
    places = torch.randperm(2 * batch * length, dtype=torch.int32, device=DEVICE).view(batch, length, 2)
    ours, reference = partial(gather, gather_keys), partial(gather, gather_keys_reference)
    return Case(ours, reference, [normal(batch, length, heads, head_size)], [ends, places])


OPS = {
    "rope": Op(draw=rope_case, small=(5, 3, 20), real=HEADS, huge=(2**17 + 1, 96, 16, 128)),
    "rope, partial and interleaved": Op(
        draw=partial(rope_case, interleaved=True), small=(5, 1, 12), real=((32, 2, 128),), huge=(2**17 + 1, 96, 16, 128)
    ),
    "qk_norm_rope": Op(draw=qk_norm_rope_case, small=(5, 3, 20), real=HEADS, huge=(2**17 + 1, 96, 16, 128)),
    "qk_norm_rope of whole rows": Op(
        draw=partial(qk_norm_rope_case, whole_row=True), small=(3, 1, 12), real=((32, 32, 128), (40, 8, 128)),
        huge=(2**17 + 1, 96, 16, 128),
    ),
    "qk_norm_rope, gated and partial": Op(
        draw=partial(qk_norm_rope_case, gated=True), small=(5, 3, 20), real=((16, 4, 256), (16, 2, 256)),
        huge=(2**17 + 1, 48, 16, 128),
    ),
    "sigmoid_gate": Op(draw=sigmoid_gate_case, small=(3, 20), real=((16, 256), (32, 128)), huge=(2**17 + 1, 96, 128)),
    # Not our kernels: the backend that runs anywhere. test_attention.py covers softcaps, document masking and caches.
    "attention": Op(draw=attention_case, small=(6, 3, 16, None)),
    "attention with a window": Op(draw=attention_case, small=(6, 3, 16, 1)),
    "gather_keys": Op(draw=gather_keys_case, small=(3, 20), real=((8, 128), (4, 256))),
}  # fmt: skip
