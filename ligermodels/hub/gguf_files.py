"""GGUF models of the Hub: owner/model:NAME, where NAME is one of the repository's files, or a part of its name that no
other model there has, such as Q4_K_M."""

from pathlib import Path

from ligermodels.errors import HubError
from ligermodels.hub.download import download, hub_errors, list_files
from ligermodels.weights.files import shortened
from ligermodels.weights.gguf.finding import is_gguf, names_of_parts
from ligermodels.weights.gguf.folder import gguf_folder

TOWER_FILES = "mmproj"  # in the names of files that have a vision tower alone


def hub_gguf(name: str, revision: str | None, token: str | None) -> Path | None:
    """Downloads a GGUF model of the Hub; returns the folder that shows it. None if the name has no colon.

    Raises HubError, or CheckpointError for a file that is damaged or not supported.
    """
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
