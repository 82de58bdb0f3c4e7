"""Names in GGUF: of the files that are a model, of types of matrices, of tensors in each architecture.

A folder has one model: one file, or all parts of a split one (name-00001-of-00003.gguf). A tensor name's pattern has
`{}` for a number: the layer, then the expert. Patterns without `.weight` carry the rest of a name over. A pattern of a
stack of experts has one `{}` more on the Hub's side: each expert is a tensor there. What the converter changed in
values stands beside the names.
Source: llama.cpp's conversion scripts, https://github.com/ggml-org/llama.cpp/tree/master/conversion.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ligermodels.errors import CheckpointError

LAYER, BLOCK = "model.layers.{}.", "blk.{}."
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PROJECTIONS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}  # fmt: skip
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GATED_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PACKED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SANDWICH_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"} | POST_NORMS


@dataclass(frozen=True)
class Stored:
    """How an architecture of GGUF stores a family.

    model_type: the family. names: of the tensors in GGUF -> on the Hub.
    interleaved: whether queries and keys have the two halves of each head's rotary pairs interleaved.
    norm_offset: what the weights of norms have been added.
    alternating: two stacks of experts whose rows alternate in one tensor on the Hub.
    """

    model_type: str
    names: Mapping[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0
    alternating: Mapping[tuple[str, str], str] = field(default_factory=dict)


def names_in_layers(*layers: Mapping[str, str]) -> dict[str, str]:
    """The names of a whole model from those within a layer."""
    return ENDS | {BLOCK + theirs: LAYER + hub for names in layers for theirs, hub in names.items()}


MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps.weight": "block_sparse_moe.experts.{}.w1.weight",
    "ffn_up_exps.weight": "block_sparse_moe.experts.{}.w3.weight",
    "ffn_down_exps.weight": "block_sparse_moe.experts.{}.w2.weight",
    # Files of before March 2024 have a tensor for each expert.
    "ffn_gate.{}.weight": "block_sparse_moe.experts.{}.w1.weight",
    "ffn_up.{}.weight": "block_sparse_moe.experts.{}.w3.weight",
    "ffn_down.{}.weight": "block_sparse_moe.experts.{}.w2.weight",
}
QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps.weight": "mlp.experts.{}.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.{}.up_proj.weight", "ffn_down_exps.weight": "mlp.experts.{}.down_proj.weight",
}  # fmt: skip
GPT_OSS_LAYER = PROJECTIONS | {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router",
    "ffn_down_exps.weight": "mlp.experts.down_proj_blocks", "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}  # fmt: skip
GPT_OSS_GATES = {
    (f"{BLOCK}ffn_gate_exps.{kind}", f"{BLOCK}ffn_up_exps.{kind}"): f"{LAYER}mlp.experts.gate_up_proj_{hub}"
    for kind, hub in (("weight", "blocks"), ("bias", "bias"))
}
GLM4_NORMS = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm", "post_ffw_norm": "post_mlp_layernorm",
}  # fmt: skip
PHI3_LAYER = PRE_NORMS | PACKED_MLP | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
LLAMA_NAMES = names_in_layers(PRE_NORMS, PROJECTIONS, GATED_MLP)
# The value of general.architecture -> how it stores a family.
STORED = {
    "llama": Stored("llama", LLAMA_NAMES, interleaved=True),
    "granite": Stored("granite", LLAMA_NAMES, interleaved=True),
    "smollm3": Stored("smollm3", LLAMA_NAMES, interleaved=True),
    "qwen2": Stored("qwen2", LLAMA_NAMES),
    "qwen3": Stored("qwen3", names_in_layers(PRE_NORMS, PROJECTIONS, QK_NORMS, GATED_MLP)),
    "qwen3moe": Stored("qwen3_moe", names_in_layers(PRE_NORMS, PROJECTIONS, QK_NORMS, GATED_MLP, QWEN_EXPERTS)),
    "gemma": Stored("gemma", LLAMA_NAMES, norm_offset=1.0),
    "gemma2": Stored("gemma2", names_in_layers(SANDWICH_NORMS, PROJECTIONS, GATED_MLP), norm_offset=1.0),
    "gemma3": Stored("gemma3_text", names_in_layers(SANDWICH_NORMS, PROJECTIONS, QK_NORMS, GATED_MLP), norm_offset=1.0),
    "phi3": Stored("phi3", names_in_layers(PHI3_LAYER)),
    "olmo2": Stored("olmo2", names_in_layers(POST_NORMS, PROJECTIONS, QK_NORMS, GATED_MLP)),
    "glm4": Stored("glm4", names_in_layers(GLM4_NORMS, PROJECTIONS, PACKED_MLP)),
    "gpt-oss": Stored("gpt_oss", names_in_layers(GPT_OSS_LAYER), alternating=GPT_OSS_GATES),
}
# Families that are stored as "llama" too: with experts, and with a window, which llama.cpp does not apply.
MIXTRAL = Stored("mixtral", names_in_layers(PRE_NORMS, PROJECTIONS, MIXTRAL_EXPERTS), interleaved=True)
MISTRAL = Stored("mistral", LLAMA_NAMES, interleaved=True)


# Those that the package `gguf` encodes.
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4", "tq2_0", "tq1_0")
SUFFIX = ".gguf"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of the one model that a folder has; none if it has no such files. Raises CheckpointError if they
    are of several models, or if a part is missing."""
    files = sorted(file for file in folder.glob("*") if is_gguf(file))
    if not files:
        return []
    parts = all_parts(files[0])
    others = [file.name for file in files if file not in parts]
    if others:
        raise CheckpointError(
            f"{folder}: has several GGUF models, {', '.join([files[0].name, *others])}: pass the path of one of them"
        )
    return parts


def all_parts(file: Path) -> list[Path]:
    """The files of the model that a GGUF file belongs to, in order. Raises CheckpointError if one is missing."""
    parts = [file.with_name(name) for name in names_of_parts(file.name)]
    missing = next((part for part in parts if part != file and not part.exists()), None)
    if missing is not None:
        raise CheckpointError(f"{missing}: is missing, a part of the model of {file.name}; download all parts")
    return parts


def names_of_parts(name: str) -> list[str]:
    """The names of all parts of the model that a file of this name belongs to, in order."""
    found = PART.fullmatch(name)
    if not found or found[2] > found[3]:
        return [name]
    stem, _, count = found.groups()
    return [f"{stem}-{number:05d}-of-{count}{SUFFIX}" for number in range(1, int(count) + 1)]
