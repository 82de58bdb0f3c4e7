"""Granite 4: Mamba-2, attention without positions, and in every layer a shared expert, with or without routed ones."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import MoEConfig, MultiplierConfig
from ligermodels.configs.hybrid import ATTENTION, MAMBA, Mamba2Config
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import ScaledLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mamba2 import Mamba2
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.moe import MoE
from ligermodels.weights.mapping import Rename, Rule, packed_qkv, stacked_granite_experts


@dataclass(kw_only=True)
class GraniteMoeHybridConfig(MoEConfig, MultiplierConfig, Mamba2Config):
    num_local_experts: int = 8
    shared_intermediate_size: int = 1024

    experts_optional = True


BASE = {"model_type": "granitemoehybrid"}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0}
TINY = {
    "layer_types": [MAMBA, ATTENTION] * 2, "attention_multiplier": 1 / 32, "mamba_n_heads": 8,
    "mamba_d_state": 32, "intermediate_size": 96, "shared_intermediate_size": 192,
}  # fmt: skip
HUB = BASE | MULTIPLIERS | {
    "vocab_size": 100352, "max_position_embeddings": 131072, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    "position_embedding_type": "nope", "attention_multiplier": 1 / 128, "mamba_n_heads": 48, "mamba_d_state": 128,
    "layer_types": [ATTENTION if layer in (5, 15, 25, 35) else MAMBA for layer in range(40)],
}  # fmt: skip


class GraniteMoeHybrid(CausalLM):
    config: GraniteMoeHybridConfig
    Config = GraniteMoeHybridConfig
    hub_class = "GraniteMoeHybridForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE | MULTIPLIERS) | TINY,
        "h-1b": preset(HUB, 1536, 4096, 40, 12, 4)
        | {"shared_intermediate_size": 4096, "num_local_experts": 0, "num_experts_per_tok": 0},
        "h-tiny": preset(HUB, 1536, 512, 40, 12, 4)
        | {"shared_intermediate_size": 1024, "num_local_experts": 64, "num_experts_per_tok": 6},
    }

    def layer(self, config: GraniteMoeHybridConfig, index: int) -> ScaledLayer:
        mixer: Mixer = Mamba2(config) if config.is_mamba(index) else self.attention(config)
        shared = config.shared_intermediate_size
        if not config.num_local_experts:
            return ScaledLayer(config, mixer, GatedMLP(config, intermediate_size=shared), config.residual_multiplier)
        experts = MoE(config, normalize=True, shared_intermediate_size=shared, shared_gate=False, **config.expert_sizes)
        return ScaledLayer(config, mixer, experts, config.residual_multiplier)

    def attention(self, config: GraniteMoeHybridConfig) -> Attention:
        scale = config.attention_multiplier
        return Attention(config, **config.attention_biases, scale=scale, rope=config.attention_rope)

    def shared_rules(self) -> tuple[Rule, ...]:
        """The rules of everything but the routed experts."""
        hub, ours = "model.layers.{}.shared_mlp", "model.layers.{}.mlp"
        ours += ".shared_expert" if self.config.num_local_experts else ""
        return (
            packed_qkv(self.config),
            Rename(f"{hub}.input_linear", f"{ours}.gate_up_proj"),
            Rename(f"{hub}.output_linear", f"{ours}.down_proj"),
        )

    def weight_rules(self) -> tuple[Rule, ...]:
        return (*self.shared_rules(), *stacked_granite_experts())

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The names that transformers 5 has in memory; the same without routed experts."""
        experts = stacked_granite_experts(in_memory=True)
        return ((*self.shared_rules(), *experts),) if self.config.num_local_experts else ()
