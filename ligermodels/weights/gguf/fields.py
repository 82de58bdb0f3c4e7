"""Fields of config.json that GGUF's metadata has as such, under other names, and the scaling of RoPE, which is in the
metadata, or in tensors of its own as factors of the wavelengths.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ligermodels.configs.rope import LLAMA3_ROPE, Rope
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


LLAMA3_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS_TOLERANCE = 1e-5  # relative; files have fp32
SCALING = "rope.scaling."
YARN_BETAS = {name: OTHER_KEYS[name] for name in ("beta_fast", "beta_slow")}
ReadValues = Callable[[str], np.ndarray]  # of a tensor, by its name


def rope_scaling(metadata: Metadata, config: Mapping[str, Any], read_values: ReadValues) -> dict[str, Any]:
    """The field rope_scaling of config.json, if there is a scaling. Raises CheckpointError if it is not known."""
    kind = metadata.header.get(f"{metadata.prefix}.{SCALING}type", str, "none")
    if metadata.has_tensor(LLAMA3_FACTORS):
        scaling = llama3_scaling(metadata, config, read_values(LLAMA3_FACTORS))
    elif metadata.has_tensor(LONG_FACTORS):
        scaling = longrope_scaling(metadata, read_values)
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": metadata.number(f"{SCALING}factor")}
    elif kind == "yarn":
        scaling = yarn_scaling(metadata, config)
    elif kind in ("none", "longrope"):
        return {}
    else:
        raise CheckpointError(
            f"{metadata.header.file}: {metadata.prefix}.{SCALING}type is {kind!r}, which is not supported; load the "
            "original checkpoint"
        )
    return {"rope_scaling": scaling}


def llama3_scaling(metadata: Metadata, config: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Llama 3.1's scaling. A file has its effect on the wavelengths only, from which its constants are recovered.
    Raises CheckpointError if they are not those of all published models."""
    scaling: dict[str, Any] = LLAMA3_ROPE | {"factor": float(factors.max())}
    rope = Rope(rope_theta=config["rope_theta"], **scaling)
    expected = llama3_factors(rope, 2 * len(factors))
    if not np.allclose(factors, expected, rtol=FACTORS_TOLERANCE, atol=0.0):
        raise CheckpointError(
            f"{metadata.header.file}: {LLAMA3_FACTORS} has not the factors of Llama 3's scaling, {scaling}, at "
            f"{metadata.prefix}.rope.freq_base {rope.rope_theta}; load the original checkpoint"
        )
    return scaling


def llama3_factors(rope: Rope, head_dim: int) -> np.ndarray:
    """What Llama 3.1's scaling multiplies each wavelength by, fp64 [head_dim / 2]."""
    wavelengths = 2 * math.pi * rope.rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = (rope.original_max_position_embeddings or 0) / wavelengths
    smooth = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / rope.factor_or_one + smooth)


def longrope_scaling(metadata: Metadata, read_values: ReadValues) -> dict[str, Any]:
    if not metadata.has_tensor(SHORT_FACTORS):
        raise CheckpointError(f"{metadata.header.file}: tensor {SHORT_FACTORS} is missing; convert it again")
    names = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
    factors = {hub: read_values(name).astype(np.float32) for hub, name in names.items()}
    return {"rope_type": "longrope"} | {hub: [float(str(x)) for x in values] for hub, values in factors.items()}


def yarn_scaling(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    trained = metadata.size(f"{SCALING}original_context_length", config["max_position_embeddings"])
    betas = {hub: metadata.number(key) for hub, key in YARN_BETAS.items() if metadata.has(key)}
    scaling = {"rope_type": "yarn", "factor": metadata.number(f"{SCALING}factor"), **betas}
    # gpt-oss does not round the bounds of its ramp, which the format cannot say.
    exact = {"truncate": False} if config["model_type"] == "gpt_oss" else {}
    return scaling | {"original_max_position_embeddings": trained} | exact


def rope_metadata(rope: Rope, max_position_embeddings: int) -> dict[str, Any]:
    """The metadata of a scaling, by the parts of the keys behind the architecture's name."""
    trained = rope.original_max_position_embeddings
    if rope.rope_type in ("linear", "yarn"):
        found: dict[str, Any] = {f"{SCALING}type": rope.rope_type, f"{SCALING}factor": rope.factor_or_one}
        if rope.rope_type == "yarn":
            found |= {f"{SCALING}original_context_length": trained or max_position_embeddings}
            found |= {key: getattr(rope, hub) for hub, key in YARN_BETAS.items()}
        return found
    if rope.rope_type == "longrope" and trained:
        stretch = max_position_embeddings / trained
        factor = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
        return {f"{SCALING}original_context_length": trained, f"{SCALING}attn_factor": factor}
    return {}


def rope_factors(rope: Rope, head_dim: int) -> dict[str, np.ndarray]:
    """The tensors of a scaling, fp32."""
    if rope.rope_type == "llama3":
        return {LLAMA3_FACTORS: llama3_factors(rope, head_dim).astype(np.float32)}
    if rope.rope_type == "longrope":
        return {
            LONG_FACTORS: np.array(rope.long_factor, np.float32),
            SHORT_FACTORS: np.array(rope.short_factor, np.float32),
        }
    return {}
