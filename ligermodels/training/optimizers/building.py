"""Optimizers by name, their parameter groups, gradient clipping, and the step: after backward, or inside it."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError, suggest
from ligermodels.training.optimizers.adamw import AdamW, AdamW8bit
from ligermodels.training.optimizers.muon import Muon, matrix_views
from ligermodels.vision.multimodal import VisionLanguageModel

OPTIMIZERS = ("adamw", "adamw8bit", "muon")
BETAS = (0.9, 0.95)  # at which moments may be in bf16: see AdamW
RATE_SCALE = "rate_scale"  # key of a parameter group: its learning rate, as a multiple of that of the run


def build_optimizer(
    model: nn.Module, name: str = "adamw", *, state_dtype: torch.dtype | None = None, weight_decay: float = 0.1,
    part_scales: Mapping[str, float] | None = None,
    param_rounding: str = "exact", seed: int = 0,
) -> AdamW:  # fmt: skip
    """Builds the optimizer of a model's trainable parameters, sharded or not. The learning rate is 0 until
    `set_learning_rate` sets it.

    name: one of OPTIMIZERS. state_dtype: dtype of the optimizer state; None for that of each parameter. weight_decay:
    not applied to norms, biases and embeddings. part_scales: by part of a model with images, what `set_learning_rate`
    multiplies its rate by. param_rounding, seed: as in `AdamW`. Raises InputError if the name is unknown, adamw8bit is
    given a state_dtype, or muon stochastic rounding.
    """
    scale_of = {
        id(parameter): scale
        for part, scale in (part_scales or {}).items()
        for parameter in cast(VisionLanguageModel, model).parts()[part]
    }
    groups: list[dict[str, Any]] = []
    for parameters, decay in zip(decay_groups(model), (weight_decay, 0.0), strict=True):
        for scale in dict.fromkeys(scale_of.get(id(parameter), 1.0) for parameter in parameters):
            chosen = [parameter for parameter in parameters if scale_of.get(id(parameter), 1.0) == scale]
            groups.append({"params": chosen, "weight_decay": decay} | ({} if scale == 1.0 else {RATE_SCALE: scale}))
    options: dict[str, Any] = {"lr": 0.0, "betas": BETAS, "weight_decay": weight_decay}
    match name:
        case "adamw":
            return AdamW(groups, state_dtype=state_dtype, param_rounding=param_rounding, seed=seed, **options)
        case "adamw8bit" if state_dtype is None:
            return AdamW8bit(groups, param_rounding=param_rounding, seed=seed, **options)
        case "adamw8bit":
            raise InputError(
                f"optimizer adamw8bit keeps its state in 8 bits, not in {state_dtype}; omit the state dtype"
            )
        case "muon" if param_rounding == "stochastic":
            raise InputError("optimizer muon does not round stochastically: keep parameters exact, or use adamw")
        case "muon":
            matrices = matrix_views(model)
            return Muon(groups, matrices, state_dtype=state_dtype, param_rounding=param_rounding, **options)
    raise InputError(f"optimizer {name!r}: unknown{suggest(name, OPTIMIZERS)}")


def decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Splits the trainable parameters into (those with weight decay, those without).

    Norms, biases and embeddings have no weight decay, nor has an embedding that is tied to the head.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    not_decayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and id(parameter) not in embeddings and not name.endswith("bias")
            (decayed if decays else not_decayed).append(parameter)
    return decayed, not_decayed


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the learning rate of all parameters, of parts with a rate of their own in proportion."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(RATE_SCALE, 1.0)


def clip_and_step(optimizer: AdamW, loss: Tensor, norm: Tensor, max_grad_norm: float) -> None:
    """Clips the gradients to a global norm of max_grad_norm and does one step.

    loss, norm: device scalars, equal on all ranks; norm is the global gradient norm. The host does not wait for them.
    If either is not finite, weights and optimizer state stay bit-identical.
    Clipping needs no pass of its own: the optimizer scales gradients while it reads them, by the protocol of torch's
    GradScaler.
    """
    optimizer.grad_scale = (norm / max_grad_norm).clamp_min(1.0)  # divides the gradients
    optimizer.found_inf = 1.0 - (loss.isfinite() & norm.isfinite()).float()
    optimizer.step()
    optimizer.grad_scale = optimizer.found_inf = None


DECAY = 0.9  # of the running norm


class OptimizerInBackward:
    """Steps an optimizer during backward: `begin`, one backward pass, `finish`. A parameter is updated as soon as its
    gradient is complete, and the gradient is freed, so that gradients never exist all at once. A tied parameter is
    updated once. Lv et al. 2023, LOMO, https://arxiv.org/abs/2306.09782.

    Works with every optimizer that derives from our AdamW, because these update one parameter independently of others.
    The global norm of a step is known only when its last parameter has been updated. Gradients are therefore clipped by
    the running norm n of the steps before: they are divided by max(1, n / max_grad_norm), and n becomes
    0.9 n + 0.1 norm. The first step is not clipped, and sets n to its norm. n is `optimizer.running_norm`, which
    checkpoints keep.

    If the loss is not finite, weights and optimizer state stay bit-identical. If a gradient is not finite, neither its
    parameter nor those after it in the backward pass are updated; those before it already are.
    """

    def __init__(self, optimizer: AdamW, max_grad_norm: float = math.inf) -> None:
        self.optimizer, self.max_grad_norm = optimizer, max_grad_norm
        self.params: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.running_norm = torch.zeros((), device=self.params[0].device)
        self.norms: dict[nn.Parameter, Tensor] = {}
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.step_parameter)

    def begin(self, loss: Tensor) -> None:
        """loss: of the backward pass that follows, a scalar. The host does not wait for it."""
        optimizer = self.optimizer
        assert optimizer.running_norm is not None
        self.groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        self.norms = {}
        optimizer.grad_scale = (optimizer.running_norm / self.max_grad_norm).clamp_min(1.0)
        optimizer.found_inf = 1.0 - loss.detach().isfinite().float()

    @torch.no_grad()
    def step_parameter(self, p: Tensor) -> None:
        """Updates a parameter whose gradient is complete, and frees the gradient. Called by autograd."""
        assert isinstance(p, nn.Parameter) and p.grad is not None
        optimizer = self.optimizer
        if optimizer.found_inf is None:
            raise RuntimeError("OptimizerInBackward: backward without begin(), or twice in one step")
        self.norms[p] = torch.linalg.vector_norm(p.grad, dtype=torch.float32)
        optimizer.found_inf = torch.maximum(optimizer.found_inf, 1.0 - self.norms[p].isfinite().float())
        optimizer.update_by_states([p], self.groups[p])
        p.grad = None

    @torch.no_grad()
    def finish(self) -> Tensor:
        """Ends the step. Returns the global norm of its gradients before clipping: a device scalar, fp32."""
        optimizer, self.norms, norms = self.optimizer, {}, self.norms
        norm = torch.linalg.vector_norm(torch.stack([norms[p] for p in self.params if p in norms]))
        assert optimizer.running_norm is not None and optimizer.found_inf is not None
        old = optimizer.running_norm
        new = torch.where(old == 0, norm, DECAY * old + (1 - DECAY) * norm)
        skipped = torch.maximum(optimizer.found_inf, 1.0 - norm.isfinite().float())
        old.copy_(torch.where(skipped.bool(), old, new))
        optimizer.grad_scale = optimizer.found_inf = None
        return norm
