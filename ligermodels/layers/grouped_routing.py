"""Models with routed experts, whose projections the Hub stores expert by expert; no family is known here.

Those that choose experts within groups by sigmoid scores have GLM-4.5's names, which DeepSeek-V3 has too. Their first
layers are dense. The layers that predict further tokens, behind the last layer, are kept, not computed. Each family
subclasses `GroupedRoutingLM` and says what its attention is.
"""

from typing import ClassVar

from ligermodels.configs.features import GroupedRoutingConfig
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.moe import MoE, SigmoidRouter
from ligermodels.weights.mapping import (
    KeptLayers,
    Rename,
    Rule,
    packed_gate_up,
    packed_projections,
    packed_qkv,
    stacked_experts,
)


class ExpertsLM(CausalLM):
    """Experts one by one in files, in a layout whose other rules are `shared_rules`."""

    expert_names: ClassVar = ("mlp.experts", "gate_proj", "up_proj", "down_proj")

    def shared_rules(self) -> tuple[Rule, ...]:
        """The rules of everything but the routed experts."""
        return packed_projections(self.config)

    def weight_rules(self) -> tuple[Rule, ...]:
        return (*self.shared_rules(), *stacked_experts(*self.expert_names))

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The names that transformers 5 has in memory, where experts are stacked as they are here."""
        return (self.shared_rules(),)


class GroupedRoutingLM(ExpertsLM):
    config: GroupedRoutingConfig

    def feed_forward(self, config: GroupedRoutingConfig, index: int) -> GatedMLP | MoE:
        if not config.is_sparse(index):
            return GatedMLP(config)
        router = SigmoidRouter(
            config, config.n_routed_experts, groups=config.n_group, top_groups=config.topk_group,
            scale=config.routed_scaling_factor,
        )  # fmt: skip
        return MoE(
            config, intermediate_size=config.moe_intermediate_size, num_experts=config.n_routed_experts,
            experts_per_token=config.num_experts_per_tok, normalize=config.norm_topk_prob, router=router,
            shared_intermediate_size=config.moe_intermediate_size * config.n_shared_experts or None, shared_gate=False,
        )  # fmt: skip

    def attention_rule(self) -> Rule:
        return packed_qkv(self.config)

    def shared_rules(self) -> tuple[Rule, ...]:
        hub, ours = "model.layers.{}.mlp.shared_experts", "model.layers.{}.mlp.shared_expert"
        shared = Rename(hub, ours, (packed_gate_up("mlp.shared_expert"),))
        return self.attention_rule(), packed_gate_up(), shared

    def kept_layers(self) -> KeptLayers:
        """Names the layers that predict further tokens."""
        field = "num_nextn_predict_layers"
        return KeptLayers("model.layers.", self.config.num_hidden_layers, field, self.config.num_nextn_predict_layers)

    def kept_tensors(self) -> tuple[str, ...]:
        return self.kept_layers().names
