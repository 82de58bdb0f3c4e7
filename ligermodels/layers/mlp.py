"""The gated feed-forward layer (SwiGLU, GeGLU) with a packed gate_up projection. Must not know any family."""

from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.layers.fused import gated_activation_then_linear, norm_then_linear
from ligermodels.layers.norm import RMSNorm
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

    def forward(self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, None]:
        """x, residual [B, T, H] -> (output [B, T, H], residual stream x + residual [B, T, H], no router logits).

        The layer reads norm(x + residual), or x + residual if norm is None.
        """
        gate_up, residual = norm_then_linear(norm, self.gate_up_proj, x, residual)
        return gated_activation_then_linear(gate_up, self.activation, self.down_proj, self.fused), residual, None
