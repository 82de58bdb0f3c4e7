"""GGUF files that tests write: headers byte by byte, and tiny models of each family."""

import struct
from pathlib import Path

import ligermodels
from ligermodels.layers.decoder import CausalLM
from tests.interop.folders import new_tokenizer, tiny_model

UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
# The families that are read and written, with changes of their tiny presets: to what llama.cpp has as constants.
GEMMA_HEADS = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
FAMILIES = {
    "llama": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 8192}},
    "mistral": {"sliding_window": 16},
    "mixtral": {},
    "qwen2": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "qwen3": {},
    "qwen3_moe": {},
    "gemma": {},
    "gemma2": GEMMA_HEADS,
    "gemma3_text": GEMMA_HEADS | {"sliding_window_pattern": 6, "num_hidden_layers": 7,
                                  "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": 16, "original_max_position_embeddings": 256,
             "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0 + 0.125 * i for i in range(12)],
                              "long_factor": [1.0 + 0.5 * i for i in range(12)]}},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "olmo2": {},
    "gpt_oss": {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False,
                                 "original_max_position_embeddings": 128}},
    "glm4": {},
    "smollm3": {"num_hidden_layers": 4},
}  # fmt: skip


def family_model(family: str) -> CausalLM:
    return tiny_model(family, **FAMILIES[family])


def write_model(model: CausalLM, folder: Path, gguf_type: str = "f32") -> Path:
    """A GGUF file of a model, with the tokenizer of new models."""
    file = folder / "model.gguf"
    ligermodels.export_gguf(model, file, gguf_type=gguf_type, tokenizer=new_tokenizer(), overwrite=True)
    return file


def string(text: bytes | str) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """shape: innermost first, as in the file."""
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def whole_file(
    entries: list[bytes], tensors: list[bytes], data: bytes = b"", *, magic: bytes = b"GGUF", version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:  # fmt: skip
    tensor_count, entry_count = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, tensor_count, entry_count) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data
