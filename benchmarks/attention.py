"""Attention. Shape: [batch, length, query heads, key and value heads, head size, window, softcap, sinks, causal]; 0 for
none.

Each row of the batch is a document. ligermodels gets the documents packed into one row, as `ligermodels train` gives
them; "plain rows" is the same work as a batch of rows without offsets. The FLOPs counted are those of the scores that
are not masked: two matrix products forward, five backward.
"""

from contextlib import contextmanager

import torch
import torch.nn.functional as F

from benchmarks import timing
from benchmarks.ops import Op, random_input, work_per_pass
from ligermodels.kernels.attention import attention as module

SHAPES = [
    (8, 2048, 32, 8, 128, 0, 0, 0, 1),
    (4, 8192, 32, 8, 128, 0, 0, 0, 1),
    (1, 32768, 32, 8, 128, 0, 0, 0, 1),
    (4, 8192, 32, 8, 128, 1024, 0, 0, 1),
    (4, 2048, 8, 4, 256, 0, 50, 0, 1),
    (4, 8192, 8, 4, 256, 0, 50, 0, 1),
    (4, 8192, 8, 4, 256, 0, 0, 0, 1),
    (4, 8192, 64, 8, 64, 128, 0, 1, 1),  # gpt-oss, its windowed layers and the others
    (4, 8192, 64, 8, 64, 0, 0, 1, 1),
    (4, 4096, 16, 16, 80, 0, 0, 0, 0),  # the vision tower of Qwen2-VL
    (1, 8192, 14, 2, 64, 0, 0, 0, 1),  # Qwen2-0.5B
    (1, 64, 4, 2, 128, 0, 0, 0, 1),  # its time is bound by the host
]


def inputs(batch, length, heads, kv_heads, size, window, softcap, sinks, causal):
    """Queries, keys and values, three options as integers for the reference, and the sinks if there are any."""
    tensors = [random_input(batch, length, number, size) for number in (heads, kv_heads, kv_heads)]
    return [*tensors, torch.tensor([window, softcap, causal], device="cpu"), *([random_input(heads)] if sinks else [])]


def packed(q, k, v, _, *sinks):
    """The rows one after the other, with the offsets at which they begin."""
    offsets = torch.arange(0, q.shape[0] * q.shape[1] + 1, q.shape[1], dtype=torch.int32, device=q.device)
    return *(x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v)), offsets, *sinks


def rows(q, k, v, _, *sinks):
    return q, k, v, *sinks


def work(batch, length, heads, kv_heads, size, window, softcap, sinks, causal):
    seen = window or length
    pairs = batch * heads * (length * seen - seen * (seen - 1) // 2 if causal else length * length)
    return work_per_pass(4 * size * pairs, 10 * size * pairs)


def options(window, softcap, causal, sinks=None):
    return {"window": window or None, "softcap": float(softcap) or None, "causal": bool(causal), "sinks": sinks}


@contextmanager
def without_flash_attention_4():
    runs, module.runs_flash_attention = module.runs_flash_attention, lambda q: False
    try:
        yield
    finally:
        module.runs_flash_attention = runs


def reference(q, k, v, chosen, sinks=None):
    """torch's kernels: SDPA and FlexAttention."""
    with without_flash_attention_4():
        return module.attention(q, k, v, **options(*chosen.tolist(), sinks))


attention = Op("attention", SHAPES, inputs, reference, work, ceiling=timing.MATMUL)


@attention.provider("pytorch", [shape for shape in SHAPES if not any(shape[5:8])], rows)
def pytorch(*shape):
    """torch's choice of kernel, of plain rows."""

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=bool(shape[8]), enable_gqa=True).transpose(1, 2)

    return attend


@attention.provider("ligermodels", layout=packed)
def ours(*shape):
    window, softcap, _, causal = shape[5:]

    def attend(q, k, v, offsets, sinks=None):
        chosen = options(window, softcap, causal, sinks)
        out = module.attention(q, k, v, cu_seqlens=offsets, max_seqlen=shape[1], **chosen)
        return out.view(shape[0], shape[1], *out.shape[2:])

    return attend


@attention.provider("ligermodels, without flash-attn-4", layout=packed)
def without(*shape):
    run = ours(*shape)

    def call(*inputs):
        with without_flash_attention_4():
            return run(*inputs)

    return call


@attention.provider("ligermodels, plain rows", layout=rows)
def plain(*shape):
    window, softcap, _, causal = shape[5:]
    return lambda q, k, v, sinks=None: module.attention(q, k, v, **options(window, softcap, causal, sinks))
