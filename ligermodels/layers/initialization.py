"""Random weights of a new model."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ligermodels.layers.lora import initialize_lora
from ligermodels.weights.mapping import is_lora_parameter
from ligermodels.weights.sharding import copy_local_shard

FILLS = frozenset([nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.kaiming_uniform_])


class NoInitialization(TorchFunctionMode):
    """Skips what fills parameters as modules are made: on the meta device it takes long, to no effect."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        return kwargs["tensor"] if function in FILLS else function(*args, **kwargs)


@torch.no_grad()
def initialize(model: nn.Module, initializer_range: float, device: torch.device, seed: int) -> None:
    """Normal weights of standard deviation initializer_range; norms act as weight 1, biases and LoRA B are 0.
    Buffers that a checkpoint stores have the values that their modules name.

    device: the one that they are drawn on.
    Every rank draws every whole parameter and keeps its shard, so that the weights do not depend on the sharding.
    The weights of the base do not depend on LoRA either.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if is_lora_parameter(name):
            continue
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        owner = model.get_submodule(name.rpartition(".")[0])
        fills = getattr(owner, "initial_values", {})
        if (leaf := name.rpartition(".")[2]) in fills:
            fills[leaf](value, generator)
        elif name.endswith("bias"):
            value.zero_()
        elif parameter.ndim == 1 and name.endswith("weight"):
            value.fill_(1.0 - getattr(owner, "offset", 0.0))
        else:
            value.normal_(0.0, initializer_range, generator=generator)
        copy_local_shard(parameter, value)
    for module in model.modules():
        if module is not model:
            for name, initial in getattr(module, "stored_buffers", {}).items():
                module.get_buffer(name).fill_(initial)
    initialize_lora(model, generator)
