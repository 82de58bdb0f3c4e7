"""Feed-forward layers: gated (SwiGLU, GeGLU) with a packed gate_up projection, and plain."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ligermodels.configs.base import Config
from ligermodels.layers.checkpointing.token_tiles import run_in_tiles, tile_count
from ligermodels.layers.fused import (
    activation_then_linear,
    gated_activation_then_linear,
    is_fusible,
    linear_without_values,
    norm_then_linear,
)
from ligermodels.layers.norm import PreNorm
from ligermodels.layers.packed import PackingModule


class FeedForward(PackingModule, ABC):
    """Base class: a projection up, an activation, and the projection down_proj.

    fused: whether activation and down_proj are one node, whose backward recomputes the activation's product. False in a
    checkpointed block: that keeps the product, so that recomputation stops before down_proj, and runs over tiles of
    tokens where there are many.
    """

    up_name: ClassVar[str]  # of the projection up
    down_proj: nn.Linear

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.fused = True

    def tiles(self, tokens: int) -> int:
        """Over how many tiles so many tokens are spread in a checkpointed block.

        One where a projection must be called as a module, or the gradient of a parameter has hooks, which would be
        called for each tile.
        """
        fusible = is_fusible(getattr(self, self.up_name)) and is_fusible(self.down_proj)
        hooked = any(parameter._backward_hooks for parameter in self.parameters())
        return tile_count(tokens) if fusible and not hooked else 1

    def forward(self, norm: PreNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, None]:
        """x, residual [B, T, H] -> (output [B, T, H], residual stream x + residual [B, T, H], no router logits).

        The layer reads norm(x + residual), or x + residual if norm is None.
        """
        whole = self.fused or is_dynamo_compiling()
        tiles = 1 if whole else self.tiles(x.shape[:-1].numel())
        if tiles == 1:
            return *self.compute(norm, self.down_proj, x, residual), None
        hidden = x if residual is None else x + residual
        owners = [self] if norm is None else [self, norm.module]
        trained = [parameter for owner in owners for parameter in owner.parameters() if parameter.requires_grad]
        ends = self.down_proj, partial(linear_without_values, self.down_proj)
        layer, layer_for_backward = (partial(self.compute, norm, end, residual=None) for end in ends)
        return *run_in_tiles(layer, layer_for_backward, hidden, trained, tiles), None

    @abstractmethod
    def compute(
        self, norm: PreNorm | None, down_proj: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x, residual [..., H] -> (output [..., H], residual stream [..., H])."""


class GatedMLP(FeedForward):
    """down_proj(activation(gate) * up). gate_up_proj [2 I, H] has the gate's rows first; down_proj [H, I].

    intermediate_size: I; None for the config's value.
    """

    up_name = "gate_up_proj"

    def __init__(self, config: Config, *, intermediate_size: int | None = None, bias: bool = False) -> None:
        super().__init__(config.activation)
        intermediate = intermediate_size or config.intermediate_size
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, config.hidden_size, bias=bias)

    def compute(self, norm, down_proj, x, residual):
        gate_up, residual = norm_then_linear(norm, self.gate_up_proj, x, residual)
        return gated_activation_then_linear(gate_up, self.activation, down_proj, self.fused), residual


class MLP(FeedForward):
    """down_proj(activation(up_proj)), without a gate. up_proj [I, H]; down_proj [H, I]."""

    up_name = "up_proj"

    def __init__(self, config: Config, *, bias: bool = False) -> None:
        super().__init__(config.activation)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def compute(self, norm, down_proj, x, residual):
        up, residual = norm_then_linear(norm, self.up_proj, x, residual)
        return activation_then_linear(up, self.activation, down_proj, self.fused), residual
