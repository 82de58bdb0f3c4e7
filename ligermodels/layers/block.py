"""The decoder blocks. They differ in where the norms are placed around attention and feed-forward layer.

The residual stream is passed as a pair (x, residual) whose sum is the stream: the addition is fused into the next norm.
A block maps one such pair to the next. It also returns its router's logits [B * T, E], or None without a router.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ligermodels.configs.base import Config
from ligermodels.generation.cache import BlockCache
from ligermodels.layers.checkpointing.kept_tensors import ResultSize, keeping
from ligermodels.layers.checkpointing.offloaded_inputs import OffloadedInputs
from ligermodels.layers.checkpointing.offloaded_weights import OffloadedWeights
from ligermodels.layers.fused import add_then_norm
from ligermodels.layers.inputs import KeysAndValues, KeysReadLater, Positions
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.mlp import MLP, GatedMLP
from ligermodels.layers.moe import MoE
from ligermodels.layers.norm import PreNorm, hidden_norm

BlockOutput = tuple[Tensor, Tensor | None, Tensor | None]  # x, residual, router logits


class Block(nn.Module, ABC):
    """Base class: attention or what stands for it, a feed-forward layer, and optional activation checkpointing."""

    def __init__(self, mixer: Mixer, mlp: GatedMLP | MLP | MoE) -> None:
        super().__init__()
        self.mixer_name = mixer.name_in_block
        self.add_module(self.mixer_name, mixer)
        self.mlp = mlp
        self.dropout = 0.0  # of both branches, before they join the residual stream
        self.activation_checkpointing = False
        self.kept: frozenset[ResultSize] = frozenset()  # what activation checkpointing keeps beside the input
        self.offloaded_inputs: OffloadedInputs | None = None  # where the input is kept in host memory
        self.offloaded_weights: tuple[OffloadedWeights, int] | None = None  # where quantised weights are, and its index

    @property
    def mixer(self) -> Any:
        """The module that mixes the tokens; a wrapper of it, where a tool has put one in its place."""
        return self._modules[self.mixer_name]

    def checkpoint_activations(self, kept: Collection[ResultSize] = ()) -> None:
        """Saves only the block's input, and what is in `kept`, for backward, which recomputes the rest.

        kept: the sizes of `keepable_tensors`.
        Also unfuses the down projection from its activation. Recomputation stops at the last saved tensor; an unfused
        linear saves its input before its matrix product, so that this product is not recomputed.
        """
        self.set_activation_checkpointing(True)
        self.kept = frozenset(kept)

    def keep_activations(self) -> None:
        """Undoes `checkpoint_activations`."""
        self.set_activation_checkpointing(False)
        self.kept, self.offloaded_inputs = frozenset(), None

    def set_activation_checkpointing(self, enabled: bool) -> None:
        self.activation_checkpointing = enabled
        for module in self.modules():
            if isinstance(module, GatedMLP | MLP):
                module.fused = not enabled

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Positions, cache: BlockCache = None
    ) -> BlockOutput:
        """x, residual [B, T, H] -> (x, residual, router logits), of the same shapes."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            x = x if residual is None else x + residual
            offloaded = self.offloaded_inputs
            with nullcontext() if offloaded is None else offloaded.around_checkpoint(x):
                x, residual, router_logits = self.forward_checkpointed(x, positions, cache)
        else:
            self.bring_weights()
            x, residual, router_logits = self.forward_block(x, residual, positions, cache)
        # A linear with a bias, and experts, return a view of a matrix; FSDP2 warns of views that leave a block.
        if is_dynamo_compiling() or (x.requires_grad and x._base is not None):
            x = torch.ops.aten._unsafe_view(x, x.shape)
        return x, residual, router_logits

    def forward_checkpointed(self, x: Tensor, positions: Positions, cache: BlockCache) -> BlockOutput:
        """`forward_block` of the residual stream x [B, T, H], which is all that is kept for backward beside `kept`."""
        outputs, read_later = checkpoint(
            self.forward_recomputed, x, positions, cache, use_reentrant=False,
            preserve_rng_state=self.drops_values(),
            context_fn=keeping(self.kept) if self.kept else noop_context_fn,
        )  # fmt: skip
        if positions.read_later is not None:
            positions.read_later.of_type.update(read_later)
        return outputs

    def drops_values(self) -> bool:
        """Whether the block draws random numbers, which recomputation must repeat: its own dropout or an adapter's."""
        modules = list(self.modules())
        own = any(getattr(module, "dropout", None) not in (None, 0) for module in modules)
        return self.training and (own or any(isinstance(module, nn.Dropout) for module in modules))

    def forward_recomputed(
        self, x: Tensor, positions: Positions, cache: BlockCache
    ) -> tuple[BlockOutput, dict[str, KeysAndValues]]:
        """`forward_block`, and what it computes for later layers: what is recomputed must write to nothing outside."""
        self.bring_weights()
        if not self.mixer.is_read:
            return self.forward_block(x, None, positions, cache), {}
        own = KeysReadLater()
        return self.forward_block(x, None, replace(positions, read_later=own), cache), own.of_type

    def bring_weights(self) -> None:
        """Brings weights that are in host memory to the device, before the block computes."""
        if self.offloaded_weights is not None:
            weights, index = self.offloaded_weights
            weights.bring(index)

    @abstractmethod
    def forward_block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: BlockCache) -> BlockOutput:
        """The computation of the block, without activation checkpointing."""


class DecoderLayer(Block):
    """Pre-norm: x = x + attention(norm(x)); x = x + mlp(norm(x))."""

    def __init__(self, config: Config, mixer: Mixer, mlp: GatedMLP | MLP | MoE) -> None:
        super().__init__(mixer, mlp)
        self.input_layernorm = hidden_norm(config)
        self.post_attention_layernorm = hidden_norm(config)

    def forward_block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: BlockCache) -> BlockOutput:
        x, residual = self.mixer(PreNorm(self.input_layernorm), x, residual, positions, cache)
        return self.mlp(PreNorm(self.post_attention_layernorm), x, residual)


class ScaledLayer(DecoderLayer):
    """Pre-norm, with a multiplier m on both branches: x = x + m attention(norm(x)); x = x + m mlp(norm(x))."""

    def __init__(self, config: Config, mixer: Mixer, mlp: GatedMLP | MLP | MoE, multiplier: float) -> None:
        super().__init__(config, mixer, mlp)
        self.multiplier = multiplier

    def forward_block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: BlockCache) -> BlockOutput:
        x, residual = self.mixer(PreNorm(self.input_layernorm), x, residual, positions, cache)
        x, residual, router_logits = self.mlp(PreNorm(self.post_attention_layernorm), x * self.multiplier, residual)
        return x * self.multiplier, residual, router_logits


class DropoutLayer(DecoderLayer):
    """Pre-norm, with dropout of both branches in training: x = x + dropout(branch(norm(x))), twice."""

    def __init__(self, config: Config, mixer: Mixer, mlp: GatedMLP | MLP | MoE, dropout: float) -> None:
        super().__init__(config, mixer, mlp)
        self.dropout = dropout

    def forward_block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: BlockCache) -> BlockOutput:
        x, residual = self.mixer(PreNorm(self.input_layernorm), x, residual, positions, cache)
        x = F.dropout(x, self.dropout, self.training)
        x, residual, router_logits = self.mlp(PreNorm(self.post_attention_layernorm), x, residual)
        return F.dropout(x, self.dropout, self.training), residual, router_logits


class ParallelLayer(Block):
    """Both branches read one norm: h = norm(x); x = x + attention(h) + mlp(h)."""

    def __init__(self, config: Config, mixer: Mixer, mlp: GatedMLP | MLP | MoE) -> None:
        super().__init__(mixer, mlp)
        self.input_layernorm = hidden_norm(config)

    def forward_block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: BlockCache) -> BlockOutput:
        normed, residual = add_then_norm(self.input_layernorm, x, residual)
        attended, _ = self.mixer(None, normed, None, positions, cache)
        x, _, router_logits = self.mlp(None, normed, None)
        return attended + x, residual, router_logits


class SandwichLayer(DecoderLayer):
    """Norms before and after each branch: x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x)))."""

    def __init__(self, config: Config, mixer: Mixer, mlp: GatedMLP | MLP | MoE) -> None:
        super().__init__(config, mixer, mlp)
        self.pre_feedforward_layernorm = hidden_norm(config)
        self.post_feedforward_layernorm = hidden_norm(config)

    def forward_block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: BlockCache) -> BlockOutput:
        x, residual = self.mixer(PreNorm(self.input_layernorm), x, residual, positions, cache)
        x = self.post_attention_layernorm(x)
        x, residual, router_logits = self.mlp(PreNorm(self.pre_feedforward_layernorm), x, residual)
        x = self.post_feedforward_layernorm(x)
        return x, residual, router_logits


class PostNormLayer(Block):
    """Post-norm, inside the residual branch: x = x + norm(attention(x)); x = x + norm(mlp(x))."""

    def __init__(self, config: Config, mixer: Mixer, mlp: GatedMLP | MLP | MoE) -> None:
        super().__init__(mixer, mlp)
        self.post_attention_layernorm = hidden_norm(config)
        self.post_feedforward_layernorm = hidden_norm(config)

    def forward_block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: BlockCache) -> BlockOutput:
        x, residual = self.mixer(None, x, residual, positions, cache)
        x = self.post_attention_layernorm(x)
        x, residual, router_logits = self.mlp(None, x, residual)
        x = self.post_feedforward_layernorm(x)
        return x, residual, router_logits
