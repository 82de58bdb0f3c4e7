"""AdamW with weight decay on matrices only, and a cosine schedule with warmup. Must not know the data."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as torch_adamw

from ligermodels.kernels.adamw import adamw_
from ligermodels.kernels.op import runs_kernels

BETAS = (0.9, 0.95)
FINAL_FRACTION = 0.1


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), updating by our kernel on a GPU and by torch's on a CPU.

    State, its creation and state_dict are torch's own, so that either continues the other's checkpoint. Sharded
    parameters are updated shard by shard. All parameters of a group are on one device.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *lists)
        params, grads, exp_avgs, exp_avg_sqs, no_amsgrad, steps = lists
        if not params:
            return
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        lr, (beta1, beta2), eps, weight_decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
        if runs_kernels(params[0]):
            count = torch.ones_like(steps[0]) if found_inf is None else 1.0 - found_inf
            torch._foreach_add_(steps, [count] * len(steps))  # one tensor for all would be read by the host
            scalars = lr, beta1, beta2, eps, weight_decay
            for p, g, m, v, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
                adamw_(local(p), local(g), local(m), local(v), *scalars, step, grad_scale, found_inf)
        else:
            torch_adamw(
                params, grads, exp_avgs, exp_avg_sqs, no_amsgrad, steps, fused=True, grad_scale=grad_scale,
                found_inf=found_inf, amsgrad=False, maximize=False,
                lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
            )  # fmt: skip


def local(x: Tensor) -> Tensor:
    """This rank's part of `x`; all of it where it is not sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def adamw(model: nn.Module, weight_decay: float) -> AdamW:
    """AdamW, its states in the parameters' dtype. `set_learning_rate` sets the learning rate of each step."""
    matrices, others = decay_groups(model)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW([group for group in groups if group["params"]], lr=0.0, betas=BETAS, weight_decay=weight_decay)


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

    loss, norm: device scalars; nothing waits for them. The kernel scales gradients as it reads them, by the
    protocol of torch's GradScaler, instead of a pass over them beforehand.
    """
    optimizer.grad_scale = (norm / largest).clamp_min(1.0)  # divides the gradients
    optimizer.found_inf = 1.0 - (loss.isfinite() & norm.isfinite()).float()
    optimizer.step()
