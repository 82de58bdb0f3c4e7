"""AdamW with a separate dtype for its state, and with a step that the device skips if gradients are not finite.

The update runs our Triton kernel on a GPU and torch's own kernel on a CPU. Each rank updates its own shards. AdamW8bit
and Muon derive from this class: they override `new_state` and `update`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.adamw import adamw as torch_adamw

from ligermodels.errors import InputError
from ligermodels.kernels.dispatch import runs_kernels
from ligermodels.kernels.optim.adamw import adamw_, adamw_reference
from ligermodels.kernels.optim.adamw8bit import adamw8bit_, adamw8bit_reference
from ligermodels.kernels.optim.param_rounding import master_reference
from ligermodels.training.optimizers.offloaded import OffloadedStates
from ligermodels.training.optimizers.update_check import UpdateCheck

# Of AdamW8bit: elements of a block, and of a parameter that is quantised.
LARGEST_BLOCK, SMALLEST_BLOCK, MIN_QUANTIZED_SIZE = 256, 64, 4096


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), with a separate dtype for its state.

    state_dtype: dtype of both moments; None for the dtype of each parameter. With None, this class and
    torch.optim.AdamW can load each other's state_dict. All parameters of a group must be on one device.
    A bf16 second moment decays only if 1 - beta2 is well above half a unit in its last place, 2^-9. At beta2 0.95
    moments in bf16 change an update by 0.4 %, those in 8 bits by 7 %, both without bias. At 0.99 it is 1 %, and where
    gradients become smaller updates are up to 5 % too small for a while. At 0.999 the moment does not decay, and they
    stay too small. (Gradients of a small language model; normal ones whose size falls to a tenth.)
    param_rounding: how updated bf16 parameters are kept (kernels/optim/param_rounding.py): "exact", with one more
    state, low_bits, int16, which makes the parameter a fp32 one and is 0 at first: training begins at the bf16 weight,
    also of a checkpoint that has more bits; "nearest"; or "stochastic", with random bits of the seed. The other two
    lose updates that are small beside their weight.
    grad_scale, found_inf: fp32 device scalars, as torch's GradScaler sets them; `clip_and_step` sets both. The step
    divides gradients by grad_scale, and writes nothing if found_inf is 1.0.
    running_norm: of the gradients, a fp32 device scalar; None unless `OptimizerInBackward` sets it.
    offloaded: the states where they are in host memory: see `offload_states`.
    check: sees what the updates of a step change, where it is set.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    running_norm: Tensor | None = None
    offloaded: OffloadedStates | None = None
    check: UpdateCheck | None = None

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8,
        state_dtype: torch.dtype | None = None, param_rounding: str = "exact", seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.state_dtype, self.param_rounding, self.seed = state_dtype, param_rounding, seed
        every = (p for group in self.param_groups for p in group["params"])
        self.streams = {p: number for number, p in enumerate(every)}  # of random words, one a parameter

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update_by_states([p for p in group["params"] if p.grad is not None], group)
        return loss

    @torch.no_grad()
    def offload_states(self) -> None:
        """Keeps the states in host memory from now on. Call it before the first step, for whole parameters."""
        self.offloaded = OffloadedStates([group["params"] for group in self.param_groups], self.new_state)

    def update_by_states(self, params: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """`update`, wherever the states are."""
        if self.offloaded is None:
            self.checked_update(params, group)
            return
        for p in params:
            host = self.state_of(p)
            with self.offloaded.on_device(p) as self.state[p]:
                self.checked_update([p], group)
            self.state[p] = host

    def shards(self) -> dict[nn.Parameter, Tensor]:
        """This rank's part of each parameter."""
        return {p: local_view(p) for group in self.param_groups for p in group["params"]}

    def checked_update(self, params: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        if self.check is None:
            self.update(params, group)
            return
        sampled = [p for p in params if p in self.check.runs]
        for p in sampled:
            self.check.before[p] = self.sampled_weights(p)
            self.expect_update(p, group)
        self.update(params, group)
        for p in sampled:
            self.check.compare(p, self.sampled_weights(p))

    def sampled_weights(self, p: nn.Parameter) -> Tensor:
        """The elements of a parameter that are checked, with their low bits, fp64."""
        return master_reference(self.sampled(p, p), self.sampled(p, self.state_of(p).get("low_bits"))).double()

    def sampled(self, p: nn.Parameter, x: Any) -> Any:
        """The elements that are checked of a tensor in the shape of a parameter, or None."""
        assert self.check is not None
        return None if x is None else local_view(x).detach().reshape(-1)[self.check.runs[p]]

    def expect_update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """Tells the check what the coming update should make of the elements that it samples."""
        assert self.check is not None
        state, (beta1, beta2) = self.state_of(p), group["betas"]
        grad, exp_avg, exp_avg_sq = (
            self.sampled(p, x).double() for x in (p.grad, state["exp_avg"], state["exp_avg_sq"])
        )
        exact, *_ = adamw_reference(
            self.check.before[p], grad, exp_avg, exp_avg_sq, group["lr"], beta1, beta2, group["eps"],
            group["weight_decay"], state["step"] + 1, self.grad_scale, self.found_inf,
        )  # fmt: skip
        self.check.expect(p, exact)

    @torch.no_grad()
    def create_states(self) -> None:
        """Creates the initial state of every parameter that has none yet, so that it can be filled in place.

        All states are then complete, and may be read and changed.
        """
        if self.offloaded is not None:
            self.offloaded.synchronize()
        for group in self.param_groups:
            for p in group["params"]:
                self.state_of(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state in its own dtype; torch's method would round it to the parameters' dtype.

        Raises InputError if the state is another optimizer's.
        """
        super().load_state_dict({**state_dict, "state": {}})
        if self.offloaded is not None:
            self.offloaded.reset()
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, params, strict=True):
            if index in state_dict["state"]:
                self.fill_state(p, state_dict["state"][index])

    def state_dict(self) -> dict[str, Any]:
        if self.offloaded is not None:
            self.offloaded.synchronize()
        return super().state_dict()

    @torch.no_grad()
    def fill_state(self, p: nn.Parameter, saved: dict[str, Tensor]) -> None:
        state = self.state_of(p)
        if "low_bits" in state and "low_bits" not in saved:  # the weight was whole without them
            saved = {**saved, "low_bits": torch.zeros_like(state["low_bits"])}
        if state.keys() != saved.keys():
            raise InputError(
                f"the saved optimizer state has {', '.join(saved)}, but {type(self).__name__} has "
                f"{', '.join(state)}: continue with the optimizer that saved it"
            )
        for name, value in saved.items():
            state[name].copy_(value)

    def state_of(self, p: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state.update(self.new_state(p) if self.offloaded is None else self.offloaded.states[p])
        return state

    def new_state(self, p: nn.Parameter) -> dict[str, Tensor]:
        zeros = {name: torch.zeros_like(p, dtype=self.state_dtype) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=p.device)} | zeros | self.new_low_bits(p)

    def new_low_bits(self, p: nn.Parameter) -> dict[str, Tensor]:
        exact = self.param_rounding == "exact" and p.dtype == torch.bfloat16
        return {"low_bits": torch.zeros_like(p, dtype=torch.int16)} if exact else {}

    def rounding(self, p: nn.Parameter) -> dict[str, Any]:
        """The arguments of `adamw_` by which the parameter is rounded."""
        if p.dtype != torch.bfloat16:
            return {}
        match self.param_rounding:
            case "exact":
                return {"low_bits": local_view(self.state_of(p)["low_bits"])}
            case "stochastic":
                return {"seed": self.seed, "stream": self.streams[p], "first": first_element(p)}
        return {}

    def update(self, params: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """One step for parameters of one group, all of which have gradients."""
        if not params:
            return
        states = [self.state_of(p) for p in params]
        steps = [state["step"] for state in states]
        weights, grads = [local_view(p) for p in params], [local_view(p.grad) for p in params if p.grad is not None]
        exp_avgs, exp_avg_sqs = ([local_view(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        lr, (beta1, beta2), eps, weight_decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
        same_dtype = len({x.dtype for x in (*weights, *grads, *exp_avgs, *exp_avg_sqs)}) == 1
        rounding = [self.rounding(p) for p in params]
        if runs_kernels(weights[0]) or not same_dtype or any(rounding):
            self.count_step(steps)
            scalars = lr, beta1, beta2, eps, weight_decay
            for p, g, m, v, step, how in zip(weights, grads, exp_avgs, exp_avg_sqs, steps, rounding, strict=True):
                adamw_(p, g, m, v, *scalars, step, self.grad_scale, self.found_inf, **how)
        else:
            torch_adamw(
                weights, grads, exp_avgs, exp_avg_sqs, [], steps, fused=True, grad_scale=self.grad_scale,
                found_inf=self.found_inf, amsgrad=False, maximize=False,
                lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
            )  # fmt: skip

    def count_step(self, steps: list[Tensor]) -> None:
        """Increments the step counts, unless the step is skipped."""
        one = torch.ones_like(steps[0]) if self.found_inf is None else 1.0 - self.found_inf
        torch._foreach_add_(steps, [one] * len(steps))  # with a single tensor, the host would wait to read its value


def local_view(x: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor; a plain tensor is returned as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def first_element(p: Tensor) -> int:
    """The number, in the flattened parameter, of the first element of this rank's shard, which is a range of rows."""
    if not isinstance(p, DTensor):
        return 0
    _, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return offsets[0] * p.shape[1:].numel()


def write_if_finite(old: Tensor, new: Tensor, found_inf: Tensor | None) -> None:
    """Writes `new` over `old` in the dtype of `old`; if found_inf is 1, `old` stays bit-identical."""
    new = new.to(old.dtype)
    old.copy_(new if found_inf is None else torch.where(found_inf.bool(), old, new))


def compiled_on_gpu(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Returns the function fused into one kernel for all sizes; on a CPU, returns it unchanged.

    On a CPU the compile time is not worth it.
    """
    return function if device.type == "cpu" else compile_once(function)


@functools.cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True)


class AdamW8bit(AdamW):
    """AdamW with both moments quantised to 8 bits: 2 bytes per weight instead of 4 or 8.

    Values are quantised in blocks of 256. Each block is scaled by its largest absolute value, and each value is rounded
    to one of 256 codes of a non-linear map: Dettmers et al. 2021, https://arxiv.org/abs/2110.02861. Our Triton kernel
    updates a parameter in one pass on a GPU (kernels/optim/adamw8bit.py). Map, rounding and arithmetic are those of
    torchao.optim.AdamW8bit, with four differences: the state is made of plain tensors; no second moment is rounded to
    0; the step can be skipped, and the gradients scaled, on the device; and blocks never cross rows, so that a shard
    has whole blocks on any number of ranks. Where the row length is not a multiple of 256, blocks have 128 or 64
    elements. Small parameters, and those whose row length is not a multiple of 64, have AdamW's state.

    The state of a quantised parameter is step, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, and AdamW's
    low_bits.
    exp_avg, exp_avg_sq: uint8 codes in the shape of the parameter. exp_avg_scale, exp_avg_sq_scale: fp32
    [rows, blocks per row].
    """

    def new_state(self, p: nn.Parameter) -> dict[str, Tensor]:
        if not is_quantized(p):
            return super().new_state(p)
        state = {"step": torch.zeros((), device=p.device)}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(p, dtype=torch.uint8)
            state[f"{name}_scale"] = zero_scales(p)
        return state | self.new_low_bits(p)

    def update(self, params: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        super().update([p for p in params if not is_quantized(p)], group)
        quantized = [p for p in params if is_quantized(p)]
        if not quantized:
            return
        self.count_step([self.state_of(p)["step"] for p in quantized])
        beta1, beta2 = group["betas"]
        scalars = {"beta1": beta1, "beta2": beta2} | {name: group[name] for name in ("lr", "eps", "weight_decay")}
        for p in quantized:
            assert p.grad is not None
            states = {name: local_view(x) for name, x in self.state_of(p).items()}
            adamw8bit_(
                local_view(p), local_view(p.grad), **states | self.rounding(p), **scalars,
                grad_scale=self.grad_scale, found_inf=self.found_inf,
            )  # fmt: skip

    def expect_update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        if not is_quantized(p):
            return super().expect_update(p, group)
        assert self.check is not None
        state, block, run = self.state_of(p), block_size(p), self.check.runs[p]
        blocks = slice(run.start // block, run.stop // block)
        grad, codes1, codes2 = (self.sampled(p, x) for x in (p.grad, state["exp_avg"], state["exp_avg_sq"]))
        scale1, scale2 = (local_view(state[f"{name}_scale"]).reshape(-1)[blocks] for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        exact, *_ = adamw8bit_reference(
            self.check.before[p], grad.double(), codes1, scale1, codes2, scale2, group["lr"], beta1, beta2,
            group["eps"], group["weight_decay"], state["step"] + 1, self.grad_scale, self.found_inf,
        )  # fmt: skip
        self.check.expect(p, exact)


def block_size(p: Tensor) -> int:
    """Returns the number of elements that share one scale."""
    return math.gcd(p.shape[1:].numel(), LARGEST_BLOCK)


def is_quantized(p: Tensor) -> bool:
    """Whether the moments of a parameter are quantised: depends on its full shape, not on this rank's shard."""
    return p.ndim >= 2 and p.numel() >= MIN_QUANTIZED_SIZE and block_size(p) >= SMALLEST_BLOCK


def zero_scales(p: Tensor) -> Tensor:
    """Returns zeros, fp32 [rows, blocks per row], sharded like the parameter."""
    blocks = p.shape[1:].numel() // block_size(p)
    scales = torch.zeros(local_view(p).shape[0], blocks, device=p.device)
    if not isinstance(p, DTensor):
        return scales
    shape = torch.Size((p.shape[0], blocks))
    return DTensor.from_local(scales, p.device_mesh, p.placements, run_check=False, shape=shape, stride=(blocks, 1))
