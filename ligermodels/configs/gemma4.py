"""The fields of Gemma 4, alone and as the text model of multimodal checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligermodels.configs.base import kernel_activation
from ligermodels.configs.features import SlidingWindowConfig
from ligermodels.configs.multimodal import TextPartConfig
from ligermodels.configs.rope import FULL_ATTENTION, Rope, object_or_empty, read_ropes_by_layer_type
from ligermodels.errors import ConfigError

PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}


@dataclass(kw_only=True)
class Gemma4Config(SlidingWindowConfig):
    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    global_head_dim: int = 512  # of full-attention layers
    num_global_key_value_heads: int | None = None  # of full-attention layers whose keys are values; null for the same
    max_position_embeddings: int = 131072
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    sliding_window: int | None = 512
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    @classmethod
    def fields_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().fields_of(dict(raw) | global_heads(raw))

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
            raw = dict(raw) | {"rope_parameters": {FULL_ATTENTION: PROPORTIONAL}}
        return read_ropes_by_layer_type(raw, 1_000_000.0, 10_000.0)

    @property
    def activation(self) -> str:
        return kernel_activation("hidden_activation", self.hidden_activation)

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping

    def is_sliding(self, layer: int) -> bool:
        return (layer + 1) % 6 != 0

    def layer_type(self, layer: int) -> str:
        """The last layer has full attention, whatever the file says."""
        if layer == self.num_hidden_layers - 1:
            return FULL_ATTENTION
        return SlidingWindowConfig.layer_type(self, layer)

    def rope_head_dim(self, kind: str) -> int:
        return self.global_head_dim if kind == FULL_ATTENTION else self.head_dim

    def keys_are_values(self, layer: int) -> bool:
        return self.attention_k_eq_v and self.layer_type(layer) == FULL_ATTENTION

    def key_value_heads(self, layer: int) -> int:
        return (self.keys_are_values(layer) and self.num_global_key_value_heads) or self.num_key_value_heads

    def packed_heads(self, layer: int) -> tuple[int, ...]:
        """The query, key and value heads that a layer has projections for."""
        heads = self.num_attention_heads, self.key_value_heads(layer), self.key_value_heads(layer)
        return heads[:2] if self.keys_are_values(layer) else heads

    def source(self, layer: int) -> int | None:
        """The layer whose keys and values this one reads: the last of its type that has its own; None for itself."""
        own = self.num_hidden_layers - self.num_kv_shared_layers
        if layer < own:
            return None
        return next(i for i in reversed(range(own)) if self.layer_type(i) == self.layer_type(layer))

    def mlp_width(self, layer: int) -> int:
        """The MLP of a layer that reads the keys of another may be twice as wide."""
        return self.intermediate_size * (2 if self.use_double_wide_mlp and self.source(layer) is not None else 1)

    @property
    def expert_sizes(self) -> dict[str, Any]:
        """The numbers of the routed experts, as `MoE` takes them."""
        sizes = {
            "num_experts": self.num_experts,
            "experts_per_token": self.top_k_experts,
            "intermediate_size": self.moe_intermediate_size,
        }
        return {name: size for name, size in sizes.items() if size is not None}

    def is_read(self, layer: int) -> bool:
        """Whether later layers read the keys and values of this one."""
        kind, own = self.layer_type(layer), self.num_hidden_layers - self.num_kv_shared_layers
        behind, readers = range(layer + 1, own), range(own, self.num_hidden_layers)
        return layer < own and kind not in map(self.layer_type, behind) and kind in map(self.layer_type, readers)

    def validate(self) -> None:
        super().validate()
        kernel_activation("hidden_activation", self.hidden_activation)
        if self.use_bidirectional_attention == "all":
            self.reject_if_set("use_bidirectional_attention")
        self.check_divides("num_global_key_value_heads", "num_attention_heads")
        own = self.num_hidden_layers - self.num_kv_shared_layers
        types = [self.layer_type(layer) for layer in range(self.num_hidden_layers)]
        if own < 0 or set(types[:own]) != set(types):
            raise ConfigError(
                f"config.json: num_kv_shared_layers {self.num_kv_shared_layers} must leave a layer of each type in "
                f"layer_types before them; there are {self.num_hidden_layers} layers"
            )
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            raise ConfigError(
                f"config.json: vocab_size_per_layer_input {self.vocab_size_per_layer_input} must be at least "
                f"vocab_size, {self.vocab_size}"
            )
        if self.enable_moe_block and len(self.expert_sizes) < 3:
            raise ConfigError(
                "config.json: enable_moe_block is true, but num_experts, top_k_experts or moe_intermediate_size is "
                "missing; add it"
            )
        if self.enable_moe_block and (self.top_k_experts or 0) > (self.num_experts or 0):
            raise ConfigError(
                f"config.json: top_k_experts {self.top_k_experts} must be at most num_experts, {self.num_experts}"
            )


def global_heads(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of full-attention layers, where a file has them by layer, in per_layer_config: transformers 5 does."""
    layers = object_or_empty("per_layer_config", raw.get("per_layer_config"))
    sizes = [object_or_empty(f"per_layer_config.{layer}", of) for layer, of in layers.items()]
    if any(of != sizes[0] for of in sizes) or any(not of.keys() <= {"head_dim", "num_key_value_heads"} for of in sizes):
        raise ConfigError(
            "config.json: per_layer_config must give head_dim and num_key_value_heads, equal in all its layers"
        )
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    return {names[name]: size for of in sizes[:1] for name, size in of.items()}


class Gemma4MultimodalConfig(TextPartConfig, Gemma4Config):
    text_type = "gemma4_text"
    tied_by_default = True
