"""The definition of a benchmarked op: inputs, reference implementation, minimum work, and providers.

OPS is the registry of all ops by name. Knows no particular op and does not measure anything.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import timing

Shape = tuple[int, ...]
OPS: dict[str, "Op"] = {}


class Provider(NamedTuple):
    """One library's implementation of an op; the fields are described in Op.provider."""

    make: Callable[..., Callable]
    shapes: Sequence[Shape]
    layout: Callable[..., Iterable[Tensor]]


@dataclass
class Op:
    """One benchmarked op. Creating it adds it to OPS.

    inputs(*shape) -> tensors on the default device. Gradients are computed for those that require one.
    reference: the reference implementation, a callable on the inputs.
    work(*shape) -> the minimum number of bytes or floating-point operations of each timed pass: "forward", "backward",
        "forward+backward". Only "forward" if no input requires a gradient.
    ceiling: the hardware limit of the op, timing.COPY (memory bandwidth) or timing.MATMUL.
    limit_function(*shape) -> a callable whose measured time is the limit. It replaces `work` divided by the ceiling.
    exclude_gradients: whether the size of the inputs' gradients is subtracted from the peak memory.
    restore_inputs: whether the inputs' values are restored after each call, untimed. Set it if a provider overwrites
        its inputs and the new values would change the time of later calls. It applies to every provider of the op,
        because the GPU cools during the pause, and at the power cap a matrix product is faster after it.
    max_error_ratio: see checks.py. Set it where peers that round more often are to be shown beside their error.
    """

    name: str
    shapes: Sequence[Shape]
    inputs: Callable[..., list[Tensor]]
    reference: Callable
    work: Callable[..., dict[str, float]]
    ceiling: str = timing.COPY
    limit_function: Callable[..., Callable] | None = None
    exclude_gradients: bool = False
    restore_inputs: bool = False
    max_error_ratio: float = 4.0  # allows more roundings than in the reference implementation, but no different formula
    providers: dict[str, Provider] = field(default_factory=dict)

    def __post_init__(self) -> None:
        OPS[self.name] = self

    def provider(
        self,
        name: str,
        shapes: Sequence[Shape] | None = None,
        layout: Callable = lambda *inputs: inputs,
    ):
        """Decorator that registers a provider: a function of the shape that returns a callable on the inputs.

        The function imports the provider's library itself. shapes: the shapes to run (default: all of the op).
        layout: converts the op's inputs to the form in which this provider would get them in a model. It is not timed.
        """

        def register(make: Callable[..., Callable]) -> Callable[..., Callable]:
            self.providers[name] = Provider(make, shapes or self.shapes, layout)
            return make

        return register

    def add_compiled(self, shapes: Sequence[Shape]) -> None:
        """Registers torch.compile of the provider "pytorch". Each shape takes seconds to compile."""
        make, _, layout = self.providers["pytorch"]

        @self.provider("torch.compile", shapes, layout)
        def compiled(*shape):
            torch._dynamo.reset()
            return torch.compile(make(*shape), dynamic=False)


def work_per_pass(forward: float, backward: float) -> dict[str, float]:
    """The work of each pass. Forward and backward share none, so "forward+backward" is their sum."""
    return {"forward": forward, "backward": backward, "forward+backward": forward + backward}


def random_input(*shape: int, scale: float = 1.0) -> Tensor:
    """A normally distributed bf16 tensor that requires a gradient."""
    return torch.randn(shape, dtype=torch.bfloat16).mul_(scale).requires_grad_()


def linear_matmuls(tokens: int, inputs: int, outputs: int) -> Callable:
    """The three matrix products of a linear layer: y = x Wᵀ, dx = dy W, dW = dyᵀ x."""
    x, weight = random_input(tokens, inputs).detach(), random_input(outputs, inputs).detach()
    y, dx, dweight = torch.empty(tokens, outputs, dtype=x.dtype), torch.empty_like(x), torch.empty_like(weight)

    def multiply():
        torch.mm(x, weight.T, out=y)
        return torch.mm(y, weight, out=dx), torch.mm(y.T, x, out=dweight)

    return multiply
