"""FlashAttention 4 as an op: causal attention over packed documents, with a window or a softcap.

The kernels are those of the package flash-attn-4 (the extra `flash`), here for Hopper GPUs. It compiles a kernel for
each kind of call at its first use, in about five seconds, and caches it on disk. This module makes an op of them that a
compiler can trace. Must not know the other implementations of attention.
Source: Shah et al. 2024, https://arxiv.org/abs/2407.08608, and https://github.com/Dao-AILab/flash-attention.
"""

import functools
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import Node, register_op

# Head dimensions with gradients within the error budget, by the major compute capability; others were not tried. Of
# 4.0.0b36 the backward pass is wrong for heads of 16, 40 and 80.
HEAD_DIMS = {9: (64, 96, 128, 192, 256)}
FEWEST_ELEMENTS = 2**23  # of the queries: for fewer the host's time, three times that of torch's kernel, costs more


@functools.cache
def package() -> ModuleType | None:
    """The module with flash-attn-4's kernels; None if it is not installed. Warns if it cannot be imported."""
    warnings.filterwarnings(
        "ignore", "Argument aux_data", UserWarning
    )  # its compiler, of an argument that is not given
    try:
        from flash_attn.cute import interface
    except ModuleNotFoundError as error:
        if error.name not in ("flash_attn", "flash_attn.cute"):
            warnings.warn(f"flash-attn-4 is not used: {error}", stacklevel=2)
        return None
    except Exception as error:  # what its compiler raises on a driver that it does not support
        warnings.warn(f"flash-attn-4 is not used: {error}", stacklevel=2)
        return None
    return interface


@torch.compiler.assume_constant_result  # a compiler must not trace the import
def head_dims(gpu: int) -> tuple[int, ...]:
    """The head dimensions that FlashAttention 4 takes on the GPU of this index; none where it cannot run."""
    return find_head_dims(gpu)


@functools.cache
def find_head_dims(gpu: int) -> tuple[int, ...]:
    if torch.version.hip or package() is None:
        return ()
    return HEAD_DIMS.get(torch.cuda.get_device_capability(gpu)[0], ())


def runs_flash_attention(q: Tensor) -> bool:
    """Whether `flash_attention` takes these queries [..., D] on a GPU, and is faster than torch's kernels."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and q.numel() >= FEWEST_ELEMENTS and q.shape[-1] in head_dims(q.device.index)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None,
    cu_seqlens: Tensor | None, longest: int,
) -> Tensor:  # fmt: skip
    """Causal attention of q [B, T, Hq, D] over k, v [B, T, Hkv, D] -> [B, T, Hq, D] in fp16 or bf16.

    Arguments as in `attention`. longest: an upper bound of the documents' lengths; of T without cu_seqlens.
    """
    left = None if window is None else window - 1
    if cu_seqlens is None:
        return FlashAttention.apply(q, k, v, None, longest, scale, left, softcap)
    q, k, v = (x[0] for x in (q, k, v))  # [T, H, D]
    return FlashAttention.apply(q, k, v, cu_seqlens, longest, scale, left, softcap)[None]


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, longest: int, scale: float, left: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [.., Hq, D] in q's dtype, and the log-sum-exp of the scores, fp32: [B, Hq, T], of documents [Hq, T]."""
    out, lse, *_ = loaded()._flash_attn_fwd(
        q, k, v, **offsets(cu_seqlens, longest), softmax_scale=scale, causal=True, window_size_left=left,
        window_size_right=0 if left is not None else None, softcap=softcap, return_lse=True,
    )  # fmt: skip
    return out, lse


def run_backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    longest: int, scale: float, left: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v."""
    q_gradient, k_gradient, v_gradient, *_ = loaded()._flash_attn_bwd(
        q, k, v, out, out_gradient, lse, scale, True, softcap or 0.0, window_size_left=left,
        window_size_right=0 if left is not None else None, **offsets(cu_seqlens, longest),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return q_gradient, k_gradient, v_gradient


def loaded() -> Any:
    """The package, which `runs_flash_attention` has found."""
    return package()


def offsets(cu_seqlens: Tensor | None, longest: int) -> dict[str, Any]:
    """The arguments of packed documents, the same for queries and keys."""
    if cu_seqlens is None:
        return {}
    return {
        "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_k": longest,
    }  # fmt: skip


def fake_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    tokens, heads = q.shape[:-2], q.shape[-2]
    rows = (heads, *tokens) if cu_seqlens is not None else (tokens[0], heads, tokens[1])
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(rows, dtype=torch.float32)


def fake_backward(out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


FLASH_OPTIONS = "Tensor? cu_seqlens, int longest, float scale, int? left, float? softcap"
flash_attention_forward = register_op(
    f"flash_attention_forward(Tensor q, Tensor k, Tensor v, {FLASH_OPTIONS}) -> (Tensor, Tensor)",
    run_forward,
    fake_forward,
)
flash_attention_backward = register_op(
    "flash_attention_backward(Tensor out_gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{FLASH_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    run_backward,
    fake_backward,
)


class FlashAttention(Node):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, *options):
        out, lse = flash_attention_forward(q, k, v, cu_seqlens, *options)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, out_gradient):
        *saved, cu_seqlens = ctx.saved_tensors
        gradients = flash_attention_backward(out_gradient, *saved, cu_seqlens, *ctx.options)
        return *gradients, *(None,) * (1 + len(ctx.options))
