"""The blocks of a decoder: where the norms stand around attention and feed-forward layer.

The residual stream travels as a pair (x, residual) whose sum it is: the addition happens inside the next norm. A block
maps one pair to the next and hands on its router's logits [B * T, E], None where it has no router.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligermodels.configs.base import Config
from ligermodels.layers.attention import Attention, Positions
from ligermodels.layers.kv_cache import LayerCache
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.moe import MoE
from ligermodels.layers.norm import hidden_norm

BlockOutput = tuple[Tensor, Tensor, Tensor | None]  # x, residual, router logits


class Block(nn.Module, ABC):
    """What all blocks share: attention, a feed-forward layer, and recomputation in backward."""

    def __init__(self, attention: Attention, mlp: GatedMLP | MoE) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.recompute = False

    def recompute_in_backward(self) -> None:
        """Keeps only the block's inputs for backward. The down projection is then better not fused with its activation:
        recomputation stops at the last tensor kept, which a linear of its own keeps before its matrix product."""
        self.recompute = True
        for module in self.modules():
            if isinstance(module, GatedMLP):
                module.fused = False

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None = None
    ) -> BlockOutput:
        if self.recompute and torch.is_grad_enabled():
            random = self.self_attn.dropout > 0
            inputs = x, residual, positions, cache
            return checkpoint(self.block, *inputs, use_reentrant=False, preserve_rng_state=random)
        return self.block(x, residual, positions, cache)

    @abstractmethod
    def block(
        self, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None
    ) -> BlockOutput: ...


class DecoderLayer(Block):
    """Pre-norm: x = x + attention(norm(x)); x = x + mlp(norm(x))."""

    def __init__(self, config: Config, attention: Attention, mlp: GatedMLP | MoE) -> None:
        super().__init__(attention, mlp)
        self.input_layernorm = hidden_norm(config)
        self.post_attention_layernorm = hidden_norm(config)

    def block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None) -> BlockOutput:
        x, residual = self.self_attn(self.input_layernorm, x, residual, positions, cache)
        return self.mlp(self.post_attention_layernorm, x, residual)


class ScaledLayer(DecoderLayer):
    """Pre-norm, and both branches enter the residual stream times a multiplier."""

    def __init__(self, config: Config, attention: Attention, mlp: GatedMLP | MoE, multiplier: float) -> None:
        super().__init__(config, attention, mlp)
        self.multiplier = multiplier

    def block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None) -> BlockOutput:
        x, residual = self.self_attn(self.input_layernorm, x, residual, positions, cache)
        x, residual, router_logits = self.mlp(self.post_attention_layernorm, x * self.multiplier, residual)
        return x * self.multiplier, residual, router_logits


class SandwichLayer(DecoderLayer):
    """Norms on both sides: x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x)))."""

    def __init__(self, config: Config, attention: Attention, mlp: GatedMLP | MoE) -> None:
        super().__init__(config, attention, mlp)
        self.pre_feedforward_layernorm = hidden_norm(config)
        self.post_feedforward_layernorm = hidden_norm(config)

    def block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None) -> BlockOutput:
        x, residual = self.self_attn(self.input_layernorm, x, residual, positions, cache)
        x, _ = self.post_attention_layernorm(x)
        x, residual, router_logits = self.mlp(self.pre_feedforward_layernorm, x, residual)
        x, _ = self.post_feedforward_layernorm(x)
        return x, residual, router_logits


class PostNormLayer(Block):
    """Norms after: x = x + norm(attention(x)); x = x + norm(mlp(x))."""

    def __init__(self, config: Config, attention: Attention, mlp: GatedMLP | MoE) -> None:
        super().__init__(attention, mlp)
        self.post_attention_layernorm = hidden_norm(config)
        self.post_feedforward_layernorm = hidden_norm(config)

    def block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None) -> BlockOutput:
        x, residual = self.self_attn(None, x, residual, positions, cache)
        x, _ = self.post_attention_layernorm(x)
        x, residual, router_logits = self.mlp(None, x, residual)
        x, _ = self.post_feedforward_layernorm(x)
        return x, residual, router_logits
