"""Exports a model as one GGUF file, which llama.cpp and Ollama run, and finds GGUF models on the Hub.

A GGUF model of the Hub is owner/model:NAME, where NAME is one of the repository's files, or a part of its name that no
other model there has, such as Q4_K_M.
"""

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from ligermodels.errors import CheckpointError, HubError, InputError
from ligermodels.hub.download import download, hub_errors, list_files
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.files import has_tokenizer
from ligermodels.weights.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE, end_of_text_ids
from ligermodels.weights.exporting import hub_weights
from ligermodels.weights.files import shortened
from ligermodels.weights.gguf.folder import gguf_folder
from ligermodels.weights.gguf.names import SUFFIX, is_gguf, names_of_parts
from ligermodels.weights.gguf.tokenizer_metadata import TokenizerParts
from ligermodels.weights.gguf.writing import known_type, prepare_gguf
from ligermodels.weights.writing import atomic_path, write_on_first_rank

TOWER_FILES = "mmproj"  # in the names of files that have a vision tower alone


def export_gguf(
    model: CausalLM, file: str | Path, *, gguf_type: str | None = None, tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
) -> None:  # fmt: skip
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
    tokenizer = tokenizer or stored_tokenizer(model)
    templates = {name: template.source for name, template in tokenizer.templates.items()}
    parts = TokenizerParts(tokenizer.file, tokenizer.tokenizer, tokenizer.named, templates)
    ends = end_of_text_ids(model.generation_config, GENERATION_CONFIG_FILE)  # of a text or a turn
    ends = ends or end_of_text_ids(model.config.raw, CONFIG_FILE)
    planned = prepare_gguf(model, file, known_type(gguf_type, model.dtype), parts, ends)
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


def hub_gguf(name: str, revision: str | None, token: str | None) -> Path | None:
    """Downloads a GGUF model of the Hub; returns the folder that shows it. None if the name has no colon. Raises
    HubError, or CheckpointError for a file that is damaged or not supported."""
    repository, colon, wanted = name.partition(":")
    if not colon or "/" not in repository:
        return None
    with hub_errors(repository, revision, token):
        file = wanted if is_gguf(Path(wanted)) else find_gguf(repository, wanted, revision, token)
        parts = names_of_parts(file)
        snapshot = download(repository, parts, revision, token)
    missing = [part for part in parts if not (snapshot / part).exists()]
    if missing:
        raise HubError(f"{repository}: has no file {missing[0]}; {what_there_is(repository, revision, token)}")
    return gguf_folder(snapshot / file)


def find_gguf(repository: str, wanted: str, revision: str | None, token: str | None) -> str:
    """The repository's file, the first of its parts, whose name has `wanted`. Raises HubError."""
    files = [file for file in gguf_names(repository, revision, token) if wanted.lower() in file.lower()]
    if len(files) != 1:
        found = f"several GGUF models are {wanted!r}: {shortened(files)}" if files else f"no GGUF model is {wanted!r}"
        raise HubError(f"{repository}: {found}; {what_there_is(repository, revision, token)}")
    return files[0]


def gguf_names(repository: str, revision: str | None, token: str | None) -> list[str]:
    """The GGUF models in the root of a repository, each by its first part."""
    files = [
        file for file in list_files(repository, revision, token) if is_gguf(Path(file)) and TOWER_FILES not in file
    ]
    return sorted({names_of_parts(file)[0] for file in files})


def what_there_is(repository: str, revision: str | None, token: str | None) -> str:
    """The end of a message: which GGUF models a repository has."""
    files = gguf_names(repository, revision, token)
    return f"it has {', '.join(f'{repository}:{file}' for file in files[:8])}" if files else "it has no GGUF model"
