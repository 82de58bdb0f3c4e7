"""Writes a model as a GGUF file that llama.cpp reads, tensor by tensor.

Matrices are encoded as asked. Norms, biases and routers stay in fp32, as in llama.cpp's own files. The embedding and
the head have at least 8 bits: with fewer they cost more than they save.
"""

import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligermodels.configs.base import Config
from ligermodels.configs.features import SlidingWindowConfig
from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION, Rope
from ligermodels.errors import InputError, suggest
from ligermodels.weights.gguf.config import hub_config
from ligermodels.weights.gguf.fields import COMMON, FURTHER, rope_factors, rope_metadata
from ligermodels.weights.gguf.header import GgufHeader, TensorInfo, as_read, import_gguf
from ligermodels.weights.gguf.names import GGUF_TYPES, MISTRAL, MIXTRAL, STORED, Stored
from ligermodels.weights.gguf.tokenizer import Vocabulary
from ligermodels.weights.gguf.tokenizer_metadata import TokenizerParts, tokenizer_metadata
from ligermodels.weights.mapping import Rule, name_translator, plan_pieces
from ligermodels.weights.module import HubModule
from ligermodels.weights.stored import Shape

TYPE_OF_DTYPE = {torch.float32: "f32", torch.float64: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
WITH_8_BITS = ("f32", "f16", "bf16", "q8_0")
FILE_TYPES = {"f32": "ALL_F32", "mxfp4": "MOSTLY_MXFP4_MOE"}  # of others, MOSTLY_ and the type
QUANTISATION_VERSION = 2
LEAST_IN_BLOCKS = 2.0**-100  # smaller values are written as zeros: scales in f16 cannot have them, 1 / scale overflows
WITHOUT_BLOCKS = ("f32", "f16", "bf16")
EMBEDDING_AND_HEAD = ("token_embd.weight", "output.weight")
ROUTER, SINKS, EXPERTS = ".ffn_gate_inp.", ".attn_sinks.", "_exps.weight"
# Fields that change nothing that is computed. Those of windows do: the windows are compared, not the fields.
WITHOUT_EFFECT = {
    *("raw", "model_type", "initializer_range", "attention_dropout", "pad_token_id", "router_aux_loss_coef"),
    *("output_router_logits", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers"),
    *("sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval", "rope_local_base_freq", "hidden_act"),
}


@dataclass(frozen=True)
class PlannedFile:
    """A tensor of the file. hub: the Hub's tensors that it has, one, or those of all experts.

    type: its encoding. heads: whose rotary pairs are interleaved; 0 if they are not. offset: is added to its values.
    first: of rows that alternate on the Hub, whether it has the first, third, ... or the second, fourth, ...; None for
    all rows.
    """

    name: str
    hub: tuple[str, ...]
    shape: Shape
    type: str
    heads: int = 0
    offset: float = 0.0
    first: bool | None = None


def known_type(name: str | None, dtype: torch.dtype) -> str:
    """The type of a file's matrices, by its name; None for that of the model's dtype. Raises InputError."""
    if name is None:
        return TYPE_OF_DTYPE[dtype]
    if name.lower() not in GGUF_TYPES:
        raise InputError(f"gguf_type is {name!r}{suggest(name.lower(), GGUF_TYPES)}")
    return name.lower()


def prepare_gguf(
    model: HubModule, file: Path, kind: str, tokenizer: TokenizerParts, end_ids: Sequence[int]
) -> "GgufFile":
    """Everything of a file but the values of its tensors. Raises InputError for what GGUF cannot have."""
    gguf, config = import_gguf(file), model.config
    architecture, stored = architecture_of(config)
    rules = next(iter(model.quantised_weight_rules()), model.weight_rules())
    shapes = {name: tensor.shape for name, tensor in model.stored_tensors().items()}
    pieces = {piece.tensor: piece.shape for piece in plan_pieces(shapes, rules)}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if stored.interleaved else {}
    outputs = plan_outputs(pieces, stored, heads)
    if kind == "mxfp4" and not any(output.name.endswith(EXPERTS) for output in outputs):
        raise InputError("gguf_type mxfp4 is for experts, of which the model has none; choose another type")
    outputs = with_types(outputs, kind, gguf)
    metadata = {
        "general.type": "model",
        "general.file_type": int(gguf.LlamaFileType[FILE_TYPES.get(kind, f"MOSTLY_{kind.upper()}")]),
        "general.quantization_version": QUANTISATION_VERSION,
        **config_metadata(config),
        **tokenizer_metadata(tokenizer, file.stem, config.vocab_size, list(end_ids)),
    }
    factors = rope_factors(config.ropes[FULL_ATTENTION], config.head_dim)
    planned = GgufFile(architecture, metadata, factors, outputs, rules)
    refuse_lost_settings(config, planned.header(file, gguf), factors)
    return planned


@dataclass(frozen=True)
class GgufFile:
    """A file to be written. factors: the tensors of RoPE's scaling. rules: of the layout that gives `outputs`."""

    architecture: str
    metadata: Mapping[str, Any]
    factors: Mapping[str, np.ndarray]
    outputs: Sequence[PlannedFile]
    rules: tuple[Rule, ...]

    def header(self, file: Path, gguf: ModuleType) -> GgufHeader:
        """What a reader finds in the file, but for the places of tensors."""
        shapes = {name: ("f32", values.shape) for name, values in self.factors.items()}
        shapes |= {output.name: (output.type, output.shape) for output in self.outputs}
        infos = dict[str, TensorInfo]()
        for name, (type_name, shape) in shapes.items():
            kind = encoding(gguf, type_name)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            infos[name] = TensorInfo(file, int(kind), block, block_bytes, shape, begin=0)
        return GgufHeader(file, {"general.architecture": self.architecture} | as_read(self.metadata), infos)

    def write(self, file: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Writes the file. tensors: the Hub's, fp32, in the order of the rules. Raises InputError."""
        gguf = import_gguf(file)
        writer = gguf.GGUFWriter(file, self.architecture)
        for key, value in self.metadata.items():
            add_value(writer, key, value)
        for name, info in self.header(file, gguf).tensors.items():
            kind = gguf.GGMLQuantizationType(info.type)
            dtype = {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)
            shape = gguf.quant_shape_to_byte_shape(info.shape, kind) if dtype is np.uint8 else info.shape
            writer.add_tensor_info(name, shape, np.dtype(dtype), info.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        try:
            for values in (*self.factors.values(), *encoded_outputs(self.outputs, tensors, gguf)):
                writer.write_tensor_data(values)
        finally:
            writer.close()


def encoded_outputs(
    outputs: Sequence[PlannedFile], tensors: Iterator[tuple[str, Tensor]], gguf: ModuleType
) -> Iterator[np.ndarray]:
    """The bytes of all outputs, in order. Raises InputError for a value that its type cannot have."""
    of_hub: dict[str, list[PlannedFile]] = {}
    for output in outputs:
        for name in output.hub:
            of_hub.setdefault(name, []).append(output)
    parts: dict[str, list[np.ndarray]] = {output.name: [] for output in outputs}
    waiting = deque(outputs)
    for name, tensor in tensors:
        values = tensor.float().cpu().numpy()
        for output in of_hub[name]:
            parts[output.name].append(encode(values, output, gguf))
        while waiting and len(parts[waiting[0].name]) == len(waiting[0].hub):
            done = parts.pop(waiting.popleft().name)
            yield done[0] if len(done) == 1 else np.stack(done)


def encode(values: np.ndarray, output: PlannedFile, gguf: ModuleType) -> np.ndarray:
    """The bytes of a tensor of the Hub in an output."""
    if output.first is not None:
        values = values[:, 0 if output.first else 1 :: 2]
    if output.heads:
        halves = values.reshape(output.heads, 2, -1, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    values = np.ascontiguousarray(values + np.float32(output.offset))
    if not np.isfinite(values).all():
        raise InputError(f"{output.name}: has values that are not finite, which GGUF cannot have")
    if output.type not in WITHOUT_BLOCKS:
        values[np.abs(values) < LEAST_IN_BLOCKS] = 0.0
    try:
        with np.errstate(over="raise", invalid="raise"):
            return gguf.quants.quantize(values, encoding(gguf, output.type))
    except FloatingPointError:
        largest = np.abs(values).max()
        raise InputError(f"{output.name}: has a value of {largest}, too large for {output.type}; choose bf16") from None


def plan_outputs(pieces: Mapping[str, Shape], stored: Stored, heads: Mapping[str, int]) -> list[PlannedFile]:
    """The tensors of the file, in the order in which their first parts come. Raises InputError."""
    outputs: dict[str, PlannedFile] = {}
    for hub, shape in pieces.items():
        offset = stored.norm_offset if hub.endswith("norm.weight") else 0.0
        projection = hub.split(".self_attn.")[-1].split(".")[0]
        for name, first, stacked in names_of_tensors(hub, stored):
            if stacked and name in outputs:
                earlier = outputs[name]
                outputs[name] = replace(earlier, hub=(*earlier.hub, hub), shape=(earlier.shape[0] + 1, *shape))
                continue
            rows = shape if first is None else (shape[0], shape[1] // 2, *shape[2:])
            full = (1, *rows) if stacked else rows
            outputs[name] = PlannedFile(name, (hub,), full, "f32", heads.get(projection, 0), offset, first)
    return list(outputs.values())


def names_of_tensors(hub: str, stored: Stored) -> list[tuple[str, bool | None, bool]]:
    """(name, first, stacked) of the tensors that have a tensor of the Hub; see `PlannedFile`. Raises InputError."""
    for pair, pattern in stored.alternating.items():
        if translate := name_translator(pattern, hub):
            return [(translate(theirs), theirs == pair[0], False) for theirs in pair]
    for theirs, pattern in stored.names.items():
        if translate := name_translator(pattern, hub):
            return [(translate(theirs), None, pattern.count("{}") > theirs.count("{}"))]
    raise InputError(f"{hub}: GGUF has no place for it: export a folder instead")


def wanted_type(output: PlannedFile, kind: str) -> str:
    """The type of a tensor in a file whose matrices are of type `kind`."""
    if len(output.shape) == 1 or any(part in output.name for part in ("_norm.", ".bias", ROUTER, SINKS)):
        return "f32"
    if kind == "mxfp4":
        return kind if output.name.endswith(EXPERTS) else "q8_0"
    return "q8_0" if output.name in EMBEDDING_AND_HEAD and kind not in WITH_8_BITS else kind


def with_types(outputs: Sequence[PlannedFile], kind: str, gguf: ModuleType) -> list[PlannedFile]:
    """The outputs with their types. Rows that are no whole blocks get the next type, and a warning says so."""
    typed, others = [], dict[tuple[str, str], int]()
    for output in outputs:
        wanted = wanted_type(output, kind)
        blocks = {choice: gguf.GGML_QUANT_SIZES[encoding(gguf, choice)][0] for choice in (wanted, "q8_0", "f16")}
        found = next(choice for choice, block in blocks.items() if output.shape[-1] % block == 0)
        if found != wanted:
            others[wanted, found] = others.get((wanted, found), 0) + 1
        typed.append(replace(output, type=found))
    for (wanted, found), count in others.items():
        size = gguf.GGML_QUANT_SIZES[encoding(gguf, wanted)][0]
        warnings.warn(
            f"{count} of the tensors are in {found} instead of {wanted}, which needs rows of a multiple of {size} "
            "numbers", stacklevel=4,
        )  # fmt: skip
    return typed


def encoding(gguf: ModuleType, kind: str) -> Any:
    return gguf.GGMLQuantizationType[kind.upper()]


def add_value(writer: Any, key: str, value: Any) -> None:
    """Adds an entry of metadata: whole numbers with 32 bits, as llama.cpp expects them."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def architecture_of(config: Config) -> tuple[str, Stored]:
    """The value of general.architecture for a family, and how it is stored. Raises InputError if it has none."""
    stored = {form.model_type: (name, form) for name, form in STORED.items()}
    stored |= {form.model_type: ("llama", form) for form in (MIXTRAL, MISTRAL)}
    if config.model_type not in stored:
        raise InputError(
            f"config.json: model_type {config.model_type!r} is not written as GGUF; supported: "
            f"{', '.join(sorted(stored))}; export a folder, and convert that with llama.cpp's script"
        )
    return stored[config.model_type]


def config_metadata(config: Config) -> dict[str, Any]:
    """The metadata of a configuration, by its keys. Raises InputError if the family is not written as GGUF."""
    architecture, _ = architecture_of(config)
    rope = config.ropes[FULL_ATTENTION]
    values = dict(vars(config))
    if SLIDING_ATTENTION in config.ropes:
        values["rope_local_base_freq"] = config.ropes[SLIDING_ATTENTION].rope_theta
    fields = {field.key: (field, values[field.hub]) for field in (*COMMON, *FURTHER.get(config.model_type, ()))}
    found = {key: field.kind(value or 0) for key, (field, value) in fields.items()}
    found |= {
        "vocab_size": config.vocab_size, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": rope.rotary_dim(config.head_dim), "rope.freq_base": float(rope.rope_theta),
        **rope_metadata(rope, config.max_position_embeddings),
    }  # fmt: skip
    return {f"{architecture}.{key}": value for key, value in found.items()}


def refuse_lost_settings(config: Config, header: GgufHeader, factors: Mapping[str, np.ndarray]) -> None:
    """Raises InputError if a reader of the file would get another model than this configuration's.

    header: of the file to be written. factors: the values of the tensors of RoPE's scaling.
    """
    raw = hub_config(header, Vocabulary(header), lambda name: factors[name].astype(np.float64))
    read = type(config).from_dict(raw | {"model_type": config.model_type})
    fields = {name for name in vars(config) if name not in WITHOUT_EFFECT and name != "ropes"}
    lost = [name for name in sorted(fields) if (getattr(read, name) or None) != (getattr(config, name) or None)]
    lost += [] if ropes_in_effect(read) == ropes_in_effect(config) else ["rope_scaling or rope_parameters"]
    lost += [] if windows(read) == windows(config) else ["sliding_window or layer_types"]
    if config.model_type == "mistral" and (window := windows(config)[0][0]) is not None:
        warnings.warn(
            f"{header.file}: llama.cpp does not apply Mistral's sliding window of {window} tokens", stacklevel=2
        )
    lost += [] if read.activation == config.activation else ["hidden_act"]
    if lost:
        raise InputError(
            f"config.json: {', '.join(lost)}: GGUF cannot say it for {config.model_type}, and llama.cpp would compute "
            "something else: export a folder instead"
        )


def ropes_in_effect(config: Config) -> dict[str, Rope]:
    """The rotary embeddings, without a trained length that has no effect."""
    return {
        kind: replace(rope, original_max_position_embeddings=None) if rope.rope_type == "default" else rope
        for kind, rope in config.ropes.items()
    }


def windows(config: Config) -> list[tuple[int | None, bool]]:
    """The window of each layer, and whether it has RoPE."""
    has_rope = getattr(config, "has_rope", lambda layer: True)
    layers = range(config.num_hidden_layers)
    if not isinstance(config, SlidingWindowConfig):
        return [(None, has_rope(layer)) for layer in layers]
    return [(config.window(layer), has_rope(layer)) for layer in layers]
