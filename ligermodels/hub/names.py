"""Names of models: an architecture, a local folder or a Hub id. Needs neither torch nor huggingface_hub."""

import difflib
import functools
import os
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from ligermodels.errors import MAX_WORD_CHARACTERS, CheckpointError, HubError

SETTINGS_FILE, MODEL, ADAPTER = "train.toml", "model", "adapter"  # names in the folder of a run
CONFIG_FILES = ("config.json", "adapter_config.json")
DEFAULT_SIZE = "tiny"  # of a family that is named without a size
# Well-known values of model_type that are not supported: another family of a similar name is not what is meant.
ABSENT_FAMILIES = {
    "bart", "bert", "bloom", "codegen", "deepseek_v2", "distilbert", "falcon", "falcon_mamba", "gpt2", "gpt_bigcode",
    "gpt_neo", "gpt_neox", "gptj", "jamba", "mamba", "mamba2", "mpt", "mt5", "olmo", "opt", "phi", "phimoe", "roberta",
    "rwkv", "stablelm", "starcoder2", "t5", "whisper",
}  # fmt: skip


@functools.cache
def architecture_list() -> str:
    """One line per architecture: its presets with their numbers of parameters, as `description.py` computes them."""
    return files("ligermodels.hub").joinpath("architectures.txt").read_text(encoding="utf-8")


@functools.cache
def known_models() -> tuple[str, ...]:
    """Ids of Hub models that this package loads, for suggestions in errors; the list need not be complete."""
    lines = files("ligermodels.hub").joinpath("known_models.txt").read_text(encoding="utf-8").splitlines()
    return tuple(owner + name for owner, *names in map(str.split, lines) for name in names)


def list_architectures() -> list[str]:
    """The supported values of config.json's model_type."""
    return [line.split()[0] for line in architecture_list().splitlines()]


def family_of(name: str) -> str:
    """The family of a name that may be a family's, with its size as llama:8b or without."""
    return name.partition(":")[0]


def local_folder(name_or_folder: str | Path, revision: str | None) -> Path | None:
    """The local folder, or None if the name may be a Hub id. A GGUF file is the folder that shows it, and the folder of
    a run stands for the model or adapter that it has exported.

    Raises HubError if it can be neither, or if a revision of a local folder is requested; CheckpointError for a run
    without an export. A Path is never a Hub id. A string that looks like a path, such as ./model, is refused later by
    huggingface_hub, before it contacts the Hub.
    """
    folder = os.path.expanduser(name_or_folder)
    if os.path.exists(folder):  # unlike Path.exists, this returns False for invalid paths
        if revision:
            kind = "folder" if os.path.isdir(folder) else "file"
            raise HubError(f"{folder}: is a {kind} and has no revision {revision!r}; leave it out, or pass a Hub id")
        from ligermodels.weights.gguf.folder import shown_folder  # torch

        return shown_folder(exported_by_run(Path(folder)))
    name = str(name_or_folder)
    if "://" in name:
        raise HubError(f"{name}: is a URL; pass the Hub name instead, such as 'owner/model'")
    if isinstance(name_or_folder, Path):
        raise HubError(f"{name}: is neither a folder nor a Hub name such as 'owner/model'{suggestion(name, ())}")
    return None


def exported_by_run(folder: Path) -> Path:
    """The model or adapter in the folder of a run; any other folder itself. Raises CheckpointError if there is none."""
    if not (folder / SETTINGS_FILE).exists() or any((folder / name).exists() for name in CONFIG_FILES):
        return folder
    for exported in (folder / MODEL, folder / ADAPTER):
        if exported.is_dir():
            return exported
    raise CheckpointError(
        f"{folder}: is a run without an export; ligermodels train --resume {folder} --no-export off makes it"
    )


def refuse_mistyped(name: str) -> None:
    """Raises HubError for a path to nothing, and for a name without an owner, as none on the Hub is, that resembles a
    known one or is an absent family's.

    name: of an architecture, with a preset as qwen2:tiny or without, a folder, or a Hub id.
    """
    families = list_architectures()
    if family_of(name) in families or os.path.exists(os.path.expanduser(name)):
        return
    if name.startswith(("/", "./", "../", "~")):
        raise HubError(f"{name}: does not exist{suggestion(name, ())}")
    if "/" in name:
        return
    family = family_of(name)
    if family.lower() in ABSENT_FAMILIES:
        raise HubError(f"{name}: is not among the families; `ligermodels list` shows them")
    if meant := suggestion(family, (*known_models(), *families)):
        raise HubError(f"{name}: is neither an architecture, nor a folder, nor a Hub id, which has an owner{meant}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the most similar known name, or folder beside the path `name`, if any is similar."""
    beside = [str(path) for path in Path(os.path.expanduser(name)).parent.glob("*") if os.path.isdir(path)]
    meant = nearest_model(name, [*beside, *known])
    return f"; did you mean {meant!r}?" if meant and meant != name else ""


def nearest_model(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to `name`, or None; the first one of several that are equal. Owner, case and
    separators are ignored. A word alone, such as lama, is a family's, and must be more similar than an id."""
    if name.lower() in ABSENT_FAMILIES:
        return None
    spelled = {normalized_name(candidate): candidate for candidate in reversed(list(candidates))}
    cutoff = 0.75 if name.isidentifier() else 0.65
    alike = difflib.get_close_matches(normalized_name(name)[:MAX_WORD_CHARACTERS], spelled, n=1, cutoff=cutoff)
    return spelled[alike[0]] if alike else None


def normalized_name(name: str) -> str:
    """The name without owner, separators and case: meta-llama/Meta-Llama-3-8B -> llama38b."""
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return re.sub(r"[^a-z0-9]", "", last)
