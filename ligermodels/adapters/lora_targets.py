"""Inserts LoRA into a built model: finds the modules by their names on the Hub and replaces them.

Beside it modules can be trained as a whole, PEFT's `modules_to_save`: the embedding, the head, the norms. They are
trained in place: the model has no second copy of them. A tied embedding and head stay one parameter.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ligermodels.adapters.writing import Layout, LoRASettings, Packed, hub_module_names, tied_modules
from ligermodels.errors import InputError
from ligermodels.kernels.linear.linear import Columns
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lm_head import LMHead, ScoreHead
from ligermodels.layers.lora import LoRALinear, lora_modules
from ligermodels.layers.moe import Experts, LoRAExperts, MoE, QuantisedExperts
from ligermodels.layers.norm import LayerNorm, RMSNorm
from ligermodels.layers.packed import PackedLinear, PackedPart
from ligermodels.layers.quantised import QuantisedLinear
from ligermodels.vision.multimodal import ImageParts
from ligermodels.weights.adapter_config import (
    ALL_LINEAR,
    adapter_config_from,
    is_saved,
    is_targeted,
    matches_suffix,
    rank_and_alpha,
)
from ligermodels.weights.mapping import Piece, Rule, full_box, pieces_of, plan_pieces
from ligermodels.weights.module import named_weights
from ligermodels.weights.stored import Shape, split_dimensions

BLOCKS = "model.layers"
EXPERTS = "experts"
VISION = "vision"


def add_lora(
    model: CausalLM, config: Any = None, *, rank: int = 16, alpha: float | None = None, dropout: float = 0.0,
    targets: str | Sequence[str] = ALL_LINEAR, modules_to_save: str | Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Adds LoRA to a model, in place, and freezes all other parameters.

    config: a PEFT `LoraConfig`, which stands for rank, alpha, dropout, targets and modules_to_save. Fields that would
    change the result and are not supported are refused by name.
    alpha: the updates are scaled by alpha / rank; None for 2 * rank.
    targets: names of projections on the Hub, such as ("q_proj", "v_proj"). Use a longer path where several projections
    share a name, as in "shared_expert.up_proj". "all-linear" stands for the projections of attention and of all dense
    and shared feed-forward layers; "experts" for both projections of all routed experts, which do not support dropout;
    "vision" for all linears of the vision tower's blocks. A name that the text model has, and "all-linear", select
    nothing of the tower. Routers, embeddings, the head and the projector cannot have LoRA.
    modules_to_save: modules that are trained as a whole, by the end of their name on the Hub: "embed_tokens",
    "lm_head", norms such as "input_layernorm"; "norm" stands for all of them. A tied embedding and head stay one
    parameter, as with PEFT's ensure_weight_tying.
    dtype: of all trained parameters, which may be wider than the model's; None for the model's.
    The model may be on the meta device: after `to_empty`, `CausalLM.initialize` or `initialize_lora` sets the initial
    values. Shard the model after this call, not before. Raises InputError.
    """
    if config is not None:
        if (rank, alpha, dropout, targets, tuple(modules_to_save)) != (16, None, 0.0, ALL_LINEAR, ()):
            raise InputError("add_lora: pass either a config, or rank, alpha, dropout, targets and modules_to_save")
        fields = adapter_config_from(config)
        modules = select_modules(model, fields.get("modules_to_save") or [])
        return insert_lora(model, settings_from(fields, model, dtype), modules, dtype)
    alpha = 2.0 * rank if alpha is None else alpha  # updates are then scaled by 2, whatever their rank
    if not (isinstance(rank, int) and rank > 0 and alpha > 0 and 0 <= dropout < 1):
        raise InputError(
            f"add_lora: rank {rank}, alpha {alpha}, dropout {dropout}: rank must be a whole number above 0, alpha must "
            "be above 0, dropout must be at least 0 and below 1"
        )
    settings = {
        linear: LoRASettings(columns, rank, alpha, dropout, dtype)
        for linear, columns in select_columns(model, targets).items()
    }
    if dropout and settings.keys() & expert_projections(model).keys():
        raise InputError(f"add_lora: dropout is {dropout}; must be 0 if the targets include experts")
    names = [modules_to_save] if isinstance(modules_to_save, str) else modules_to_save
    insert_lora(model, settings, select_modules(model, names), dtype)


def settings_from(config: Mapping[str, Any], model: CausalLM, dtype: torch.dtype | None) -> dict[str, LoRASettings]:
    """The LoRA that a configuration in PEFT's format describes, by linear. Raises InputError."""
    settings, dropout = {}, float(config.get("lora_dropout", 0.0))
    for linear, columns in targeted_columns(config, model).items():
        strengths = {rank_and_alpha(config, name) for name in columns}
        if len(strengths) > 1:
            raise InputError(
                f"rank_pattern and alpha_pattern must give the same values to {', '.join(columns)}: "
                "they are one packed linear here"
            )
        ((rank, alpha),) = strengths
        settings[linear] = LoRASettings(tuple(columns.values()), rank, alpha, dropout, dtype)
    return settings


def targeted_columns(config: Mapping[str, Any], model: CausalLM) -> dict[str, Mapping[str, tuple[int, int]]]:
    """For each module that target_modules and target_parameters select, the selected columns by their names."""
    targets, parameters = config["target_modules"], config.get("target_parameters") or []
    linears, stacked = linear_projections(model, tuple(model.weight_rules())), expert_projections(model)
    names = {name for packed in linears.values() for name in packed.columns}
    if targets == ALL_LINEAR and stacked:
        raise InputError(f"target_modules: {targets!r} includes the routers of this model; name the projections")
    for target in targets if isinstance(targets, list) else ():
        check_target(target, names, model)
    experts = {p.parameter or "" for p in stacked.values()}
    for parameter in parameters:
        if not any(matches_suffix(name, [parameter]) for name in experts):
            raise InputError(f"target_parameters: {parameter!r} is not the projection of routed experts")
    chosen = {name for name in experts if matches_suffix(name, parameters)}
    if chosen and (config.get("lora_dropout") or chosen != experts):
        raise InputError("target_parameters: must be both projections of all routed experts, without lora_dropout")
    columns: dict[str, Mapping[str, tuple[int, int]]] = {
        linear: {name: span for name, span in packed.columns.items() if is_targeted(config, name)}
        for linear, packed in linears.items()
    }
    columns |= {linear: packed.columns for linear, packed in stacked.items() if packed.parameter in chosen}
    if not any(columns.values()):
        raise InputError(f"target_modules: {targets!r} selects no projection that can have LoRA")
    return {linear: spans for linear, spans in columns.items() if spans}


def insert_lora(
    model: CausalLM, settings: Mapping[str, LoRASettings], modules: Sequence[str] = (), dtype: torch.dtype | None = None
) -> None:
    """Adds LoRA to the named projections and freezes all other parameters, except the weights of `modules`.

    dtype: of the weights of `modules`; None for the model's. Raises InputError if the model is sharded or has LoRA
    already.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise InputError("the model is sharded; add LoRA before sharding it")
    if hasattr(model, "peft_config"):
        raise InputError("the model has adapters of PEFT; merge them with merge_and_unload(), or add these with PEFT")
    if any(lora_modules(model)):
        raise InputError("the model has LoRA already; export it merged and load that, or start from the base")
    model.requires_grad_(False)
    stacked = expert_projections(model)
    for projection, lora in settings.items():
        if projection not in stacked:
            base = cast(nn.Linear, model.get_submodule(projection))
            model.set_submodule(projection, LoRALinear(base, **asdict(lora)))
        elif projection.endswith(".down_proj"):  # both projections of the experts have LoRA, or neither
            name = projection.rpartition(".")[0]
            experts = cast(Experts | QuantisedExperts, model.get_submodule(name))
            model.set_submodule(name, LoRAExperts(experts, lora.rank, lora.alpha, dtype=lora.dtype))
    train_whole(model, modules, dtype)


def adapter_layouts(model: CausalLM) -> list[Layout]:
    """What of the model can be in an adapter, under the names of each layout that its checkpoints have: all modules
    that can have LoRA (linears and stacked experts), each with the Hub's projections packed in it, and others."""
    every, experts = (model.weight_rules(), *model.other_weight_rules()), expert_projections(model)
    return [
        Layout(linear_projections(model, rules) | experts, modules_trained_whole(model, rules), rules)
        for rules in every
    ]


def linear_projections(model: CausalLM, rules: tuple[Rule, ...]) -> dict[str, Packed]:
    """The linears of the blocks whose names end in `_proj`; the names of routers do not. Those of a tower are last."""
    found = {}
    for name, module in block_modules(model):
        if name.endswith("_proj") and isinstance(module, nn.Linear | PackedLinear | QuantisedLinear | LoRALinear):
            base = module.base_layer if isinstance(module, LoRALinear) else module
            if isinstance(base, PackedPart) or base.weight is None:
                continue  # a packed linear has the weight, or its parts have it
            pieces = pieces_of(f"{name}.weight", tuple(base.weight.shape), rules)
            columns = {p.tensor.removesuffix(".weight"): (p.index[0].start, p.index[0].stop) for p in pieces}
            found[name] = Packed(base.in_features, columns)
    return found


def block_modules(model: CausalLM) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside the blocks of the text model, then of a vision tower, by name."""
    for prefix in (BLOCKS, *tower_blocks(model)):
        yield from model.get_submodule(prefix).named_modules(prefix=prefix)


def tower_blocks(model: CausalLM) -> tuple[str, ...]:
    """The names of the lists of blocks of a vision tower; none without one."""
    return model.tower_lists if isinstance(model, ImageParts) else ()


def expert_projections(model: CausalLM) -> dict[str, Packed]:
    """The stacked projections of all routed experts, with the names under which PEFT stores their updates.

    PEFT wraps down_proj and then gate_up_proj of the same module. Therefore the update of down_proj is stored at the
    experts, and that of gate_up_proj one level below, in `base_layer`.
    """
    found = {}
    for name, module in model.get_submodule(BLOCKS).named_modules(prefix=BLOCKS):
        if isinstance(module, MoE):
            experts = module.experts.base_layer if isinstance(module.experts, LoRAExperts) else module.experts
            for projection, below in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
                parameter = f"{name}.experts.{projection}"
                groups, outputs, inputs = shape = tuple(getattr(experts, projection).shape)
                piece = stacked_piece(model, parameter, shape)
                hub = piece.tensor.removesuffix(f".{projection}")
                columns = {hub + below: (0, outputs)}
                found[parameter] = Packed(inputs, columns, groups, piece.tensor, *output_order(piece))
    return found


def stacked_piece(model: CausalLM, parameter: str, shape: Shape) -> Piece:
    """A projection of the experts in the checkpoint layout that stacks them; as it is here if no layout does."""
    for rules in (model.weight_rules(), *model.other_weight_rules()):
        pieces = list(islice(pieces_of(parameter, shape, rules), 2))
        if len(pieces) == 1 and pieces[0].tensor.endswith(f".experts.{parameter.rpartition('.')[2]}"):
            return pieces[0]
    return Piece(parameter, parameter, full_box(shape), shape)


def output_order(piece: Piece) -> tuple[Shape, tuple[int, ...]]:
    """How the Hub orders the outputs of stacked experts: the sizes into which they are split there, and the order of
    these here. Both are empty if the order is the same."""
    if not piece.view:
        return (), ()
    experts, outputs, _ = split_dimensions(piece.box_shape, piece.box_view)
    dims = piece.order[len(experts) : len(experts) + len(outputs)]
    stored = sorted(dims)
    return tuple(piece.view[dim] for dim in stored), tuple(stored.index(dim) for dim in dims)


def select_columns(model: CausalLM, targets: str | Sequence[str]) -> dict[str, Columns]:
    """For each module that `targets` select, the selected columns of its output. Raises InputError."""
    stacked, available = expert_projections(model), linear_projections(model, tuple(model.weight_rules()))
    tower = {name for linear, p in available.items() if linear.startswith(tower_blocks(model)) for name in p.columns}
    text = {name for packed in available.values() for name in packed.columns} - tower
    wanted = [targets] if isinstance(targets, str) else list(targets)
    for keyword, part in ((EXPERTS, stacked), (VISION, tower)):
        if keyword in wanted and not part:
            kind = "routed experts" if keyword == EXPERTS else "vision tower"
            raise InputError(f"targets: {keyword!r}: the model has no {kind}; remove it")
    named = [target for target in wanted if target not in (ALL_LINEAR, EXPERTS, VISION)]
    names = set(text) if ALL_LINEAR in wanted else set()
    names |= tower if VISION in wanted else set()
    for target in named:
        of_text = {name for name in text if matches_suffix(name, [target])}
        names |= of_text or {name for name in tower if matches_suffix(name, [target])}
        check_target(target, text if of_text else text | tower, model)
    if EXPERTS in wanted:
        available |= stacked
        names |= {name for packed in stacked.values() for name in packed.columns}
    columns = {
        linear: tuple(span for name, span in packed.columns.items() if name in names)
        for linear, packed in available.items()
    }
    return {linear: spans for linear, spans in columns.items() if spans}


def check_target(target: str, names: set[str], model: CausalLM) -> None:
    """Raises InputError unless a target names projections, and no other modules of the blocks."""
    matching = sorted(name for name in names if matches_suffix(name, [target]))
    if not matching:
        available = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in sorted(names)))
        raise InputError(
            f"targets: {target!r} is not a projection that can have LoRA; choose from: {available}. "
            "Embeddings, lm_head and routers cannot have LoRA; routed experts are selected by the name 'experts'"
        )
    shapes = {name: weight.shape for name, weight in named_weights(model).items() if name.startswith(BLOCKS)}
    others = {piece.tensor.rpartition(".")[0] for piece in plan_pieces(shapes, model.weight_rules())} - names
    unfit = sorted(name for name in others if matches_suffix(name, [target]))
    if unfit:
        raise InputError(
            f"targets: {target!r} also names {unfit[0]}, which cannot have LoRA; "
            f"use a longer path, as in {'.'.join(matching[0].split('.')[-2:])!r}"
        )


class WideEmbedding(nn.Embedding):
    """An embedding with a weight in a wider dtype than the rest of the model. Its output is in the model's dtype."""

    like: Tensor  # empty, in the model's dtype: `to` and `half` change it with the model's weights

    def __init__(self, base: nn.Embedding, weight: nn.Parameter) -> None:
        super().__init__(base.num_embeddings, base.embedding_dim, base.padding_idx, _weight=weight.detach())
        self.weight = weight
        self.register_buffer("like", base.weight.new_empty(0), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Ids [...] -> [..., H]."""
        return super().forward(input).to(self.like.dtype)


def modules_trained_whole(model: CausalLM, rules: Iterable[Rule]) -> dict[str, str]:
    """The modules that can be trained as a whole, each with its name in the layout that has these rules."""
    rules = tuple(rules)
    computed = set(model.model.modules()) | {model.head}  # not a multimodal model's vision tower
    names = [
        name
        for name, module in model.named_modules()
        if module in computed and isinstance(module, nn.Embedding | LMHead | ScoreHead | RMSNorm | LayerNorm)
    ]
    return {name: hub_name(name, model.get_parameter(f"{name}.weight"), rules) for name in names}


def hub_name(module: str, weight: Tensor, rules: tuple[Rule, ...]) -> str:
    """The Hub's name of a module whose weight is one tensor there."""
    (piece,) = pieces_of(f"{module}.weight", tuple(weight.shape), rules)
    return piece.tensor.removesuffix(".weight")


def select_modules(model: CausalLM, names: Collection[str]) -> tuple[str, ...]:
    """The modules whose name on the Hub ends in one of `names`. Raises InputError for a name that fits none, or others.

    Of a tied embedding and head, one stands for both.
    """
    available = modules_trained_whole(model, model.weight_rules())
    others = hub_module_names(model, model.weight_rules()) - set(available.values())
    for name in names:
        if not any(is_saved(module, [name]) for module in available.values()) or any(
            is_saved(module, [name]) for module in others
        ):
            choices = dict.fromkeys(module.rpartition(".")[2] for module in available.values())
            raise InputError(
                f"modules_to_save: {name!r} is neither the embedding nor the head nor a norm; choose from: "
                f"{', '.join(choices)}. Projections are trained by LoRA, as its targets"
            )
    selected = {module for module, hub in available.items() if is_saved(hub, names)}
    if not selected.isdisjoint(tied := tied_modules(model)):
        selected |= tied
    return tuple(module for module in available if module in selected)


def train_whole(model: CausalLM, modules: Sequence[str], dtype: torch.dtype | None) -> None:
    """Makes the weights of these modules trainable, in place. dtype: of their weights; None for the model's."""
    weights: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays one
    for name in modules:
        module = model.get_submodule(name)
        weight = model.get_parameter(f"{name}.weight")
        wide = weights.setdefault(weight, nn.Parameter(weight.detach().to(dtype or weight.dtype)))
        if isinstance(module, nn.Embedding) and wide.dtype != weight.dtype:
            model.set_submodule(name, WideEmbedding(module, wide))
        else:
            module.weight = wide
    model.modules_to_save = tuple(modules)


def untie_head(model: CausalLM) -> None:
    """Gives the head a weight of its own with the values of the embedding's, and says so in the configuration."""
    model.config = model.config.untied()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
