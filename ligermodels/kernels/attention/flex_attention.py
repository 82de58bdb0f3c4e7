"""FlexAttention, compiled: what the FlashAttention that is there cannot compute, without a dense mask.

Block masks are cached, because one batch needs the same in all layers.
Source: Dong et al. 2024, https://arxiv.org/abs/2412.05496, and torch.nn.attention.flex_attention.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ligermodels.kernels.attention.attention_mask import Alignment, Mask, align_ends
from ligermodels.kernels.dispatch import assume_constant_result
from ligermodels.kernels.launch import shared_memory

MIN_FLEX_HEAD_DIM = 16
HOPPER_SHARED_MEMORY = 227 * 1024  # bytes available to one program
# FlexAttention's kernel options for heads of 256. Its defaults are a third slower (H200); these fill the shared memory.
HEAD_256_TILES = {
    "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 2,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 8, "bwd_num_stages": 2,
}  # fmt: skip
# For heads of 512, where its defaults do not fit into shared memory.
HEAD_512_TILES = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_warps": 8, "fwd_num_stages": 2,
    "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32,
    "bwd_num_warps": 8, "bwd_num_stages": 1,
}  # fmt: skip


@assume_constant_result  # a compiler must not trace the query of the driver
def runs_wide_heads(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether these are heads that no FlashAttention takes and FlexAttention does: in half precision, of more than 256
    and at most 512, on a GPU with the shared memory for them. device: a GPU."""
    wide = 256 < head_dim <= 512 and dtype in (torch.float16, torch.bfloat16)
    return wide and shared_memory(device) >= HOPPER_SHARED_MEMORY


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, softcap: float | None, mask: Mask
) -> Tensor:
    """q [B, T, Hq, D], k, v [B, S, Hkv, D] on a GPU -> [B, T, Hq, D]. Arguments as in `attention`."""
    out = compiled_flex_attention()(
        *(x.transpose(1, 2) for x in (q, k, v)),
        sinks,
        score_mod=None if softcap is None else softcap_score_mod(softcap, q.dtype == torch.float32),
        block_mask=shared_block_mask(q.shape[1], k.shape[1], q.device, mask),
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
        kernel_options=kernel_options(q, mask),
    )
    return out.transpose(1, 2)


@functools.cache
def compiled_flex_attention():
    return torch.compile(flex_attention_with_sinks)


def flex_attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **options: Any) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if sinks is None:
        return flex_attention(q, k, v, **options)
    out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    # One more column of the softmax, whose value is zero, scales what the other columns give.
    return (out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(out.dtype)


@functools.cache
def softcap_score_mod(softcap: float, fp32: bool):
    """FlexAttention's score_mod: the softcap, in fp32. Half precision takes a sigmoid, in a third of tanh's time."""

    def by_tanh(score, batch, head, query, key):
        return softcap * torch.tanh(score / softcap)

    def by_sigmoid(score, batch, head, query, key):
        return (2 * softcap) * torch.sigmoid(score * (2 / softcap)) - softcap

    return by_tanh if fp32 else by_sigmoid


def kernel_options(q: Tensor, mask: Mask) -> dict[str, Any]:
    contiguous = mask.left is mask.cu_seqlens is mask.ahead is None  # the key blocks that a query block sees
    options = {"BLOCKS_ARE_CONTIGUOUS": contiguous}
    if runs_wide_heads(q.device, q.dtype, q.shape[-1]):
        return options | HEAD_512_TILES
    wide = q.shape[-1] == 256 and q.element_size() == 2 and shared_memory(q.device) >= HOPPER_SHARED_MEMORY
    return options | (HEAD_256_TILES if wide else {})


class PackedMasks(NamedTuple):
    """The block masks of one batch."""

    versions: tuple[int | None, ...]  # of the content of the tensors of the mask
    others: tuple[Tensor | None, ...]  # those of them that are not the key
    alignment: Alignment
    by_window: dict[tuple[int | None, int | None], Any]  # (left, right) -> block mask


PACKED_MASKS = WeakTensorKeyDictionary()  # cu_seqlens, or where there is one `ahead` -> PackedMasks


def shared_block_mask(queries: int, keys: int, device: torch.device, mask: Mask):
    """FlexAttention's block mask, cached for all layers: creating it takes longer than one attention."""
    key, others = mask.ahead, (mask.cu_seqlens, mask.cu_seqlens_k)
    if key is None:
        key, others = mask.cu_seqlens, (mask.cu_seqlens_k, None)
    if key is None:
        return unpacked_block_mask(queries, keys, device, mask.left, mask.right)
    masks = PACKED_MASKS.get(key)
    # The next batch may overwrite the same tensors.
    versions = tuple(None if x is None else x._version for x in (key, *others))
    same = masks is not None and all(x is y for x, y in zip(masks.others, others, strict=True))
    if masks is None or not same or masks.versions != versions:
        alignment = align_ends(queries, keys, device, mask)
        masks = PACKED_MASKS[key] = PackedMasks(versions, others, alignment, {})
    window = mask.left, mask.right
    if window not in masks.by_window:
        masks.by_window[window] = make_block_mask(queries, keys, device, *window, masks.alignment, mask.ahead)
    return masks.by_window[window]


@functools.lru_cache(maxsize=64)
def unpacked_block_mask(queries: int, keys: int, device: torch.device, left: int | None, right: int | None):
    return make_block_mask(queries, keys, device, left, right, align_ends(queries, keys, device, Mask()))


def make_block_mask(
    queries: int, keys: int, device: torch.device, left: int | None, right: int | None, alignment: Alignment,
    ahead: Tensor | None = None,
):  # fmt: skip
    from torch.nn.attention.flex_attention import create_block_mask

    shift, document, document_k = alignment

    def seen(batch, head, query, key):
        distance = query - key + (shift if isinstance(shift, int) else shift[query])
        mask = query >= 0
        if ahead is not None:
            mask = mask & (distance >= -ahead[batch, query])
        elif right is not None:
            mask = mask & (distance >= -right)
        if left is not None:
            mask = mask & (distance <= left)
        if document is not None:
            mask = mask & (document[query] == document_k[key])
        return mask

    batch = None if ahead is None else ahead.shape[0]
    return create_block_mask(seen, batch, None, queries, keys, device=device)
