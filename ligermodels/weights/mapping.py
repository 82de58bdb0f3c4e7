"""How a model's parameters correspond to the tensors of a Hub checkpoint, in both directions.

A rule relates patterns of names. A pattern matches a name, or the start of one that ends at a dot: what follows
(`.weight`, `.bias`, a whole subtree) is carried over. `{}` stands for a number: a layer's index, then an expert's. The
first rule that matches a parameter decides; a parameter that no rule matches has the same name on the Hub.

All rules reduce to a plan, a list of pieces: a bijection between the Hub's tensors and the boxes that tile the
parameters. Loading and exporting run over the same plan. Knows names and shapes only; no file, no tensor, no family.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

Shape = tuple[int, ...]

# A linear with a low-rank update keeps the one it was, whose names the rules speak of, as `base_layer`.
BASE_LAYER = ".base_layer."
UPDATE_SUFFIXES = (".lora_A", ".lora_B")


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
    def pieces(self, name: str, shape: Shape) -> Iterable[Piece] | None:
        """The pieces of the parameter `name`, or None where the rule does not match it."""


@dataclass(frozen=True)
class Rename:
    """A tensor, or everything below a module, that has another name on the Hub.

    rules: those of what lies below, where it is not only renamed; they speak of `ours` on both sides.
    """

    hub: str
    ours: str
    rules: tuple[Rule, ...] = ()

    def pieces(self, name: str, shape: Shape) -> Iterable[Piece] | None:
        if name_translator(self.ours, name) is None:
            return None
        return (replace(piece, tensor=self.renamed(piece.tensor)) for piece in pieces_of(name, shape, self.rules))

    def renamed(self, tensor: str) -> str:
        translate = name_translator(self.ours, tensor)
        if translate is None:
            raise ValueError(f"{tensor} is not below {self.ours}, which its rule renames to {self.hub}")
        return translate(self.hub)


@dataclass(frozen=True)
class Concat:
    """A packed parameter: the Hub's tensors one after another along dimension 0.

    sizes: how many rows each of them has; None for equally many.
    """

    ours: str
    hub: tuple[str, ...]
    sizes: tuple[int, ...] | None = None

    def pieces(self, name: str, shape: Shape) -> list[Piece] | None:
        translate = name_translator(self.ours, name)
        if translate is None:
            return None
        sizes = self.sizes or (shape[0] // len(self.hub),) * len(self.hub)
        if len(sizes) != len(self.hub) or sum(sizes) != shape[0]:
            raise ValueError(f"{name} has {shape[0]} rows, which its rule splits into {sizes} for {self.hub}")
        return [
            Piece(translate(hub), name, (slice(stop - size, stop), *full_box(shape[1:])), (size, *shape[1:]))
            for hub, size, stop in zip(self.hub, sizes, accumulate(sizes), strict=True)
        ]


@dataclass(frozen=True)
class Stack:
    """A parameter of all experts, dimension 0, each expert's part made of one or several of the Hub's tensors.

    hub: tensors of one expert, its index the last `{}`; they follow one another along dimension 1 in equal parts.
    """

    ours: str
    hub: tuple[str, ...]

    def pieces(self, name: str, shape: Shape) -> Iterable[Piece] | None:
        translate = name_translator(self.ours, name)
        if translate is None:
            return None
        experts, rows, *rest = shape
        if rows % len(self.hub):
            raise ValueError(f"{name} has {rows} rows an expert, which its rule splits in equal parts for {self.hub}")
        part = rows // len(self.hub)
        return (
            Piece(
                translate(hub, expert),
                name,
                (slice(expert, expert + 1), slice(row, row + part), *full_box(tuple(rest))),
                (part, *rest),
            )
            for expert in range(experts)
            for row, hub in zip(range(0, rows, part), self.hub, strict=True)
        )


def plan_pieces(
    parameters: Mapping[str, Sequence[int]], rules: Iterable[Rule], *, at_most: int | None = None
) -> list[Piece]:
    """The pieces of all parameters, those of one parameter side by side, or the first `at_most`.

    parameters: shapes by name. Raises ValueError where a rule does not fit a shape or two pieces claim one tensor.
    Low-rank updates have no piece: they are no part of a checkpoint.
    """
    rules = tuple(rules)
    pieces: list[Piece] = []
    owner: dict[str, str] = {}
    for name, shape in parameters.items():
        if is_lora_parameter(name):
            continue
        for piece in pieces_of(name.replace(BASE_LAYER, "."), tuple(shape), rules):
            if piece.tensor in owner:
                raise ValueError(f"both {owner[piece.tensor]} and {name} map to the checkpoint's {piece.tensor}")
            owner[piece.tensor] = name
            pieces.append(replace(piece, parameter=name))
            if len(pieces) == at_most:
                return pieces
    return pieces


def is_lora_parameter(name: str) -> bool:
    """Whether a parameter belongs to a low-rank update."""
    return name.endswith(UPDATE_SUFFIXES)


def pieces_of(name: str, shape: Shape, rules: Iterable[Rule]) -> Iterable[Piece]:
    for rule in rules:
        pieces = rule.pieces(name, shape)
        if pieces is not None:
            return pieces
    return [Piece(name, name, full_box(shape), shape)]


def full_box(shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def name_translator(pattern: str, name: str) -> Callable[..., str] | None:
    """Where `name` matches `pattern`: the function from another pattern to what `name` is called under it.

    That pattern may have more numbers than `pattern`; they are the function's further arguments.
    """
    numbered = re.escape(pattern).replace(re.escape("{}"), r"(\d+)")
    found = re.fullmatch(rf"{numbered}(\..+)?", name)
    if not found:
        return None
    *numbers, rest = found.groups(default="")
    return lambda other, *more: other.format(*numbers, *more) + rest


class HeadSizes(Protocol):
    """The sizes of a configuration that say how packed queries, keys and values are split."""

    @property
    def query_size(self) -> int: ...

    @property
    def key_value_size(self) -> int: ...


def packed_projections(config: HeadSizes) -> tuple[Rule, ...]:
    """The rules of nearly every family: packed_qkv and packed_gate_up."""
    return packed_qkv(config), packed_gate_up()


def packed_qkv(config: HeadSizes) -> Concat:
    """self_attn.qkv_proj from q_proj, k_proj and v_proj."""
    layer, sizes = "model.layers.{}.self_attn.", (config.query_size, config.key_value_size, config.key_value_size)
    return Concat(layer + "qkv_proj", (layer + "q_proj", layer + "k_proj", layer + "v_proj"), sizes)


def packed_gate_up(mlp: str = "mlp") -> Concat:
    """gate_up_proj of a layer's module `mlp` from gate_proj and up_proj."""
    layer = f"model.layers.{{}}.{mlp}."
    return Concat(layer + "gate_up_proj", (layer + "gate_proj", layer + "up_proj"))


def stacked_experts(experts: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """mlp.experts.gate_up_proj and down_proj from the tensors of each expert.

    experts: where the Hub keeps them within a layer, such as `mlp.experts`. gate, up, down: what it calls the three.
    """
    layer, ours = f"model.layers.{{}}.{experts}.{{}}.", "model.layers.{}.mlp.experts."
    return (
        Stack(ours + "gate_up_proj", (f"{layer}{gate}.weight", f"{layer}{up}.weight")),
        Stack(ours + "down_proj", (f"{layer}{down}.weight",)),
    )
