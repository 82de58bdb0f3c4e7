"""The mixture of experts: a router, gated experts on packed projections, and what keeps the router balanced."""

import torch
from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.kernels.experts import experts, route
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.norm import RMSNorm


class Experts(nn.Module):
    """num_experts gated layers: gate_up_proj [E, 2 I, H] with each gate's rows first, down_proj [E, H, I]."""

    def __init__(self, config: Config, *, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, config.hidden_size, intermediate_size))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, 0.0, config.initializer_range)

    def forward(self, x: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
        """x [tokens, H], expert_index and expert_weight [tokens, k] -> the weighted sum of k experts [tokens, H]."""
        return experts(x, expert_index, expert_weight, self.gate_up_proj, self.down_proj, self.activation)

    def extra_repr(self) -> str:
        num_experts, hidden_size, intermediate_size = self.down_proj.shape
        return f"{num_experts} of {hidden_size} × {intermediate_size}"


class MoE(nn.Module):
    """The experts_per_token likeliest experts of each token, and one that every token shares where its size is given.

    The shared expert's output is scaled by a gate of its own. normalize: whether a token's weights sum to one.
    """

    def __init__(
        self,
        config: Config,
        *,
        intermediate_size: int,
        num_experts: int,
        experts_per_token: int,
        normalize: bool,
        shared_intermediate_size: int | None = None,
    ) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.normalize = normalize
        self.gate = nn.Linear(config.hidden_size, num_experts, bias=False)
        self.experts = Experts(config, intermediate_size=intermediate_size, num_experts=num_experts)
        self.shared_expert = self.shared_expert_gate = None
        if shared_intermediate_size is not None:
            self.shared_expert = GatedMLP(config, intermediate_size=shared_intermediate_size)
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, norm: RMSNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x, residual [B, T, H] -> (output [B, T, H], the residual stream x + residual, router logits [B T, E])."""
        normed, residual = norm(x, residual)  # not fused with a linear: there are several readers
        tokens = normed.flatten(0, -2)
        router_logits = self.gate(tokens)
        expert_weight, expert_index = route(router_logits, self.experts_per_token, self.normalize)
        out = self.experts(tokens, expert_index, expert_weight)
        out = torch.ops.aten._unsafe_view(out, normed.shape)  # FSDP2 warns of every view that leaves a block
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            shared, _, _ = self.shared_expert(None, normed, None)
            out = out + torch.sigmoid(self.shared_expert_gate(normed)) * shared
        return out, residual, router_logits


def load_balancing_loss(router_logits: list[Tensor] | tuple[Tensor, ...], k: int) -> Tensor:
    """E Σ_e f_e P_e, k where the experts are used evenly: a scalar, fp32.

    router_logits: [tokens, E] of each layer, taken together. f_e: expert e's top-k choices a token, P_e: its mean
    probability. Fedus et al. 2021, https://arxiv.org/abs/2101.03961, with the Hub's sum over the k choices.
    """
    probability = torch.softmax(torch.cat(router_logits), -1, dtype=torch.float32)  # [layers tokens, E]
    num_experts = probability.shape[-1]
    chosen = torch.zeros_like(probability).scatter_(-1, probability.topk(k).indices, 1.0)
    return num_experts * (chosen.mean(0) * probability.mean(0)).sum()
