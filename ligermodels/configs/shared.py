"""What several families add to config.json: windows, bounds, RoPE on half a head, multipliers, experts.

Each class is one such addition, its fields under the Hub's names, and what they mean; a family inherits those it has.
Must not know which families do.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import Config, supported_activation
from ligermodels.configs.rope import FULL, SLIDING
from ligermodels.errors import ConfigError


@dataclass(kw_only=True)
class SlidingConfig(Config):
    """Adds layers that see only a window of the keys before them."""

    sliding_window: int | None = None  # how many keys a query sees, its own included
    layer_types: tuple[str, ...] | None = None

    def slides(self, layer: int) -> bool:
        """Whether this layer has the window, where the file has no layer_types."""
        return True

    def layer_type(self, layer: int) -> str:
        if self.layer_types is not None:
            return self.layer_types[layer]
        return SLIDING if self.slides(layer) else FULL

    def window(self, layer: int) -> int | None:
        return (self.sliding_window or None) if self.layer_type(layer) == SLIDING else None

    def validate(self) -> None:
        super().validate()
        self.one_per_layer("layer_types")
        unknown = sorted(set(self.layer_types or ()) - {FULL, SLIDING})
        if unknown:
            raise ConfigError(
                f"config.json: layer_types: {unknown[0]!r} is not supported; {FULL!r} and {SLIDING!r} are"
            )


@dataclass(kw_only=True)
class SwitchedWindowConfig(SlidingConfig):
    """A window that the file has to switch on; it is then in the upper layers."""

    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28

    def slides(self, layer: int) -> bool:
        return self.use_sliding_window and layer >= self.max_window_layers


@dataclass(kw_only=True)
class UnitOffsetConfig(Config):
    """Norms that add one to their weight, and tied embeddings that enter times the root of their width."""

    head_dim: int = 256
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    use_bidirectional_attention: bool | None = None

    norm_offset = 1.0

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    def validate(self) -> None:
        super().validate()
        self.refuse("use_bidirectional_attention")


@dataclass(kw_only=True)
class SoftcapConfig(UnitOffsetConfig, SlidingConfig):
    """Adds bounds on the scores and the logits, and a scale of the scores that is not that of the head size."""

    sliding_window: int | None = 4096
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    @property
    def activation(self) -> str:
        return supported_activation("hidden_activation", self.hidden_activation)

    @property
    def attention_scale(self) -> float:
        return self.query_pre_attn_scalar**-0.5

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping

    def validate(self) -> None:
        super().validate()
        supported_activation("hidden_activation", self.hidden_activation)
        if self.attn_logit_softcapping:
            self.refuse("attention_dropout")


@dataclass(kw_only=True)
class HalfRotaryConfig(Config):
    """RoPE on half of each head and biases on q, k, v, in the sizes of the 9B models that have them."""

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
    """Multipliers of the embeddings, the scores and both branches, and a divisor of the logits."""

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


@dataclass(kw_only=True)
class MoEConfig(Config):
    """Adds a router and its load-balancing loss."""

    num_experts_per_tok: int = 2
    output_router_logits: bool = False  # whether the training loss includes that of the router
    router_aux_loss_coef: float = 0.001

    experts_field: ClassVar[str] = "num_local_experts"

    def validate(self) -> None:
        super().validate()
        num_experts = getattr(self, self.experts_field)
        if 0 < num_experts < self.num_experts_per_tok:
            raise ConfigError(
                f"config.json: num_experts_per_tok {self.num_experts_per_tok} must be at most "
                f"{self.experts_field}, {num_experts}"
            )


@dataclass(kw_only=True)
class SparseStepConfig(MoEConfig):
    """Adds dense layers among those with experts, whose width is their own."""

    num_experts: int = 128
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None

    experts_field = "num_experts"

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        chosen = layer not in (self.mlp_only_layers or ()) and (layer + 1) % self.decoder_sparse_step == 0
        return chosen and self.num_experts > 0
