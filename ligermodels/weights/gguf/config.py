"""config.json and generation_config.json of a GGUF file, from its metadata and the names of its tensors.

Where a file says nothing, llama.cpp's code has constants, such as Gemma 3's pattern of windows; they are here too.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from ligermodels.errors import CheckpointError
from ligermodels.weights.gguf.fields import COMMON, FURTHER, Metadata, ReadValues, metadata_key, rope_scaling
from ligermodels.weights.gguf.header import GgufHeader, import_gguf
from ligermodels.weights.gguf.tensors import head_count, stored_as
from ligermodels.weights.gguf.tokenizer import Vocabulary

LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # the models whose attention scale is not that of a head's size
ALWAYS_BIASED = ("qwen2",)  # families with biases of queries, keys and values, and no field that says so
GEMMA = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
NOPE_INTERVAL = 4  # SmolLM3's layers without RoPE
GEMMA3_WINDOW_PATTERN = 6
# Sizes whose product is a dimension of a tensor, where a file has it.
SIZES = (
    (("hidden_size",), "token_embd.weight", -1),
    (("num_attention_heads", "head_dim"), "blk.0.attn_output.weight", -1),
    (("num_key_value_heads", "head_dim"), "blk.0.attn_k.weight", 0),
    (("intermediate_size",), "blk.0.ffn_down.weight", -1),
    (("num_experts",), "blk.0.ffn_gate_inp.weight", 0),
    (("num_local_experts",), "blk.0.ffn_gate_inp.weight", 0),
)


def hub_config(header: GgufHeader, vocabulary: Vocabulary, read_values: ReadValues) -> dict[str, Any]:
    """The content of config.json. read_values: gives the values of one of the file's small tensors. Raises
    CheckpointError."""
    model_type, metadata = stored_as(header).model_type, Metadata(header)
    heads = head_count(header, "head_count")
    config: dict[str, Any] = {"model_type": model_type, "vocab_size": embedded_tokens(header)}
    config |= {field.hub: metadata.read(field) for field in COMMON}
    config |= {field.hub: metadata.read(field) for field in FURTHER.get(model_type, ())}
    config |= {
        "num_key_value_heads": head_count(header, "head_count_kv"),
        "head_dim": head_dim(metadata, config["hidden_size"], heads),
        "rope_theta": metadata.number("rope.freq_base", 1e6 if model_type == "gemma3_text" else 1e4),
        "tie_word_embeddings": not metadata.has_tensor("output.weight"), "attention_dropout": 0.0, "hidden_act": "silu",
        "torch_dtype": stored_dtype(header),
    }  # fmt: skip
    refuse_other_sizes(metadata, config)
    if model_type not in ALWAYS_BIASED:
        config["attention_bias"] = metadata.has_tensor("blk.0.attn_q.bias")
    if special := SPECIAL.get(model_type):
        config |= special(metadata, config)
    return config | rope_scaling(metadata, config, read_values) | special_token_ids(vocabulary)


def hub_generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    ends = vocabulary.end_ids()
    return special_token_ids(vocabulary) | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


def special_token_ids(vocabulary: Vocabulary) -> dict[str, int | None]:
    """The ids in config.json. Without a token for padding it says so: some families have a default."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {hub: vocabulary.special_id(theirs) for hub, theirs in names.items()}
    return {name: index for name, index in found.items() if index is not None or name == "pad_token_id"}


def embedded_tokens(header: GgufHeader) -> int:
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{header.file}: tensor token_embd.weight is missing: it is no whole model")
    return header.tensors["token_embd.weight"].shape[0]


def head_dim(metadata: Metadata, hidden: int, heads: int) -> int:
    """The size of a head. Raises CheckpointError."""
    if metadata.has("attention.key_length"):
        return metadata.size("attention.key_length")
    if hidden % heads:
        keys = [metadata_key(metadata.prefix, "", name) for name in ("hidden_size", "num_attention_heads")]
        stated = f"{keys[0]} {hidden} is no multiple of {keys[1]} {heads}"
        raise CheckpointError(f"{metadata.header.file}: {stated}; convert it again")
    return hidden // heads


def refuse_other_sizes(metadata: Metadata, config: dict[str, Any]) -> None:
    """Raises CheckpointError, which names the key, for a size in the metadata that is not that of the tensors."""
    header, model_type = metadata.header, config["model_type"]
    blocks = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
    if config["num_hidden_layers"] != blocks:
        stated = f"{metadata.prefix}.block_count is {config['num_hidden_layers']}"
        raise CheckpointError(f"{header.file}: {stated}, but its tensors are of {blocks} blocks; convert it again")
    of_experts = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    for fields, name, dim in (*SIZES, ((of_experts,), "blk.0.ffn_down_exps.weight", -1)):
        if name not in header.tensors or not config.keys() >= set(fields):
            continue
        stated, stored = math.prod(config[field] for field in fields), header.tensors[name].shape[dim]
        if stated != stored:
            keys = " * ".join(metadata_key(metadata.prefix, model_type, field) for field in fields)
            raise CheckpointError(f"{header.file}: {keys} is {stated}, but {name} has {stored}; convert it again")


def stored_dtype(header: GgufHeader) -> str:
    """The dtype in which a model is loaded by default: that of most weights, bf16 if they are encoded."""
    gguf = import_gguf(header.file)
    elements = Counter[str]()
    for info in header.tensors.values():
        elements[gguf.GGMLQuantizationType(info.type).name] += math.prod(info.shape)
    most = max(elements, key=elements.__getitem__, default="BF16")
    return {"F32": "float32", "F64": "float64", "F16": "float16"}.get(most, "bfloat16")


def rotary_fraction(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"partial_rotary_factor": metadata.size("rope.dimension_count", config["head_dim"]) / config["head_dim"]}


def with_mlp_bias(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"mlp_bias": metadata.has_tensor("blk.0.ffn_gate.bias")}


def smollm3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return with_mlp_bias(metadata, config) | {"no_rope_layer_interval": NOPE_INTERVAL, "use_sliding_window": False}


def gemma2(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    large = config["num_hidden_layers"] == LAYERS_OF_27B[metadata.prefix]
    scale = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    return GEMMA | {"query_pre_attn_scalar": scale}


def gemma3_text(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    softcaps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    return gemma2(metadata, config) | softcaps | {"sliding_window_pattern": GEMMA3_WINDOW_PATTERN}


def phi3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    trained = metadata.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = {"sliding_window": config["sliding_window"] or None, "original_max_position_embeddings": trained}
    return rotary_fraction(metadata, config) | window | {"attention_bias": False}


SPECIAL: dict[str, Callable[[Metadata, dict[str, Any]], dict[str, Any]]] = {
    "llama": with_mlp_bias,
    "granite": with_mlp_bias,
    "smollm3": smollm3,
    "mixtral": lambda metadata, config: {"sliding_window": None},
    "qwen3_moe": lambda metadata, config: {"norm_topk_prob": True},
    "gemma": lambda metadata, config: GEMMA,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "phi3": phi3,
    "glm4": rotary_fraction,
    "gpt_oss": lambda metadata, config: {"swiglu_limit": 7.0},
}
