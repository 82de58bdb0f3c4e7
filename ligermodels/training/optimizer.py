"""AdamW with weight decay on matrices only, and a cosine schedule with warmup. Must not know the data."""

import math
from typing import Any

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
FINAL_FRACTION = 0.1


def adamw(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Fused AdamW, its states in the parameters' dtype. `set_learning_rate` sets the learning rate of each step."""
    matrices, others = decay_groups(model)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=BETAS, fused=True)


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


def default_learning_rate(hidden_size: int) -> float:
    """Peak for training from random weights: 4.5e-3 at the width of the tiny presets, falling as 1 / width."""
    return 4.5e-3 * 128 / hidden_size


def cosine(step: int, steps: int, warmup: int, peak: float) -> float:
    """The learning rate of a step, from 0 on: linear to `peak` over `warmup` steps, then half a cosine to a tenth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def clipped_step(optimizer: Any, loss: Tensor, norm: Tensor, largest: float) -> None:
    """One update of `adamw`'s optimizer by the gradients scaled to a joint norm of at most `largest`; none if loss or
    norm is not finite.

    loss, norm: device scalars; nothing waits for them. The fused kernel scales gradients as it reads them, by the
    protocol of torch's GradScaler, instead of a pass over them beforehand.
    """
    optimizer.grad_scale = (norm / largest).clamp_min(1.0)  # divides the gradients
    optimizer.found_inf = 1.0 - (loss.isfinite() & norm.isfinite()).float()
    optimizer.step()
