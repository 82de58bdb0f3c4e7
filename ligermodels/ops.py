"""Every fused op as a function: the way to use the kernels in a model of one's own.

    from ligermodels import ops
    y = ops.rms_norm(x, weight)                                          # x [..., N], weight [N]
    loss = ops.linear_cross_entropy(hidden, lm_head.weight, targets)     # never holds the logits of many tokens

| op                     | what it computes                                                                  |
|------------------------|-----------------------------------------------------------------------------------|
| `rms_norm`             | root-mean-square norm                                                             |
| `add_rms_norm`         | residual add and RMSNorm; returns both the norm and the sum                       |
| `layer_norm`           | LayerNorm with an optional bias                                                   |
| `apply_rope`           | rotary position embedding of separate queries and keys, out of place              |
| `rope_`                | rotary position embedding of a packed qkv projection, in place: the fastest form  |
| `qk_norm_rope`         | RMSNorm of each query and key head, then RoPE, on a packed qkv projection         |
| `swiglu`, `geglu`      | silu(gate) * up and gelu(gate) * up on a packed gate_up projection                |
| `gated_activation`     | the same with the activation named by a string                                    |
| `norm_linear`          | residual add, RMSNorm and the linear after it as one autograd node                |
| `gated_linear`         | gated activation and the linear after it as one autograd node                     |
| `low_rank_linear`      | linear with a LoRA update (`LowRank`) as one autograd node                        |
| `route`                | top-k router: probabilities and indices of a token's experts                      |
| `experts`              | mixture of gated experts by grouped GEMM, with optional LoRA (`GroupedLowRank`)   |
| `attention`            | causal attention over SDPA, FlashAttention and FlexAttention                      |
| `cross_entropy`        | cross-entropy of logits: softcap, z-loss, label smoothing, in-place gradient      |
| `linear_cross_entropy` | output projection and cross-entropy, one chunk of logits at a time                |
| `token_log_probs`      | log-probability of each target token, without all logits in memory                |
| `adamw_`               | one AdamW step on one parameter, in place                                         |

`cross_entropy_with_metrics` and `linear_cross_entropy_with_metrics` return a `CrossEntropyOutput`: the loss, z-loss,
accuracy, predicted tokens and entropy, all from the same kernel.

Dispatch: CPU tensors take the plain PyTorch reference implementation; CUDA and ROCm tensors take the Triton kernels.
Under torch.compile the ops are custom operators `torch.ops.ligermodels.*`, without graph breaks. Under torch.autocast,
the ops that contain a matrix product (linears, experts, attention, linear_cross_entropy) take their operands in the
autocast dtype.
Requirements: torch and triton as in pyproject.toml; NVIDIA Ampere or newer, or ROCm; fp32, bf16 or fp16 tensors.
Numerics: sums in fp32, one rounding at the end, weight gradients without atomics and bit-identical from run to run.
Double backward is refused with a RuntimeError: `torch.func` differentiates twice, on the reference implementation.

Must not know any model. `docs/kernels.md` has examples, `ligermodels.nn` the modules that own weights.
"""

import torch
from torch import Tensor

from ligermodels.kernels.adamw import adamw_
from ligermodels.kernels.attention import attention
from ligermodels.kernels.cross_entropy import CrossEntropyOutput, cross_entropy, cross_entropy_with_metrics
from ligermodels.kernels.dispatch import runs_kernels
from ligermodels.kernels.experts import experts, route
from ligermodels.kernels.gated_activation import gated_activation, geglu, swiglu
from ligermodels.kernels.gated_linear import gated_linear
from ligermodels.kernels.grouped_low_rank import GroupedLowRank
from ligermodels.kernels.layer_norm import layer_norm
from ligermodels.kernels.linear import LowRank, low_rank_linear
from ligermodels.kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
    token_log_probs,
)
from ligermodels.kernels.norm_linear import norm_linear
from ligermodels.kernels.qk_norm_rope import qk_norm_rope
from ligermodels.kernels.rms_norm import add_rms_norm, rms_norm
from ligermodels.kernels.rope import rope_

__all__ = [
    "CrossEntropyOutput",
    "GroupedLowRank",
    "LowRank",
    "adamw_",
    "add_rms_norm",
    "apply_rope",
    "attention",
    "cross_entropy",
    "cross_entropy_with_metrics",
    "experts",
    "gated_activation",
    "gated_linear",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_with_metrics",
    "low_rank_linear",
    "norm_linear",
    "qk_norm_rope",
    "rms_norm",
    "rope_",
    "route",
    "swiglu",
    "token_log_probs",
]


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of separate queries and keys, out of place: (rotated q, rotated k).

    q [B, T, H, D], k [B, T, Hkv, D] float, any strides; cos, sin fp32 [T, R/2], which the batch shares, or [B, T, R/2]
    or [B T, R/2], a row for each token; R <= D is even -> contiguous tensors of the shapes and dtypes of q and k. The
    first R dimensions of a head are rotated in pairs (j, j + R/2), or (2j, 2j + 1) if interleaved; the others are
    copied.

    Hugging Face's layout is [B, H, T, D], and its cos and sin [B, T, D] hold each angle twice: pass q.transpose(1, 2),
    k.transpose(1, 2), cos[..., : D // 2].float() and sin[..., : D // 2].float().

    Cost on a GPU: two launches and two copies forward, because q and k are copied before they are rotated in place;
    two launches backward, without a copy. torch.compile adds a copy of each. `rope_` rotates the packed projection in
    place by one launch, without a copy.
    Raises ValueError where the shapes disagree. Su et al. 2021, https://arxiv.org/abs/2104.09864.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"apply_rope: q {list(q.shape)} and k {list(k.shape)}; needed [B, T, H, D] and [B, T, Hkv, D]")
    cos, sin = cos.flatten(0, -2).contiguous(), sin.flatten(0, -2).contiguous()
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, T, H, D] as a packed projection of H query heads, no key heads and no value heads."""
    if runs_kernels(x):  # in place; the reference implementation leaves its input alone
        x = x.clone(memory_format=torch.contiguous_format)
    rotated, _, _ = rope_(x.flatten(2), cos, sin, x.shape[2], 0, interleaved)
    return rotated
