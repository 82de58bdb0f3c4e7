"""FlashAttention 4 as an op: attention over packed documents, with a window, a softcap or sinks.

The kernels are those of the package flash-attn-4 (the extra `flash`), here for Hopper GPUs. It compiles a kernel for
each kind of call at its first use, in about five seconds, and caches it on disk. This module makes an op of them that a
compiler can trace. Source: Shah et al. 2024, https://arxiv.org/abs/2407.08608, and
https://github.com/Dao-AILab/flash-attention.
"""

import functools
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels.attention.attention_mask import Mask
from ligermodels.kernels.dispatch import Node, assume_constant_result, register_op

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


@assume_constant_result  # a compiler must not trace the import
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
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, softcap: float | None, mask: Mask
) -> Tensor:
    """Attention of q [B, T, Hq, D] over k, v [B, S, Hkv, D] -> [B, T, Hq, D] in fp16 or bf16. Arguments as in
    `attention`."""
    options = (*mask.offsets, mask.longest, mask.longest_k, scale, mask.left, mask.right, softcap)
    if mask.cu_seqlens is None:
        return FlashAttention.apply(q, k, v, sinks, *options)
    return FlashAttention.apply(q[0], k[0], v[0], sinks, *options)[None]


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None,
    longest: int, longest_k: int, scale: float, left: int | None, right: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [.., Hq, D] in q's dtype, and the log-sum-exp of the scores with the sink, fp32: [B, Hq, T], of documents
    [Hq, T]."""
    out, lse, *_ = loaded()._flash_attn_fwd(
        q, k, v, **offsets(cu_seqlens, cu_seqlens_k, longest, longest_k), softmax_scale=scale,
        causal=right == 0, window_size_left=left, window_size_right=right, softcap=softcap, learnable_sink=sinks,
        return_lse=True,
    )  # fmt: skip
    return out, lse


def run_backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, longest: int, longest_k: int, scale: float,
    left: int | None, right: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of q, k, v and sinks."""
    gradients = loaded()._flash_attn_bwd(
        q, k, v, out, out_gradient, lse, scale, right == 0, softcap or 0.0, window_size_left=left,
        window_size_right=right, **offsets(cu_seqlens, cu_seqlens_k, longest, longest_k), learnable_sink=sinks,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return gradients if sinks is not None else (*gradients[:3], None)


def loaded() -> Any:
    """The package, which `runs_flash_attention` has found."""
    return package()


def offsets(cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, longest: int, longest_k: int) -> dict[str, Any]:
    """The arguments of packed documents."""
    if cu_seqlens is None:
        return {}
    return {
        "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": longest, "max_seqlen_k": longest_k,
    }  # fmt: skip


def fake_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    tokens, heads = q.shape[:-2], q.shape[-2]
    rows = (heads, *tokens) if cu_seqlens is not None else (tokens[0], heads, tokens[1])
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(rows, dtype=torch.float32)


def fake_backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *others: Any
) -> tuple[Tensor | None, ...]:
    inputs = (q, k, v, sinks)
    return tuple(None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


FLASH_OPTIONS = (
    "Tensor? cu_seqlens, Tensor? cu_seqlens_k, int longest, int longest_k, float scale, int? left, int? right,"
    " float? softcap"
)
flash_attention_forward = register_op(
    f"flash_attention_forward(Tensor q, Tensor k, Tensor v, Tensor? sinks, {FLASH_OPTIONS}) -> (Tensor, Tensor)",
    run_forward,
    fake_forward,
)
flash_attention_backward = register_op(
    "flash_attention_backward(Tensor out_gradient, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse,"
    f" {FLASH_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    run_backward,
    fake_backward,
)


class FlashAttention(Node):
    @staticmethod
    def forward(ctx, q, k, v, sinks, cu_seqlens, cu_seqlens_k, *options):
        out, lse = flash_attention_forward(q, k, v, sinks, cu_seqlens, cu_seqlens_k, *options)
        ctx.save_for_backward(q, k, v, sinks, out, lse, cu_seqlens, cu_seqlens_k)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, out_gradient):
        *gradients, sinks_gradient = flash_attention_backward(out_gradient, *ctx.saved_tensors, *ctx.options)
        sinks_gradient = sinks_gradient if ctx.needs_input_grad[3] else None
        return *gradients, sinks_gradient, *(None,) * (2 + len(ctx.options))
