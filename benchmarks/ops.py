"""What an op of the benchmarks is: its inputs, what is right, the work it cannot avoid, and its providers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import timing

Shape = tuple[int, ...]
OPS: dict[str, "Op"] = {}


class Provider(NamedTuple):
    make: Callable[..., Callable]
    shapes: Sequence[Shape]
    layout: Callable[..., Iterable[Tensor]]


@dataclass
class Op:
    """One op beside its peers, listed under its name.

    inputs(*shape) -> tensors, on the default device; those that require a gradient are differentiated.
    reference: callable on them, the definition.
    work(*shape) -> the fewest bytes or operations of each pass that is timed: "forward", "backward",
        "forward+backward"; only "forward" where nothing is differentiated.
    ceiling: what bounds it, timing.COPY or timing.MATMUL.
    alone(*shape) -> callable whose own time is the limit, in place of work at the ceiling.
    beyond_gradients: whether the peak of memory leaves out the inputs' gradients.
    overwritten: whether a provider writes over the inputs, and what it computes next would take another time. Then
        their values are put back after each call, which is not timed: of every provider, because the pause lets the
        device cool, and a product at the power cap is faster after it.
    """

    name: str
    shapes: Sequence[Shape]
    inputs: Callable[..., list[Tensor]]
    reference: Callable
    work: Callable[..., dict[str, float]]
    ceiling: str = timing.COPY
    alone: Callable[..., Callable] | None = None
    beyond_gradients: bool = False
    overwritten: bool = False
    providers: dict[str, Provider] = field(default_factory=dict)

    def __post_init__(self) -> None:
        OPS[self.name] = self

    def provider(
        self,
        name: str,
        shapes: Sequence[Shape] | None = None,
        layout: Callable = lambda *inputs: inputs,
    ):
        """Registers a function of the shape that imports what it needs and returns a callable on the inputs.

        shapes: those to run, all if not given. layout: from the op's inputs to those this provider would find in a
        model; not timed.
        """

        def register(make: Callable[..., Callable]) -> Callable[..., Callable]:
            self.providers[name] = Provider(make, shapes or self.shapes, layout)
            return make

        return register

    def compiled(self, shapes: Sequence[Shape]) -> None:
        """Registers torch.compile of the provider "pytorch"; each shape costs seconds of compilation."""
        make, _, layout = self.providers["pytorch"]

        @self.provider("torch.compile", shapes, layout)
        def compiled(*shape):
            torch._dynamo.reset()
            return torch.compile(make(*shape), dynamic=False)


def both(forward: float, backward: float) -> dict[str, float]:
    """The work of each pass, where one after the other can share nothing."""
    return {"forward": forward, "backward": backward, "forward+backward": forward + backward}


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    """A bf16 input that is differentiated."""
    return torch.randn(shape, dtype=torch.bfloat16).mul_(scale).requires_grad_()


def three_products(tokens: int, inputs: int, outputs: int) -> Callable:
    """Those of a linear: y = x Wᵀ, dx = dy W, dW = dyᵀ x."""
    x, weight = draw(tokens, inputs).detach(), draw(outputs, inputs).detach()
    y, dx, dweight = torch.empty(tokens, outputs, dtype=x.dtype), torch.empty_like(x), torch.empty_like(weight)

    def multiply():
        torch.mm(x, weight.T, out=y)
        return torch.mm(y, weight, out=dx), torch.mm(y.T, x, out=dweight)

    return multiply
