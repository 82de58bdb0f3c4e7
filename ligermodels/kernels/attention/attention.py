"""Attention: dispatch to the fastest existing implementation. This module has no kernel of its own.

out = softmax(mask(softcap(scale * q kᵀ))) v, where query head h reads key-value head h // (Hq / Hkv).
q [B, T, Hq, D], k, v [B, S, Hkv, D] -> [B, T, Hq, D]. Values may have another size than keys; where a kernel needs
equal ones, the smaller are padded with zeros. Which keys a query sees is in attention_mask.py.

Documents of equal length are computed as rows. Implementations:
- heads of 257 to 512 in half precision on a Hopper GPU: compiled FlexAttention;
- rows without a window, softcap or sinks: SDPA, on the GPU with cuDNN first (fastest on Hopper), then FlashAttention;
- queries that see different numbers of keys ahead of them, on a GPU: compiled FlexAttention (head dimension 16 and up);
- everything else in half precision on a GPU: FlashAttention 4 if it is installed and can run there
  (flash_attention.py); otherwise the next two;
- everything but a softcap in half precision on a GPU: FlashAttention 2 (flash_attention.py);
- a softcap, and sinks in fp32, on a GPU: compiled FlexAttention (head dimension 16 and up);
- packed documents on the CPU: one document after the other, because a mask of the whole row needs quadratic memory;
- a key-value cache, fp32 on the GPU, and everything else on the CPU: SDPA with a dense mask, or the reference
  implementation if there is a softcap or there are sinks.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligermodels.kernels.attention.attention_mask import Mask, dense_mask
from ligermodels.kernels.attention.flash_attention import (
    HEAD_DIMS,
    MAX_FLASH_HEAD_DIM,
    flash_attention,
    flash_attention_2,
    head_dims,
    runs_flash_attention,
    runs_flash_attention_2,
)
from ligermodels.kernels.attention.flex_attention import MIN_FLEX_HEAD_DIM, flex_attention, runs_wide_heads
from ligermodels.kernels.dispatch import (
    INDICES,
    INT32,
    autocast,
    can_be_read,
    check_dtypes,
    check_floats,
    check_one_of,
    check_shape,
    is_traced,
    runs_kernels,
    shape_of,
    widen,
)

SDPA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = True, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_k: int | None = None,
    position_ids: Tensor | None = None, ahead: Tensor | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attention of q [B, T, Hq, D] over k [B, S, Hkv, D], v [B, S, Hkv, V] -> [B, T, Hq, V]; any strides, unit stride
    along D and V.

    The last query stands at the position of the last key, also within each packed document: with T queries over S keys,
    query i is at position i + S - T. A query that sees no key gets zeros.

    scale: of the scores; None for D^-1/2.
    causal: a query sees the keys at its position and before. Otherwise it sees those after it too.
    window: how many keys back a query sees, itself included, and if not causal how many ahead; None for no limit.
    softcap: bounds the scores to softcap * tanh(scores / softcap).
    sinks: [Hq] float, learnable: one more score of each query in the softmax, after scale and softcap, whose value is
    zero.
    cu_seqlens: int32 [documents + 1], offsets of the documents packed into one row (B = 1), from 0 to T. max_seqlen:
    length of the longest document.
    cu_seqlens_k, max_seqlen_k: those of the keys, where the documents have other numbers of keys than of queries.
    position_ids: [B, T] or [1, T], positions of the queries, if k and v are a cache; key j is at position j.
    ahead: int64 [B, T] or [1, T], how many keys behind its own position each query sees too; None for none.
    dropout: probability of dropping a softmax weight.
    Raises ValueError where shapes or dtypes disagree, for packed documents in a batch of several rows, for offsets of
    the keys without those of the queries or the reverse, for position_ids or ahead without causal, and for dropout
    combined with a softcap or sinks.
    """
    check_attention(q, k, v, softcap, sinks, cu_seqlens, cu_seqlens_k, position_ids, ahead, causal, dropout)
    q, k, v = autocast(q, k, v)
    check_dtypes("attention", q=q, k=k, v=v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if position_ids is ahead is cu_seqlens_k is None and are_equally_long(q, cu_seqlens, max_seqlen):
        rows = (x[0].unflatten(0, (-1, max_seqlen)) for x in (q, k, v))
        rest: dict[str, Any] = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "sinks": sinks}
        return attention(*rows, **rest, dropout=dropout).flatten(0, 1)[None]
    # An exported program is for any length: this one must not be compared.
    if window is not None and not torch.compiler.is_exporting() and window >= max(q.shape[1], k.shape[1]):
        window = None
    left = None if window is None else window - 1
    longest = max_seqlen or q.shape[1]
    longest_k = longest if cu_seqlens_k is None and cu_seqlens is not None else max_seqlen_k or k.shape[1]
    mask = Mask(left, 0 if causal else left, cu_seqlens, cu_seqlens_k, longest, longest_k, ahead)

    if position_ids is not None:
        return dense_attention(q, k, v, sinks, scale, softcap, mask, position_ids, dropout)
    plain = softcap is None and sinks is None and cu_seqlens is None and left is None and ahead is None
    wide = q.is_cuda and not dropout and runs_wide_heads(q.device, q.dtype, q.shape[-1])
    if plain and not wide and (not causal or q.shape[1] == k.shape[1]):
        return plain_attention(q, k, v, scale, causal, dropout)
    if q.is_cuda and (sinks is None or runs_kernels(q)):
        return attention_on_gpu(q, k, v, sinks, scale, softcap, mask, dropout)
    if cu_seqlens is not None and q.is_cpu and can_be_read(cu_seqlens):
        options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "sinks": sinks}
        return attention_by_document(q, k, v, mask, dropout=dropout, **options)
    return dense_attention(q, k, v, sinks, scale, softcap, mask, None, dropout)


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, softcap: float | None, sinks: Tensor | None, cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None, position_ids: Tensor | None, ahead: Tensor | None, causal: bool, dropout: float,
) -> None:  # fmt: skip
    if dropout and (softcap is not None or sinks is not None):
        raise ValueError("attention: dropout cannot be combined with a softcap or with sinks")
    if position_ids is not None and not causal:
        raise ValueError("attention: position_ids are for causal attention over a cache; they need causal=True")
    if ahead is not None and not causal:
        raise ValueError("attention: ahead adds keys to those of causal attention; it needs causal=True")
    batch, queries, heads, size = shape_of("attention", "q", q, "B, T, Hq, D")
    _, keys, kv_heads, _ = shape_of("attention", "k", k, "B, S, Hkv, D")
    check_shape("attention", "k", k, batch, keys, kv_heads, size)
    check_shape("attention", "v", v, batch, keys, kv_heads, shape_of("attention", "v", v)[-1])
    check_shape("attention", "sinks", sinks, heads)
    for name, x in (("position_ids", position_ids), ("ahead", ahead)):
        if x is not None and x.shape != (1, queries):  # which rows share
            check_shape("attention", name, x, batch, queries)
    if heads % kv_heads:
        raise ValueError(f"attention: q has {heads} heads, k {kv_heads}; the first must be a multiple of the second")
    check_floats("attention", sinks=sinks)
    check_one_of("attention", INT32, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    check_one_of("attention", INDICES, position_ids=position_ids, ahead=ahead)
    if cu_seqlens is None and cu_seqlens_k is None:
        return
    for name, offsets in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is not None:
            shape_of("attention", name, offsets, "N + 1")
    if batch != 1:
        raise ValueError(f"attention: cu_seqlens needs a batch of one row, but the batch has {batch} rows")
    if cu_seqlens is None:
        raise ValueError("attention: cu_seqlens_k needs cu_seqlens, the offsets of the queries")
    if cu_seqlens_k is None and position_ids is None and queries != keys:
        raise ValueError(f"attention: {queries} queries over {keys} keys in documents need cu_seqlens_k")


def are_equally_long(q: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> bool:
    """Whether all documents have max_seqlen tokens, as pictures of one size have patches. Does not read the offsets:
    so many documents of no more tokens each fill the row."""
    if cu_seqlens is None or max_seqlen is None or torch.compiler.is_compiling():
        return False
    return (cu_seqlens.shape[0] - 1) * max_seqlen == q.shape[1]


class DocumentRun(NamedTuple):
    """Neighbouring documents with equal numbers of queries and of keys each."""

    documents: int
    queries: int
    keys: int


def attention_by_run(q: Tensor, k: Tensor, v: Tensor, runs: Sequence[DocumentRun], **options: Any) -> Tensor:
    """`attention` of packed documents, each run as rows, which are faster. Needs nothing from the device.

    runs: of all documents, in order; those without queries may have keys. options: as those of `attention`, without the
    documents' offsets.
    """
    queries, keys = [run.documents * run.queries for run in runs], [run.documents * run.keys for run in runs]
    outputs = []
    for run, *tensors in zip(runs, q[0].split(queries), k[0].split(keys), v[0].split(keys), strict=True):
        rows = (x.unflatten(0, (run.documents, -1)) for x in tensors)
        outputs += [attention(*rows, **options).flatten(0, 1)] if run.queries else []
    return torch.cat(outputs)[None]


def attention_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, softcap: float | None, mask: Mask,
    dropout: float,
) -> Tensor:  # fmt: skip
    size, value_size = q.shape[-1], v.shape[-1]
    if size != value_size:
        q, k, v = (F.pad(x, (0, max(size, value_size) - x.shape[-1])) for x in (q, k, v))
        return attention_on_gpu(q, k, v, sinks, scale, softcap, mask, dropout)[..., :value_size]
    if mask.ahead is None and not dropout and runs_kernels(q) and runs_flash_attention(q):
        return flash_attention(q, k, v, sinks, scale, softcap, mask)
    if mask.ahead is None and softcap is None and runs_flash_attention_2(q, mask):
        return flash_attention_2(q, k, v, sinks, scale, mask, dropout)
    runs_flex = size >= MIN_FLEX_HEAD_DIM and q.dtype != torch.float64 and not dropout
    wide = runs_wide_heads(q.device, q.dtype, size)
    if runs_flex and (wide or not (softcap is sinks is mask.ahead is None)):
        return flex_attention(q, k, v, sinks, scale, softcap, mask)
    if mask.cu_seqlens is not None and not is_traced((q, k, v)):
        warn_of_quadratic_memory(q.dtype, q.shape[-1])
    return dense_attention(q, k, v, sinks, scale, softcap, mask, None, dropout)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, softcap: float | None, mask: Mask,
    position_ids: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    seen = dense_mask(q.shape[1], k.shape[1], q.device, mask, position_ids)
    if softcap is not None or sinks is not None:
        return masked_attention(q, k, v, sinks, scale, softcap, seen)
    return sdpa(q, k, v, scale, dropout, attn_mask=seen[:, None])


@functools.cache  # once
def warn_of_quadratic_memory(dtype: torch.dtype, head_dim: int) -> None:
    warnings.warn(
        f"attention over packed documents in {str(dtype).removeprefix('torch.')} with heads of {head_dim} stores a mask"
        " of tokens x tokens; bfloat16 with heads of at most 256 does not",
        stacklevel=4,
    )


def packed_attention_name(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str:
    """What computes the attention of packed documents, for reports, and what would be faster to install."""
    if device.type != "cuda":
        return "SDPA, one document after the other"
    gpu, half = device.index or 0, dtype in (torch.float16, torch.bfloat16)
    if half and head_dim in head_dims(gpu):
        return "FlashAttention 4"
    faster = half and head_dim in HEAD_DIMS.get(torch.cuda.get_device_capability(gpu)[0], ())
    other = "; the extra `flash` is faster: pip install 'ligermodels[flash]'" if faster else ""
    if softcap is not None or runs_wide_heads(device, dtype, head_dim):
        return f"FlexAttention{other}"
    return f"FlashAttention 2{other}" if half and head_dim <= MAX_FLASH_HEAD_DIM else "SDPA with a dense mask"


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, cu_seqlens: Tensor | None = None, position_ids: Tensor | None = None, *,
    causal: bool = True, sinks: Tensor | None = None, cu_seqlens_k: Tensor | None = None, ahead: Tensor | None = None,
) -> Tensor:  # fmt: skip
    left = None if window is None else window - 1
    mask = Mask(left, 0 if causal else left, cu_seqlens, cu_seqlens_k, ahead=ahead)
    seen = dense_mask(q.shape[1], k.shape[1], q.device, mask, position_ids)
    return masked_attention(q, k, v, sinks, q.shape[-1] ** -0.5 if scale is None else scale, softcap, seen)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, softcap: float | None, seen: Tensor
) -> Tensor:
    """Attention in plain operations. seen: bool [B or 1, T, S], true where the query sees the key."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = widen(scores).masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    weights = weights.masked_fill(~seen[:, None], 0.0).to(q.dtype)  # not NaN where a query sees no key
    return torch.einsum("bhts,bshd->bthd", weights, v)


def attention_by_document(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> Tensor:
    """Attention computed document by document. Reads the offsets on the host: not for GPU tensors or tracing."""
    lengths, lengths_k = (offsets.diff().tolist() for offsets in mask.offsets if offsets is not None)
    if len(lengths) == 1:
        return attention(q, k, v, ahead=mask.ahead, **options)
    ahead = [None] * len(lengths) if mask.ahead is None else mask.ahead.split(lengths, 1)
    documents = zip(q.split(lengths, 1), k.split(lengths_k, 1), v.split(lengths_k, 1), ahead, strict=True)
    return torch.cat([attention(q, k, v, ahead=seen, **options) for q, k, v, seen in documents], dim=1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, dropout: float) -> Tensor:
    if not q.is_cuda:
        return sdpa(q, k, v, scale, dropout, is_causal=causal)
    with sdpa_kernel(SDPA_BACKENDS, set_priority=True):
        return sdpa(q, k, v, scale, dropout, is_causal=causal)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, **mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:
        # The only fused fp32 implementation does not support grouped-query heads; the others materialise all scores.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, dropout_p=dropout, enable_gqa=grouped, **mask)
    return out.transpose(1, 2)
