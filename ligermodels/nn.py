"""Drop-in modules over the fused ops: they own their weights, and take and return plain tensors.

| module                   | replaces                                       | parameters                          |
|--------------------------|------------------------------------------------|-------------------------------------|
| `RMSNorm`                | LlamaRMSNorm; Gemma's with offset=1            | `weight`                            |
| `LayerNorm`              | torch.nn.LayerNorm over one dimension          | `weight`, `bias`                    |
| `GatedMLP`               | LlamaMLP, Phi3MLP, GemmaMLP                    | `gate_up_proj`, `down_proj`         |
| `RotaryEmbedding`        | RoPE's cos and sin, and their application      | none                                |
| `CrossEntropyLoss`       | torch.nn.CrossEntropyLoss over logits [..., V] | none                                |
| `LinearCrossEntropyLoss` | the output projection and the loss             | none; takes the projection's weight |
| `Experts`                | MixtralExperts, Qwen3MoeExperts                | `gate_up_proj`, `down_proj`         |
| `MoE`                    | MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock  | `gate.weight`, `experts`            |

Parameter names are those of the modules that they replace, so that `load_state_dict` takes the weights over. `device`
and `dtype` are as in torch.nn. Dispatch, dtypes and numerics are those of `ligermodels.ops`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels import ops

__all__ = [
    "CrossEntropyLoss", "Experts", "GatedMLP", "LayerNorm", "LinearCrossEntropyLoss", "MoE", "RMSNorm",
    "RotaryEmbedding",
]  # fmt: skip

Device = torch.device | str | int | None


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension: x * rsqrt(mean(x²) + eps) * (weight + offset).

    `weight` [hidden_size] starts at 1 - offset, which scales by 1. offset: 1 for Gemma, whose checkpoints store the
    scale minus one. Without elementwise_affine there is no weight: x * rsqrt(mean(x²) + eps).
    Raises ValueError for an offset without a weight.
    """

    weight: nn.Parameter | None

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, device: Device = None,
        dtype: torch.dtype | None = None, *, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if offset and not elementwise_affine:
            raise ValueError(f"RMSNorm: offset is {offset:g}, but without elementwise_affine there is no weight")
        self.hidden_size = hidden_size
        self.eps = eps
        self.offset = offset
        empty = torch.empty(hidden_size, device=device, dtype=dtype) if elementwise_affine else None
        self.register_parameter("weight", None if empty is None else nn.Parameter(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        return ops.rms_norm(x, self.weight, self.eps, self.offset)

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return f"{self.hidden_size}, eps={self.eps}, offset={self.offset}, elementwise_affine={affine}"


class LayerNorm(nn.Module):
    """torch.nn.LayerNorm over one dimension, the last: same arguments, defaults, parameter names and initial values.
    Raises ValueError where normalized_shape has more than one dimension."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True, device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1:
            raise ValueError(f"LayerNorm: normalized_shape is {shape}; only one dimension, the last, can be normed")
        self.normalized_shape = shape
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        for name, used in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            empty = torch.empty(shape, device=device, dtype=dtype) if used else None
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., normalized_shape] -> the same shape and dtype."""
        weight = x.new_ones(self.normalized_shape) if self.weight is None else self.weight
        return ops.layer_norm(x, weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class GatedMLP(nn.Module):
    """Gated feed-forward layer: down_multiplier * down_proj(activation(gate_multiplier * gate) * up), where
    [gate, up] = gate_up_proj(x).

    activation: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU). The two projections are torch.nn.Linear:
    `gate_up_proj` [2 intermediate_size, hidden_size], the gate's rows first, and `down_proj`. `load_state_dict` also
    takes separate `gate_proj` and `up_proj` and packs them. The multipliers are Falcon-H1's `mlp_multipliers`.

    Activation and down projection run as one autograd node, which keeps only gate_up for backward, and writes its
    gradient over it. Where a projection is wrapped (PEFT, float8) or has a hook, it is called as a module instead.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str = "silu", bias: bool = False,
        device: Device = None, dtype: torch.dtype | None = None, *, gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation
        self.gate_multiplier, self.down_multiplier = gate_multiplier, down_multiplier
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)
        self.register_load_state_dict_pre_hook(_pack_gate_and_up)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> [..., hidden_size]. Raises ValueError for an unknown activation."""
        gate_up, down = self.gate_up_proj(x), self.down_proj
        options: dict[str, Any] = {
            "gate_multiplier": self.gate_multiplier,
            "inplace": _is_plain_linear(self.gate_up_proj),  # a hook could have kept gate_up
        }
        scaled = self.down_multiplier != 1.0
        if not _is_plain_linear(down):
            y = down(ops.gated_activation(gate_up, self.activation, **options))
            return self.down_multiplier * y if scaled else y
        bias = self.down_multiplier * down.bias if scaled and down.bias is not None else down.bias
        options["down_multiplier"] = self.down_multiplier
        return ops.gated_linear(gate_up, down.weight, bias, self.activation, **options)

    def extra_repr(self) -> str:
        multipliers = f"gate_multiplier={self.gate_multiplier}, down_multiplier={self.down_multiplier}"
        return f"activation={self.activation}, {multipliers}"


def _pack_gate_and_up(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Replaces separate gate_proj and up_proj in a state_dict by the packed gate_up_proj."""
    for name in ("weight", "bias"):
        gate, up = f"{prefix}gate_proj.{name}", f"{prefix}up_proj.{name}"
        if gate in state_dict and up in state_dict:
            state_dict[f"{prefix}gate_up_proj.{name}"] = torch.cat((state_dict.pop(gate), state_dict.pop(up)))


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether an op may read the module's weights instead of calling it."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) is nn.Linear and not hooked


class RotaryEmbedding(nn.Module):
    """Rotary position embedding: angle = position * inv_freq, inv_freq[j] = theta^(-2j / dim), in fp32.

    dim: the rotated dimensions of a head, even; all of them in most models. theta: the base of the frequencies.
    interleaved: pairs are (2j, 2j + 1) instead of (j, j + dim/2). `inv_freq` [dim / 2] is a buffer outside of the
    state_dict; it stays in fp32 where the module is converted to another dtype. Raises ValueError for an odd dim.
    """

    inv_freq: Tensor

    def __init__(self, dim: int, theta: float = 10000.0, interleaved: bool = False, device: Device = None) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"RotaryEmbedding: dim is {dim}; needed an even number of dimensions")
        self.dim = dim
        self.theta = theta
        self.interleaved = interleaved
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)

    def _frequencies(self, device: Device) -> Tensor:
        return self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / -self.dim)

    def _apply(self, fn, recurse=True):
        """Moves the frequencies to the device only: .to(bfloat16) would round them, to_empty() would lose them."""
        super()._apply(fn, recurse)
        self.inv_freq = self._frequencies(self.inv_freq.device)
        return self

    @torch.no_grad()
    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids [T] or [B, T] int -> cos, sin, each [T, dim / 2] or [B, T, dim / 2] fp32."""
        angle = position_ids[..., None].float() * self.inv_freq
        return angle.cos(), angle.sin()

    def rotate(self, q: Tensor, k: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """q [B, T, H, D], k [B, T, Hkv, D] -> both rotated, out of place (`ops.apply_rope`). position_ids [T] or [B, T]
        int; None for 0 … T - 1."""
        cos, sin = self._angles(q, position_ids)
        return ops.apply_rope(q, k, cos, sin, self.interleaved)

    def rotate_packed(
        self, qkv: Tensor, num_heads: int, num_kv_heads: int, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotates queries and keys in the memory of the packed projection (`ops.rope_`), which must not be used again.

        qkv [B, T, (num_heads + 2 num_kv_heads) D], query heads first, then key heads, then value heads; position_ids
        as in `rotate` -> q [B, T, num_heads, D], k and v [B, T, num_kv_heads, D], views of qkv.
        """
        cos, sin = self._angles(qkv, position_ids)
        return ops.rope_(qkv, cos.flatten(0, -2), sin.flatten(0, -2), num_heads, num_kv_heads, self.interleaved)

    def _angles(self, x: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        return self(torch.arange(x.shape[1], device=x.device) if position_ids is None else position_ids)

    def extra_repr(self) -> str:
        return f"{self.dim}, theta={self.theta}, interleaved={self.interleaved}"


class _OptionsLoss(nn.Module):
    """Keeps the options of a loss. class_weight: a buffer. metrics: whether the loss comes with its metrics."""

    class_weight: Tensor | None

    def __init__(self, class_weight: Tensor | None, metrics: bool, **options: Any) -> None:
        super().__init__()
        self.register_buffer("class_weight", class_weight)
        self.metrics, self.options = metrics, options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


class CrossEntropyLoss(_OptionsLoss):
    """Cross-entropy of logits against class indices, as torch.nn.CrossEntropyLoss.

    Differs from torch's: the classes are the last dimension, logits [..., V]; the loss is fp32; the mean over no target
    is 0 and not NaN; targets are class indices, not probabilities; a target that is no class gives an infinite loss.
    class_weight: float [V], torch's `weight`, a buffer. softcap: logits become softcap * tanh(logits / softcap);
    logit_scale: multiplies them first; z_loss: adds z_loss * log(Σ exp(logits))². token_scaling: multiplies each
    token's loss by the probability of its target. inplace: on a GPU the gradient is written over the logits, whose
    values are lost. metrics: returns `ops.CrossEntropyOutput`: the loss, z-loss, accuracy, predicted tokens, entropy.
    Raises ValueError for a reduction other than "mean", "sum" and "none", and where the shapes disagree.
    """

    def __init__(
        self, *, class_weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0, z_loss: float = 0.0,
        token_scaling: bool = False, inplace: bool = False, metrics: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            class_weight, metrics, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
            softcap=softcap, logit_scale=logit_scale, z_loss=z_loss, token_scaling=token_scaling, inplace=inplace,
        )  # fmt: skip

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor | ops.CrossEntropyOutput:
        """logits [..., V] float, targets [...] int64 in [0, V) or ignore_index -> fp32 scalar, or [...] for "none"."""
        loss = ops.cross_entropy_with_metrics if self.metrics else ops.cross_entropy
        return loss(logits, targets, class_weight=self.class_weight, **self.options)


class LinearCrossEntropyLoss(_OptionsLoss):
    """Cross-entropy of hidden @ weightᵀ + bias, computed a chunk of logits at a time.

    Options as in `CrossEntropyLoss`. low_memory: 64 MiB beyond the gradients, for at least a third more time. The loss
    does not shift: for a causal language model pass hidden[:, :-1] and labels[:, 1:].
    """

    def __init__(
        self, *, class_weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0, z_loss: float = 0.0,
        token_scaling: bool = False, low_memory: bool = False, metrics: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            class_weight, metrics, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
            softcap=softcap, logit_scale=logit_scale, z_loss=z_loss, token_scaling=token_scaling, low_memory=low_memory,
        )  # fmt: skip

    def forward(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None
    ) -> Tensor | ops.CrossEntropyOutput:
        """hidden [..., H], weight [V, H] and bias [V] of one float dtype, targets [...] int64 in [0, V) or ignore_index
        -> fp32 scalar, or [...] for "none"."""
        loss = ops.linear_cross_entropy_with_metrics if self.metrics else ops.linear_cross_entropy
        return loss(hidden, weight, targets, bias=bias, class_weight=self.class_weight, **self.options)


class Experts(nn.Module):
    """num_experts gated layers on packed weights: `gate_up_proj` [E, 2 I, H], the gate's rows first, `down_proj`
    [E, H, I]. Each expert starts as torch.nn.Linear does. activation: "silu", "gelu" or "gelu_tanh"."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, activation: str = "silu",
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation
        gate_up = torch.empty(num_experts, 2 * intermediate_size, hidden_size, device=device, dtype=dtype)
        down = torch.empty(num_experts, hidden_size, intermediate_size, device=device, dtype=dtype)
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up), nn.Parameter(down)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.gate_up_proj, self.down_proj):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
        """x [tokens, H], expert_index [tokens, k] int64 or int32, expert_weight [tokens, k] fp32 -> [tokens, H]. Raises
        ValueError where the shapes disagree and for an unknown activation."""
        return ops.experts(x, expert_index, expert_weight, self.gate_up_proj, self.down_proj, self.activation)

    def extra_repr(self) -> str:
        num_experts, hidden_size, intermediate_size = self.down_proj.shape
        return f"{hidden_size}, {intermediate_size}, num_experts={num_experts}, activation={self.activation}"


class MoE(nn.Module):
    """Mixture of experts: a linear router `gate` [E, H] picks experts_per_token of num_experts for each token.

    normalize: whether a token's weights sum to 1 (Mixtral; Qwen3-MoE's norm_topk_prob). No token is dropped. The router
    logits, for a load-balancing loss, are the output of `gate`, where a forward hook sees them.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, experts_per_token: int,
        normalize: bool = True, activation: str = "silu", device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.experts_per_token = experts_per_token
        self.normalize = normalize
        self.gate = nn.Linear(hidden_size, num_experts, False, device, dtype)
        self.experts = Experts(hidden_size, intermediate_size, num_experts, activation, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> [..., hidden_size]."""
        tokens = x.reshape(-1, x.shape[-1])
        expert_weight, expert_index = ops.route(self.gate(tokens), self.experts_per_token, self.normalize)
        return self.experts(tokens, expert_index, expert_weight).view(x.shape)

    def extra_repr(self) -> str:
        return f"experts_per_token={self.experts_per_token}, normalize={self.normalize}"
