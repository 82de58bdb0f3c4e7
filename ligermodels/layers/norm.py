"""RMSNorm and LayerNorm, which `layers/fused.py` fuses with what comes before and after."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.kernels.norms.layer_norm import layer_norm
from ligermodels.kernels.norms.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """y = x * rsqrt(mean(x²) + eps) * (weight + offset)."""

    def __init__(self, hidden_size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps, self.offset)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}"


class LayerNorm(nn.Module):
    """y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias."""

    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, eps: float, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.zeros(hidden_size)) if bias else None)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> the same shape and dtype."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@dataclass(frozen=True)
class PreNorm:
    """The norm of a layer's input, passed to the layer, which fuses it with its first projection.

    Not the module itself: tools that move the arguments of every call to a device, such as accelerate's offloading,
    would move a module, whose weights they may have taken away.
    """

    module: nn.Module


def hidden_norm(config: Config) -> RMSNorm | LayerNorm:
    """A norm over the residual stream."""
    if config.layer_norms:
        return LayerNorm(config.hidden_size, config.norm_eps, config.norm_bias)
    return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
