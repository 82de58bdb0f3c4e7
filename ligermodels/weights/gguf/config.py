"""config.json and generation_config.json of a GGUF file, from its metadata and the names of its tensors.

llama.cpp's code has constants where a file says nothing, such as Gemma 3's pattern of windows; they are here too.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ligermodels.errors import CheckpointError
from ligermodels.weights.gguf.header import GgufHeader, import_gguf
from ligermodels.weights.gguf.tensors import one_tensor, stored_as
from ligermodels.weights.gguf.tokenizer import Vocabulary
from ligermodels.weights.streaming import read_tensors

LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FREQUENCIES_TOLERANCE = 1e-5  # relative; files have fp32
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # the models whose attention scale is not that of a head's size
GELU_TANH = "gelu_pytorch_tanh"


class Fields:
    """The metadata of the architecture, by the part of the keys behind its name."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.prefix = header.require("general.architecture", str)

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number that is not negative. Raises CheckpointError, also if it is missing without a default."""
        key = f"{self.prefix}.{name}"
        value = self.header.require(key, int) if default is None else self.header.get(key, int, default)
        if not 0 <= value < 2**31:
            raise CheckpointError(f"{self.header.file}: {key} is {value}, no size; convert it again")
        return value

    def real(self, name: str, default: float) -> float:
        value = self.header.get(f"{self.prefix}.{name}", float, default)
        if not math.isfinite(value):
            raise CheckpointError(f"{self.header.file}: {self.prefix}.{name} is {value}; convert it again")
        return value

    def has(self, name: str) -> bool:
        return f"{self.prefix}.{name}" in self.header.metadata

    def tensor(self, name: str) -> bool:
        return name in self.header.tensors


def hub_config(header: GgufHeader, vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of config.json. Raises CheckpointError."""
    stored, fields = stored_as(header), Fields(header)
    heads = fields.number("attention.head_count")
    hidden = fields.number("embedding_length")
    config = {
        "model_type": stored.model_type,
        "vocab_size": embedded_tokens(header),
        "hidden_size": hidden,
        "intermediate_size": fields.number("feed_forward_length"),
        "num_hidden_layers": fields.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.number("attention.head_count_kv", heads),
        "head_dim": head_dim(fields, hidden, heads),
        "max_position_embeddings": fields.number("context_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": fields.real("rope.freq_base", 10_000.0),
        "tie_word_embeddings": not fields.tensor("output.weight"),
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "torch_dtype": stored_dtype(header),
    }
    scaling = rope_scaling(header, fields, config)
    if scaling:
        config["rope_scaling"] = scaling
    if special := SPECIAL.get(stored.model_type):
        config |= special(fields, config)
    return config | special_token_ids(vocabulary)


def hub_generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of generation_config.json."""
    ids = special_token_ids(vocabulary)
    ends = vocabulary.end_ids()
    return ids | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


def special_token_ids(vocabulary: Vocabulary) -> dict[str, int]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {hub: vocabulary.special_id(theirs) for hub, theirs in names.items()}
    return {name: index for name, index in found.items() if index is not None}


def embedded_tokens(header: GgufHeader) -> int:
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{header.file}: tensor token_embd.weight is missing: it is no whole model")
    return header.tensors["token_embd.weight"].shape[0]


def head_dim(fields: Fields, hidden: int, heads: int) -> int:
    """The size of a head. Raises CheckpointError."""
    if fields.has("attention.key_length"):
        return fields.number("attention.key_length")
    if not heads or hidden % heads:
        raise CheckpointError(f"{fields.header.file}: {hidden} is no multiple of its {heads} heads; convert it again")
    return hidden // heads


def stored_dtype(header: GgufHeader) -> str:
    """The dtype in which a model is loaded by default: that of most weights, bf16 if they are encoded."""
    gguf = import_gguf(header.file)
    elements: dict[str, int] = {}
    for info in header.tensors.values():
        name = gguf.GGMLQuantizationType(info.type).name
        elements[name] = elements.get(name, 0) + math.prod(info.shape)
    most = max(elements, key=elements.__getitem__, default="BF16")
    return {"F32": "float32", "F64": "float64", "F16": "float16"}.get(most, "bfloat16")


def rope_scaling(header: GgufHeader, fields: Fields, config: dict[str, Any]) -> dict[str, Any] | None:
    """The scaling of RoPE. Raises CheckpointError if it is not known."""
    kind = header.get(f"{fields.prefix}.rope.scaling.type", str, "none")
    original = fields.number("rope.scaling.original_context_length", config["max_position_embeddings"])
    if fields.tensor("rope_freqs.weight"):
        return llama3_scaling(header, config)
    if fields.tensor("rope_factors_long.weight"):
        return longrope_scaling(header, fields)
    if kind == "linear":
        return {"rope_type": "linear", "factor": fields.real("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": fields.real("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": original,
        }
        betas = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        return scaling | {
            hub: fields.real(f"rope.scaling.{theirs}", 0.0)
            for hub, theirs in betas.items()
            if fields.has(f"rope.scaling.{theirs}")
        }
    if kind not in ("none", "longrope"):
        raise CheckpointError(f"{header.file}: {fields.prefix}.rope.scaling.type is {kind!r}, which is not supported")
    return None


def values_of(header: GgufHeader, name: str) -> np.ndarray:
    """The values of a small tensor, fp64. Raises CheckpointError."""
    return read_tensors({name: one_tensor(header.tensors[name])})[name].double().numpy().ravel()


def llama3_scaling(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1's scaling, of which a file has the factors of the frequencies only.

    Raises CheckpointError if they are not those of its constants, which all published models have.
    """
    found = values_of(header, "rope_freqs.weight")
    factor = float(found.max())
    dim = 2 * len(found)
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    original = LLAMA3_SCALING["original_max_position_embeddings"]
    low, high = LLAMA3_SCALING["low_freq_factor"], LLAMA3_SCALING["high_freq_factor"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(found, expected, rtol=FREQUENCIES_TOLERANCE, atol=0.0):
        raise CheckpointError(
            f"{header.file}: rope_freqs.weight has not the factors of Llama 3's scaling with "
            f"{LLAMA3_SCALING}; load the original checkpoint"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_SCALING}


def longrope_scaling(header: GgufHeader, fields: Fields) -> dict[str, Any]:
    if not fields.tensor("rope_factors_short.weight"):
        raise CheckpointError(f"{header.file}: tensor rope_factors_short.weight is missing; convert it again")
    factors = {kind: values_of(header, f"rope_factors_{kind}.weight") for kind in ("long", "short")}
    return {
        "rope_type": "longrope",
        "long_factor": [float(str(np.float32(value))) for value in factors["long"]],
        "short_factor": [float(str(np.float32(value))) for value in factors["short"]],
    }


def rotary_fraction(fields: Fields, config: dict[str, Any]) -> float:
    return fields.number("rope.dimension_count", config["head_dim"]) / config["head_dim"]


def llama(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": fields.tensor("blk.0.attn_q.bias"), "mlp_bias": fields.tensor("blk.0.ffn_gate.bias")}


def mixtral(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": fields.number("expert_count"),
        "num_experts_per_tok": fields.number("expert_used_count"),
        "sliding_window": None,
    }


def granite(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    multipliers = {
        "embedding_multiplier": ("embedding_scale", 1.0),
        "attention_multiplier": ("attention.scale", config["head_dim"] ** -0.5),
        "residual_multiplier": ("residual_scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
    }
    return llama(fields, config) | {hub: fields.real(*theirs) for hub, theirs in multipliers.items()}


def smollm3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return llama(fields, config) | {"no_rope_layer_interval": 4, "use_sliding_window": False}


def qwen3_moe(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": fields.number("expert_count"),
        "num_experts_per_tok": fields.number("expert_used_count"),
        "moe_intermediate_size": fields.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def gemma(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": GELU_TANH, "hidden_activation": GELU_TANH}


def gemma2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    large = config["num_hidden_layers"] == LAYERS_OF_27B[fields.prefix]
    scale = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    softcaps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    window = {"sliding_window": fields.number("attention.sliding_window"), "query_pre_attn_scalar": scale}
    caps = {name: fields.real(name, default) for name, default in softcaps.items()}
    return gemma(fields, config) | window | (caps if fields.prefix == "gemma2" else {})


def gemma3_text(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    caps = {"final_logit_softcapping": None, "attn_logit_softcapping": None}
    local = {"sliding_window_pattern": 6, "rope_local_base_freq": fields.real("rope.freq_base_swa", 10_000.0)}
    theta = {"rope_theta": fields.real("rope.freq_base", 1_000_000.0)}
    return gemma2(fields, config) | caps | local | theta


def phi3(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "partial_rotary_factor": rotary_fraction(fields, config),
        "sliding_window": fields.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": fields.number(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
        "attention_bias": False,
        "pad_token_id": None,
    }


def glm4(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    bias = fields.tensor("blk.0.attn_q.bias")
    return {"partial_rotary_factor": rotary_fraction(fields, config), "attention_bias": bias, "pad_token_id": None}


def olmo2(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": fields.tensor("blk.0.attn_q.bias"), "pad_token_id": None}


def gpt_oss(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": fields.number("expert_count"),
        "num_experts_per_tok": fields.number("expert_used_count"),
        "intermediate_size": fields.number("expert_feed_forward_length", config["intermediate_size"]),
        "sliding_window": fields.number("attention.sliding_window"),
        "attention_bias": fields.tensor("blk.0.attn_q.bias"),
        "swiglu_limit": 7.0,
    }


SPECIAL: dict[str, Callable[[Fields, dict[str, Any]], dict[str, Any]]] = {
    "llama": llama,
    "mixtral": mixtral,
    "granite": granite,
    "smollm3": smollm3,
    "qwen3_moe": qwen3_moe,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "phi3": phi3,
    "glm4": glm4,
    "olmo2": olmo2,
    "gpt_oss": gpt_oss,
}
