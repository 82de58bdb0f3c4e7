"""AdamW whose states may have another dtype than the weights, and whose step may be refused on the device.

The update is our kernel on a GPU and torch's on a CPU. Sharded parameters are updated shard by shard. The optimizers
beside it derive from it: they say what a parameter's state is and how a list of parameters is updated. Must not know
what a model is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as torch_adamw

from ligermodels.errors import InputError
from ligermodels.kernels.adamw import adamw_
from ligermodels.kernels.dispatch import runs_kernels


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), with states in a dtype of their own.

    states: the dtype of both moments; None for each parameter's own, where either optimizer continues the other's
    state_dict. All parameters of a group are on one device.
    grad_scale, found_inf: what divides the gradients, and 1.0 where nothing may be written, device scalars in fp32 as
    torch's GradScaler sets them; `clipped_step` does.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float = 1e-8,
        states: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.states = states

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update([p for p in group["params"] if p.grad is not None], group)
        return loss

    @torch.no_grad()
    def create_states(self) -> None:
        """Gives every parameter the state that its first step would begin from, to be filled in place."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state_of(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises InputError where the states are another optimizer's. torch's own would round them to the weights'
        dtype."""
        super().load_state_dict({**state_dict, "state": {}})
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, params, strict=True):
            if index in state_dict["state"]:
                self.fill_state(p, state_dict["state"][index])

    @torch.no_grad()
    def fill_state(self, p: nn.Parameter, saved: dict[str, Tensor]) -> None:
        state = self.state_of(p)
        if state.keys() != saved.keys():
            raise InputError(
                f"the optimizer's saved states are {', '.join(saved)}, where {type(self).__name__} has "
                f"{', '.join(state)}: continue with the optimizer that saved them"
            )
        for name, value in saved.items():
            state[name].copy_(value)

    def state_of(self, p: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state.update(self.new_state(p))
        return state

    def new_state(self, p: nn.Parameter) -> dict[str, Tensor]:
        zeros = {name: torch.zeros_like(p, dtype=self.states) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=p.device)} | zeros

    def update(self, params: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """One step of parameters of one group, which have gradients."""
        if not params:
            return
        states = [self.state_of(p) for p in params]
        steps = [state["step"] for state in states]
        weights, grads = [local(p) for p in params], [local(p.grad) for p in params if p.grad is not None]
        exp_avgs, exp_avg_sqs = ([local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        lr, (beta1, beta2), eps, weight_decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
        alike = len({x.dtype for x in (*weights, *grads, *exp_avgs, *exp_avg_sqs)}) == 1
        if runs_kernels(weights[0]) or not alike:
            self.count(steps)
            scalars = lr, beta1, beta2, eps, weight_decay
            for p, g, m, v, step in zip(weights, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
                adamw_(p, g, m, v, *scalars, step, self.grad_scale, self.found_inf)
        else:
            torch_adamw(
                weights, grads, exp_avgs, exp_avg_sqs, [], steps, fused=True, grad_scale=self.grad_scale,
                found_inf=self.found_inf, amsgrad=False, maximize=False,
                lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
            )  # fmt: skip

    def count(self, steps: list[Tensor]) -> None:
        """Counts this step, unless it is refused."""
        one = torch.ones_like(steps[0]) if self.found_inf is None else 1.0 - self.found_inf
        torch._foreach_add_(steps, [one] * len(steps))  # one tensor for all would be read by the host


def local(x: Tensor) -> Tensor:
    """This rank's part of `x`; all of it where it is not sharded."""
    return x.to_local() if isinstance(x, DTensor) else x


def keep(old: Tensor, new: Tensor, found_inf: Tensor | None) -> None:
    """Writes `new` over `old`, in its dtype; where found_inf is 1, not a bit of it."""
    new = new.to(old.dtype)
    old.copy_(new if found_inf is None else torch.where(found_inf.bool(), old, new))


def fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function as one kernel for all sizes; as it is on a CPU, where that is not worth a compiler."""
    return function if device.type == "cpu" else compiled(function)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True)
