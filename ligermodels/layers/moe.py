"""Mixture of experts: router, routed experts with packed projections (with or without LoRA, in 16 or in few bits),
load-balancing loss.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ligermodels.configs.base import Config
from ligermodels.configs.features import SparseStepConfig
from ligermodels.kernels.collectives import sum_gradient
from ligermodels.kernels.linear.fp32_linear import fp32_linear
from ligermodels.kernels.moe.experts import experts, route, route_by_sigmoid
from ligermodels.kernels.moe.permute import experts_on_ranks
from ligermodels.kernels.quant.quantised_weight import QuantisedWeight, WeightLayout
from ligermodels.layers.fused import add_then_norm, routed_experts
from ligermodels.layers.lora import GroupedUpdate, reset_lora
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.norm import PreNorm
from ligermodels.layers.packed import is_intercepted
from ligermodels.layers.quantised import FrozenWeights
from ligermodels.weights.module import Fp32Module


class Experts(nn.Module):
    """E stacked gated feed-forward layers: gate_up_proj [E, 2 I, H], each gate's rows first; down_proj [E, H, I].

    bias: whether they have gate_up_proj_bias [E, 2 I] and down_proj_bias [E, H].
    mesh: of the ranks that have parts of the experts (expert parallelism), after `distribute`; None where each has all.
    """

    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, config: Config, *, intermediate_size: int, num_experts: int, bias: bool = False) -> None:
        super().__init__()
        self.activation = config.activation
        self.mesh: DeviceMesh | None = None
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, config.hidden_size, intermediate_size))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, 0.0, config.initializer_range)
        for name, weight in (("gate_up_proj_bias", self.gate_up_proj), ("down_proj_bias", self.down_proj)):
            self.register_parameter(name, nn.Parameter(torch.zeros(weight.shape[:2])) if bias else None)

    @property
    def own(self) -> slice:
        """Which experts this rank has."""
        if self.mesh is None:
            return slice(None)
        count, rank = self.down_proj.shape[0] // self.mesh.size(1), self.mesh.get_local_rank(1)
        return slice(rank * count, (rank + 1) * count)

    def forward(self, x: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
        """x [tokens, H], expert_index and expert_weight [tokens, k] -> weighted sum of the k experts [tokens, H]."""
        return self.run(self.compute, x, expert_index, expert_weight)

    def run(self, compute: Callable[..., Tensor], x: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
        """`forward` by `compute`, which takes the same and weights: those of all experts, or this rank's on the tokens
        that are sent to them."""
        weights = self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias
        if self.mesh is None:
            return compute(x, expert_index, expert_weight, weights)
        own = [None if weight is None else own_part(weight, self.mesh, x.dtype) for weight in weights]
        count, group = self.down_proj.shape[0] // self.mesh.size(1), self.mesh.get_group(1)
        return experts_on_ranks(partial(compute, weights=own), x, expert_index, expert_weight, count, group)

    def compute(self, x: Tensor, expert_index: Tensor, expert_weight: Tensor, weights: Sequence[Any]) -> Tensor:
        """`forward` with these weights: gate_up_proj, down_proj, and their biases."""
        gate_up, down, *biases = weights
        return routed_experts(x, expert_index, expert_weight, gate_up, down, self.activation, *biases)

    def distribute(self, mesh: DeviceMesh) -> None:
        """Gives each rank of the mesh [replicas, ranks] its part of the experts, in place; their number is a multiple.

        Parameters become DTensors, with the whole shape. Tokens then go to experts, where else FSDP brings weights.
        """
        self.mesh = mesh
        for name, parameter in list(self.named_parameters()):
            parts = distribute_tensor(parameter.detach(), mesh, [Replicate(), Shard(0)], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(parts, parameter.requires_grad))

    def extra_repr(self) -> str:
        num_experts, hidden_size, intermediate_size = self.down_proj.shape
        return f"{num_experts} of {hidden_size} × {intermediate_size}"


def own_part(weight: Any, mesh: DeviceMesh, dtype: torch.dtype) -> Tensor:
    """This rank's rows of a distributed parameter, cast to `dtype`; all replicas get the sum of their gradients."""
    part = weight.to_local()
    return (part if mesh.size(0) == 1 else sum_gradient(part, mesh.get_group(0))).to(dtype)


class QuantisedExperts(FrozenWeights):
    """Experts with both projections in few bits, and with frozen biases if `experts` has them.

    layouts: of gate_up_proj and down_proj, by these names; their bytes are not set.
    """

    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, experts: Experts, layouts: Mapping[str, WeightLayout]) -> None:
        super().__init__(layouts, experts.down_proj.device)
        self.activation = experts.activation
        self.register_parameter("gate_up_proj_bias", experts.gate_up_proj_bias)
        self.register_parameter("down_proj_bias", experts.down_proj_bias)

    @property
    def gate_up_proj(self) -> QuantisedWeight:
        return self.quantised("gate_up_proj")

    @property
    def down_proj(self) -> QuantisedWeight:
        return self.quantised("down_proj")

    def forward(self, x: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
        """Does what Experts does: x [tokens, H], expert_index and expert_weight [tokens, k] -> [tokens, H]."""
        return routed_experts(
            x, expert_index, expert_weight, self.gate_up_proj, self.down_proj, self.activation,
            self.gate_up_proj_bias, self.down_proj_bias,
        )  # fmt: skip

    def extra_repr(self) -> str:
        num_experts, hidden_size, intermediate_size = self.down_proj.shape
        layout = type(self.layouts["down_proj"]).__name__
        return f"{num_experts} of {hidden_size} × {intermediate_size}, {layout}"


class LoRAExperts(nn.Module):
    """Experts with LoRA on both projections; the caller freezes base_layer.

    Where the base is distributed, each rank has the updates of all experts when it computes, and uses those of its own:
    FSDP2 shards them as all other parameters.
    dtype: of the LoRA parameters; None for the base's.
    """

    def __init__(
        self, base_layer: Experts | QuantisedExperts, rank: int, alpha: float, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.gate_up_proj = GroupedUpdate(base_layer.gate_up_proj, rank, alpha, dtype)
        self.down_proj = GroupedUpdate(base_layer.down_proj, rank, alpha, dtype)
        reset_lora(self.gate_up_proj)
        reset_lora(self.down_proj)
        self.train(base_layer.training)

    def forward(self, x: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
        """Does what Experts does: x [tokens, H], expert_index and expert_weight [tokens, k] -> [tokens, H].

        Raises RuntimeError if a part has hooks, which one node for all experts cannot call.
        """
        base = self.base_layer
        if any(map(is_intercepted, (base, self.gate_up_proj, self.down_proj))):
            raise RuntimeError("LoRA of experts: hooks on its parts are not supported; hook the LoRAExperts module")
        if isinstance(base, Experts):
            return base.run(partial(self.compute, own=base.own), x, expert_index, expert_weight)
        weights = base.gate_up_proj, base.down_proj, base.gate_up_proj_bias, base.down_proj_bias
        return self.compute(x, expert_index, expert_weight, weights, slice(None))

    def compute(
        self, x: Tensor, expert_index: Tensor, expert_weight: Tensor, weights: Sequence[Any], own: slice
    ) -> Tensor:
        """`forward` with these weights of the base, and with the updates of the experts `own`, to which they belong."""
        gate_up, down, *biases = weights
        parts = self.gate_up_proj, self.down_proj
        gate_up_update, down_update = (part.low_rank(x.dtype, own) if part.enabled else None for part in parts)
        return experts(
            x, expert_index, expert_weight, gate_up, down, self.base_layer.activation, gate_up_update, down_update,
            *biases,
        )  # fmt: skip


class Router(nn.Module):
    """Scores of E experts, weight [E, H] and, with `bias`, bias [E]. It is no `nn.Linear`, which tools would adapt or
    quantise with all others."""

    bias: nn.Parameter | None
    norms_input = False  # whether it reads the residual stream, not what the experts read

    def __init__(self, config: Config, num_experts: int, *, bias: bool = False) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))
        nn.init.normal_(self.weight, 0.0, config.initializer_range)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, H] -> logits [tokens, E]."""
        return F.linear(x, self.weight, self.bias)

    def choose(self, logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        """Logits [tokens, E] -> routing weights [tokens, k] fp32 and expert indices [tokens, k]."""
        return route(logits, k, normalize)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, num_experts={self.num_experts}"


class SigmoidRouter(Fp32Module, Router):
    """Router whose scores are sigmoids in fp32, and whose choice among groups of experts a bias can correct.

    e_score_correction_bias [E]: fp32 in a model of any dtype, because a rounded one would choose other experts; a
    buffer, because no gradient trains it. None unless `corrected`.
    groups, top_groups, scale, eps: as those of `route_by_sigmoid`.
    """

    fp32_tensors = ("e_score_correction_bias",)
    e_score_correction_bias: Tensor | None

    def __init__(
        self, config: Config, num_experts: int, *, groups: int, top_groups: int, scale: float, eps: float = 1e-20,
        corrected: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(config, num_experts)
        self.groups, self.top_groups, self.scale, self.eps = groups, top_groups, scale, eps
        self.stored_buffers = {"e_score_correction_bias": 0.0} if corrected else {}
        bias = torch.zeros(num_experts, dtype=torch.float32) if corrected else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, H] -> logits [tokens, E] fp32, of an fp64 model fp64."""
        return fp32_linear(x, self.weight)

    def choose(self, logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        return route_by_sigmoid(
            logits, self.e_score_correction_bias, k, groups=self.groups, top_groups=self.top_groups,
            normalize=normalize, scale=self.scale, eps=self.eps,
        )  # fmt: skip


class MoE(nn.Module):
    """Top-k routed experts and, if shared_intermediate_size is given, a shared expert.

    normalize: whether the routing weights of a token's k experts are rescaled to sum to 1.
    shared_gate: whether a sigmoid gate multiplies the shared expert's output.
    router: None for softmax scores. bias: whether the routed experts have biases.
    """

    def __init__(
        self, config: Config, *, intermediate_size: int, num_experts: int, experts_per_token: int, normalize: bool,
        shared_intermediate_size: int | None = None, shared_gate: bool = True, router: Router | None = None,
        bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.experts_per_token = experts_per_token
        self.normalize = normalize
        self.gate = router or Router(config, num_experts)
        self.experts = Experts(config, intermediate_size=intermediate_size, num_experts=num_experts, bias=bias)
        self.shared_expert = self.shared_expert_gate = None
        if shared_intermediate_size is not None:
            self.shared_expert = GatedMLP(config, intermediate_size=shared_intermediate_size)
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if shared_gate else None

    def forward(self, norm: PreNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x, residual [B, T, H] -> (output [B, T, H], residual stream x + residual, router logits [B T, E])."""
        normed, residual = add_then_norm(norm.module, x, residual)  # router and experts both read it
        tokens = normed.flatten(0, -2)
        router = getattr(self.gate, "base_layer", self.gate)  # PEFT wraps the router
        router_logits = self.gate(residual.flatten(0, -2) if router.norms_input else tokens)
        expert_weight, expert_index = router.choose(router_logits, self.experts_per_token, self.normalize)
        out = self.experts(tokens, expert_index, expert_weight)
        out = out.view(normed.shape)
        if self.shared_expert is not None:
            shared, _, _ = self.shared_expert(None, normed, None)
            gate = self.shared_expert_gate
            out = out + (shared if gate is None else torch.sigmoid(gate(normed)) * shared)
        return out, residual, router_logits


def load_balancing_loss(
    router_logits: list[Tensor] | tuple[Tensor, ...],
    k: int,
    mean: Callable[[Tensor], Tensor] = lambda share: share,
    mask: Tensor | None = None,
) -> Tensor:
    """E Σ_e f_e P_e, a scalar in fp32; it is k if all experts are used equally.

    router_logits: [tokens, E] of each layer; the sums run over the tokens of all layers together. f_e: how often expert
    e is in the top k, per token. P_e: its mean probability. mean: of both, [E], over the ranks that share the tokens.
    mask: bool [tokens], those that count; None for all.
    Source: Fedus et al. 2021, https://arxiv.org/abs/2101.03961, summed over the k choices as in transformers.
    """
    probability = torch.softmax(torch.cat(router_logits), -1, dtype=torch.float32)  # [layers tokens, E]
    num_experts = probability.shape[-1]
    chosen = torch.zeros_like(probability).scatter_(-1, probability.topk(k).indices, 1.0)
    if mask is None:
        return num_experts * (mean(chosen.mean(0)) * mean(probability.mean(0))).sum()
    counted = mask.repeat(len(router_logits))[:, None].to(probability.dtype)
    tokens = mean(counted.mean(0)).clamp(min=torch.finfo(counted.dtype).tiny)  # a rank may have padding alone
    chosen, probability = (mean((counted * values).mean(0)) / tokens for values in (chosen, probability))
    return num_experts * (chosen * probability).sum()


def experts_or_mlp(config: SparseStepConfig, index: int, **options: Any) -> MoE | GatedMLP:
    """The feed-forward layer of block `index`. options: of `MoE`, beside its sizes."""
    return MoE(config, **options, **config.expert_sizes) if config.is_sparse(index) else GatedMLP(config)
