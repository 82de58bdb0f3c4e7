"""Feed-forward layers: gated (SwiGLU, GeGLU) with a packed gate_up projection, and plain. Must not know any family."""

from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.layers.fused import activation_then_linear, gated_activation_then_linear, norm_then_linear
from ligermodels.layers.norm import PreNorm
from ligermodels.layers.packed import PackingModule


class GatedMLP(PackingModule):
    """down_proj(activation(gate) * up). gate_up_proj [2 I, H] has the gate's rows first; down_proj [H, I].

    intermediate_size: I; None for the config's value.
    """

    def __init__(self, config: Config, *, intermediate_size: int | None = None, bias: bool = False) -> None:
        super().__init__()
        intermediate = intermediate_size or config.intermediate_size
        self.activation = config.activation
        self.fused = True  # fuse activation and down projection: backward recomputes the product instead of saving it
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, config.hidden_size, bias=bias)

    def forward(self, norm: PreNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, None]:
        """x, residual [B, T, H] -> (output [B, T, H], residual stream x + residual [B, T, H], no router logits).

        The layer reads norm(x + residual), or x + residual if norm is None.
        """
        gate_up, residual = norm_then_linear(norm, self.gate_up_proj, x, residual)
        return gated_activation_then_linear(gate_up, self.activation, self.down_proj, self.fused), residual, None


class MLP(nn.Module):
    """down_proj(activation(up_proj)), without a gate. up_proj [I, H]; down_proj [H, I]."""

    def __init__(self, config: Config, *, bias: bool = False) -> None:
        super().__init__()
        self.activation = config.activation
        self.fused = True
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)

    def forward(self, norm: PreNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, None]:
        """As `GatedMLP.forward`."""
        up, residual = norm_then_linear(norm, self.up_proj, x, residual)
        return activation_then_linear(up, self.activation, self.down_proj, self.fused), residual, None
