"""Features that several families add to config.json: sliding window, softcaps, partial RoPE, multipliers, experts.

Each class is one feature: its fields under the Hub's names, and their meaning. A family inherits from the features that
it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.configs.base import Config, kernel_activation
from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION
from ligermodels.errors import ConfigError


@dataclass(kw_only=True)
class SlidingWindowConfig(Config):
    """Sliding-window attention in some or all layers."""

    sliding_window: int | None = None  # number of keys that a query attends to, including its own
    layer_types: tuple[str, ...] | None = None

    def is_sliding(self, layer: int) -> bool:
        """Whether this layer has the window; ignored if the file has layer_types."""
        return True

    def layer_type(self, layer: int) -> str:
        """FULL_ATTENTION or SLIDING_ATTENTION."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return SLIDING_ATTENTION if self.is_sliding(layer) else FULL_ATTENTION

    def window(self, layer: int) -> int | None:
        return (self.sliding_window or None) if self.layer_type(layer) == SLIDING_ATTENTION else None

    def validate(self) -> None:
        super().validate()
        self.check_one_per_layer("layer_types")
        unknown = sorted(set(self.layer_types or ()) - {FULL_ATTENTION, SLIDING_ATTENTION})
        if unknown:
            raise ConfigError(
                f"config.json: layer_types: {unknown[0]!r} is not supported; "
                f"must be {FULL_ATTENTION!r} or {SLIDING_ATTENTION!r}"
            )


@dataclass(kw_only=True)
class SwitchedWindowConfig(SlidingWindowConfig):
    """A sliding window that use_sliding_window enables, in the layers from max_window_layers on."""

    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    def is_sliding(self, layer: int) -> bool:
        return self.use_sliding_window and layer >= self.max_window_layers


@dataclass(kw_only=True)
class UnitOffsetConfig(Config):
    """RMSNorm with weight + 1, and tied embeddings scaled by sqrt(hidden_size)."""

    head_dim: int = 256
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    use_bidirectional_attention: bool | None = None

    norm_offset = 1.0
    unsupported = ("use_bidirectional_attention",)

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5


@dataclass(kw_only=True)
class SoftcapConfig(UnitOffsetConfig, SlidingWindowConfig):
    """Softcaps on attention scores and logits, and an attention scale that does not depend on head_dim."""

    sliding_window: int | None = 4096
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    @property
    def activation(self) -> str:
        return kernel_activation("hidden_activation", self.hidden_activation)

    @property
    def attention_scale(self) -> float:
        return self.query_pre_attn_scalar**-0.5

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping

    def validate(self) -> None:
        super().validate()
        kernel_activation("hidden_activation", self.hidden_activation)
        if self.attn_logit_softcapping:
            self.reject_if_set("attention_dropout")


@dataclass(kw_only=True)
class HalfRotaryConfig(Config):
    """RoPE on half of each head, and biases on q, k, v; the default sizes are those of the 9B models."""

    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-07
    pad_token_id: int | None = 151329
    attention_bias: bool = True

    default_partial_rotary_factor = 0.5
    partial_rotary = True


@dataclass(kw_only=True)
class MultiplierConfig(Config):
    """Multipliers of embeddings, attention scores and both residual branches, and a divisor of the logits."""

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    @property
    def embedding_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def logit_scale(self) -> float:
        return 1.0 / self.logits_scaling


def refuse_zero(config: Config, name: str) -> None:
    """Raises ConfigError if a field that some families may set to 0 is 0."""
    if getattr(config, name) == 0:
        raise ConfigError(f"config.json: {name} is 0; must be positive")


@dataclass(kw_only=True)
class MoEConfig(Config):
    """Mixture of experts: a top-k router and its load-balancing loss."""

    num_experts_per_tok: int = 2
    output_router_logits: bool = False  # whether the loss includes the load-balancing loss
    router_aux_loss_coef: float = 0.001

    experts_field: ClassVar[str] = "num_local_experts"
    experts_optional: ClassVar[bool] = False  # whether layers without experts are dense

    @property
    def expert_sizes(self) -> dict[str, Any]:
        """The sizes of the routed experts, as `MoE` takes them."""
        width = getattr(self, "moe_intermediate_size", self.intermediate_size)
        experts = getattr(self, self.experts_field)
        return {"intermediate_size": width, "num_experts": experts, "experts_per_token": self.num_experts_per_tok}

    def validate(self) -> None:
        super().validate()
        num_experts = getattr(self, self.experts_field)
        if not self.experts_optional:
            refuse_zero(self, self.experts_field)
        if num_experts:
            refuse_zero(self, "num_experts_per_tok")
        if 0 < num_experts < self.num_experts_per_tok:
            raise ConfigError(
                f"config.json: num_experts_per_tok {self.num_experts_per_tok} must be at most "
                f"{self.experts_field}, {num_experts}"
            )


@dataclass(kw_only=True)
class ClampedExpertsConfig(MoEConfig):
    """Experts with a clamped SwiGLU. Its numbers are those of all published models: the kernels have them as constants.
    hidden_act is not what is computed."""

    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    choices: ClassVar = {"hidden_act": ["silu"], "swiglu_limit": [7.0], "swiglu_alpha": [1.702]}

    @property
    def activation(self) -> str:
        return "clamped_silu"


@dataclass(kw_only=True)
class GroupedRoutingConfig(Config):
    """Experts behind the first dense layers, chosen within groups by sigmoid scores, beside shared ones without a gate;
    behind the last layer, layers that predict further tokens."""

    n_routed_experts: int = 128
    n_shared_experts: int = 1
    moe_intermediate_size: int = 1408
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    num_nextn_predict_layers: int = 1

    only_values: ClassVar = {"moe_layer_freq": 1}
    alternative_names: ClassVar = {
        "n_routed_experts": "num_local_experts",
        "num_nextn_predict_layers": "num_mtp_layers",
    }

    def is_sparse(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def validate(self) -> None:
        super().validate()
        refuse_zero(self, "num_experts_per_tok")
        if self.n_routed_experts % self.n_group or self.n_routed_experts < 2 * self.n_group:
            raise ConfigError(
                f"config.json: n_group {self.n_group} must divide n_routed_experts {self.n_routed_experts} into groups "
                "of two or more"
            )
        chosen = self.n_routed_experts // self.n_group * self.topk_group
        if self.topk_group > self.n_group or self.num_experts_per_tok > chosen:
            raise ConfigError(
                f"config.json: topk_group {self.topk_group} of n_group {self.n_group} groups must have "
                f"num_experts_per_tok {self.num_experts_per_tok} experts or more"
            )


@dataclass(kw_only=True)
class LatentAttentionConfig(Config):
    """Multi-head latent attention (MLA): queries from a latent or, if q_lora_rank is null, from the residual stream;
    keys and values from another latent. Each head has a part without RoPE and one with; the latter's key is shared by
    all heads. head_dim is the size of the rotated part."""

    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True  # RoPE rotates neighbouring pairs
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"

    choices: ClassVar = {"scoring_func": ["sigmoid"], "topk_method": ["noaux_tc"]}

    @classmethod
    def default_head_dim(cls, values: Mapping[str, Any]) -> int:
        return values["qk_rope_head_dim"]

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def query_input_size(self) -> int:
        """Width of the queries' latent; without one, of all query heads together."""
        return self.q_lora_rank or self.query_size

    def validate(self) -> None:
        super().validate()
        for name, value in {"qk_rope_head_dim": self.head_dim, "num_attention_heads": self.num_key_value_heads}.items():
            if getattr(self, name) != value:
                other = "head_dim" if name == "qk_rope_head_dim" else "num_key_value_heads"
                raise ConfigError(f"config.json: {other} {value} must be {name}, {getattr(self, name)}; leave it out")
        if self.attention_bias and self.q_lora_rank is None:
            raise ConfigError("config.json: attention_bias true is not supported if q_lora_rank is null; set it false")


@dataclass(kw_only=True)
class SparseStepConfig(MoEConfig):
    """Mixture of experts with an expert width of its own, in some layers only; the other layers are dense."""

    num_experts: int = 128
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None

    experts_field = "num_experts"
    experts_optional = True

    def is_sparse(self, layer: int) -> bool:
        selected = layer not in (self.mlp_only_layers or ()) and (layer + 1) % self.decoder_sparse_step == 0
        return selected and self.num_experts > 0
