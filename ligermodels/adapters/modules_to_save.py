"""Modules that are trained as a whole beside LoRA, PEFT's `modules_to_save`: the embedding, the head, the norms.

They are trained in place: the model has no second copy of them. A tied embedding and head stay one parameter. Must not
know how adapters are stored.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from ligermodels.adapters.writing import hub_module_names, tied_modules
from ligermodels.errors import InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lm_head import LMHead, ScoreHead
from ligermodels.layers.norm import LayerNorm, RMSNorm
from ligermodels.weights.adapter_config import is_saved
from ligermodels.weights.mapping import Rule, pieces_of


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
