"""What an entry of the table of ops is: a case, its sizes, and what several kinds of ops share."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ligermodels.kernels.linear.linear import LowRank
from tests.conftest import DEVICE

Function = Callable[..., Tensor | tuple[Tensor, ...]]
EPS = 1e-6
RANK = 3  # of low-rank updates
HEADS = (32, 8, 128), (8, 4, 256), (40, 8, 128), (64, 8, 128), (16, 16, 64)  # query heads, key and value heads, size
VOCABULARIES = 32000, 128256, 151936, 262144


@dataclass(frozen=True)
class Case:
    """ours and reference take the leaves, which are cast to the dtype under test and differentiated, then constants."""

    ours: Function
    reference: Function
    leaves: list[Tensor]
    constants: list[Tensor]

    def to(self, dtype: torch.dtype, device: str = DEVICE) -> "Case":
        leaves = [x.to(device, dtype).requires_grad_() for x in self.leaves]
        return replace(self, leaves=leaves, constants=[x.to(device) for x in self.constants])

    def freeze(self, *frozen: int) -> "Case":
        return replace(self, leaves=[x.detach() if i in frozen else x for i, x in enumerate(self.leaves)])

    def train_only(self, trained: int) -> "Case":
        return self.freeze(*(i for i in range(len(self.leaves)) if i != trained))

    def freeze_inputs(self) -> "Case":
        """Freezes the activations, so that only weights are trained."""
        rows = self.leaves[0].shape[:2]
        return self.freeze(*(i for i, x in enumerate(self.leaves) if x.shape[:2] == rows))

    def step(self, function: Function, upstream: list[Tensor]) -> list[Tensor]:
        """The outputs, then the gradients of the leaves that require one."""
        outputs = as_list(function(*self.leaves, *self.constants))
        leaves = [x for x in self.leaves if x.requires_grad]
        gradients = torch.autograd.grad(outputs, leaves, upstream) if outputs[0].requires_grad else []
        return [*(x.detach() for x in outputs), *gradients]

    @torch.no_grad()
    def forward(self, function: Function) -> list[Tensor]:
        return as_list(function(*self.leaves, *self.constants))

    def upstream(self, function: Function | None = None) -> list[Tensor]:
        """Random gradients of the outputs of `function`, or of the reference, which takes the interpreter no time."""
        return [torch.randn_like(x) for x in self.forward(function or self.reference)]

    def run(self) -> None:
        """Runs the kernels, without gradients and with them."""
        self.step(self.ours, self.upstream(self.ours))


@dataclass(frozen=True, kw_only=True)
class Op:
    draw: Callable[..., Case]  # from (batch, length, *size)
    small: tuple[int, ...]
    real: tuple[tuple[int, ...], ...] = ()  # sizes of models; empty if another entry or another library has the kernels
    huge: tuple[int, ...] | None = None  # length, then the size; None if another entry has the kernels
    # FLOPs of backward divided by those of forward: with all leaves trained, then with each leaf alone. Empty if there
    # is no matrix product, or one is in place, which FLOP counters miss.
    products: tuple[float, ...] = ()
    has_gradients: bool = True
    # Pairs (batch, length) that launch a further variant: with few rows, or with enough programs to fill the GPU.
    more_variants: tuple[tuple[int, int], ...] = ()

    def case(self, batch: int = 2, length: int = 4, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Case:
        return self.draw(batch, length, *self.small).to(dtype, device)


def as_list(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.normal(0.0, scale, shape, device=DEVICE)


def draw_update(inputs, width) -> list[Tensor]:
    """A and B for the first half of a projection's columns and for its last column, as for queries and values."""
    return [normal(2 * RANK, inputs, scale=0.2), normal(width // 2 + 1, RANK, scale=0.2)]


def with_low_rank_update(function: Function, width: int, **settings) -> Function:
    """`function` with a low-rank update, whose A and B are the last two arguments."""
    columns = (0, width // 2), (width - 1, width)
    return lambda *inputs: function(*inputs[:-2], low_rank=LowRank(*inputs[-2:], columns, 0.5), **settings)


def run_all_kernels(name: str, case: Case) -> None:
    """Runs all kernels of a case: norms have other variants if their inputs are frozen, log-probabilities if the head
    is."""
    cases = [case]
    if "norm" in name:
        cases.append(case.freeze_inputs())
    if "logprobs" in name:
        cases.append(case.train_only(0))
    for trained in cases:
        trained.run()
