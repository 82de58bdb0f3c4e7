"""LFM2-8B-A1B: LFM2 with routed experts, chosen by sigmoid scores, behind dense layers."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.fields import check_choice
from ligermodels.configs.hybrid import ShortConvConfig, conv_layers
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.grouped_routing import ExpertsLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.moe import MoE, SigmoidRouter
from ligermodels.layers.states import conv_or_attention
from ligermodels.weights.mapping import Rename, Rule, packed_short_conv_layers


@dataclass(kw_only=True)
class Lfm2MoeConfig(ShortConvConfig):
    hidden_size: int = 2048
    intermediate_size: int = 7168
    moe_intermediate_size: int = 1792
    num_dense_layers: int = 2
    num_experts: int = 32
    num_experts_per_tok: int = 4
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    def validate(self) -> None:
        super().validate()
        check_choice("num_experts_per_tok", self.num_experts_per_tok, range(1, self.num_experts + 1))


BASE = {"model_type": "lfm2_moe"}
TINY = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "num_dense_layers": 1}
HUB = BASE | {"bos_token_id": 1, "eos_token_id": 7}
FEED_FORWARD, GATE = "model.layers.{}.feed_forward", "model.layers.{}.mlp.gate"
SUM_EPS = 1e-6  # added to the sum that normalises a token's routing weights


class Lfm2Moe(ExpertsLM):
    config: Lfm2MoeConfig
    Config = Lfm2MoeConfig
    expert_names = ("feed_forward.experts", "w1", "w3", "w2")
    hub_class = "Lfm2MoeForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | TINY | {"layer_types": conv_layers(4, (1, 3))},
        "8b-a1b": preset(HUB, 2048, 7168, 24, 32, 8) | {"layer_types": conv_layers(24, (2, 6, 10, 14, 18, 21))},
    }

    def layer(self, config: Lfm2MoeConfig, index: int) -> DecoderLayer:
        mixer = conv_or_attention(config, index)
        if index < config.num_dense_layers:
            return DecoderLayer(config, mixer, GatedMLP(config))
        router = SigmoidRouter(
            config, config.num_experts, groups=1, top_groups=1, scale=config.routed_scaling_factor, eps=SUM_EPS,
            corrected=config.use_expert_bias,
        )  # fmt: skip
        experts = MoE(
            config, intermediate_size=config.moe_intermediate_size, num_experts=config.num_experts,
            experts_per_token=config.num_experts_per_tok, normalize=config.norm_topk_prob, router=router,
        )  # fmt: skip
        return DecoderLayer(config, mixer, experts)

    def shared_rules(self) -> tuple[Rule, ...]:
        bias = Rename(f"{FEED_FORWARD}.expert_bias", f"{GATE}.e_score_correction_bias")
        return (*packed_short_conv_layers(self.config), bias, Rename(f"{FEED_FORWARD}.gate", GATE))

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The names that transformers 5 has in memory, where experts are stacked as they are here."""
        return ((*self.shared_rules(), Rename(f"{FEED_FORWARD}.experts", "model.layers.{}.mlp.experts")),)
