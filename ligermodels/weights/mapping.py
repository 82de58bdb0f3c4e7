"""Rules that map a model's parameters to the tensors of a Hub checkpoint, in both directions.

A rule relates two name patterns. A pattern matches a full name, or a prefix of a name that ends before a dot; the rest
of the name (`.weight`, `.bias`, a whole subtree) is carried over. `{}` stands for a number: the layer index first, then
the expert index. The first rule that matches a parameter is applied. A parameter without a matching rule has the same
name on the Hub.

`plan_pieces` applies the rules and returns a list of pieces: a bijection between the Hub's tensors and the boxes (index
ranges) that tile the parameters. Loading and exporting both use this list.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from ligermodels.configs.base import Config
from ligermodels.configs.features import LatentAttentionConfig
from ligermodels.configs.hybrid import GatedDeltaConfig
from ligermodels.weights.stored import Shape

# A linear that LoRA wraps becomes the wrapper's `base_layer`. Rules use the names without it.
BASE_LAYER = ".base_layer."
UPDATE_SUFFIXES = (".lora_A", ".lora_B")
WRAPPED = re.compile(r"(.+?)\.(base_layer|original_module|modules_to_save)\.")  # by LoRA, ours or PEFT's


@dataclass(frozen=True)
class Piece:
    """One Hub tensor, and the box of a parameter that holds the same elements.

    tensor, parameter: their names.
    index: the box as one slice, with start and stop, per dimension of the parameter.
    shape: the Hub tensor's shape. The box may have additional leading dimensions of size 1.
    view, order: the Hub tensor in shape `view`, with its dimensions in `order`, has the elements of the box in their
    order. Both are empty if the Hub tensor has them in this order itself.
    """

    tensor: str
    parameter: str
    index: tuple[slice, ...]
    shape: Shape
    view: Shape = ()
    order: tuple[int, ...] = ()

    @property
    def box_shape(self) -> Shape:
        return tuple(side.stop - side.start for side in self.index)

    @property
    def box_view(self) -> Shape:
        """The box's shape with the dimensions of `view`, in `order`."""
        return tuple(self.view[dim] for dim in self.order)

    @property
    def inverse_order(self) -> tuple[int, ...]:
        return tuple(sorted(range(len(self.order)), key=self.order.__getitem__))

    def to_box(self, stored: Tensor) -> Tensor:
        permuted = stored.reshape(self.view).permute(self.order) if self.view else stored
        return permuted.reshape(self.box_shape)

    def from_box(self, box: Tensor) -> Tensor:
        permuted = box.reshape(self.box_view).permute(self.inverse_order) if self.view else box
        return permuted.reshape(self.shape)


class Rule(Protocol):
    def pieces(self, name: str, shape: Shape) -> Iterable[Piece] | None:
        """The pieces of the parameter `name`, or None if the rule does not match it."""


@dataclass(frozen=True)
class Rename:
    """A tensor, or a whole subtree, that has another name on the Hub.

    hub, ours: the name patterns on the Hub and in the model.
    rules: applied to the subtree before the renaming. They use the model's name on both sides.
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
            raise ValueError(f"{tensor} is not below {self.ours}, the name that its rule renames to {self.hub}")
        return translate(self.hub)


@dataclass(frozen=True)
class Concat:
    """A packed parameter: several Hub tensors concatenated along dimension 0.

    hub: name patterns of the tensors, in order. sizes: the number of rows of each; None for equal sizes.
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
            raise ValueError(f"{name} has {shape[0]} rows, but its rule splits it into {sizes} rows for {self.hub}")
        return [
            Piece(translate(hub), name, (slice(stop - size, stop), *full_box(shape[1:])), (size, *shape[1:]))
            for hub, size, stop in zip(self.hub, sizes, accumulate(sizes), strict=True)
        ]


@dataclass(frozen=True)
class Stack:
    """A parameter that stacks all experts along dimension 0, stored on the Hub as separate tensors for each expert.

    hub: name patterns of one expert's tensors; the last `{}` is the expert index. They are concatenated along dimension
    1, in equal parts.
    """

    ours: str
    hub: tuple[str, ...]

    def pieces(self, name: str, shape: Shape) -> Iterable[Piece] | None:
        translate = name_translator(self.ours, name)
        if translate is None:
            return None
        experts, rows, *rest = shape
        if rows % len(self.hub):
            raise ValueError(
                f"{name} has {rows} rows per expert, which cannot be split into equal parts for {self.hub}"
            )
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


@dataclass(frozen=True)
class Permute:
    """Hub tensors that hold the elements of another rule's pieces in another order.

    rule: gives the pieces. hub: name pattern of the Hub tensors that are permuted.
    view: the sizes into which each of the Hub tensor's first dimensions is split; further dimensions stay as they are.
    order: of all these sizes, in the parameter.
    Example: queries and gates that alternate by head, [H 2 D, K], become all queries, then all gates with the view
    ((H, 2, D),) and the order (1, 0, 2).
    """

    rule: Rule
    hub: str
    view: tuple[Shape, ...]
    order: tuple[int, ...]

    def pieces(self, name: str, shape: Shape) -> Iterable[Piece] | None:
        pieces = self.rule.pieces(name, shape)
        return None if pieces is None else map(self.permuted, pieces)

    def permuted(self, piece: Piece) -> Piece:
        if name_translator(self.hub, piece.tensor) is None:
            return piece
        rest = piece.shape[len(self.view) :]
        view = (*(size for sizes in self.view for size in sizes), *rest)
        if math.prod(view) != math.prod(piece.shape):
            raise ValueError(f"{piece.tensor}: its rule splits it into {view}, but its box has the shape {piece.shape}")
        stored = (*map(math.prod, self.view), *rest)
        return replace(piece, shape=stored, view=view, order=(*self.order, *range(len(self.order), len(view))))


def permuted(ours: str, view: tuple[Shape, ...], order: tuple[int, ...], hub: str | None = None) -> Permute:
    """A tensor whose elements have another order on the Hub. hub: its name there; None for the same as `ours`."""
    hub = ours if hub is None else hub
    return Permute(Rename(hub, ours), hub, view, order)


def plan_pieces(
    parameters: Mapping[str, Sequence[int]], rules: Iterable[Rule], *, at_most: int | None = None
) -> list[Piece]:
    """The pieces of all parameters, in the order of the parameters; only the first `at_most` if that is given.

    parameters: shapes by name. LoRA parameters are skipped, because a checkpoint does not contain them.
    Raises ValueError if a rule does not fit a shape, or if two pieces have the same Hub tensor.
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
            pieces.append(piece if piece.parameter == name else replace(piece, parameter=name))
            if len(pieces) == at_most:
                return pieces
    return pieces


def is_lora_parameter(name: str) -> bool:
    """Whether a parameter belongs to a low-rank update (LoRA)."""
    return name.endswith(UPDATE_SUFFIXES)


def foreign_adapters(parameters: Iterable[str]) -> list[str]:
    """The names of modules that another library has wrapped, found by the names of the model's parameters."""
    names = list(parameters)
    ours = {f"{name.rpartition('.')[0]}." for name in names if is_lora_parameter(name)}
    wrapped = dict.fromkeys(found[1] for found in map(WRAPPED.match, names) if found)
    return [name for name in wrapped if not any(owner.startswith(f"{name}.") for owner in ours)]


def pieces_of(name: str, shape: Shape, rules: Iterable[Rule]) -> Iterable[Piece]:
    """The pieces of one parameter, by the first rule that matches it."""
    for rule in rules:
        pieces = rule.pieces(name, shape)
        if pieces is not None:
            return pieces
    return [Piece(name, name, full_box(shape), shape)]


def full_box(shape: Shape) -> tuple[slice, ...]:
    """The index of a box that covers the whole shape."""
    return tuple(slice(0, size) for size in shape)


@dataclass(frozen=True)
class KeptLayers:
    """Numbered layers that a checkpoint has and the model does not compute, whose number config.json gives.

    prefix: of their names, before the number. first: the lowest number. field: of config.json, which is `count`.
    """

    prefix: str
    first: int
    field: str
    count: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}{self.first + number}" for number in range(self.count))


def further_token_layers(config: GatedDeltaConfig) -> KeptLayers:
    """Qwen's layers that predict further tokens."""
    return KeptLayers("mtp.layers.", 0, "mtp_num_hidden_layers", config.mtp_num_hidden_layers)


def name_translator(pattern: str, name: str) -> Callable[..., str] | None:
    """A function that translates `name` from `pattern` to another pattern, or None if `name` does not match `pattern`.

    The returned function takes the other pattern. If that has more `{}` than `pattern`, the additional numbers are
    passed as further arguments.
    """
    found = compile_pattern(pattern).fullmatch(name)
    if not found:
        return None
    *numbers, rest = found.groups(default="")
    return lambda other, *more: other.format(*numbers, *more) + rest


@cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    numbered = re.escape(pattern).replace(re.escape("{}"), r"(\d+)")
    return re.compile(rf"{numbered}(\..+)?")


def packed_projections(config: Config) -> tuple[Rule, ...]:
    """The rules that nearly every family uses: packed_qkv and packed_gate_up."""
    return packed_qkv(config), packed_gate_up()


def packed_qkv(config: Config, query_parts: int = 1) -> Concat:
    """self_attn.qkv_proj is the concatenation of the Hub's q_proj, k_proj and v_proj.

    query_parts: 2 if q_proj has a gate behind each head's query.
    """
    layer = "model.layers.{}.self_attn."
    sizes = (query_parts * config.query_size, config.key_value_size, config.key_value_size)
    return Concat(layer + "qkv_proj", (layer + "q_proj", layer + "k_proj", layer + "v_proj"), sizes)


def packed_heads(layer: int, head_dim: int, heads: Sequence[int]) -> Concat:
    """self_attn.qkv_proj of one layer is the concatenation of the Hub's q_proj, k_proj and v_proj, or of the first of
    them. heads: of each."""
    attention = f"model.layers.{layer}.self_attn."
    names = tuple(attention + name for name in ("q_proj", "k_proj", "v_proj")[: len(heads)])
    return Concat(attention + "qkv_proj", names, tuple(count * head_dim for count in heads))


def packed_delta_projections(config: GatedDeltaConfig) -> tuple[Rule, ...]:
    """The rules of models with the gated delta rule: those of `packed_projections`, with a gate in q_proj, and
    linear_attn.in_proj as the concatenation of the Hub's in_proj_qkv, in_proj_z, in_proj_b and in_proj_a."""
    layer, heads, values = "model.layers.{}.linear_attn.", config.linear_num_value_heads, config.linear_value_size
    parts = tuple(f"{layer}in_proj_{part}" for part in ("qkv", "z", "b", "a"))
    linear = Concat(layer + "in_proj", parts, (2 * config.linear_key_size + values, values, heads, heads))
    return packed_qkv(config, query_parts=2), linear, packed_gate_up()


def packed_short_conv_layers(config: Config) -> tuple[Rule, ...]:
    """The rules of layers under LFM2's names, and of the final norm."""
    layer, mlp = "model.layers.{}.", "model.layers.{}.feed_forward."
    renamed = {
        "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "self_attn.out_proj": "self_attn.o_proj", "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm", "feed_forward.w2": "mlp.down_proj",
    }  # fmt: skip
    return (
        packed_qkv(config),
        Concat(layer + "mlp.gate_up_proj", (mlp + "w1", mlp + "w3")),
        *(Rename(layer + hub, layer + ours) for hub, ours in renamed.items()),
        Rename("model.embedding_norm", "model.norm"),
    )


def packed_latents(config: LatentAttentionConfig) -> Concat:
    """self_attn.qkv_a_proj is the concatenation of the Hub's q_a_proj, or q_proj, and kv_a_proj_with_mqa."""
    layer, q = "model.layers.{}.self_attn.", "q_proj" if config.q_lora_rank is None else "q_a_proj"
    sizes = config.query_input_size, config.kv_lora_rank + config.qk_rope_head_dim
    return Concat(layer + "qkv_a_proj", (layer + q, layer + "kv_a_proj_with_mqa"), sizes)


def packed_gate_up(mlp: str = "mlp") -> Concat:
    """gate_up_proj of a layer's module `mlp` is the concatenation of the Hub's gate_proj and up_proj."""
    layer = f"model.layers.{{}}.{mlp}."
    return Concat(layer + "gate_up_proj", (layer + "gate_proj", layer + "up_proj"))


def stacked_experts(experts: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """mlp.experts.gate_up_proj and mlp.experts.down_proj stack the Hub's tensors of each expert.

    experts: the path of the experts within a Hub layer, such as `mlp.experts`. gate, up, down: the Hub's names of the
    three projections.
    """
    layer, ours = f"model.layers.{{}}.{experts}.{{}}.", "model.layers.{}.mlp.experts."
    return (
        Stack(ours + "gate_up_proj", (f"{layer}{gate}.weight", f"{layer}{up}.weight")),
        Stack(ours + "down_proj", (f"{layer}{down}.weight",)),
    )


def stacked_granite_experts(in_memory: bool = False) -> tuple[Rule, ...]:
    """The routed experts and the router of Granite, whose files stack experts as they are here.

    in_memory: the names that transformers 5 has in memory.
    """
    hub, ours = "model.layers.{}.block_sparse_moe", "model.layers.{}.mlp"
    if in_memory:
        return Rename(f"{hub}.router", f"{ours}.gate"), Rename(f"{hub}.experts", f"{ours}.experts")
    return (
        Rename(f"{hub}.input_linear.weight", f"{ours}.experts.gate_up_proj"),
        Rename(f"{hub}.output_linear.weight", f"{ours}.experts.down_proj"),
        Rename(f"{hub}.router.layer", f"{ours}.gate"),
    )
