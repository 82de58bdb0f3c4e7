"""Gemma 4: normed values, two sizes of heads, RoPE on a quarter of the large ones, a scale of each layer's output.

Switches: per-layer embeddings, layers that read the keys and values of earlier ones (E2B, E4B); keys that are values
too (26B-A4B, 31B); routed experts beside the MLP (26B-A4B). Towers of a multimodal checkpoint are kept, not computed.
"""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.gemma4 import Gemma4Config, Gemma4MultimodalConfig
from ligermodels.layers.decoder import CausalLM, Decoder
from ligermodels.layers.gemma import LayerInputDecoder, LayerInputLayer, NormedRouter, gemma4_attention
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.moe import MoE
from ligermodels.weights.mapping import Rename, Rule, packed_gate_up, packed_heads

BASE = {"model_type": "gemma4_text"}
SMALL = {"head_dim": 32, "global_head_dim": 64, "sliding_window": 128, "final_logit_softcapping": 30.0}
TINY = {"hidden_size_per_layer_input": 0}
HUB = BASE | {"final_logit_softcapping": 30.0, "bos_token_id": 2, "eos_token_id": 1}
E2B_LAYERS = {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "num_kv_shared_layers": 20}
WIDE = {"max_position_embeddings": 262144, "sliding_window": 1024, "attention_k_eq_v": True} | TINY
MOE_26B = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}


class Gemma4Text(CausalLM):
    config: Gemma4Config
    Config: ClassVar = Gemma4Config
    hub_class = "Gemma4ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | SMALL | TINY,
        "e2b": preset(HUB, 1536, 6144, 35, 8, 1) | E2B_LAYERS | {"use_double_wide_mlp": True},
        "e4b": preset(HUB, 2560, 10240, 42, 8, 2) | {"num_kv_shared_layers": 18},
        "31b": preset(HUB, 5376, 21504, 60, 32, 16) | WIDE | {"num_global_key_value_heads": 4},
        "26b-a4b": preset(HUB, 2816, 2112, 30, 16, 8) | WIDE | MOE_26B | {"num_global_key_value_heads": 2},
    }

    def decoder(self, config: Gemma4Config, layers: list) -> Decoder:
        size, table = config.hidden_size_per_layer_input, config.vocab_size_per_layer_input
        return LayerInputDecoder(config, layers, table, size) if size else Decoder(config, layers)

    def layer(self, config: Gemma4Config, index: int) -> LayerInputLayer:
        attention, mlp = gemma4_attention(config, index), GatedMLP(config, intermediate_size=config.mlp_width(index))
        moe, sizes = None, config.expert_sizes
        if config.enable_moe_block:
            moe = MoE(config, normalize=True, router=NormedRouter(config, sizes["num_experts"]), **sizes)
        size = config.hidden_size_per_layer_input
        return LayerInputLayer(config, attention, mlp, moe=moe, layer_input_size=size)

    def weight_rules(self) -> tuple[Rule, ...]:
        config, layer, gate = self.config, "model.layers.{}.", "model.layers.{}.moe.gate"
        layers = range(config.num_hidden_layers)
        return (
            *(packed_heads(i, config.rope_head_dim(config.layer_type(i)), config.packed_heads(i)) for i in layers),
            packed_gate_up(),
            Rename(layer + "router.scale", gate + ".norm.weight"),
            Rename(layer + "router.per_expert_scale", gate + ".per_expert_weight"),
            Rename(layer + "router.proj", gate),
            Rename(layer + "experts", layer + "moe.experts"),
        )

    def kept_tensors(self) -> tuple[str, ...]:
        """What some files hold for layers that read the keys and values of others."""
        count, names = self.config.num_hidden_layers, ("k_proj", "v_proj", "k_norm")
        readers = range(count - self.config.num_kv_shared_layers, count)
        return tuple(f"model.layers.{i}.self_attn.{name}" for i in readers for name in names)


class Gemma4(Gemma4Text):
    Config = Gemma4MultimodalConfig
    hub_class = "Gemma4ForConditionalGeneration"
    SIZES: ClassVar = {}

    def weight_rules(self) -> tuple[Rule, ...]:
        return (Rename("model.language_model", "model", super().weight_rules()),)

    def kept_tensors(self) -> tuple[str, ...]:
        text = (name.replace("model.", "model.language_model.", 1) for name in super().kept_tensors())
        return (*text, "model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio")
