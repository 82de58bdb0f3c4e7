"""The optimizer step inside the backward pass: a parameter is updated as soon as its gradient is complete, and the
gradient is freed, so that gradients never exist all at once.

Lv et al. 2023, LOMO, https://arxiv.org/abs/2306.09782. Works with every optimizer that derives from our AdamW, because
these update one parameter independently of the others. A tied parameter is updated once, after its last gradient.
"""

import math

import torch
from torch import Tensor, nn

from ligermodels.training.optimizers.adamw import AdamW

DECAY = 0.9  # of the running norm


class OptimizerInBackward:
    """Steps an optimizer during backward: `begin`, one backward pass, `finish`.

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
