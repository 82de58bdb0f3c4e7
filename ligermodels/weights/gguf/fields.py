"""Fields of config.json that GGUF's metadata has as such, under other names."""

import math
from dataclasses import dataclass

from ligermodels.errors import CheckpointError
from ligermodels.weights.gguf.header import GgufHeader

LARGEST_SIZE = 2**31 - 1


@dataclass(frozen=True)
class Field:
    """hub: the name in config.json. key: in the metadata, behind the architecture's name. default: of files without
    the key; None if they must have it."""

    hub: str
    key: str
    kind: type[int] | type[float] = int
    default: float | None = None


COMMON = (
    Field("hidden_size", "embedding_length"), Field("intermediate_size", "feed_forward_length"),
    Field("num_hidden_layers", "block_count"), Field("num_attention_heads", "attention.head_count"),
    Field("max_position_embeddings", "context_length"),
    Field("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
)  # fmt: skip
WINDOW = Field("sliding_window", "attention.sliding_window")
EXPERTS_PER_TOKEN = Field("num_experts_per_tok", "expert_used_count")
LOCAL_EXPERTS = (Field("num_local_experts", "expert_count"), EXPERTS_PER_TOKEN)
# Further ones, by the Hub's model_type.
FURTHER = {
    "mistral": (WINDOW,),
    "mixtral": LOCAL_EXPERTS,
    "granite": (
        Field("embedding_multiplier", "embedding_scale", float, 1.0),
        Field("attention_multiplier", "attention.scale", float),
        Field("residual_multiplier", "residual_scale", float, 1.0),
        Field("logits_scaling", "logit_scale", float, 1.0),
    ),
    "qwen3_moe": (
        Field("num_experts", "expert_count"),
        Field("moe_intermediate_size", "expert_feed_forward_length"),
        EXPERTS_PER_TOKEN,
    ),
    "gemma2": (
        WINDOW,
        Field("attn_logit_softcapping", "attn_logit_softcapping", float, 50.0),
        Field("final_logit_softcapping", "final_logit_softcapping", float, 30.0),
    ),
    "gemma3_text": (WINDOW, Field("rope_local_base_freq", "rope.freq_base_swa", float, 10_000.0)),
    "phi3": (Field("sliding_window", "attention.sliding_window", int, 0),),
    "gpt_oss": (WINDOW, *LOCAL_EXPERTS, Field("intermediate_size", "expert_feed_forward_length")),
}
# What is read in another way than by a Field.
OTHER_KEYS = {
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base", "partial_rotary_factor": "rope.dimension_count", "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow",
}  # fmt: skip


def metadata_key(prefix: str, model_type: str, name: str) -> str:
    """The key of a field of config.json, or the field's own name where there is none. prefix: the architecture's."""
    keys = {field.hub: field.key for field in (*COMMON, *FURTHER.get(model_type, ()))} | OTHER_KEYS
    return f"{prefix}.{keys[name]}" if name in keys else name


class Metadata:
    """The metadata of the architecture, by the part of the keys behind its name."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.prefix = header.require("general.architecture", str)

    def read(self, field: Field) -> int | float:
        """The value of a field. Raises CheckpointError if it is missing without a default, or no size or number."""
        key = f"{self.prefix}.{field.key}"
        given = field.default is None or key in self.header.metadata
        value = self.header.require(key, field.kind) if given else field.default
        assert value is not None  # it is given, or has a default
        limits = (0, LARGEST_SIZE) if field.kind is int else (-math.inf, math.inf)
        if not math.isfinite(value) or not limits[0] <= value <= limits[1]:
            raise CheckpointError(f"{self.header.file}: {key} is {value}, which it cannot be; convert it again")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        return int(self.read(Field(key, key, int, default)))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self.read(Field(key, key, float, default)))

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.header.metadata

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors
