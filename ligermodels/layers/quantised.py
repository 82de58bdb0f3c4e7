"""Modules whose frozen weights are in few bits: the base of QLoRA, and a model that generates in less memory.

A quantised linear stands for a linear, or for a packed one with all its parts. It owns the bytes of its weight, a
parameter that is never trained; dtype casts, optimizers and sharding leave the bytes as they are. The fused nodes
dequantise the weight where they multiply. Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ligermodels.kernels.quant.quantised_weight import QuantisedWeight, WeightLayout, frozen_linear
from ligermodels.weights.module import BYTES, QuantisedModule


class FrozenWeights(QuantisedModule):
    """A module that owns the bytes of quantised weights, which are attributes under their own names.

    layouts: of the weights, by name. device: of their bytes, which are not set.
    device_bytes: of weights in host memory, where their bytes come to the device, by name.
    is_on_device: whether they are there.
    """

    def __init__(self, layouts: Mapping[str, WeightLayout], device: torch.device) -> None:
        super().__init__()
        self.layouts: dict[str, WeightLayout] = {}
        self.device_bytes: dict[str, Tensor] = {}
        self.is_on_device = False
        for name, layout in layouts.items():
            self.set_layout(name, layout, device)

    def set_layout(self, name: str, layout: WeightLayout, device: torch.device) -> None:
        """Gives a weight this layout, and bytes that are not set."""
        self.layouts[name] = layout
        data = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self.register_parameter(name + BYTES, nn.Parameter(data, requires_grad=False))

    def offload(self, name: str, memory: Tensor, buffer: Tensor) -> None:
        """Keeps a weight's bytes in host memory [nbytes], from which they come to a buffer on the device."""
        self.register_parameter(name + BYTES, nn.Parameter(memory, requires_grad=False))
        self.device_bytes[name] = buffer

    def quantised(self, name: str) -> QuantisedWeight:
        data = self.device_bytes[name] if self.is_on_device else self.get_parameter(name + BYTES)
        return QuantisedWeight(data, self.layouts[name])

    def quantised_weights(self) -> dict[str, QuantisedWeight]:
        return {name: self.quantised(name) for name in self.layouts}

    def _apply(self, fn, recurse=True):
        """`to` and `half` change the dtype in which weights are used; their bytes stay, in host memory too."""
        on_host = {id(self.get_parameter(name + BYTES)) for name in self.device_bytes}
        super()._apply(lambda x: x if id(x) in on_host else fn(x), recurse)
        for name, layout in self.layouts.items():
            like = torch.empty(0, dtype=layout.dtype, device=self.get_parameter(name + BYTES).device)
            self.layouts[name] = layout.with_dtype(fn(like).dtype)
        return self


class QuantisedLinear(FrozenWeights):
    """A linear with a quantised weight [N, K] and a frozen bias [N] or None."""

    bias: nn.Parameter | None

    def __init__(self, layout: WeightLayout, bias: nn.Parameter | None, device: torch.device) -> None:
        super().__init__({"weight": layout}, device)
        self.out_features, self.in_features = layout.shape
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> QuantisedWeight:
        return self.quantised("weight")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        return frozen_linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        layout = type(self.layouts["weight"]).__name__
        return f"in_features={self.in_features}, out_features={self.out_features}, {layout}"
