"""The optimizers by name, their parameter groups, and the step that clips and may be refused. Knows no data."""

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError, suggest
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.training.optimizers.adamw8bit import AdamW8bit
from ligermodels.training.optimizers.muon import Muon, matrices_of

OPTIMIZERS = ("adamw", "adamw8bit", "muon")
BETAS = (0.9, 0.95)


def build_optimizer(
    model: nn.Module, name: str = "adamw", *, states: torch.dtype | None = None, weight_decay: float = 0.1
) -> AdamW:
    """The optimizer of what a model trains, sharded or not; `set_learning_rate` sets the learning rate of each step.

    states: dtype of what it remembers, whatever the weights' is; None for theirs. Raises InputError where there is no
    such optimizer, adamw8bit is given a dtype or torchao is missing.
    """
    matrices, others = decay_groups(model)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": 0.0, "betas": BETAS, "weight_decay": weight_decay}
    match name:
        case "adamw":
            return AdamW(groups, states=states, **options)
        case "adamw8bit" if states is None:
            return AdamW8bit(groups, **options)
        case "adamw8bit":
            raise InputError(f"optimizer adamw8bit keeps its states in 8 bits, not in {states}; leave states out")
        case "muon":
            return Muon(groups, matrices_of(model), states=states, **options)
    raise InputError(f"optimizer {name!r}: unknown{suggest(name, OPTIMIZERS)}")


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices, the rest), without what is frozen. Embeddings belong to the rest, also one tied to the head."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and id(parameter) not in embeddings and not name.endswith("bias")
            (matrices if decays else others).append(parameter)
    return matrices, others


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clipped_step(optimizer: AdamW, loss: Tensor, norm: Tensor, largest: float) -> None:
    """One update by the gradients scaled to a joint norm of at most `largest`; where loss or norm is not finite, no bit
    of weights and states changes.

    loss, norm: device scalars, equal on all ranks; nothing waits for them. The optimizers scale gradients as they read
    them, by the protocol of torch's GradScaler, instead of a pass over them beforehand.
    """
    optimizer.grad_scale = (norm / largest).clamp_min(1.0)  # divides the gradients
    optimizer.found_inf = 1.0 - (loss.isfinite() & norm.isfinite()).float()
    optimizer.step()
    optimizer.grad_scale = optimizer.found_inf = None
