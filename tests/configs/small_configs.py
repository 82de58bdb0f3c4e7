"""Contents of small config.json files, and what our configs and the reference's say of them."""

from ligermodels.architectures import ARCHITECTURES
from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION

SIZES = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 8,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": None,
}
# What other families call what SIZES has, or what they need it to be.
LATENTS = {"num_key_value_heads": 3, "q_lora_rank": 12, "kv_lora_rank": 6, "qk_rope_head_dim": 8}
SIZES_OF = {"deepseek_v3": LATENTS, "glm4_moe_lite": LATENTS, "granitemoehybrid": {"mamba_n_heads": 6}}
VISION = {"vision_config": {"vision_use_head": False}}
MROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
LINEAR = {"rope_type": "linear", "factor": 4.0}
NESTED = {
    FULL_ATTENTION: {"rope_type": "default", "rope_theta": 9.0},
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 8.0},
}


def raw(model_type, /, **fields):
    """The content of a config.json with these fields."""
    if model_type == "mllama":
        return {"model_type": model_type, "text_config": SIZES | {"cross_attention_layers": [0]} | fields}
    if model_type in ("gemma3", "llava"):
        return {"model_type": model_type, "text_config": SIZES | fields} | VISION
    if model_type in ("idefics3", "smolvlm"):
        outer = {key: fields.pop(key) for key in ("tie_word_embeddings",) if key in fields}
        return {"model_type": model_type, "text_config": SIZES | fields} | VISION | outer
    if model_type == "paligemma":
        outer = {key: fields.pop(key) for key in ("tie_word_embeddings",) if key in fields}
        text = {"model_type": model_type, "projection_dim": 24, "text_config": SIZES | fields}
        return text | {"vision_config": VISION["vision_config"] | {"image_size": 32}} | outer
    if model_type == "gemma4":
        tied = {name: fields[name] for name in ("tie_word_embeddings",) if name in fields}
        return {"model_type": model_type, "text_config": SIZES | fields} | tied
    if model_type in ("qwen3_5", "qwen3_5_moe"):
        tied = {key: fields.pop(key) for key in ("tie_word_embeddings", "quantization_config") if key in fields}
        return {"model_type": model_type, "text_config": SIZES | {"model_type": f"{model_type}_text"} | fields} | tied
    axes = {} if "rope_parameters" in fields else MROPE
    if model_type in ("qwen2_vl", "qwen2_5_vl"):
        return SIZES | axes | {"model_type": model_type} | VISION | fields
    if model_type in ("qwen3_vl", "qwen3_vl_moe"):
        outer = {key: fields.pop(key) for key in ("tie_word_embeddings",) if key in fields}
        return {"model_type": model_type, "text_config": SIZES | axes | fields} | VISION | outer
    if model_type == "mistral3":
        return {"model_type": model_type, "text_config": SIZES | {"model_type": "ministral3"} | fields}
    return SIZES | SIZES_OF.get(model_type, {}) | {"model_type": model_type} | fields


def read(model_type, **fields):
    """The config that a family reads from it."""
    return ARCHITECTURES[model_type].Config.from_dict(raw(model_type, **fields))


def windows(config):
    """The window of every layer."""
    return [config.window(i) if hasattr(config, "window") else None for i in range(config.num_hidden_layers)]


def reference_windows(reference):
    """The same of the reference. Families without layer_types have their window, if any, in all layers."""
    window = getattr(reference, "sliding_window", None) or None
    types = getattr(reference, "layer_types", None) or [SLIDING_ATTENTION] * reference.num_hidden_layers
    return [window if kind == SLIDING_ATTENTION else None for kind in types]
