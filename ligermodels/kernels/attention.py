"""Causal attention: dispatch to the fastest existing implementation. This module has no kernel of its own.

out = softmax(mask(softcap(scale * q kᵀ))) v, where query head h reads key-value head h // (Hq / Hkv).
A query at position i sees key j if and only if j <= i, i - j < window (if there is a window) and both are in the same
document.
q [B, T, Hq, D], k, v [B, S, Hkv, D] -> [B, T, Hq, D].

Implementations:
- plain causal attention: SDPA, on the GPU with cuDNN first (fastest on Hopper), then FlashAttention;
- packed documents, a window or a softcap, in half precision on a GPU: FlashAttention 4 if it is installed and can run
  there (flash_attention.py); otherwise the next two;
- packed documents or a window, in half precision on the GPU: FlashAttention's variable-length kernel;
- softcap on the GPU: compiled FlexAttention (head dimension 16 and up);
- packed documents on the CPU: one document after the other, because a mask of the whole row needs quadratic memory;
- a key-value cache, fp32 on the GPU, and everything else on the CPU: SDPA with a dense mask, or the reference
  implementation if there is a softcap.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.weak import WeakTensorKeyDictionary

from ligermodels.kernels.dispatch import autocast, is_traced, runs_kernels, widen
from ligermodels.kernels.flash_attention import HEAD_DIMS, flash_attention, head_dims, runs_flash_attention
from ligermodels.kernels.launch import shared_memory

SDPA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
MIN_FLEX_HEAD_DIM = 16
HOPPER_SHARED_MEMORY = 227 * 1024  # bytes available to one program
# FlexAttention's kernel options for heads of 256. Its defaults are a third slower (H200); these fill the shared memory.
HEAD_256_TILES = {
    "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 2,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 8, "bwd_num_stages": 2,
}  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    position_ids: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention of q [B, T, Hq, D] over k, v [B, S, Hkv, D] -> [B, T, Hq, D]; any strides, unit stride along D.

    scale: of the scores; None for D^-1/2.
    window: number of keys that a query sees, itself included; None for no limit.
    softcap: bounds the scores to softcap * tanh(scores / softcap).
    cu_seqlens: int32 [documents + 1], offsets of the documents packed into one row (B = 1). max_seqlen: length of the
    longest document.
    position_ids: [B, T] positions of the queries, if k and v are a cache; key j is at position j.
    dropout: probability of dropping a softmax weight.
    Raises ValueError for packed documents in a batch of several rows and for dropout combined with a softcap.
    """
    if dropout and softcap is not None:
        raise ValueError("attention: dropout cannot be combined with a softcap")
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"attention: cu_seqlens needs a batch of one row, but the batch has {q.shape[0]} rows")
    q, k, v = autocast(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # An exported program is for any length: this one must not be compared.
    if window is not None and not torch.compiler.is_exporting() and window >= k.shape[1]:
        window = None
    if softcap is None and window is None and cu_seqlens is None and position_ids is None:
        return causal_attention(q, k, v, scale, dropout)
    if q.is_cuda and position_ids is None:
        if not dropout and runs_kernels(q) and runs_flash_attention(q):
            return flash_attention(q, k, v, scale, window, softcap, cu_seqlens, max_seqlen or q.shape[1])
        if softcap is not None and q.shape[-1] >= MIN_FLEX_HEAD_DIM:
            return flex_attention_with_softcap(q, k, v, scale, window, softcap, cu_seqlens)
        if softcap is None and q.dtype in (torch.float16, torch.bfloat16):
            return varlen_flash_attention(q, k, v, scale, window, cu_seqlens, max_seqlen, dropout)
    if cu_seqlens is not None and q.is_cpu and position_ids is None and not is_traced((q, k, v)):
        return attention_by_document(q, k, v, cu_seqlens, scale=scale, window=window, softcap=softcap, dropout=dropout)
    if softcap is not None:
        return attention_reference(q, k, v, scale, window, softcap, cu_seqlens, position_ids)
    mask = dense_mask(q.shape[1], k.shape[1], q.device, window, cu_seqlens, position_ids)
    return sdpa(q, k, v, scale, dropout, attn_mask=mask[:, None])


def packed_attention_name(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str:
    """What computes the attention of packed documents, for reports, and what would be faster to install."""
    if device.type != "cuda":
        return "SDPA, one document after the other"
    gpu, half = device.index or 0, dtype in (torch.float16, torch.bfloat16)
    if half and head_dim in head_dims(gpu):
        return "FlashAttention 4"
    faster = half and head_dim in HEAD_DIMS.get(torch.cuda.get_device_capability(gpu)[0], ())
    other = "; the extra `flash` is faster: pip install 'ligermodels[flash]'" if faster else ""
    if softcap is not None:
        return f"FlexAttention{other}"
    return f"FlashAttention 2{other}" if half else "SDPA with a dense mask"


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = dense_mask(q.shape[1], k.shape[1], q.device, window, cu_seqlens, position_ids)
    weights = widen(scores).masked_fill(~mask[:, None], -torch.inf).softmax(-1).to(q.dtype)
    return torch.einsum("bhts,bshd->bthd", weights, v)


def dense_mask(
    queries: int,
    keys: int,
    device: torch.device,
    window: int | None,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
) -> Tensor:
    """bool [B or 1, T, S], true where the query sees the key."""
    key = torch.arange(keys, device=device)
    query = torch.arange(queries, device=device)[None] if position_ids is None else position_ids
    distance = query[:, :, None] - key  # [B, T, S]
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)  # not in place: selective checkpointing could not replay it
    if cu_seqlens is not None:
        document = document_ids(key, cu_seqlens)
        mask = mask & (document[:, None] == document)
    return mask


def document_ids(position: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Index of the packed document that each position of the row belongs to."""
    return torch.bucketize(position, cu_seqlens[1:], right=True)


def attention_by_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **options: Any) -> Tensor:
    """Attention computed document by document. Reads `cu_seqlens` on the host: not for GPU tensors or tracing."""
    lengths = cu_seqlens.diff().tolist()
    documents = zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([attention(*document, **options) for document in documents], dim=1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
    if not q.is_cuda:
        return sdpa(q, k, v, scale, dropout, is_causal=True)
    with sdpa_kernel(SDPA_BACKENDS, set_priority=True):
        return sdpa(q, k, v, scale, dropout, is_causal=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, **mask) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:
        # The only fused fp32 implementation does not support grouped-query heads; the others materialise all scores.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, dropout_p=dropout, enable_gqa=grouped, **mask)
    return out.transpose(1, 2)


def varlen_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, cu_seqlens: Tensor | None,
    max_seqlen: int | None, dropout: float,
) -> Tensor:  # fmt: skip
    """FlashAttention's variable-length kernel over documents, or over whole rows if cu_seqlens is None."""
    longest = max_seqlen or q.shape[1]
    if cu_seqlens is not None:
        q, k, v = (x[0] for x in (q, k, v))  # [T, H, D]
    left, head_dim = -1 if window is None else window - 1, q.shape[-1]
    if head_dim % 8:  # the kernel needs a multiple of 8
        q, k, v = (F.pad(x, (0, -head_dim % 8)) for x in (q, k, v))
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, dropout, True, False,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return out[..., :head_dim] if cu_seqlens is None else out[None, ..., :head_dim]


@functools.cache
def compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex_attention_with_softcap(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float, cu_seqlens: Tensor | None
) -> Tensor:
    attend = compiled_flex_attention()
    out = attend(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score_mod=softcap_score_mod(softcap, q.dtype == torch.float32),
        block_mask=shared_block_mask(q.shape[1], q.device, window, cu_seqlens),
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
        kernel_options=flex_kernel_options(q, causal=window is None and cu_seqlens is None),
    )
    return out.transpose(1, 2)


@functools.cache
def softcap_score_mod(softcap: float, fp32: bool):
    """FlexAttention's score_mod: the softcap, in fp32. Half precision takes a sigmoid, in a third of tanh's time."""

    def by_tanh(score, batch, head, query, key):
        return softcap * torch.tanh(score / softcap)

    def by_sigmoid(score, batch, head, query, key):
        return (2 * softcap) * torch.sigmoid(score * (2 / softcap)) - softcap

    return by_tanh if fp32 else by_sigmoid


def flex_kernel_options(q: Tensor, causal: bool) -> dict[str, Any]:
    """causal: the mask is purely causal, so that the key blocks that a query block sees are contiguous."""
    wide = q.shape[-1] == 256 and q.element_size() == 2 and shared_memory(q.device) >= HOPPER_SHARED_MEMORY
    return {"BLOCKS_ARE_CONTIGUOUS": causal} | (HEAD_256_TILES if wide else {})


class PackedMasks(NamedTuple):
    """The block masks of one batch of packed documents, one per window (None: full attention)."""

    version: int  # of the content of cu_seqlens
    document: Tensor  # [T], document index of each position
    by_window: dict[int | None, Any]


PACKED_MASKS = WeakTensorKeyDictionary()  # cu_seqlens -> PackedMasks


def shared_block_mask(length: int, device: torch.device, window: int | None, cu_seqlens: Tensor | None):
    """FlexAttention's block mask, cached for all layers: creating it takes longer than one attention."""
    if cu_seqlens is None:
        return unpacked_block_mask(length, device, window)
    masks = PACKED_MASKS.get(cu_seqlens)
    if masks is None or masks.version != cu_seqlens._version:  # the next batch may overwrite the same tensor
        document = document_ids(torch.arange(length, device=device), cu_seqlens)
        masks = PACKED_MASKS[cu_seqlens] = PackedMasks(cu_seqlens._version, document, {})
    if window not in masks.by_window:
        masks.by_window[window] = make_block_mask(length, device, window, masks.document)
    return masks.by_window[window]


@functools.lru_cache(maxsize=64)
def unpacked_block_mask(length: int, device: torch.device, window: int | None):
    return make_block_mask(length, device, window, None)


def make_block_mask(length: int, device: torch.device, window: int | None, document: Tensor | None):
    from torch.nn.attention.flex_attention import create_block_mask

    def mask(batch, head, query, key):
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        if document is not None:
            seen = seen & (document[query] == document[key])
        return seen

    return create_block_mask(mask, None, None, length, length, device=device)
