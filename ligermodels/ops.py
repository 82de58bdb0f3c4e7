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
| `apply_rotary_pos_emb` | the same in the layout of Hugging Face, whose function it replaces                |
| `rope_`                | rotary position embedding of a packed qkv projection, in place: the fastest form  |
| `qk_norm_rope`         | RMSNorm of each query and key head, then RoPE, on a packed qkv projection         |
| `sigmoid_gate`         | attention's output times the sigmoid of a gate, elementwise                       |
| `swiglu`, `geglu`      | silu(gate) * up and gelu(gate) * up, packed in one tensor or in two               |
| `gated_activation`     | the same with the activation named by a string, and with multipliers              |
| `norm_linear`          | residual add, RMSNorm and the linear after it as one autograd node                |
| `layer_norm_linear`    | the same with a LayerNorm                                                         |
| `gated_linear`         | gated activation and the linear after it as one autograd node                     |
| `plain_activation`     | gelu, gelu_tanh, quick_gelu, silu without a gate                                  |
| `activated_linear`     | activation and the linear after it as one autograd node                           |
| `low_rank_linear`      | linear with a LoRA update (`LowRank`) as one autograd node                        |
| `frozen_linear`        | linear of a `QuantisedWeight`, which is dequantised forward and backward          |
| `nf4_weight`           | a `QuantisedWeight` in NF4 with double quantisation, as bitsandbytes quantises it |
| `route`                | top-k router: probabilities and indices of a token's experts                      |
| `experts`              | mixture of gated experts by grouped GEMM, with optional LoRA (`GroupedLowRank`)   |
| `attention`            | attention over SDPA, FlashAttention and FlexAttention, causal by default          |
| `decode_attention`     | one query per row against a paged key-value cache: a step of generation           |
| `write_cache`          | keys and values into the slots (`CacheSlots`) of a paged cache                    |
| `rope_write_cache_`    | `rope_` and the write of its keys and values in one launch                        |
| `qk_norm_rope_write_cache` | the same with `qk_norm_rope`                                                  |
| `gather_keys`          | keys or values, copied to the packed documents that share a prefix                |
| `gated_delta_rule`     | linear attention with decay and delta rule; `gated_delta_step_` decodes one token |
| `causal_conv`          | causal depthwise convolution and SiLU; `causal_conv_step_` decodes one token      |
| `causal_conv_state`    | the last inputs of each document, with which `causal_conv` goes on                |
| `gated_rms_norm`       | root-mean-square norm times silu of a gate, which may come first                  |
| `mamba2_scan`          | state-space layer of Mamba-2; `mamba2_step_` decodes one token                    |
| `cross_entropy`        | cross-entropy of logits: softcap, z-loss, label smoothing, in-place gradient      |
| `linear_cross_entropy` | output projection and cross-entropy, one chunk of logits at a time                |
| `sample`               | one token per row of logits: temperature, top-k, top-p, min-p; its log-probability |
| `linear_logprobs`      | log-probability of each target and entropy, one chunk of fp32 logits at a time |
| `linear_logprobs_loss` | a loss that is a sum over rows or pairs of them, with gradients formed in the forward pass |
| `linear_divergence`    | distillation: output projections and the divergence from a teacher                |
| `adamw_`               | one AdamW step on one parameter, in place                                         |
| `adamw8bit_`           | the same with both moments in 8 bits                                              |

`cross_entropy_with_metrics` and `linear_cross_entropy_with_metrics` return a `CrossEntropyOutput`: the loss, z-loss,
accuracy, predicted tokens and entropy, all from the same kernel.

Dispatch: CPU tensors take the plain PyTorch reference implementation; CUDA and ROCm tensors take the Triton kernels.
Under torch.compile the ops are custom operators `torch.ops.ligermodels.*`, without graph breaks. Under torch.autocast,
the ops that contain a matrix product (linears, experts, attention, linear_cross_entropy, linear_logprobs,
linear_divergence) take their
operands in the autocast dtype.
Requirements: torch and triton as in pyproject.toml; NVIDIA Ampere or newer, or ROCm; fp32, bf16 or fp16 tensors.
Numerics: sums in fp32, one rounding at the end, weight gradients without atomics and bit-identical from run to run.
Double backward is refused with a RuntimeError: `torch.func` differentiates twice, on the reference implementation.

`docs/kernels.md` has examples, `ligermodels.nn` the modules that own weights.
"""

import torch
from torch import Tensor

from ligermodels.kernels.activations.gated_activation import gated_activation, geglu, swiglu
from ligermodels.kernels.activations.plain_activation import plain_activation
from ligermodels.kernels.attention.attention import attention
from ligermodels.kernels.attention.qk_norm_rope import qk_norm_rope
from ligermodels.kernels.attention.rope import rope_
from ligermodels.kernels.attention.shared_keys import gather_keys
from ligermodels.kernels.attention.sigmoid_gate import sigmoid_gate
from ligermodels.kernels.decoding.cache_write import (
    CacheSlots,
    qk_norm_rope_write_cache,
    rope_write_cache_,
    write_cache,
)
from ligermodels.kernels.decoding.decode_attention import decode_attention
from ligermodels.kernels.decoding.sample import sample
from ligermodels.kernels.dispatch import WIDE_FLOATS, check_floats, check_one_of, check_shape, runs_kernels, shape_of
from ligermodels.kernels.linear.linear import (
    LowRank,
    activated_linear,
    gated_linear,
    layer_norm_linear,
    low_rank_linear,
    norm_linear,
)
from ligermodels.kernels.linear_attention.causal_conv import causal_conv, causal_conv_state, causal_conv_step_
from ligermodels.kernels.linear_attention.gated_delta_rule import gated_delta_rule, gated_delta_step_
from ligermodels.kernels.linear_attention.mamba2_scan import mamba2_scan, mamba2_step_
from ligermodels.kernels.losses.cross_entropy import CrossEntropyOutput, cross_entropy, cross_entropy_with_metrics
from ligermodels.kernels.losses.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_with_metrics
from ligermodels.kernels.losses.linear_divergence import DivergenceOutput, linear_divergence
from ligermodels.kernels.losses.linear_logprobs import LogProbs, linear_logprobs
from ligermodels.kernels.losses.linear_logprobs_loss import LogProbsLoss, linear_logprobs_loss
from ligermodels.kernels.moe.experts import experts, route
from ligermodels.kernels.moe.grouped_gemm import GroupedLowRank
from ligermodels.kernels.norms.gated_rms_norm import gated_rms_norm
from ligermodels.kernels.norms.layer_norm import layer_norm
from ligermodels.kernels.norms.rms_norm import add_rms_norm, rms_norm
from ligermodels.kernels.optim.adamw import adamw_
from ligermodels.kernels.optim.adamw8bit import adamw8bit_
from ligermodels.kernels.quant.nf4 import nf4_weight
from ligermodels.kernels.quant.quantised_weight import QuantisedWeight, frozen_linear

__all__ = [
    "CacheSlots", "CrossEntropyOutput", "DivergenceOutput", "GroupedLowRank", "LogProbs", "LogProbsLoss", "LowRank",
    "QuantisedWeight", "activated_linear", "adamw8bit_", "adamw_", "add_rms_norm", "apply_rope", "apply_rotary_pos_emb",
    "attention", "causal_conv", "causal_conv_state", "causal_conv_step_", "cross_entropy", "cross_entropy_with_metrics",
    "decode_attention", "experts", "frozen_linear", "gated_activation", "gated_delta_rule", "gated_delta_step_",
    "gated_linear", "gated_rms_norm", "gather_keys", "geglu", "layer_norm", "layer_norm_linear", "linear_cross_entropy",
    "linear_cross_entropy_with_metrics", "linear_divergence", "linear_logprobs", "linear_logprobs_loss",
    "low_rank_linear", "mamba2_scan", "mamba2_step_", "nf4_weight", "norm_linear", "plain_activation", "qk_norm_rope",
    "qk_norm_rope_write_cache", "rms_norm", "rope_", "rope_write_cache_", "route", "sample", "sigmoid_gate", "swiglu",
    "write_cache",
]  # fmt: skip


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of separate queries and keys, out of place: (rotated q, rotated k).

    q [B, T, H, D], k [B, T, Hkv, D] float, any strides; cos, sin fp32 [T, R/2], which the batch shares, or [B, T, R/2]
    or [B T, R/2], a row for each token; R <= D is even -> contiguous tensors of the shapes and dtypes of q and k. The
    first R dimensions of a head are rotated in pairs (j, j + R/2), or (2j, 2j + 1) if interleaved; the others are
    copied.

    The tables hold each angle once. Their width does not show it: a table that holds each twice is as wide if half as
    many dimensions are rotated. For tables of Hugging Face use `apply_rotary_pos_emb`.

    Cost on a GPU: two launches and two copies forward, because q and k are copied before they are rotated in place;
    two launches backward, without a copy. torch.compile adds a copy of each. `rope_` rotates the packed projection in
    place by one launch, without a copy.
    Raises ValueError where the shapes disagree. Su et al. 2021, https://arxiv.org/abs/2104.09864.
    """
    batch, tokens, _, size = shape_of("apply_rope", "q", q, "B, T, H, D")
    check_shape("apply_rope", "k", k, batch, tokens, shape_of("apply_rope", "k", k, "B, T, Hkv, D")[2], size)
    check_floats("apply_rope", q=q, k=k)
    check_one_of("apply_rope", WIDE_FLOATS, cos=cos, sin=sin)
    check_shape("apply_rope", "sin", sin, *shape_of("apply_rope", "cos", cos))
    if 2 * cos.shape[-1] > size:
        raise ValueError(
            f"apply_rope: cos has {cos.shape[-1]} columns for heads of {size} dimensions; it needs one for each"
            " pair, or use apply_rotary_pos_emb, whose tables hold each angle twice"
        )
    cos, sin = cos.flatten(0, -2).contiguous(), sin.flatten(0, -2).contiguous()
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding with the layout and tables of Hugging Face's function of this name, which it replaces.

    q [B, H, T, D], k [B, Hkv, T, D] float, any strides; with unsqueeze_dim=2 [B, T, H, D] and [B, T, Hkv, D]. cos, sin
    [1, T, R] or [B, T, R] float, which hold each of the R/2 angles twice, the second half as the first -> tensors of
    the shapes and dtypes of q and k. The first R <= D dimensions of a head are rotated in pairs (j, j + R/2), the
    others are copied. cos and sin are read in fp32: tables in half precision have already been rounded.

    Not for models that rotate adjacent pairs (2j, 2j + 1), whose tables differ: use `apply_rope` with
    interleaved=True, and cos[..., : R // 2] where the table's second half repeats the first (GLM), or cos[..., ::2]
    where each angle is repeated (Cohere).
    Cost: that of `apply_rope`. Raises ValueError for another unsqueeze_dim, an odd R, and shapes that disagree.
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"apply_rotary_pos_emb: unsqueeze_dim is {unsqueeze_dim}; 1 (heads first) or 2 is needed")
    shape_of("apply_rotary_pos_emb", "q", q, "B, H, T, D")
    shape_of("apply_rotary_pos_emb", "k", k, "B, Hkv, T, D")
    *_, rotated = shape = shape_of("apply_rotary_pos_emb", "cos", cos, "B, T, R")
    check_shape("apply_rotary_pos_emb", "sin", sin, *shape)
    check_floats("apply_rotary_pos_emb", cos=cos, sin=sin)
    if rotated % 2 or rotated > q.shape[-1]:
        raise ValueError(
            f"apply_rotary_pos_emb: cos has {rotated} columns; an even number of at most the head size,"
            f" {q.shape[-1]}, is needed"
        )
    cos, sin = (table[..., : rotated // 2].float() for table in (cos, sin))
    if unsqueeze_dim == 2:
        return apply_rope(q, k, cos, sin)
    q, k = apply_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, T, H, D] as a packed projection of H query heads, no key heads and no value heads."""
    if runs_kernels(x):  # in place; the reference implementation leaves its input alone
        x = x.clone(memory_format=torch.contiguous_format)
    rotated, _, _ = rope_(x.flatten(2), cos, sin, x.shape[2], 0, interleaved)
    return rotated
