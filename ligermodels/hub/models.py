"""Loads, creates and exports models: the functions of the public API.

This is the only module that knows both the list of architectures and `download`. Remote code is never run.
"""

import copy
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ligermodels.adapters.quantising import multiply_in_fp8, quantise
from ligermodels.architectures import ARCHITECTURES
from ligermodels.configs.base import Config
from ligermodels.configs.quantisation import scheme_of
from ligermodels.errors import CheckpointError, ConfigError, HubError, InputError, suggest_closest
from ligermodels.hub.download import MODEL_FILES, adapter_folder, fetch_files, fetch_weights, hub_errors
from ligermodels.hub.gguf import gguf_names, hub_gguf
from ligermodels.hub.names import DEFAULT_SIZE, family_of, known_models, local_folder, nearest_model
from ligermodels.images.inputs import Processor
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.initialization import NoInitialization
from ligermodels.layers.reward_model import RewardModel, initialize_new_parameters, is_classifier, reward_model_class
from ligermodels.tokenizer import Tokenizer, check_vocabulary
from ligermodels.tokenizer.files import has_tokenizer
from ligermodels.weights.adapter_config import ADAPTER_CONFIG_FILE
from ligermodels.weights.config_file import CONFIG_FILE, check_objects, read_config, read_generation_config
from ligermodels.weights.exporting import export_weights
from ligermodels.weights.files import INDEX_FILE, open_checkpoint, shortened
from ligermodels.weights.gguf.folder import in_terms_of_gguf, shown_file
from ligermodels.weights.loading import (
    DTYPES_BY_NAME,
    LoadPlan,
    fill_weights,
    float_dtype,
    most_common_dtype,
    plan_loading,
)
from ligermodels.weights.stored import Checkpoint

MIN_TENSORS_PER_LAYER = 4  # in any layout: a norm, the input and output of attention, a feed-forward layer


def load(
    name_or_folder: str | Path, *, dtype: torch.dtype | str | None = None, device: int | str | torch.device = "cpu",
    revision: str | None = None, token: str | None = None, allow_unexpected: bool = False, reward_model: bool = False,
    quantize: str | None = None,
) -> CausalLM:  # fmt: skip
    """Loads a model with the weights of a Hub repository or a folder, in evaluation mode.

    A checkpoint of a sequence classification with one label becomes a `RewardModel`.

    dtype: of the parameters, as torch.bfloat16 or "bfloat16"; None for the dtype in config.json, or else that of the
    stored weights. A few that families compute in fp32, such as A_log, stay in fp32 (docs/models.md).
    device: an int means a GPU. The weights are streamed there; the host holds buffers of 192 MiB, never the model.
    allow_unexpected: ignore tensors that the model has no place for, with a warning, instead of raising an error.
    reward_model: the checkpoint of a language model becomes a `RewardModel` too, with a new score head: a warning says
    so. Its head is left out, its values are those of seed 0.
    quantize: a format for the linears and routed experts of the blocks, "nf4" or "fp8": they are frozen and quantised
    while they are read, one at a time; `add_lora` trains on them. What a checkpoint has in FP8 stays so with "fp8",
    what it has in MXFP4 with "mxfp4". The other weights have `dtype`, in which all are used.
    Raises HubError, ConfigError or CheckpointError (all are InputError) before memory for the weights is allocated.
    """
    wanted = None if dtype is None else float_dtype(dtype)
    folder = resolve(name_or_folder, revision=revision, token=token)
    return load_folder(folder, read_config(folder), wanted, device, allow_unexpected, reward_model, quantize)


def load_folder(
    folder: Path, raw: dict[str, Any], dtype: torch.dtype | None = None, device: int | str | torch.device = "cpu",
    allow_unexpected: bool = False, reward_model: bool = False, quantize: str | None = None,
) -> CausalLM:  # fmt: skip
    """`load` of a folder, with `raw` in place of the content of its config.json."""
    generation_config = read_generation_config(folder)
    architecture, config = select_architecture(raw, folder / CONFIG_FILE, reward_model=reward_model)
    checkpoint = open_checkpoint(folder)
    refuse_layers_without_tensors(config, checkpoint)
    model = build_on_meta(architecture, config, dtype or checkpoint_dtype(raw, checkpoint))
    plan = plan_loading(model, checkpoint, allow_unexpected=allow_unexpected)
    quantise_as_stored(model, plan, quantize)
    fill_weights(model.to_empty(device=device), plan)
    if model.new_parameters:
        initialize_new_parameters(model, seed=0)
        warnings.warn(f"{folder}: has no score head; the reward model gets a new one, to be trained", stacklevel=3)
    model.source, model.generation_config = folder, generation_config
    return model.eval()


def quantise_as_stored(model: CausalLM, plan: LoadPlan, quantize: str | None) -> None:
    """Quantises the weights of a model that is still on the meta device: as `quantize` says, or as they are stored.

    Weights in FP8 or MXFP4 stay so if `quantize` names their format, and are dequantised otherwise. Raises InputError
    if a checkpoint in NF4 is to be quantised otherwise.
    """
    scheme = scheme_of(model.config.raw)
    stored = plan.quantised_parameters if scheme is not None and scheme in ("nf4", quantize) else ()
    if stored and quantize not in (None, scheme):
        raise InputError(
            f"{plan.checkpoint.folder}: is in NF4 already; leave out quantize={quantize!r}, or load the original"
        )
    if stored and scheme is not None:
        quantise(model, scheme, stored, plan.rules, plan.dense_parts)
    elif quantize is not None:
        quantise(model, quantize)


def quantise_on_meta(model: CausalLM, folder: Path, quantize: str | None, *, float8: bool = False) -> bool:
    """Quantises weights of a model on the meta device, whose values `load_weights` will read from `folder`. Returns
    whether it has quantised any: as `quantize` says, or as the folder stores them. float8: the products of a base
    that `quantize` has put in FP8 are FP8 too. Raises InputError."""
    scheme = scheme_of(model.config.raw)
    stored = scheme is not None and scheme in ("nf4", quantize)
    if stored:
        quantise_as_stored(model, plan_loading(model, open_checkpoint(folder)), quantize)
    elif quantize is not None:
        quantise(model, quantize)
    if float8 and quantize == "fp8":
        multiply_in_fp8(model)
    return stored or quantize is not None


def load_tokenizer(
    name_or_folder: str | Path, *, adapter: str | Path | None = None, revision: str | None = None,
    token: str | None = None,
) -> Tokenizer:  # fmt: skip
    """Loads the tokenizer of a Hub repository or a folder.

    adapter: a LoRA adapter in PEFT's format that will be used with the model, a Hub repository or a folder. If it
    contains a tokenizer, it was trained with that, so that tokenizer is loaded instead.
    Raises HubError; CheckpointError if there is no tokenizer, or if it has more ids than the model's vocabulary.
    """
    folder = local_folder(name_or_folder, revision)
    if folder is None or not has_tokenizer(folder):
        folder = local_model_folder(name_or_folder, revision) or fetch_all_but_weights(
            str(name_or_folder), revision, token
        )
    of_adapter = None if adapter is None else adapter_folder(adapter, token=token)
    tokenizer = Tokenizer.from_folder(of_adapter if of_adapter and has_tokenizer(of_adapter) else folder)
    config = read_config(folder) if (folder / CONFIG_FILE).exists() else {}
    for part in (config, config.get("text_config")):  # loading the model reports all other faults of the config
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            check_vocabulary(tokenizer, part["vocab_size"], folder / CONFIG_FILE)
    return tokenizer


def load_processor(name_or_folder: str | Path, *, revision: str | None = None, token: str | None = None) -> Processor:
    """Loads the tokenizer and the image processor of a vision-language model, of a Hub repository or a folder. Raises
    HubError; CheckpointError, which names the file and the field, if one of them is missing or not supported."""
    folder = local_model_folder(name_or_folder, revision) or fetch_all_but_weights(str(name_or_folder), revision, token)
    return Processor.from_folder(folder, load_tokenizer(folder))


def create(
    architecture_or_config: str | Path | dict[str, Any], *, size: str | None = None,
    dtype: torch.dtype | str = torch.float32, device: str | torch.device = "cpu", seed: int = 0,
    reward_model: bool = False,
) -> CausalLM:  # fmt: skip
    """Creates a model with random weights, in training mode. On the meta device it has no weights.

    architecture_or_config: a name from `list_architectures()`, with a preset as llama:8b or in `size`, else the
    smallest; the Hub id, folder or .gguf file of a checkpoint, of which only the configuration is read; or a
    config.json as a dict or its path.
    reward_model: a score head instead of the language-model head, also for the configuration of a language model.
    """
    raw, origin = read_preset_or_config(architecture_or_config, size)
    selected = select_architecture(raw, origin, reward_model=reward_model)
    model = build_on_meta(*selected, float_dtype(dtype))
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    model.initialize(seed)
    return model


def export(
    model: CausalLM, folder: str | Path, *, dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None, also: Callable[[Path], None] | None = None, overwrite: bool = False,
) -> None:  # fmt: skip
    """Exports a model to a folder that transformers 4 and 5 and vLLM read. LoRA is merged; the model is not changed.

    If the model is sharded by FSDP2, every rank must call; rank 0 writes, and at most one parameter is gathered at a
    time.
    folder: must be empty or not exist. It is written atomically.
    dtype: of the written weights: float64, float32, float16 or bfloat16; None for the model's dtype. Weights that the
    model keeps in fp32 are written in it if they were read in it.
    max_shard_size: bytes per file, as a number or as "5GB" or "2GiB"; None for the files of the source, or else 5GB.
    also: a function that writes further files, such as a tokenizer, into the temporary folder it gets.
    overwrite: the folder may also be an earlier export, which stays until the new one is complete. A folder with files
    that no export writes is refused.
    Raises CheckpointError if `folder` is in use or cannot be written, InputError for an invalid dtype or size.
    """
    export_weights(
        model, folder, source=model.source, dtype=dtype, max_shard_size=max_shard_size, also=also, overwrite=overwrite
    )


def build_on_meta(architecture: type[CausalLM], config: Config, dtype: torch.dtype = torch.float32) -> CausalLM:
    with torch.device("meta"), NoInitialization():
        model = architecture(config)
    if isinstance(model, RewardModel) and not is_classifier(config.raw):
        model.with_new_head()
    return model if dtype == torch.float32 else model.to(dtype)


def select_architecture(
    raw: dict[str, Any], origin: str | Path, *, reward_model: bool = False
) -> tuple[type[CausalLM], Config]:
    """The architecture of a raw configuration and its parsed Config. Raises HubError or ConfigError.

    origin: names the configuration in errors. reward_model: as for `create`.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise HubError(f"{origin}: model_type {model_type!r} is not supported{meant_family(str(model_type))}")
    check_objects(raw)
    architecture = ARCHITECTURES[model_type].of_config(raw)
    try:
        config = architecture.Config.from_dict(raw)
    except ConfigError as error:
        raise in_terms_of_gguf(error, model_type, origin) from None
    if reward_model or is_classifier(raw):
        architecture = reward_model_class(architecture, model_type)
    return architecture, config


def refuse_layers_without_tensors(config: Config, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if there are too few tensors. Called before the build: many layers take seconds."""
    if config.num_hidden_layers * MIN_TENSORS_PER_LAYER > len(checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.folder}: num_hidden_layers of its {checkpoint.description} is {config.num_hidden_layers}, "
            f"but the weights are {len(checkpoint.tensors)} tensors; correct it, or download the weights again"
        )


def read_preset_or_config(source: str | Path | dict[str, Any], size: str | None) -> tuple[dict[str, Any], str | Path]:
    """The raw configuration of a preset, a dict or a file, and its name in errors."""
    if isinstance(source, str) and family_of(source) in ARCHITECTURES:
        return read_preset(source, size), source
    if size is not None:
        raise HubError(f"{source}: size {size!r} needs the name of an architecture{meant_family(str(source))}")
    if isinstance(source, dict):
        return source, "config"
    path = Path(source).expanduser()
    if not path.exists() and "/" not in str(source):
        raise HubError(f"{source}: is neither an architecture nor a config.json{meant_family(str(source))}")
    folder = path.parent if path.name == CONFIG_FILE else local_folder(source, None) or fetch_config(str(source))
    return read_config(folder), folder / CONFIG_FILE


def read_preset(name: str, given: str | None) -> dict[str, Any]:
    """The raw configuration of a preset. Its size is in the name or given beside it, else it is the smallest."""
    family, colon, named = name.partition(":")
    sizes = ARCHITECTURES[family].SIZES
    if not sizes:
        raise HubError(f"{family}: has no presets; load a checkpoint, or pass a config.json")
    if colon and given is not None:
        raise HubError(f"{name}: has a size, and size={given!r} is given too; leave one out")
    size = named if colon else DEFAULT_SIZE if given is None else given
    if size not in sizes:
        raise HubError(f"{family}: size {size!r} is not a preset{meant_size(size, sizes)}")
    return copy.deepcopy(sizes[size])


def meant_family(wrong: str) -> str:
    """The end of a message about an unknown family: the closest one, if one is close; what lists all."""
    meant = nearest_model(wrong, ARCHITECTURES)
    return f"{f'; did you mean {meant!r}?' if meant else ''}; `ligermodels list` shows all"


def meant_size(wrong: str, sizes: Iterable[str]) -> str:
    """The end of a message about an unknown preset: the one of the nearest number of parameters, or else of the most
    similar name, and all there are."""
    numbers = {size: number for size in sizes if (number := parameters_in(size))}
    wanted = parameters_in(wrong)
    near = min(numbers, key=lambda size: abs(math.log(numbers[size] / wanted))) if wanted and numbers else None
    hint = f"; did you mean {near!r}?" if near else suggest_closest(wrong, sizes)
    return f"{hint}; choose from: {', '.join(sizes)}"


def parameters_in(size: str) -> float | None:
    """The number of parameters that the name of a preset says: 7e9 of 2-7b; None if it says none."""
    match = re.search(r"(\d+(?:\.\d+)?)([mb])", size.lower())
    return float(match[1]) * {"m": 1e6, "b": 1e9}[match[2]] if match else None


def checkpoint_dtype(raw: dict[str, Any], checkpoint: Checkpoint) -> torch.dtype:
    """The dtype in config.json, else that of most floating-point weights. Raises CheckpointError."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        return most_common_dtype(checkpoint.tensors.values())
    if not isinstance(name, str) or name not in DTYPES_BY_NAME:
        file = checkpoint.folder / CONFIG_FILE
        raise CheckpointError(f"{file}: dtype {name!r} is not one of {', '.join(DTYPES_BY_NAME)}; pass a dtype")
    return DTYPES_BY_NAME[name]


def resolve(name_or_folder: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """The folder of a model: a local folder, or one in the Hub's cache, downloaded if necessary.

    revision: a branch, tag or commit of the Hub repository. token: overrides HF_TOKEN and the login token.
    The configuration is downloaded first: an unsupported model is refused before its weights are downloaded.
    Raises HubError, ConfigError or CheckpointError.
    """
    return complete_model(name_or_folder, all_but_weights(name_or_folder, revision, token), token)


def all_but_weights(name_or_folder: str | Path, revision: str | None, token: str | None) -> Path:
    """A local folder, or the snapshot of a Hub repository of which everything but the weights has been downloaded."""
    folder = local_folder(name_or_folder, revision)
    if folder is not None:
        return folder
    name = str(name_or_folder)
    if family_of(name) in ARCHITECTURES:
        raise HubError(f"{name}: is an architecture and has no weights to load; create a model, or pass a checkpoint")
    return fetch_all_but_weights(name, revision, token)


def complete_model(name_or_folder: str | Path, folder: Path, token: str | None) -> Path:
    """The second half of `resolve`: downloads the weights, if `folder` is a snapshot, into it; returns it."""
    refuse_other_folders(folder)
    if not os.path.exists(os.path.expanduser(name_or_folder)):
        name = str(name_or_folder)
        refuse_without_config(name, folder, token)
        select_architecture(read_config(folder), folder / CONFIG_FILE)
        if shown_file(folder) is None:
            fetch_weights(name, folder, token=token)
    return folder


def fetch_config(name: str, revision: str | None = None, token: str | None = None) -> Path:
    """The snapshot of a Hub repository with its config.json and the index of its weights alone."""
    folder = fetch_all_but_weights(name, revision, token, files=(CONFIG_FILE, INDEX_FILE))
    refuse_without_config(name, folder, token)
    return folder


def refuse_without_config(name: str, folder: Path, token: str | None) -> None:
    """Raises HubError if a repository's snapshot has no config.json, which names its GGUF files if it has any."""
    if (folder / CONFIG_FILE).exists():
        return
    with hub_errors(name, folder.name, token):
        files = gguf_names(name, folder.name, token)
    if files:
        named = shortened([f"{name}:{file}" for file in files])
        raise HubError(f"{name}: has no {CONFIG_FILE}, but GGUF; name one of its files: {named}")
    raise HubError(f"{name}: has no {CONFIG_FILE}; only models in the transformers format, or GGUF, can be read")


def local_model_folder(name_or_folder: str | Path, revision: str | None) -> Path | None:
    """Finds a folder as `local_folder` does. Raises CheckpointError for an adapter alone, or models in subfolders."""
    folder = local_folder(name_or_folder, revision)
    if folder is not None:
        refuse_other_folders(folder)
    return folder


def refuse_other_folders(folder: Path) -> None:
    """Raises CheckpointError if the folder contains no model, but an adapter, or models in subfolders."""
    if is_adapter(folder):
        raise CheckpointError(
            f"{folder}: contains an adapter and no model: load its base model, then call ligermodels.load_adapter; "
            "ligermodels export merges both, and ligermodels train --adapter continues it"
        )
    within = sorted(folder.glob(f"*/{CONFIG_FILE}"))
    if within and not (folder / CONFIG_FILE).exists():
        raise CheckpointError(f"{folder}: contains no {CONFIG_FILE}; did you mean {str(within[0].parent)!r}?")


def is_adapter(folder: Path) -> bool:
    """Whether a folder contains an adapter and no model."""
    return (folder / ADAPTER_CONFIG_FILE).exists() and not (folder / CONFIG_FILE).exists()


def fetch_all_but_weights(
    name: str, revision: str | None, token: str | None, files: Iterable[str] = MODEL_FILES
) -> Path:
    """Downloads the files of a Hub repository except its weights; returns the snapshot folder. A GGUF file,
    owner/model:NAME, is downloaded as a whole, because all else is in it."""
    if (folder := hub_gguf(name, revision, token)) is not None:
        return folder
    known = known_models() if "/" in name else (*known_models(), *ARCHITECTURES)  # a bare name may mean an architecture
    return fetch_files(name, revision=revision, token=token, known=known, files=files)
