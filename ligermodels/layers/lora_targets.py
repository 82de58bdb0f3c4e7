"""Which parts of a model get LoRA, by their names on the Hub, and how they get it: the model is walked as it was built.

Must not know any architecture, nor how adapters are stored.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ligermodels.errors import InputError
from ligermodels.kernels.linear import Columns
from ligermodels.layers.lora import LoRAExperts, LoRALinear, updates
from ligermodels.layers.moe import Experts, MoE
from ligermodels.weights.adapter_config import matches_suffix
from ligermodels.weights.adapters import LoRASettings, Packed
from ligermodels.weights.mapping import Rule, pieces_of, plan_pieces

if TYPE_CHECKING:
    from ligermodels.layers.decoder import CausalLM

BLOCKS = "model.layers"
ALL_LINEAR, EXPERTS = "all-linear", "experts"


def add_lora(
    model: "CausalLM",
    *,
    rank: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.0,
    targets: str | Sequence[str] = ALL_LINEAR,
    dtype: torch.dtype | None = None,
) -> None:
    """Puts LoRA into a model, in place, and freezes everything else.

    targets: projections by what the Hub calls them, such as ("q_proj", "v_proj"), where several share a name with more
    of the path, as in "shared_expert.up_proj"; "all-linear" for those of attention and of all dense and shared
    feed-forward layers; "experts" for both projections of all routed experts, which cannot have dropout. Routers,
    embeddings and the head cannot have LoRA.
    dtype: of the updates, which may be wider than the model; None for the model's own.
    The model may be on the meta device: `CausalLM.initialize` or `initialize_lora` then gives the updates their first
    values, after `to_empty`. It is sharded afterwards. Raises InputError.
    """
    if not (isinstance(rank, int) and rank > 0 and alpha > 0 and 0 <= dropout < 1):
        raise InputError(
            f"add_lora: rank {rank}, alpha {alpha}, dropout {dropout}: rank must be a whole number above 0, alpha be "
            "above 0, dropout lie between 0 and 1"
        )
    settings = {
        linear: LoRASettings(columns, rank, alpha, dropout, dtype) for linear, columns in chosen(model, targets).items()
    }
    if dropout and settings.keys() & expert_projections(model).keys():
        raise InputError(f"add_lora: dropout is {dropout}; must be 0 where the experts are among the targets")
    insert(model, settings)


def insert(model: "CausalLM", settings: Mapping[str, LoRASettings]) -> None:
    """Puts LoRA on the linears named, freezing everything else. Raises InputError where that comes too late."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise InputError("the model is sharded; give it LoRA before that")
    if any(updates(model)):
        raise InputError("the model has LoRA already; export it merged and load that, or start from the base")
    model.requires_grad_(False)
    stacked = expert_projections(model)
    for linear, of_linear in settings.items():
        if linear not in stacked:
            base = cast(nn.Linear, model.get_submodule(linear))
            model.set_submodule(linear, LoRALinear(base, **asdict(of_linear)))
        elif linear.endswith(".down_proj"):  # both projections have one, or neither
            name = linear.rpartition(".")[0]
            experts = cast(Experts, model.get_submodule(name))
            model.set_submodule(name, LoRAExperts(experts, of_linear.rank, of_linear.alpha, dtype=of_linear.dtype))


def projections(model: "CausalLM", rules: Iterable[Rule] | None = None) -> dict[str, Packed]:
    """What can have LoRA, linears and stacked experts, with the Hub's projections that each consists of.

    rules: those of the model's layouts whose names are wanted, by default the Hub's own.
    """
    rules = tuple(model.weight_rules() if rules is None else rules)
    return linear_projections(model, rules) | expert_projections(model)


def linear_projections(model: "CausalLM", rules: tuple[Rule, ...]) -> dict[str, Packed]:
    """The linears of the blocks whose names end in `_proj`; routers' do not."""
    found = {}
    for name, module in model.get_submodule(BLOCKS).named_modules(prefix=BLOCKS):
        if name.endswith("_proj") and isinstance(module, nn.Linear | LoRALinear):
            base = module.base_layer if isinstance(module, LoRALinear) else module
            pieces = pieces_of(f"{name}.weight", tuple(base.weight.shape), rules)
            columns = {p.tensor.removesuffix(".weight"): (p.index[0].start, p.index[0].stop) for p in pieces}
            found[name] = Packed(base.in_features, columns)
    return found


def expert_projections(model: "CausalLM") -> dict[str, Packed]:
    """The stacked projections of all routed experts, under the names by which PEFT stores their updates.

    Those of down_proj lie beside the experts, those of gate_up_proj a level below: PEFT wraps the one, then the other.
    """
    found = {}
    for name, module in model.get_submodule(BLOCKS).named_modules(prefix=BLOCKS):
        if isinstance(module, MoE):
            experts = module.experts.base_layer if isinstance(module.experts, LoRAExperts) else module.experts
            hub = stacked_name(model, f"{name}.experts")
            for projection, below in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
                groups, outputs, inputs = getattr(experts, projection).shape
                columns = {hub + below: (0, outputs)}
                found[f"{name}.experts.{projection}"] = Packed(inputs, columns, groups, f"{hub}.{projection}")
    return found


def stacked_name(model: "CausalLM", experts: str) -> str:
    """What the layout of the model that stacks the experts calls them."""
    for rules in (model.weight_rules(), *model.other_weight_rules()):
        parameter = f"{experts}.down_proj"
        pieces = list(pieces_of(parameter, (2, 1, 1), rules))
        if len(pieces) == 1 and pieces[0].tensor.endswith(".experts.down_proj"):
            return pieces[0].tensor.removesuffix(".down_proj")
    return experts


def chosen(model: "CausalLM", targets: str | Sequence[str]) -> dict[str, Columns]:
    """The linears that `targets` name, and the columns of their outputs which those have. Raises InputError."""
    stacked, available = expert_projections(model), linear_projections(model, tuple(model.weight_rules()))
    names = {name for packed in available.values() for name in packed.columns}
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if EXPERTS in wanted and not stacked:
        raise InputError(f"targets: {EXPERTS!r}: the model has no routed experts")
    named = [target for target in wanted if target not in (ALL_LINEAR, EXPERTS)]
    for target in named:
        refuse_unfit(target, names, model)
    if ALL_LINEAR not in wanted:
        names = {name for name in names if matches_suffix(name, named)}
    if EXPERTS in wanted:
        available |= stacked
        names |= {name for packed in stacked.values() for name in packed.columns}
    columns = {
        linear: tuple(span for name, span in packed.columns.items() if name in names)
        for linear, packed in available.items()
    }
    return {linear: spans for linear, spans in columns.items() if spans}


def refuse_unfit(target: str, names: set[str], model: "CausalLM") -> None:
    """A target must name projections, and nothing in the blocks beside them."""
    fitting = sorted(name for name in names if matches_suffix(name, [target]))
    if not fitting:
        there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in sorted(names)))
        raise InputError(
            f"targets: {target!r} is no projection that can have LoRA; there are: {there}; "
            "embeddings, lm_head and routers cannot have it, routed experts by the name 'experts'"
        )
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name.startswith(BLOCKS)}
    others = {piece.tensor.rpartition(".")[0] for piece in plan_pieces(shapes, model.weight_rules())} - names
    unfit = sorted(name for name in others if matches_suffix(name, [target]))
    if unfit:
        raise InputError(
            f"targets: {target!r} names {unfit[0]} too, which cannot have LoRA; "
            f"say more of the path, as in {'.'.join(fitting[0].split('.')[-2:])!r}"
        )
