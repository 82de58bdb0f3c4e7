"""LoRA: a linear whose weight stays as it is and learns a low-rank update beside it, and how a model gets such linears.

y = base(x) + alpha / rank * (x Aᵀ) Bᵀ, Hu et al. 2021, https://arxiv.org/abs/2106.09685. The model is walked as it was
built, its projections go by their names on the Hub. Must not know any architecture, nor how adapters are stored.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ligermodels.errors import InputError
from ligermodels.kernels.linear import Columns, LowRank, low_rank_update
from ligermodels.weights.adapter_config import is_named
from ligermodels.weights.adapters import Packed, Settings
from ligermodels.weights.mapping import Rule, pieces_of, plan
from ligermodels.weights.sharding import keep_part

if TYPE_CHECKING:
    from ligermodels.layers.decoder import CausalLM

BLOCKS = "model.layers"
ALL_LINEAR = "all-linear"


class LoRALinear(nn.Module):
    """A linear with an update of its own for each of the projections that are packed in it.

    base_layer: an ordinary Linear, or what has taken its place; the caller freezes its parameters.
    columns: of each projection with an update, where it starts and stops in the output, ascending; all of the output
    where it is not packed. dropout: the probability with which an element of x is dropped from the update's input.
    dtype: of the update's parameters; None for the base's.
    Parameters, projection by projection: lora_A [P rank, in], lora_B [Σ (stop - start), rank].
    """

    def __init__(
        self,
        base_layer: nn.Linear,
        rank: int,
        alpha: float,
        *,
        columns: Columns | None = None,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.columns = ((0, base_layer.out_features),) if columns is None else columns
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank
        self.dropout = dropout
        updated = sum(stop - start for start, stop in self.columns)
        weight = base_layer.weight
        self.lora_A = nn.Parameter(weight.new_empty(len(self.columns) * rank, base_layer.in_features, dtype=dtype))
        self.lora_B = nn.Parameter(weight.new_empty(updated, rank, dtype=dtype))
        self.reset_parameters()
        self.train(base_layer.training)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """An update of zero that learns: A as a Linear's weight begins, B zero.

        Where the parameters are sharded, every rank draws all of A and keeps its part: give equal generators.
        """
        a = torch.empty(self.lora_A.shape, dtype=self.lora_A.dtype, device=self.lora_A.device)
        keep_part(self.lora_A, nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator))
        nn.init.zeros_(self.lora_B)

    def low_rank(self, dtype: torch.dtype) -> LowRank:
        """The update as kernels take it, computed in `dtype`: A and B may be kept in a wider one."""
        return LowRank(self.lora_A.to(dtype), self.lora_B.to(dtype), self.columns, self.scale)

    @property
    def drops(self) -> bool:
        """Whether dropout is active."""
        return self.training and self.dropout > 0.0

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        kept = F.dropout(x, self.dropout, self.training)
        # First the update: recomputation stops at the last tensor kept, which the base keeps before its product.
        update = low_rank_update(kept, self.low_rank(x.dtype), self.base_layer.out_features)
        return self.base_layer(x) + update

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}, columns={self.columns}, dropout={self.dropout}"


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
    feed-forward layers. Routed experts, routers, embeddings and the head cannot have LoRA.
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
        linear: Settings(columns, rank, alpha, dropout, dtype) for linear, columns in chosen(model, targets).items()
    }
    insert(model, settings)


def insert(model: "CausalLM", settings: Mapping[str, Settings]) -> None:
    """Puts LoRA on the linears named, freezing everything else. Raises InputError where that comes too late."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise InputError("the model is sharded; give it LoRA before that")
    if any(updates(model)):
        raise InputError("the model has LoRA already; export it merged and load that, or start from the base")
    model.requires_grad_(False)
    for linear, of_linear in settings.items():
        base = cast(nn.Linear, model.get_submodule(linear))
        model.set_submodule(linear, LoRALinear(base, **asdict(of_linear)))


def updates(model: nn.Module) -> Iterator[LoRALinear]:
    return (module for module in model.modules() if isinstance(module, LoRALinear))


def initialize_lora(model: nn.Module, generator: torch.Generator) -> None:
    """Gives all updates of a model their first values, the same on any number of ranks, which have equal generators."""
    for module in updates(model):
        module.reset_parameters(generator)


def projections(model: "CausalLM", rules: Iterable[Rule] | None = None) -> dict[str, Packed]:
    """The linears that can have LoRA, with the Hub's projections that each consists of.

    They are those of the blocks whose names end in `_proj`; routers' do not. rules: those of the model's layouts whose
    names are wanted, by default the Hub's own.
    """
    rules = tuple(model.weight_rules() if rules is None else rules)
    found = {}
    for name, module in model.get_submodule(BLOCKS).named_modules(prefix=BLOCKS):
        if name.endswith("_proj") and isinstance(module, nn.Linear | LoRALinear):
            base = module.base_layer if isinstance(module, LoRALinear) else module
            pieces = pieces_of(f"{name}.weight", tuple(base.weight.shape), rules)
            columns = {p.tensor.removesuffix(".weight"): (p.index[0].start, p.index[0].stop) for p in pieces}
            found[name] = Packed(base.in_features, columns)
    return found


def chosen(model: "CausalLM", targets: str | Sequence[str]) -> dict[str, Columns]:
    """The linears that `targets` name, and the columns of their outputs which those have. Raises InputError."""
    available = projections(model)
    names = {name for packed in available.values() for name in packed.columns}
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if wanted != [ALL_LINEAR]:
        for target in wanted:
            refuse_unfit(target, names, model)
        names = {name for name in names if is_named(name, wanted)}
    columns = {
        linear: tuple(span for name, span in packed.columns.items() if name in names)
        for linear, packed in available.items()
    }
    return {linear: spans for linear, spans in columns.items() if spans}


def refuse_unfit(target: str, names: set[str], model: "CausalLM") -> None:
    """A target must name projections, and nothing in the blocks beside them."""
    fitting = sorted(name for name in names if is_named(name, [target]))
    if not fitting:
        there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in sorted(names)))
        raise InputError(
            f"targets: {target!r} is no projection that can have LoRA; there are: {there}; "
            "embeddings, lm_head, routers and routed experts cannot have it"
        )
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name.startswith(BLOCKS)}
    others = {piece.tensor.rpartition(".")[0] for piece in plan(shapes, model.weight_rules())} - names
    unfit = sorted(name for name in others if is_named(name, [target]))
    if unfit:
        raise InputError(
            f"targets: {target!r} names {unfit[0]} too, which cannot have LoRA; "
            f"say more of the path, as in {'.'.join(fitting[0].split('.')[-2:])!r}"
        )
