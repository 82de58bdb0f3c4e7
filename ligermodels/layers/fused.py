"""Chooses between a fused autograd node, a kernel for few rows and the unfused operations. No other file does.

A fused node reads the weights of a plain `nn.Linear` or a whole `PackedLinear`, with or without LoRA, and of our
RMSNorm or LayerNorm; of a quantised linear too. The unfused operations run where a module was replaced (float8, PEFT, a
parametrization), has hooks, has been taken apart, has a quantised weight of another library, or has active LoRA
dropout: every module is then called, with one tensor. Both paths give the same numbers. The kernels for few rows run in
inference.
"""

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ligermodels.kernels.activations.gated_activation import gated_activation
from ligermodels.kernels.activations.plain_activation import plain_activation
from ligermodels.kernels.attention.qk_norm_rope import qk_norm_rope
from ligermodels.kernels.attention.qkv_heads import split_all_heads, split_heads
from ligermodels.kernels.attention.rope import rope_
from ligermodels.kernels.decoding.cache_write import (
    CacheSlots,
    qk_norm_rope_write_cache,
    rope_write_cache_,
    write_cache,
)
from ligermodels.kernels.decoding.few_rows_experts import FEW_TOKENS, few_rows_experts
from ligermodels.kernels.decoding.few_rows_linear import (
    FEW_ROWS,
    few_rows_gated_linear,
    few_rows_linear,
    few_rows_norm_linear,
)
from ligermodels.kernels.dispatch import is_traced, runs_kernels
from ligermodels.kernels.linear.linear import (
    LowRank,
    activated_linear,
    gated_linear,
    gradients_of_linear,
    layer_norm_linear,
    low_rank_linear,
    norm_linear,
)
from ligermodels.kernels.moe.experts import experts
from ligermodels.kernels.norms.rms_norm import add_rms_norm
from ligermodels.kernels.quant.nf4 import Nf4
from ligermodels.kernels.quant.quantised_weight import Weight, dense, operand
from ligermodels.layers.lora import LoRALinear
from ligermodels.layers.norm import LayerNorm, PreNorm, RMSNorm
from ligermodels.layers.packed import PackedLinear, is_unmodified
from ligermodels.layers.quantised import QuantisedLinear

Angles = tuple[Tensor, Tensor]  # cos and sin, [B * T or T, R / 2] fp32


class LinearWeights(NamedTuple):
    """The tensors of a projection that a fused node reads."""

    weight: Weight
    bias: Tensor | None
    low_rank: LowRank | None


def is_plain(projection: nn.Module) -> TypeGuard[nn.Linear | PackedLinear | QuantisedLinear]:
    """Whether a projection is one product with its weight: a plain linear, a quantised one, or a packed one that is not
    taken apart."""
    if is_unmodified(projection, QuantisedLinear):
        return True
    if is_unmodified(projection, PackedLinear):
        return projection.is_whole and not is_quantised(projection.weight)
    return is_unmodified(projection, nn.Linear) and not is_quantised(projection.weight)


def is_plain_with_lora(projection: nn.Module) -> TypeGuard[LoRALinear]:
    """Whether a projection is a plain one with LoRA, which has no dropout now."""
    return is_unmodified(projection, LoRALinear) and is_plain(projection.base_layer) and not projection.dropout_active


def is_fusible(projection: nn.Module) -> bool:
    """Whether a fused node may read the weights of a projection; otherwise it must be called as a module."""
    return is_plain(projection) or is_plain_with_lora(projection)


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight is a tensor subclass that holds other tensors, as torchao's; only its own linear reads it."""
    return type(weight) not in (Tensor, nn.Parameter) and is_traceable_wrapper_subclass(weight)


def fusible_weights(projection: nn.Module, dtype: torch.dtype) -> LinearWeights | None:
    """The weights for a fused node; None if the projection is not fusible. dtype: of its input."""
    if is_plain(projection):
        return LinearWeights(projection.weight, projection.bias, None)
    if is_plain_with_lora(projection):
        base = projection.base_layer
        return LinearWeights(base.weight, base.bias, projection.low_rank(dtype) if projection.enabled else None)
    return None


def has_few_rows(x: Tensor, weight: Weight, low_rank: LowRank | None = None, few: int = FEW_ROWS) -> bool:
    """Whether a product with `weight` runs by a kernel for few rows: in a step of generation, without LoRA."""
    if not runs_kernels(x) or torch.is_grad_enabled() or low_rank is not None:
        return False
    data, layout = operand(weight)
    if not isinstance(layout, Nf4 | None) or is_traced((x, data)):
        return False
    return x.shape[:-1].numel() <= few


def apply_linear(projection: nn.Module, x: Tensor) -> Tensor:
    """x [..., K] -> projection(x) [..., N]; base and LoRA as one autograd node where possible."""
    weights = fusible_weights(projection, x.dtype)
    if weights is None:
        return projection(x)
    weight, bias, low_rank = weights
    if x.dtype == weight.dtype and has_few_rows(x, weight, low_rank):
        return few_rows_linear(x, weight, bias)
    return projection(x) if low_rank is None else low_rank_linear(x, weight, bias, low_rank)


def linear_without_values(projection: nn.Module, x: Tensor) -> Tensor:
    """Is `apply_linear` of a fusible projection, but the output has no values: only its gradients are computed."""
    weights = fusible_weights(projection, x.dtype)
    assert weights is not None
    return gradients_of_linear(x, *weights)


def effective_weight(projection: nn.Module, inputs: int) -> Tensor:
    """The weight [N, inputs] of a projection without a bias, with its LoRA: projection(x) = x @ weightᵀ."""
    plain = fusible_weights(projection, torch.float32)
    if plain is None:  # its call is all that is known of it
        like = next(projection.parameters())
        return projection(torch.eye(inputs, dtype=like.dtype, device=like.device)).mT
    weight = dense(*operand(plain.weight))
    if plain.low_rank is None:
        return weight
    a, b, _, scale = plain.low_rank
    return torch.addmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scale)


def add_then_norm(norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """x, residual [B, T, H] -> (norm(x + residual), x + residual); without a residual, (norm(x), x)."""
    if residual is not None and is_unmodified(norm, RMSNorm):
        return add_rms_norm(x, residual, norm.weight, norm.eps, norm.offset)
    hidden = x if residual is None else x + residual
    return norm(hidden), hidden


def norm_then_linear(
    norm: PreNorm | None, projection: nn.Module, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x, residual [B, T, H] -> (projection(norm(x + residual)) [B, T, N], x + residual).

    If norm is None, the projection reads x + residual.
    """
    if norm is None:
        hidden = x if residual is None else x + residual
        return apply_linear(projection, hidden), hidden
    module, weights = norm.module, fusible_weights(projection, x.dtype)
    if weights is not None and is_unmodified(module, RMSNorm):
        weight, bias, low_rank = weights
        if has_few_rows(x, weight, low_rank):
            return few_rows_norm_linear(x, residual, module.weight, weight, bias, module.eps, module.offset)
        return norm_linear(x, residual, module.weight, weight, bias, module.eps, module.offset, low_rank)
    if weights is not None and is_unmodified(module, LayerNorm):
        weight, bias, low_rank = weights
        return layer_norm_linear(x, residual, module.weight, module.bias, weight, bias, module.eps, low_rank)
    normed, hidden = add_then_norm(module, x, residual)
    return apply_linear(projection, normed), hidden


def qk_norm_then_rope(
    q_norm: nn.Module, k_norm: nn.Module, qkv: Tensor, angles: Angles | None, num_heads: int, num_kv_heads: int,
    whole_rows: bool, slots: CacheSlots | None, gated: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Packed qkv [B, T, (Hq + 2 Hkv) D] -> normed and rotated q [B, T, Hq, D] and k [B, T, Hkv, D], and v.

    angles: cos and sin; None for no RoPE. whole_rows: the norms are over all heads of a token together, not over each
    head. slots: where k and v are also written; None for nowhere. gated: behind each query head of qkv is its gate, and
    the gates [B, T, Hq, D] are a fourth result.
    """
    if angles is not None and is_unmodified(q_norm, RMSNorm) and is_unmodified(k_norm, RMSNorm):
        options = q_norm.weight, k_norm.weight, *angles, num_heads, num_kv_heads, q_norm.eps, q_norm.offset
        if slots is None:
            return qk_norm_rope(qkv, *options, gated)
        return qk_norm_rope_write_cache(qkv, *options, slots, gated)
    q, k, v, *gates = split_all_heads(qkv, num_heads, num_kv_heads, gated)
    if whole_rows:
        q, k = q_norm(q.flatten(2)).view_as(q), k_norm(k.flatten(2)).view_as(k)
    else:
        q, k = q_norm(q), k_norm(k)
    normed = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1)
    return *rope_then_write(normed, angles, num_heads, num_kv_heads, False, slots), *gates


def rope_then_write(
    qkv: Tensor, angles: Angles | None, num_heads: int, num_kv_heads: int, interleaved: bool, slots: CacheSlots | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed qkv -> rotated q and k, and v; k and v are also written to `slots`. See `qk_norm_then_rope`."""
    if angles is not None:
        options = *angles, num_heads, num_kv_heads, interleaved
        return rope_(qkv, *options) if slots is None else rope_write_cache_(qkv, *options, slots)
    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    if slots is not None:
        write_cache(k, v, slots)
    return q, k, v


def gated_activation_then_linear(gate_up: Tensor, activation: str, projection: Any, fused: bool) -> Tensor:
    """gate_up [B, T, 2 I] -> projection(activation(gate) * up) [B, T, H].

    fused: use one autograd node where possible; otherwise projection may be any function. No other code may use
    gate_up: backward overwrites it with its gradient.
    """
    weights = fusible_weights(projection, gate_up.dtype) if fused else None
    if weights is None:
        return projection(gated_activation(gate_up, activation, inplace=True))
    weight, bias, low_rank = weights
    if has_few_rows(gate_up, weight, low_rank):
        return few_rows_gated_linear(gate_up, weight, bias, activation)
    return gated_linear(gate_up, weight, bias, activation, low_rank, inplace=True)


def activation_then_linear(x: Tensor, activation: str, projection: Any, fused: bool) -> Tensor:
    """x [B, T, I] -> projection(activation(x)) [B, T, H]. fused: as in `gated_activation_then_linear`."""
    weights = fusible_weights(projection, x.dtype) if fused else None
    if weights is None:
        return projection(plain_activation(x, activation))
    return activated_linear(x, weights.weight, weights.bias, activation, weights.low_rank, inplace=True)


def routed_experts(
    x: Tensor, expert_index: Tensor, expert_weight: Tensor, gate_up: Weight, down: Weight, activation: str,
    gate_up_bias: Tensor | None, down_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """x [tokens, H], expert_index and expert_weight [tokens, k] -> weighted sum of the k experts [tokens, H]."""
    routing = x, expert_index, expert_weight
    data, layout = operand(gate_up)
    fewer = layout is None or expert_index.numel() < gate_up.shape[0]  # experts to dequantise: one for each slot
    if fewer and has_few_rows(x, data, few=FEW_TOKENS):
        return few_rows_experts(*routing, gate_up, down, activation, gate_up_bias, down_bias)
    return experts(*routing, gate_up, down, activation, gate_up_bias=gate_up_bias, down_bias=down_bias)
