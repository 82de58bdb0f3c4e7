"""FlashAttention 2, as torch has it, over packed documents or rows; with sinks, which its kernels do not know.

A sink s adds a column of the value zero to the softmax. With the output o and the log-sum-exp l of the scores alone, o'
= o * sigmoid(l - s)        l' = logaddexp(l, s) The backward pass without sinks, given o' and l', computes the
gradients of q, k and v. With t over the queries, ds = -Σ_t exp(s - l'_t) * (do_t · o'_t) Source: Dao 2023,
https://arxiv.org/abs/2307.08691.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.attention.attention_mask import Mask
from ligermodels.kernels.dispatch import Node, is_traced, widen

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
    """The gradients of q, k, v."""
    return torch.ops.aten._flash_attention_backward(
        out_gradient, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, longest, longest_k, 0.0, right == 0, *random_states,
        scale=scale, **window_sizes(left, right),
    )  # fmt: skip


def window_sizes(left: int | None, right: int | None) -> dict[str, Any]:
    return {
        "window_size_left": -1 if left is None else left,
        "window_size_right": -1 if right is None else right,
    }


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
