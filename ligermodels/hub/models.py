"""Models by name: from a Hub id, a folder, an architecture's name or a configuration, and back to a folder.

The one place that knows both the list of architectures and the Hub's door, `download`. Remote code is never run.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ligermodels.architectures import ARCHITECTURES
from ligermodels.configs.base import Config
from ligermodels.errors import CheckpointError, HubError, suggest
from ligermodels.hub.download import FILES, fetch_adapter, fetch_files, fetch_weights, local_folder
from ligermodels.hub.known_models import KNOWN_MODELS
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import lora_modules
from ligermodels.layers.lora_targets import insert_lora, lora_projections
from ligermodels.tokenizer import Tokenizer, check_vocabulary
from ligermodels.tokenizer.files import has_tokenizer
from ligermodels.weights.adapter_config import ADAPTER_CONFIG_FILE
from ligermodels.weights.adapters import fill_updates, fitted, read_adapter, write_adapter
from ligermodels.weights.config_file import CONFIG_FILE, read_config, read_generation_config
from ligermodels.weights.exporting import MAX_SHARD_SIZE, export_weights
from ligermodels.weights.files import Checkpoint, open_checkpoint
from ligermodels.weights.loading import FLOATS, fill_weights, fit_weights, refuse_meta

LEAST_TENSORS = 4  # of a layer in any layout: a norm, attention's two sides, a feed-forward layer


def list_architectures() -> list[str]:
    """The supported values of config.json's model_type."""
    return sorted(ARCHITECTURES)


def load(
    name_or_folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: int | str | torch.device = "cpu",
    revision: str | None = None,
    token: str | None = None,
    allow_unexpected: bool = False,
) -> CausalLM:
    """A model with the weights of a Hub repository or a folder, in evaluation mode.

    dtype: of all parameters; None takes config.json's, or where it has none that of the stored weights.
    device: an int is a GPU's. The weights are streamed there: the host holds buffers of 192 MiB, never the model.
    allow_unexpected: tensors that the model has no place for are left out with a warning, instead of refused.
    Raises HubError, ConfigError or CheckpointError (all InputError), before memory is taken for the weights.
    """
    folder = resolve(name_or_folder, revision=revision, token=token)
    raw, generation_config = read_config(folder), read_generation_config(folder)
    architecture, config = understood(raw, folder / CONFIG_FILE)
    checkpoint = open_checkpoint(folder)
    refuse_layers_without_tensors(config, checkpoint)
    model = build(architecture, config).to(dtype or stored_dtype(raw, checkpoint))
    fit = fit_weights(model, checkpoint, allow_unexpected=allow_unexpected)
    fill_weights(model.to_empty(device=device), fit)
    model.source, model.generation_config = folder, generation_config
    return model.eval()


def load_tokenizer(
    name_or_folder: str | Path,
    *,
    adapter: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Tokenizer:
    """The tokenizer of a Hub repository or a folder.

    adapter: what is to be used with the model, a Hub repository or a folder in PEFT's format; its tokenizer, where it
    brings one, is the one that it was trained with, and is taken instead.
    Raises HubError, or CheckpointError where there is none, or one with more ids than the folder's model has.
    """
    folder = local_folder(name_or_folder, revision)
    if folder is None or not has_tokenizer(folder):
        folder = local_model(name_or_folder, revision) or small_files(str(name_or_folder), revision, token)
    brought = None if adapter is None else adapter_folder(adapter, token=token)
    tokenizer = Tokenizer.from_folder(brought if brought and has_tokenizer(brought) else folder)
    config = read_config(folder) if (folder / CONFIG_FILE).exists() else {}
    for part in (config, config.get("text_config")):  # whatever else is wrong with it is the model's concern
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            check_vocabulary(tokenizer, part["vocab_size"], folder / CONFIG_FILE)
    return tokenizer


def create(
    architecture_or_config: str | Path | dict[str, Any],
    *,
    size: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> CausalLM:
    """A model with random weights, in training mode; on the meta device without any.

    architecture_or_config: a name of `list_architectures()`, which needs a `size` among its presets; or a config.json
    as a dict, its path or that of its folder.
    """
    raw, origin = raw_config(architecture_or_config, size)
    model = build(*understood(raw, origin)).to(dtype)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    model.initialize(seed)
    return model


def export(
    model: CausalLM,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Writes a folder that transformers 4 and 5 and vLLM read; LoRA is merged on the way, the model stays as it is.

    Of a model sharded by FSDP2 every rank calls, rank 0 writes, and no rank gathers more than a parameter at a time.
    folder: must be empty or not yet exist; it is complete or is not there. dtype: of the weights as written, float64,
    float32, float16 or bfloat16; None for the model's. max_shard_size: bytes per file, or as in "5GB" or "2GiB".
    also: writes more into the path that it is given, such as a tokenizer, before the folder has its name.
    Raises CheckpointError where `folder` is in use or cannot be written, InputError for what is no dtype or size.
    """
    export_weights(model, folder, source=model.source, dtype=dtype, max_shard_size=max_shard_size, also=also)


def export_adapter(model: CausalLM, folder: str | Path, *, also: Callable[[Path], None] | None = None) -> None:
    """Writes the model's LoRA alone, as PEFT reads it: adapter_config.json and adapter_model.safetensors.

    Calls, `also` and errors are as with `export`; InputError where the model has no LoRA.
    """
    write_adapter(
        model, lora_projections(model), folder, None if model.source is None else hub_name(model.source), also
    )


def load_adapter(
    model: CausalLM, name_or_folder: str | Path, *, revision: str | None = None, token: str | None = None
) -> None:
    """Gives a model the LoRA of a Hub repository or folder in PEFT's format, in place, and freezes everything else.

    model: one that has LoRA already, as it must have where it is sharded, is filled if it has just the adapter's.
    Where it brings a generation_config.json, as a tokenizer of its own needs, that becomes the model's.
    Raises HubError, or CheckpointError naming what does not fit: features beyond plain and rank-stabilised LoRA,
    tensors that are missing, unexpected or misshapen, updates of routers, embeddings or the head.
    """
    refuse_meta(model)
    folder = adapter_folder(name_or_folder, revision=revision, token=token)
    adapter = read_adapter(folder)
    layouts = [lora_projections(model, rules) for rules in (model.weight_rules(), *model.other_weight_rules())]
    layout, settings = fitted(adapter, layouts)
    if not any(lora_modules(model)):
        insert_lora(model, settings)
    fill_updates(model, adapter, layout, settings)
    model.generation_config = read_generation_config(folder) or model.generation_config


def adapter_folder(name_or_folder: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """As `resolve`, of an adapter in PEFT's format. Raises HubError."""
    folder = local_folder(name_or_folder, revision)
    return folder or fetch_adapter(str(name_or_folder), revision=revision, token=token)


def hub_name(folder: Path) -> str:
    """What others know a folder's model by: its name on the Hub, where the folder is of the Hub's cache."""
    *_, repository, snapshots, _ = ("", "", *folder.absolute().parts)
    if snapshots == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return str(folder)


def build(architecture: type[CausalLM], config: Config) -> CausalLM:
    """The model of a configuration on the meta device, in fp32."""
    with torch.device("meta"):
        return architecture(config)


def understood(raw: dict[str, Any], origin: str | Path) -> tuple[type[CausalLM], Config]:
    """The architecture of a raw configuration, and what that makes of it. Raises HubError or ConfigError."""
    model_type = raw.get("model_type")
    if model_type not in list_architectures():
        raise HubError(f"{origin}: model_type {model_type!r} is not supported{suggest(str(model_type), ARCHITECTURES)}")
    architecture = ARCHITECTURES[model_type]
    return architecture, architecture.Config.from_dict(raw)


def refuse_layers_without_tensors(config: Config, checkpoint: Checkpoint) -> None:
    """To build thousands of layers takes seconds, so this must be known before."""
    if config.num_hidden_layers * LEAST_TENSORS > len(checkpoint.tensors):
        raise CheckpointError(
            f"{checkpoint.folder / CONFIG_FILE}: num_hidden_layers is {config.num_hidden_layers}, but the weights are "
            f"{len(checkpoint.tensors)} tensors; correct it, or download the weights again"
        )


def raw_config(source: str | Path | dict[str, Any], size: str | None) -> tuple[dict[str, Any], str | Path]:
    """The configuration that `create` was asked for, and what to call it in errors."""
    if isinstance(source, str) and source in ARCHITECTURES:
        sizes = ARCHITECTURES[source].SIZES
        if not sizes:
            raise HubError(f"{source}: has no presets; load a checkpoint of it, or pass a config.json")
        if size not in sizes:
            raise HubError(f"{source}: size {size!r} is not a preset{suggest(str(size), sizes)}")
        return sizes[size], source
    if size is not None:
        raise HubError(
            f"{source}: size {size!r} goes with the name of an architecture{suggest(str(source), ARCHITECTURES)}"
        )
    if isinstance(source, dict):
        return source, "config"
    path = Path(source).expanduser()
    if not path.exists():
        raise HubError(f"{source}: is no architecture and no config.json{suggest(str(source), ARCHITECTURES)}")
    folder = path if path.is_dir() else path.parent
    return read_config(folder), folder / CONFIG_FILE


def stored_dtype(raw: dict[str, Any], checkpoint: Checkpoint) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        return next((tensor.dtype for tensor in checkpoint.tensors.values() if tensor.dtype in FLOATS), torch.float32)
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
    if not isinstance(name, str) or name not in dtypes:
        file = checkpoint.folder / CONFIG_FILE
        raise CheckpointError(f"{file}: dtype {name!r} is not one of {', '.join(dtypes)}; pass a dtype")
    return dtypes[name]


def resolve(name_or_folder: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """The folder of a model: an existing one as it is, else that of the Hub's cache, downloaded where needed.

    revision: a branch, tag or commit of the Hub's repository. token: in place of HF_TOKEN or the one logged in with.
    Its configuration comes first: a model that cannot be built is refused before its weights are downloaded.
    Raises HubError, ConfigError or CheckpointError.
    """
    folder = local_model(name_or_folder, revision)
    if folder is not None:
        return folder
    name = str(name_or_folder)
    if name in ARCHITECTURES:
        raise HubError(f"{name}: is an architecture, which has no weights to load; create one, or pass a checkpoint")
    folder = small_files(name, revision, token)
    if not (folder / CONFIG_FILE).exists():
        raise HubError(f"{name}: has no {CONFIG_FILE}; only models in the format of transformers are read")
    understood(read_config(folder), folder / CONFIG_FILE)
    fetch_weights(name, folder, token=token)
    return folder


def local_model(name_or_folder: str | Path, revision: str | None) -> Path | None:
    """As `local_folder`. Raises CheckpointError where it holds an adapter alone, or models in folders of their own."""
    folder = local_folder(name_or_folder, revision)
    if folder is None or (folder / CONFIG_FILE).exists():
        return folder
    if (folder / ADAPTER_CONFIG_FILE).exists():
        raise CheckpointError(
            f"{folder}: holds an adapter and no model: load the model below it, then ligermodels.load_adapter; export "
            "writes both as one"
        )
    if within := sorted(folder.glob(f"*/{CONFIG_FILE}")):
        raise CheckpointError(f"{folder}: holds no {CONFIG_FILE}; did you mean {str(within[0].parent)!r}?")
    return folder


def small_files(name: str, revision: str | None, token: str | None, files: Iterable[str] = FILES) -> Path:
    """The snapshot of a Hub repository without its weights. files: those of it that are wanted."""
    known = KNOWN_MODELS if "/" in name else (*KNOWN_MODELS, *ARCHITECTURES)  # a bare name may mean an architecture
    return fetch_files(name, revision=revision, token=token, known=known, files=files)
