"""Downloads files of a Hugging Face Hub repository into the Hub's cache, with huggingface_hub.

huggingface_hub manages the cache (HF_HOME) and the token (HF_TOKEN, or `hf auth login`), works offline on request
(HF_HUB_OFFLINE), shows progress, locks files against other processes and resumes broken connections. It renames a file
to its final name only when it is complete, so a killed process keeps complete files and loses partial ones.
This module decides which files are downloaded and in which order, and explains failures to the user. Remote code is
never downloaded. It knows file names, but no file content except the shards that an index names. It checks what a Hub
answers: the library joins commit hashes and ETags to the cache's folder as they come, and HF_ENDPOINT may name any
server: one that answers with `../../x` would write outside of the cache.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, errors, get_token, set_client_factory, snapshot_download
from huggingface_hub.utils import _http
from tqdm import tqdm

from ligermodels.adapters.writing import ADAPTER_FILE
from ligermodels.errors import HubError, InputError, first_line
from ligermodels.hub.names import local_folder, suggestion
from ligermodels.weights.adapter_config import ADAPTER_CONFIG_FILE
from ligermodels.weights.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE
from ligermodels.weights.exporting import COPIED_FILES, TOKENIZER_FILES
from ligermodels.weights.files import INDEX_FILE, SINGLE_FILE, read_weight_map, shortened

# All files except weights: those that a model is built from, those that an export copies, and the one that shows that a
# repository has an adapter.
MODEL_FILES = (CONFIG_FILE, INDEX_FILE, *COPIED_FILES, ADAPTER_CONFIG_FILE)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which a retry may succeed
RETRY_PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each further attempt

T = TypeVar("T")
COMMIT = re.compile(r"[0-9a-f]{40}")
PLAIN_NAME = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)
ETAG = re.compile(rf'(W/)?"?({PLAIN_NAME.pattern})"?', re.ASCII)


class SilentProgress(tqdm):
    """A disabled progress bar, for small files."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": True})


def fetch_files(
    name: str, *, revision: str | None, token: str | None, known: Iterable[str] = (),
    files: Iterable[str] = MODEL_FILES,
) -> Path:  # fmt: skip
    """Downloads a repository's `files` where the cache does not have them; returns the snapshot folder in the cache.

    revision: a branch, tag or commit. known: names to suggest from if the Hub does not know `name`.
    files: names or patterns; by default all files except weights. If the Hub cannot be reached, or in offline mode, the
    cache must contain all of them. Raises HubError.
    """
    with hub_errors(name, revision, token, known=known):
        return download(name, files, revision, token, tqdm_class=SilentProgress)


def adapter_folder(name_or_folder: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """The folder of an adapter in PEFT's format: a local folder, or one in the Hub's cache, downloaded if necessary. Of
    a Hub repository the two files of the adapter and the tokenizer's are downloaded. Raises HubError."""
    folder = local_folder(name_or_folder, revision)
    if folder is not None:
        return folder
    name = str(name_or_folder)
    with hub_errors(name, revision, token):
        files = (ADAPTER_CONFIG_FILE, ADAPTER_FILE, GENERATION_CONFIG_FILE, *TOKENIZER_FILES)
        return download(name, files, revision, token)


def fetch_weights(name: str, folder: Path, *, token: str | None) -> None:
    """Downloads the repository's safetensors weights into `folder`, the snapshot that `fetch_files` returned. Raises
    HubError. If the repository lacks a file, the error is raised before any weights are downloaded."""
    missing = missing_weights(folder)
    if not missing:
        return
    commit = folder.name
    with hub_errors(name, commit, token, missing=missing):
        stored = list_files(name, commit, token)
        if SINGLE_FILE in stored:
            missing = [SINGLE_FILE]
        elif INDEX_FILE not in stored:
            others = [file for file in stored if file.endswith(WEIGHT_SUFFIXES)]
            raise HubError(
                f"{name}: has no weights in safetensors{', but ' + shortened(others) if others else ''}; only "
                f"{SINGLE_FILE}, or {INDEX_FILE} with its shards, is read: convert them, or use another repository"
            )
        absent = [file for file in missing if file not in stored]
        if absent:
            raise HubError(
                f"{name}: {INDEX_FILE} names files that the repository does not have: {shortened(absent)}; "
                f"see {hub_page(name)}/tree/{commit} and use another revision"
            )
        download(name, missing, commit, token)


def weight_sizes(name: str, folder: Path, *, token: str | None) -> dict[str, int | None]:
    """The weight files of a repository and their bytes, without a download. folder: its snapshot in the cache. None for
    a file that the index names and the repository does not have. Raises HubError."""
    with hub_errors(name, folder.name, token):
        stored = list_files(name, folder.name, token)
    if SINGLE_FILE in stored:
        return {SINGLE_FILE: stored[SINGLE_FILE]}
    return {shard: stored.get(shard) for shard in indexed_files(folder)}


def indexed_files(folder: Path) -> list[str]:
    """The files that the folder's index names; an empty list if it has no index."""
    return sorted(set(read_weight_map(folder).values())) if (folder / INDEX_FILE).exists() else []


def list_files(name: str, revision: str | None, token: str | None) -> dict[str, int | None]:
    """The entries of a repository's root: files with their bytes, folders with None. Raises the same errors as
    `snapshot_download`."""

    def ask() -> dict[str, int | None]:
        entries = HfApi(token=token).list_repo_tree(name, revision=revision)
        return {entry.path: getattr(entry, "size", None) for entry in entries}

    check_answers()
    try:
        return with_retries(ask)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, HubError):
        raise
    except Exception as error:
        raise errors.LocalEntryNotFoundError(f"{name}: the files at {revision} are not known") from error


def missing_weights(folder: Path) -> list[str]:
    """The names of the weight files that a snapshot lacks."""
    if (folder / SINGLE_FILE).exists():
        return []
    if not (folder / INDEX_FILE).exists():
        return [SINGLE_FILE]
    return [shard for shard in indexed_files(folder) if not (folder / shard).exists()]


def download(name: str, files: Iterable[str], revision: str | None, token: str | None, **how: Any) -> Path:
    """Downloads the files that match the patterns; returns the snapshot folder.

    Raises HubError for a revision that is a path out of the cache: the cache has a file of its name.
    """
    if revision is not None and (".." in Path(revision).parts or os.path.isabs(revision)):
        raise HubError(f"{name}: has no revision {revision!r}; see {hub_page(name)}/commits")
    check_answers()
    return Path(
        with_retries(lambda: snapshot_download(name, revision=revision, token=token, allow_patterns=list(files), **how))
    )


def with_retries(call: Callable[[], T]) -> T:
    """Calls the function; retries it after a pause if the Hub is overloaded or the connection was reset. Files that are
    complete are kept between the attempts."""
    for pause in RETRY_PAUSES:
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
        time.sleep(pause)
    return call()


def is_transient(error: Exception) -> bool:
    """Whether the same call may succeed later."""
    return http_status(error) in RETRIED_STATUSES or any(
        isinstance(cause, ConnectionResetError) for cause in error_chain(error)
    )


@contextmanager
def hub_errors(
    name: str, revision: str | None, token: str | None, *, missing: Iterable[str] = (), known: Iterable[str] = (),
) -> Iterator[None]:  # fmt: skip
    """Converts all errors of huggingface_hub into HubErrors. missing: the requested files that the cache lacks."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # includes errors of its HTTP library, which depends on the version
        raise HubError(f"{name}: {failure_reason(error, name, revision, token, shortened(missing), known)}") from error


def failure_reason(
    error: Exception, name: str, revision: str | None, token: str | None, missing: str, known: Iterable[str]
) -> str:
    """Why a download failed, and what the user can do."""
    has_token = bool(token or get_token())
    match error:
        case errors.HFValidationError():
            return f"is neither a folder nor a Hub name such as 'owner/model'{suggestion(name, known)}"
        case errors.GatedRepoError() if has_token:
            request = f"request access at {hub_page(name)} with the token's account"
            return (
                f"is gated and {token_source(token)} has no access to it{hub_message(error)}; accept its licence and "
                f"{request}"
            )
        case errors.GatedRepoError():
            return f"is gated and there is no token; accept its licence at {hub_page(name)}, then set HF_TOKEN"
        case _ if isinstance(error, errors.RepositoryNotFoundError) or (http_status(error) == 401 and not has_token):
            access = f"{token_source(token)} cannot see it" if has_token else "private, which needs HF_TOKEN"
            remedy = suggestion(name, known) or "; check the spelling"
            return f"{absent_folder(name)}is not a repository of the Hub, or {access}{remedy}"
        case errors.RevisionNotFoundError():
            return f"has no revision {revision!r}; see {hub_page(name)}/commits"
        case _ if http_status(error) == 401:
            tokens = f"{constants.ENDPOINT}/settings/tokens"
            refusal = f"the Hub does not accept {token_source(token)}{hub_message(error)}"
            return f"{refusal}; create another at {tokens}, or use none"
        case _ if http_status(error) == 403:
            return f"the Hub refuses {token_source(token)}{hub_message(error)}; see {hub_page(name)}"
        case errors.LocalEntryNotFoundError():
            absent = "" if missing else absent_folder(name)
            return f"{absent}{not_cached(error, revision, missing)}{suggestion(name, known)}"
    failed = f"{missing or 'it'} could not be downloaded"
    return f"{failed} ({type(error).__name__}: {first_line(error)}); complete files are kept: try again"


def absent_folder(name: str) -> str:
    """The start of a message about a Hub id that may be meant as a folder."""
    owner = Path(name).parent
    return f"is no folder in {owner}, and " if owner.is_dir() and "/" in name else "is no folder, and "


def not_cached(error: Exception, revision: str | None, missing: str) -> str:
    """Why the cache had to be used, what it lacks, and what the user can do."""
    match error.__cause__ or error:
        case errors.OfflineModeIsEnabled():
            why, remedy = "HF_HUB_OFFLINE is set", "unset it"
        case errors.HfHubHTTPError() as cause:
            why, remedy = f"the Hub answers {first_line(cause)}", "try later"
        case cause:
            why = f"{constants.ENDPOINT} cannot be reached ({type(cause).__name__}: {first_line(cause)})"
            remedy = "connect"
    if isinstance(error, errors.IncompleteSnapshotError):
        missing = f"all of it: {first_line(error)}"  # this error lists the files
    what = missing or f"revision {revision or constants.DEFAULT_REVISION!r}"
    return f"{why}, and the cache {constants.HF_HUB_CACHE} does not hold {what}; {remedy}, or pass a folder"


def hub_page(name: str) -> str:
    """The URL of a repository's page."""
    return f"{constants.ENDPOINT}/{name}"


def token_source(token: str | None) -> str:
    """Names the token in an error message by its source."""
    if token:
        return "the token passed"
    return "the token in HF_TOKEN" if os.environ.get("HF_TOKEN") else f"the token in {constants.HF_TOKEN_PATH}"


def http_status(error: BaseException) -> int | None:
    """The HTTP status of an error, or of one of its causes."""
    refusal = hub_refusal(error)
    return refusal.response.status_code if refusal else None


def hub_refusal(error: BaseException) -> errors.HfHubHTTPError | None:
    """The HTTP error of the Hub, with its response, in the chain of an error's causes."""
    http_errors = (cause for cause in error_chain(error) if isinstance(cause, errors.HfHubHTTPError))
    return next((cause for cause in http_errors if cause.response is not None), None)


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def hub_message(error: BaseException) -> str:
    """The Hub's own message in parentheses, or an empty string."""
    refusal = hub_refusal(error)
    return f" ({first_line(refusal.server_message)})" if refusal and refusal.server_message else ""


def check_answers() -> None:
    """Has the client of huggingface_hub check answers, in the whole process, whoever has made the client."""
    if not isinstance(_http._GLOBAL_CLIENT_FACTORY, CheckedClients):
        set_client_factory(CheckedClients(_http._GLOBAL_CLIENT_FACTORY))


@dataclass(frozen=True)
class CheckedClients:
    """Makes HTTP clients as `make` does, which raise HubError for an answer that could lead out of the cache."""

    make: Callable[[], Any]

    def __call__(self) -> Any:
        client = self.make()
        send = client.send

        def checked_send(request: Any, *, stream: bool = False, **how: Any) -> Any:
            response = send(request, stream=stream, **how)
            check_headers(response)
            if not stream:  # the content of a file is streamed
                check_content(response)
            return response

        client.send = checked_send
        return client


def check_headers(response: Any) -> None:
    """Raises HubError for the headers of a file that name no commit, or an ETag that is no plain name."""
    commit = response.headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)
    if commit is None:
        return  # no answer about a file
    check(COMMIT, "commit", commit)
    for name in (constants.HUGGINGFACE_HEADER_X_LINKED_ETAG, "ETag"):
        etag = response.headers.get(name)
        if etag and not response.is_error:
            check(ETAG, "ETag", etag)


def check_content(response: Any) -> None:
    """Raises HubError for the description of a repository, or a list of its files, whose hashes are none."""
    try:
        value = response.json()
    except ValueError:
        return
    if isinstance(value, dict) and value.get("sha") is not None:
        check(COMMIT, "commit", value["sha"])
    for entry in value if isinstance(value, list) else ():
        stored = entry.get("lfs") if isinstance(entry, dict) else None
        for name in ("oid", "sha256"):
            if isinstance(stored, dict) and stored.get(name) is not None:
                check(PLAIN_NAME, "hash of a file", stored[name])


def check(pattern: re.Pattern[str], what: str, value: Any) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise HubError(f"{constants.ENDPOINT}: answers with {value!r} for a {what}; is HF_ENDPOINT a Hub?")
