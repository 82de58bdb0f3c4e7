"""Exports a model as one GGUF file, which llama.cpp and Ollama run."""

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.files import has_tokenizer
from ligermodels.weights.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE, end_of_text_ids
from ligermodels.weights.exporting import hub_weights
from ligermodels.weights.gguf.finding import SUFFIX, is_gguf
from ligermodels.weights.gguf.tokenizer_metadata import TokenizerParts
from ligermodels.weights.gguf.writing import known_type, prepare_gguf
from ligermodels.weights.writing import atomic_path, write_on_first_rank


def export_gguf(
    model: CausalLM,
    file: str | Path,
    *,
    gguf_type: str | None = None,
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
) -> None:
    """Exports a model with its tokenizer and chat template to a GGUF file. LoRA is merged; the model is not changed.

    If the model is sharded by FSDP2, every rank must call; rank 0 writes, and at most one parameter is gathered at a
    time.
    file: must not exist, and end with .gguf. It is written atomically.
    gguf_type: of the matrices: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, mxfp4 (experts only), tq2_0 or tq1_0; None
    for the model's dtype. Norms, biases and routers are written in fp32; the embedding and the head with at least 8
    bits.
    tokenizer: None for that of the folder that the model was loaded from.
    overwrite: the file may exist.
    Raises InputError for a family, a setting or a tokenizer that GGUF cannot have, CheckpointError if the file exists
    or cannot be written.
    """
    file = Path(file).expanduser().absolute()
    refuse_target(file, overwrite)
    parts = tokenizer_parts(tokenizer or stored_tokenizer(model))
    planned = prepare_gguf(model, file, known_type(gguf_type, model.dtype), parts, end_ids_of(model))
    tensors = hub_weights(model, torch.float32, planned.rules)
    sharded = any(isinstance(tensor, DTensor) for tensor in model.stored_tensors().values())

    def write() -> None:
        with atomic_path(file, overwrite) as temporary:
            planned.write(temporary, tensors)

    write_on_first_rank(write, tensors, sharded)


def refuse_target(file: Path, overwrite: bool) -> None:
    """Raises InputError unless `file` can be written as GGUF."""
    if not is_gguf(file):
        raise InputError(f"{file}: must end with {SUFFIX}")
    if file.is_dir() or (file.exists() and not overwrite):
        raise CheckpointError(f"{file}: exists; export to another file, or overwrite it")


def stored_tokenizer(model: CausalLM) -> Tokenizer:
    """The tokenizer of the folder that a model was loaded from. Raises InputError if there is none."""
    if model.source is None or not has_tokenizer(model.source):
        raise InputError(f"{model.source or 'the model'}: has no tokenizer, which a GGUF file needs; pass one")
    return Tokenizer.from_folder(model.source)


def tokenizer_parts(tokenizer: Tokenizer) -> TokenizerParts:
    templates = {name: template.source for name, template in tokenizer.templates.items()}
    return TokenizerParts(tokenizer.file, tokenizer.tokenizer, tokenizer.named, templates)


def end_ids_of(model: CausalLM) -> list[int]:
    """The ids that end a text or a turn."""
    ids = end_of_text_ids(model.generation_config, GENERATION_CONFIG_FILE)
    return ids or end_of_text_ids(model.config.raw, CONFIG_FILE)
