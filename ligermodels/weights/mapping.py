"""How a model's parameters correspond to the tensors of a Hub checkpoint, in both directions.

A rule relates patterns of names. A pattern matches a name, or the start of one that ends at a dot: what follows
(`.weight`, `.bias`, a whole subtree) is carried over. `{}` stands for a number, a layer's index. The first rule that
matches a parameter decides; a parameter that no rule matches has the same name on the Hub.

All rules reduce to a plan, a list of pieces: a bijection between the Hub's tensors and the boxes that tile the
parameters. Loading and exporting run over the same plan. Knows names and shapes only; no file, no tensor, no family.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One Hub tensor and the box of a parameter that holds its elements in the same order.

    index: one slice, with start and stop, per dimension of the parameter.
    shape: the Hub tensor's shape; the box may have further leading dimensions of size 1.
    """

    tensor: str
    parameter: str
    index: tuple[slice, ...]
    shape: Shape


class Rule(Protocol):
    def pieces(self, name: str, shape: Shape) -> list[Piece] | None:
        """The pieces of the parameter `name`, or None where the rule does not match it."""


@dataclass(frozen=True)
class Rename:
    """A tensor, or everything below a module, that has another name on the Hub."""

    hub: str
    ours: str

    def pieces(self, name: str, shape: Shape) -> list[Piece] | None:
        translate = translator(self.ours, name)
        return None if translate is None else [Piece(translate(self.hub), name, whole(shape), shape)]


@dataclass(frozen=True)
class Concat:
    """A packed parameter: the Hub's tensors one after another along dimension 0.

    sizes: how many rows each of them has.
    """

    ours: str
    hub: tuple[str, ...]
    sizes: tuple[int, ...]

    def pieces(self, name: str, shape: Shape) -> list[Piece] | None:
        translate = translator(self.ours, name)
        if translate is None:
            return None
        if len(self.sizes) != len(self.hub) or sum(self.sizes) != shape[0]:
            raise ValueError(f"{name} has {shape[0]} rows, which its rule splits into {self.sizes} for {self.hub}")
        return [
            Piece(translate(hub), name, (slice(stop - size, stop), *whole(shape[1:])), (size, *shape[1:]))
            for hub, size, stop in zip(self.hub, self.sizes, accumulate(self.sizes), strict=True)
        ]


def plan(parameters: Mapping[str, Sequence[int]], rules: Iterable[Rule]) -> list[Piece]:
    """The pieces of all parameters, those of one parameter side by side.

    parameters: shapes by name. Raises ValueError where a rule does not fit a shape or two pieces claim one tensor.
    """
    rules = tuple(rules)
    pieces: list[Piece] = []
    owner: dict[str, str] = {}
    for name, shape in parameters.items():
        for piece in pieces_of(name, tuple(shape), rules):
            if piece.tensor in owner:
                raise ValueError(f"both {owner[piece.tensor]} and {name} map to the checkpoint's {piece.tensor}")
            owner[piece.tensor] = name
            pieces.append(piece)
    return pieces


def pieces_of(name: str, shape: Shape, rules: Iterable[Rule]) -> list[Piece]:
    for rule in rules:
        pieces = rule.pieces(name, shape)
        if pieces is not None:
            return pieces
    return [Piece(name, name, whole(shape), shape)]


def whole(shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def translator(pattern: str, name: str) -> Callable[[str], str] | None:
    """Where `name` matches `pattern`: the function from another pattern to what `name` is called under it."""
    numbered = re.escape(pattern).replace(re.escape("{}"), r"(\d+)")
    found = re.fullmatch(rf"{numbered}(\..+)?", name)
    if not found:
        return None
    *numbers, rest = found.groups(default="")
    return lambda other: other.format(*numbers) + rest


def packed_qkv(query: int, key_value: int) -> Concat:
    """self_attn.qkv_proj from q_proj, k_proj and v_proj. query, key_value: their rows."""
    layer = "model.layers.{}.self_attn."
    return Concat(
        layer + "qkv_proj", (layer + "q_proj", layer + "k_proj", layer + "v_proj"), (query, key_value, key_value)
    )


def packed_gate_up(intermediate: int) -> Concat:
    """mlp.gate_up_proj from gate_proj and up_proj. intermediate: the rows of each."""
    layer = "model.layers.{}.mlp."
    return Concat(layer + "gate_up_proj", (layer + "gate_proj", layer + "up_proj"), (intermediate, intermediate))
