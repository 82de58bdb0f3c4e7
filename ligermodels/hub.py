"""Models by name: from a Hub id, a folder, an architecture's name or a configuration, and back to a folder.

The one place that knows both the list of architectures and the Hugging Face Hub. Remote code is never run.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors, get_token, snapshot_download

from ligermodels.architectures import ARCHITECTURES
from ligermodels.errors import CheckpointError, HubError
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer
from ligermodels.weights.config_file import CONFIG_FILE, read_config, read_generation_config
from ligermodels.weights.exporting import MAX_SHARD_BYTES, export_weights
from ligermodels.weights.files import open_checkpoint
from ligermodels.weights.loading import FLOATS, load_weights

DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "LICENSE*", "USE_POLICY*"]
# Weights in the vendor's own layout, and whatever lies in sub-folders (other formats of the same weights).
NOT_DOWNLOADED = ["consolidated*", "*/*"]


def list_architectures() -> list[str]:
    """The supported values of config.json's model_type."""
    return sorted(ARCHITECTURES)


def load(
    name_or_folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    token: str | None = None,
) -> CausalLM:
    """A model with the weights of a Hub repository or a folder, in evaluation mode.

    dtype: of all parameters; None takes config.json's, or where it has none that of the stored weights.
    Raises HubError, ConfigError or CheckpointError (all InputError).
    """
    folder = resolve(name_or_folder, revision=revision, token=token)
    raw = read_config(folder)
    model = build(raw, folder / CONFIG_FILE)
    model.to(dtype or stored_dtype(raw, folder)).to_empty(device=device)
    load_weights(model, folder)
    model.source = folder
    model.generation_config = read_generation_config(folder)
    return model.eval()


def load_tokenizer(name_or_folder: str | Path, *, revision: str | None = None, token: str | None = None) -> Tokenizer:
    """The tokenizer of a Hub repository or a folder. Raises HubError, or CheckpointError where there is none."""
    return Tokenizer.from_folder(resolve(name_or_folder, revision=revision, token=token))


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
    model = build(raw, origin).to(dtype)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    model.initialize(seed)
    return model


def export(model: CausalLM, folder: str | Path, *, max_shard_size: int = MAX_SHARD_BYTES) -> None:
    """Writes a folder that transformers 4 and 5 and vLLM read. Raises CheckpointError where `folder` is in use."""
    export_weights(model, folder, source=model.source, max_shard_size=max_shard_size)


def build(raw: dict[str, Any], origin: str | Path) -> CausalLM:
    """The model of a raw configuration on the meta device, in fp32. origin: names the configuration in errors."""
    model_type = raw.get("model_type")
    if model_type not in list_architectures():
        raise HubError(f"{origin}: model_type {model_type!r} is not supported{hint(str(model_type), ARCHITECTURES)}")
    architecture = ARCHITECTURES[model_type]
    with torch.device("meta"):
        return architecture(architecture.Config.from_dict(raw))


def raw_config(source: str | Path | dict[str, Any], size: str | None) -> tuple[dict[str, Any], str | Path]:
    """The configuration that `create` was asked for, and what to call it in errors."""
    if isinstance(source, str) and source in ARCHITECTURES:
        sizes = ARCHITECTURES[source].SIZES
        if not sizes:
            raise HubError(f"{source}: has no presets; load a checkpoint of it, or pass a config.json")
        if size not in sizes:
            raise HubError(f"{source}: size {size!r} is not a preset{hint(str(size), sizes)}")
        return sizes[size], source
    if size is not None:
        raise HubError(
            f"{source}: size {size!r} goes with the name of an architecture{hint(str(source), ARCHITECTURES)}"
        )
    if isinstance(source, dict):
        return source, "config"
    path = Path(source).expanduser()
    if not path.exists():
        raise HubError(f"{source}: is no architecture and no config.json{hint(str(source), ARCHITECTURES)}")
    folder = path if path.is_dir() else path.parent
    return read_config(folder), folder / CONFIG_FILE


def hint(wrong: str, right: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(wrong, right, n=1)
    suggestion = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{suggestion}; there is: {', '.join(sorted(right))}"


def stored_dtype(raw: dict[str, Any], folder: Path) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        return next(iter(open_checkpoint(folder).tensors.values())).dtype
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
    if name not in dtypes:
        raise CheckpointError(f"{folder / CONFIG_FILE}: dtype {name!r} is not one of {', '.join(dtypes)}; pass a dtype")
    return dtypes[name]


def resolve(name_or_folder: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """The folder of a model: an existing one as it is, else that of the Hub's cache, downloaded where needed.

    Only safetensors, configuration, tokenizer and licence files are downloaded. Raises HubError.
    """
    folder = Path(name_or_folder).expanduser()
    if folder.is_dir():
        return folder
    name = str(name_or_folder)
    try:
        return Path(
            snapshot_download(
                name, revision=revision, token=token, allow_patterns=DOWNLOADED, ignore_patterns=NOT_DOWNLOADED
            )
        )
    except Exception as error:  # the Hub's client lets through those of its HTTP library, which differs by version
        architecture = "" if "/" in name else hint(name, ARCHITECTURES)  # a name like these is more likely meant as one
        raise HubError(f"{name}: {reason(error, name, revision, token)}{architecture}") from error


def reason(error: Exception, name: str, revision: str | None, token: str | None) -> str:
    """Why a download failed, and what to do."""
    page, has_token = f"https://huggingface.co/{name}", bool(token or get_token())
    match error:
        case errors.HFValidationError():
            return "is neither a folder nor a Hub name such as 'owner/model'; check the path"
        case errors.GatedRepoError() if has_token:
            return f"is gated and the token has no access to it; accept its licence at {page} with the token's account"
        case errors.GatedRepoError():
            return f"is gated and there is no token; accept its licence at {page}, then set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            access = "the token cannot see it" if has_token else "private, which needs HF_TOKEN"
            return f"is not a repository of the Hub, or {access}; check the spelling at {page}"
        case errors.RevisionNotFoundError():
            return f"has no revision {revision!r}; see {page}/commits"
        case errors.LocalEntryNotFoundError():
            return "is not completely in the Hub's cache, and the Hub cannot be reached; connect, or pass a folder"
    return f"could not be downloaded ({type(error).__name__}: {first_line(error)}); what is complete is kept: try again"


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
