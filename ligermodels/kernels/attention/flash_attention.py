"""FlashAttention 4 and 2 over packed documents or rows, with a window; with a softcap (4 alone) or sinks.

FlashAttention 4: the kernels are those of the package flash-attn-4 (the extra `flash`), here for Hopper GPUs. It
compiles a kernel for each kind of call at its first use, in about five seconds, and caches it on disk. This module
makes an op of them that a compiler can trace.
Source: Shah et al. 2024, https://arxiv.org/abs/2407.08608, and https://github.com/Dao-AILab/flash-attention.

FlashAttention 2, as torch has it, does not know sinks. A sink s adds a column of the value zero to the softmax. With
the output o and the log-sum-exp l of the scores alone,
    o' = o * sigmoid(l - s)        l' = logaddexp(l, s)
The backward pass without sinks, given o' and l', computes the gradients of q, k and v. With t over the queries,
    ds = -Σ_t exp(s - l'_t) * (do_t · o'_t)
Source: Dao 2023, https://arxiv.org/abs/2307.08691.
"""

import functools
import warnings
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.attention.attention_mask import Mask
from ligermodels.kernels.dispatch import Node, assume_constant_result, is_traced, register_op, widen

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


flash_attention_forward = register_op("flash_attention_forward", run_forward, fake_forward)
flash_attention_backward = register_op("flash_attention_backward", run_backward, fake_backward)


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


MAX_FLASH_HEAD_DIM = 256


def runs_flash_attention_2(q: Tensor, mask: Mask) -> bool:
    """Whether `flash_attention_2` takes these queries [.., D] on a GPU."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    # It takes a window as wide as the keys for none, which is wrong for a query that stands before the first key.
    unlimited = mask.right is not None and mask.longest > mask.longest_k and mask.right >= mask.longest_k
    return half and q.shape[-1] <= MAX_FLASH_HEAD_DIM and not unlimited


def flash_attention_2(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, mask: Mask, dropout: float
) -> Tensor:
    """q [B, T, Hq, D], k, v [B, S, Hkv, D] in fp16 or bf16 on a GPU -> [B, T, Hq, D]. Arguments as in `attention`.

    dropout: zero if there are sinks.
    """
    head_dim = q.shape[-1]
    if mask.cu_seqlens is not None:
        q, k, v = (x[0] for x in (q, k, v))  # [T, H, D]
    if head_dim % 8:  # the kernel needs a multiple of 8
        q, k, v = (F.pad(x, (0, -head_dim % 8)) for x in (q, k, v))
    documents = (*mask.offsets, mask.longest, mask.longest_k)
    if sinks is None:
        out, *_ = flash_2_forward(q, k, v, *documents, scale, mask.left, mask.right, dropout)
    else:
        out = SinkAttention.apply(q, k, v, sinks, *documents, scale, mask.left, mask.right)
    out = out[..., :head_dim]
    return out if mask.cu_seqlens is None else out[None]


def flash_2_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, longest: int,
    longest_k: int, scale: float, left: int | None, right: int | None, dropout: float = 0.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """out [.., Hq, D]; the log-sum-exp of the scores, fp32: [B, Hq, T], of documents [Hq, T]; two random states."""
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens_k, longest, longest_k, dropout, right == 0, False,
        scale=scale, **window_sizes(left, right),
    )[:4]  # fmt: skip


def flash_2_backward(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, random_states: tuple[Tensor, ...],
    cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, longest: int, longest_k: int, scale: float,
    left: int | None, right: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.ops.aten._flash_attention_backward(
        out_gradient, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, longest, longest_k, 0.0, right == 0, *random_states,
        scale=scale, **window_sizes(left, right),
    )  # fmt: skip


def window_sizes(left: int | None, right: int | None) -> dict[str, Any]:
    return {"window_size_left": -1 if left is None else left, "window_size_right": -1 if right is None else right}


class SinkAttention(Node):
    @staticmethod
    def forward(ctx, q, k, v, sinks, cu_seqlens, cu_seqlens_k, *options):
        out, lse, *random_states = flash_2_forward(q, k, v, cu_seqlens, cu_seqlens_k, *options)
        out, lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse, cu_seqlens, cu_seqlens_k, *random_states)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, out_gradient):
        q, k, v, sinks, out, lse, cu_seqlens, cu_seqlens_k, *random_states = ctx.saved_tensors
        gradients = flash_2_backward(
            out_gradient, q, k, v, out, lse, random_states, cu_seqlens, cu_seqlens_k, *ctx.options
        )
        sinks_gradient = gradient_of_sinks(out_gradient, out, lse, sinks) if ctx.needs_input_grad[3] else None
        return *gradients, sinks_gradient, *(None,) * (2 + len(ctx.options))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out [.., T, H, D] and lse [.., H, T] without sinks [H] -> with them; may overwrite `out`."""
    sinks = widen(sinks)[:, None]
    weight = torch.sigmoid(lse - sinks).transpose(-1, -2)[..., None]  # of all keys together
    lse = torch.logaddexp(lse, sinks)
    if is_traced((out,)):  # selective checkpointing may have saved what the kernel returned
        return (out * weight).to(out.dtype), lse
    return out.mul_(weight), lse


def gradient_of_sinks(out_gradient: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[H] in the dtype of sinks. out [.., T, H, D] and lse [.., H, T] are with sinks."""
    weight = torch.exp(widen(sinks) - lse.transpose(-1, -2))  # [.., T, H], of the sink
    dots = (widen(out_gradient) * out).sum(-1)
    return -(weight * dots).flatten(0, -2).sum(0).to(sinks.dtype)
