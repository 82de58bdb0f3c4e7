"""The gated feed-forward layer on one packed projection."""

from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.layers.fused import gated_activation_then_linear, norm_then_linear
from ligermodels.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """down_proj(activation(gate) * up), gate_up_proj [2 I, H] with the gate's rows first.

    intermediate_size: I; None for the config's.
    """

    def __init__(self, config: Config, *, intermediate_size: int | None = None, bias: bool = False) -> None:
        super().__init__()
        intermediate = intermediate_size or config.intermediate_size
        self.activation = config.activation
        self.fused = True  # whether the down projection recomputes its input in backward instead of keeping it
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, config.hidden_size, bias=bias)

    def forward(self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, None]:
        """x, residual [B, T, H] -> (the layer's output [B, T, H], the residual stream x + residual, no router logits).

        Without a norm the layer reads the residual stream itself.
        """
        gate_up, residual = norm_then_linear(norm, self.gate_up_proj, x, residual)
        return gated_activation_then_linear(gate_up, self.activation, self.down_proj, self.fused), residual, None
