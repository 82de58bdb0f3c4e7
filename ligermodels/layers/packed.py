"""Packed linears, and their parts as modules under the Hub's names.

A packed linear (`qkv_proj`, `gate_up_proj`) owns one weight, which one matrix product reads. Beside it in their parent
are its parts (`q_proj`, `k_proj`, `v_proj`; `gate_proj`, `up_proj`), for tools that find linears by the Hub's names and
wrap, replace or read them, such as PEFT. A part owns nothing at first. When its weight is read, or another module is
put in its place, the packed linear is taken apart: its parts become ordinary `nn.Linear`s over the same memory, it
keeps no parameter, and from then on its output is theirs, concatenated. A tool therefore has the modules, parameters
and numbers that it would have in the Hub's own model, and nothing is computed twice. The numbers of a part with hooks
are computed by the part, too.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeGuard, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ligermodels.errors import InputError
from ligermodels.weights.mapping import Rule, pieces_of

Kind = TypeVar("Kind", bound=nn.Module)


def is_intercepted(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class's forward.

    It has hooks, or its forward was replaced, as by accelerate's offloading. Hooks of all modules do not count: FLOP
    counters and profilers set them, and must measure what runs without them.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def is_unmodified(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether a module is exactly of this class, not of a subclass, and nothing intercepts its calls."""
    return type(module) is kind and not is_intercepted(module)


class PackingModule(nn.Module):
    """Base class of modules that have packed linears as children: they may get parts beside them, by `name_parts`."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Takes the packed linear apart before one of its parts is replaced."""
        part = self.__dict__.get("_modules", {}).get(name)
        if isinstance(part, PackedPart):
            part.packed.take_apart()
        super().__setattr__(name, value)


class PackedLinear(nn.Module):
    """A linear whose output is that of its parts, concatenated. It is no `nn.Linear`: to tools, its parts are.

    weight [N, K] and bias [N]: None once it is taken apart.
    rows: of each part, by its name, its rows of the weight; they cover the weight in order.
    """

    weight: Any
    bias: Any

    def __init__(self, linear: nn.Linear, parent: PackingModule, rows: dict[str, slice]) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.rows = rows
        self._parent = (parent,)  # a tuple, because a module assigned to a module becomes its child

    @property
    def parent(self) -> PackingModule:
        return self._parent[0]

    @property
    def parts(self) -> list[nn.Module]:
        """The modules that stand at the parts' names, whatever they are."""
        return [getattr(self.parent, name) for name in self.rows]

    @property
    def is_whole(self) -> bool:
        """Whether the product with the packed weight is all that its parts would do."""
        if self._parameters.get("weight", self) is None:  # fast; parametrized, it has no such key
            return False
        modules = self._parent[0]._modules
        for name in self.rows:
            part = modules[name]
            if type(part) is not PackedPart or is_intercepted(part):
                return False
        return True

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        if self.is_whole:
            return F.linear(x, self.weight, self.bias)
        return torch.cat([part(x) for part in self.parts], -1)

    @torch.no_grad()
    def take_apart(self) -> None:
        """Makes every part an `nn.Linear` that owns its rows, in the same memory.

        Raises InputError if the weight is sharded, or if another module stands at the packed linear's own name.
        """
        if self.weight is None:
            return
        names = ", ".join(self.rows)
        if self not in self.parent.children():
            raise InputError(f"{names}: the linear that packs them was replaced, as LoRA does; adapt them before that")
        if isinstance(self.weight, DTensor):
            raise InputError(f"{names}: the linear that packs them is sharded; adapt them before sharding the model")
        for part in self.parts:
            if isinstance(part, PackedPart):
                part.become_linear(self.weight, self.bias)
        self.weight = self.bias = None

    @torch.no_grad()
    def put_together(self) -> None:
        """Undoes `take_apart`, if all parts are ordinary linears again whose parameters can be one."""
        parts = [part for part in self.parts if is_unmodified(part, nn.Linear)]
        if self.weight is not None or len(parts) < len(self.rows):
            return
        try:
            weight, bias = concatenate([part.weight for part in parts]), concatenate([part.bias for part in parts])
        except ValueError:
            return
        self.weight, self.bias = weight, bias
        for part, rows in zip(parts, self.rows.values(), strict=True):
            part.__class__ = PackedPart
            cast(PackedPart, part).own_nothing(self, rows)

    def as_linear(self) -> nn.Linear:
        """An `nn.Linear` with the packed parameters, to replace the packed linear as a whole."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, parts={', '.join(self.rows)}"


class PackedPart(nn.Linear):
    """Rows of a packed linear, under a name of its own. It becomes an `nn.Linear` when it is used as one."""

    def __init__(self, packed: PackedLinear, rows: slice) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = packed.in_features, rows.stop - rows.start
        self.own_nothing(packed, rows)

    def own_nothing(self, packed: PackedLinear, rows: slice) -> None:
        """Leaves the parameters to the packed linear."""
        self._parameters.clear()
        self._packed, self.rows = (packed,), rows  # a tuple, because a module assigned to a module becomes its child

    def become_linear(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        """Takes its rows of the packed parameters, and their gradients, as parameters of its own."""
        rows = self.rows
        del self._packed, self.rows
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", parameter_rows(weight, rows))
        self.register_parameter("bias", None if bias is None else parameter_rows(bias, rows))

    @property
    def packed(self) -> PackedLinear:
        return self._packed[0]

    def __getattr__(self, name: str) -> Any:
        """Takes the packed linear apart when weight or bias are read, or assigned to."""
        if name not in ("weight", "bias"):
            return super().__getattr__(name)
        self.packed.take_apart()
        return getattr(self, name)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Does what an `nn.Linear` does, which this part becomes."""
        self.packed.take_apart()
        return self.requires_grad_(requires_grad)

    def forward(self, input: Tensor) -> Tensor:
        """x [..., K] -> its rows of the packed linear's output, [..., rows]."""
        weight, bias = self.packed.weight, self.packed.bias
        return F.linear(input, weight[self.rows], None if bias is None else bias[self.rows])

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """Copied without its parent it is an `nn.Linear` that owns its weight."""
        packed = self.packed
        if id(packed.parent) in memo:
            copied = nn.Module.__new__(PackedPart)
            memo[id(self)] = copied
            vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
            return copied
        linear = nn.Linear(self.in_features, self.out_features, packed.bias is not None, device="meta")
        linear.weight = nn.Parameter(packed.weight.detach()[self.rows].clone(), packed.weight.requires_grad)
        if packed.bias is not None:
            linear.bias = nn.Parameter(packed.bias.detach()[self.rows].clone(), packed.bias.requires_grad)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rows={self.rows}"


def parameter_rows(parameter: nn.Parameter, rows: slice) -> nn.Parameter:
    """Rows of a parameter, in its memory, as a parameter."""
    part = nn.Parameter(parameter.detach()[rows], parameter.requires_grad)
    if parameter.grad is not None:
        part.grad = parameter.grad[rows]
    return part


def concatenate(parameters: Sequence[Tensor | None]) -> nn.Parameter | None:
    """One parameter with the rows of all; None of absent ones.

    Raises ValueError if they differ in dtype, device or requires_grad, have gradients, or are not plain parameters.
    """
    present = [parameter for parameter in parameters if parameter is not None]
    if not present and parameters:
        return None
    kinds = {(p.dtype, p.device, p.requires_grad, p.shape[1:]) for p in present}
    plain = all(type(p) is nn.Parameter and p.grad is None for p in present)
    if len(kinds) != 1 or not plain or len(present) < len(parameters):
        raise ValueError("the parameters cannot be one")
    return nn.Parameter(torch.cat(present), present[0].requires_grad)


def name_parts(model: nn.Module, rules: Iterable[Rule]) -> None:
    """Gives parts to all linears in `PackingModule`s that pack several of the Hub's, by the rules of the checkpoint."""
    rules = tuple(rules)
    for prefix, parent in list(model.named_modules()):
        if isinstance(parent, PackingModule):
            for name, linear in list(parent.named_children()):
                if type(linear) is nn.Linear:
                    pieces = list(pieces_of(f"{prefix}.{name}.weight", tuple(linear.weight.shape), rules))
                    if len(pieces) > 1:
                        add_parts(parent, name, {piece.tensor.split(".")[-2]: piece.index[0] for piece in pieces})


def add_parts(parent: PackingModule, name: str, rows: dict[str, slice]) -> None:
    """Replaces a linear by a packed linear, and adds its parts to the parent."""
    packed = PackedLinear(getattr(parent, name), parent, rows)
    setattr(parent, name, packed)
    for part, its_rows in rows.items():
        setattr(parent, part, PackedPart(packed, its_rows))


def take_apart_trained(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, PackedLinear) and any(parameter.requires_grad for parameter in module.parameters()):
            module.take_apart()


def put_together(model: nn.Module) -> None:
    """Undoes what took packed linears apart, wherever nothing of it is left: see `PackedLinear.put_together`."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.put_together()
