"""RMSNorm with the residual addition fused in. Must not know any family."""

import torch
from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """y = x * rsqrt(mean(x²) + eps) * (weight + offset)."""

    def __init__(self, hidden_size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x, residual [..., H] -> (norm(x + residual), x + residual); without a residual, (norm(x), x)."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps, self.offset), x
        return add_rms_norm(x, residual, self.weight, self.eps, self.offset)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}"


def hidden_norm(config: Config) -> RMSNorm:
    """An RMSNorm over the residual stream."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
