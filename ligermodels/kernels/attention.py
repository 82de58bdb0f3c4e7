"""Causal attention: the one door to the implementations that others keep fast. Nothing here is a kernel of ours.

out = softmax(mask(softcap(scale * q kᵀ))) v, query head h reading kv head h // (Hq / Hkv).
A query at position i sees key j iff j <= i, i - j < window (where there is one) and both lie in one document.
q [B, T, Hq, D], k, v [B, S, Hkv, D] -> [B, T, Hq, D].

What runs where:
- plain causal: SDPA, cuDNN first on the GPU (fastest on Hopper), then FlashAttention;
- packed documents or a window, in half precision on the GPU: FlashAttention's variable-length kernel;
- softcap on the GPU: FlexAttention, compiled (from heads of 16 on);
- packed documents on the CPU: one after the other, as the mask of a whole row would cost its length squared;
- a key-value cache, fp32 on the GPU, and the rest on the CPU: SDPA with a dense mask, or the reference for a softcap.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from ligermodels.kernels.dispatch import autocast, is_traced, widen
from ligermodels.kernels.launch import shared_memory

BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
NARROWEST_FLEX_HEAD = 16
HOPPER_MEMORY = 227 * 1024  # bytes of shared memory that one program may use
WIDE_HEAD_TILES = {
    "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 2,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 8, "bwd_num_stages": 2,
}  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    position_ids: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of q [B, T, Hq, D] over k, v [B, S, Hkv, D] -> [B, T, Hq, D], any strides with unit stride along D.

    cu_seqlens: int32 [documents + 1] offsets of the documents packed into the one row (B = 1); max_seqlen their
    longest.
    position_ids: [B, T] positions of the queries where the keys are a cache, key j being at position j.
    dropout: probability of dropping a weight of the softmax.
    Raises ValueError for packed documents in more than one row, and for dropout together with a softcap.
    """
    if dropout and softcap is not None:
        raise ValueError("attention: dropout cannot be combined with a softcap")
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"attention: cu_seqlens packs documents into one row, but the batch has {q.shape[0]}")
    q, k, v = autocast(q, k, v)
    if window is not None and window >= k.shape[1]:
        window = None
    if softcap is None and window is None and cu_seqlens is None and position_ids is None:
        return causal(q, k, v, scale, dropout)
    if q.is_cuda and position_ids is None:
        if softcap is not None and q.shape[-1] >= NARROWEST_FLEX_HEAD:
            return flex(q, k, v, scale, window, softcap, cu_seqlens)
        if softcap is None and q.dtype in (torch.float16, torch.bfloat16):
            return variable_length(q, k, v, scale, window, cu_seqlens, max_seqlen, dropout)
    if cu_seqlens is not None and q.is_cpu and position_ids is None and not is_traced((q, k, v)):
        return by_document(q, k, v, cu_seqlens, scale=scale, window=window, softcap=softcap, dropout=dropout)
    if softcap is not None:
        return attention_reference(q, k, v, scale, window, softcap, cu_seqlens, position_ids)
    mask = visible(q.shape[1], k.shape[1], q.device, window, cu_seqlens, position_ids)
    return sdpa(q, k, v, scale, dropout, attn_mask=mask[:, None])


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visible(q.shape[1], k.shape[1], q.device, window, cu_seqlens, position_ids)
    weights = widen(scores).masked_fill(~mask[:, None], -torch.inf).softmax(-1).to(q.dtype)
    return torch.einsum("bhts,bshd->bthd", weights, v)


def visible(
    queries: int,
    keys: int,
    device: torch.device,
    window: int | None,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
) -> Tensor:
    """The dense mask, bool [B or 1, T, S], true where the query sees the key."""
    key = torch.arange(keys, device=device)
    query = torch.arange(queries, device=device)[None] if position_ids is None else position_ids
    distance = query[:, :, None] - key  # [B, T, S]
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)  # in place it could not be replayed by selective checkpointing
    if cu_seqlens is not None:
        document = document_of(key, cu_seqlens)
        mask = mask & (document[:, None] == document)
    return mask


def document_of(position: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Which packed document each position of the row belongs to."""
    return torch.bucketize(position, cu_seqlens[1:], right=True)


def by_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **options: Any) -> Tensor:
    """Attention within each packed document by itself. Waits for `cu_seqlens`, so it is not for a GPU or a tracer."""
    lengths = cu_seqlens.diff().tolist()
    documents = zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([attention(*document, **options) for document in documents], dim=1)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
    if not q.is_cuda:
        return sdpa(q, k, v, scale, dropout, is_causal=True)
    with sdpa_kernel(BACKENDS, set_priority=True):
        return sdpa(q, k, v, scale, dropout, is_causal=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, **mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:
        # The one fused implementation for fp32 cannot group heads; without it all scores would be materialised.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, dropout_p=dropout, enable_gqa=grouped, **mask)
    return out.transpose(1, 2)


def variable_length(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cu_seqlens: Tensor | None,
    max_seqlen: int | None, dropout: float,
) -> Tensor:  # fmt: skip
    """FlashAttention over documents (or, without cu_seqlens, over whole rows), with a window counted to the left."""
    longest = max_seqlen or q.shape[1]
    if cu_seqlens is not None:
        q, k, v = (x[0] for x in (q, k, v))  # [T, H, D]
    left, size = -1 if window is None else window - 1, q.shape[-1]
    q, k, v = (F.pad(x, (0, -size % 8)) if size % 8 else x for x in (q, k, v))  # the kernel takes multiples of 8
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, dropout, True, False,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return out[..., :size] if cu_seqlens is None else out[None, ..., :size]


@functools.cache
def compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float, cu_seqlens: Tensor | None
) -> Tensor:
    attend = compiled_flex_attention()
    out = attend(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score_mod=bound(softcap, q.dtype == torch.float32),
        block_mask=visible_blocks(q.shape[1], q.device, window, cu_seqlens),
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
        kernel_options=flex_options(q, causal=window is None and cu_seqlens is None),
    )
    return out.transpose(1, 2)


@functools.cache
def bound(softcap: float, single: bool):
    """The softcap of one score, computed in fp32; for half precision by a sigmoid, at a third of tanh's time."""

    def by_tanh(score, batch, head, query, key):
        return softcap * torch.tanh(score / softcap)

    def by_sigmoid(score, batch, head, query, key):
        return (2 * softcap) * torch.sigmoid(score * (2 / softcap)) - softcap

    return by_tanh if single else by_sigmoid


def flex_options(q: Tensor, causal: bool) -> dict[str, Any]:
    """Tiles for heads of 256, where FlexAttention's own are a third slower (H200); they fill Hopper's shared memory.

    causal: the mask is nothing more, so that the blocks that a block sees, whole or in part, follow one another.
    """
    wide = q.shape[-1] == 256 and q.element_size() == 2 and shared_memory(q.device) >= HOPPER_MEMORY
    return {"BLOCKS_ARE_CONTIGUOUS": causal} | (WIDE_HEAD_TILES if wide else {})


def visible_blocks(length: int, device: torch.device, window: int | None, cu_seqlens: Tensor | None):
    """FlexAttention's mask, made once for all layers: it costs more than an attention."""
    if cu_seqlens is None:
        return unpacked_blocks(length, device, window)
    known = PACKED_BLOCKS.get(cu_seqlens)
    if known is None or known.version != cu_seqlens._version:  # a batch may be written over the one before
        document = document_of(torch.arange(length, device=device), cu_seqlens)
        known = PACKED_BLOCKS[cu_seqlens] = PackedBlocks(cu_seqlens._version, document, {})
    if window not in known.by_window:
        known.by_window[window] = blocks_of(length, device, window, known.document)
    return known.by_window[window]


class PackedBlocks(NamedTuple):
    """The masks of one batch of packed documents, those of windowed layers and of full ones."""

    version: int  # of cu_seqlens' content
    document: Tensor
    by_window: dict[int | None, Any]


PACKED_BLOCKS = WeakTensorKeyDictionary()


@functools.lru_cache(maxsize=64)
def unpacked_blocks(length: int, device: torch.device, window: int | None):
    return blocks_of(length, device, window, None)


def blocks_of(length: int, device: torch.device, window: int | None, document: Tensor | None):
    from torch.nn.attention.flex_attention import create_block_mask

    def mask(batch, head, query, key):
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        if document is not None:
            seen = seen & (document[query] == document[key])
        return seen

    return create_block_mask(mask, None, None, length, length, device=device)
