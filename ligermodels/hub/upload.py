"""Uploads folders to repositories of the Hugging Face Hub, with huggingface_hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, errors
from huggingface_hub.utils import validate_repo_id

from ligermodels.errors import HubError, first_line
from ligermodels.hub.download import http_status, hub_message, hub_page, token_source, with_retries

MODEL_CARD = "README.md"


def writable_repository(name: str) -> str:
    """The whole name of a repository, "owner/model", that the token may write. Asks the Hub; changes nothing there.

    name: "owner/model", or "model" for one of the token's account. Raises HubError without a token that can write, and
    for an owner that is neither the token's account nor one of its organisations.
    """
    with upload_errors(name):
        validate_repo_id(name)
        account = with_retries(HfApi().whoami)
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise HubError(f"{name}: {token_source(None)} can only read; create one that can write, then `hf auth login`")
    owners = [account["name"], *(organisation["name"] for organisation in account.get("orgs", []))]
    owner, slash, _ = name.partition("/")
    if not slash:
        return f"{account['name']}/{name}"
    if owner not in owners:
        raise HubError(f"{name}: {token_source(None)} is of {', '.join(owners)}, which cannot write to {owner}")
    return name


def upload_folder(folder: Path, name: str, card: str) -> str:
    """Uploads the files of a folder; returns the address of the repository.

    A new repository is private; one that exists stays as it is. card: the model card for a repository that has none,
    where the folder has none either. Raises HubError.
    """
    api = HfApi()
    with upload_errors(name):
        repository = with_retries(lambda: api.create_repo(name, private=True, exist_ok=True)).repo_id
        with_retries(lambda: api.upload_folder(repo_id=repository, folder_path=folder))
        if not with_retries(lambda: api.file_exists(repository, MODEL_CARD)):
            with_retries(
                lambda: api.upload_file(path_or_fileobj=card.encode(), path_in_repo=MODEL_CARD, repo_id=repository)
            )
    return hub_page(repository)


@contextmanager
def upload_errors(name: str) -> Iterator[None]:
    """Converts all errors of huggingface_hub into HubErrors."""
    try:
        yield
    except Exception as error:  # includes errors of its HTTP library, which depends on the version
        raise HubError(f"{name}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Why nothing was uploaded, and what the user can do."""
    match error:
        case errors.HFValidationError():
            return "is not the name of a repository such as 'owner/model'"
        case errors.LocalTokenNotFoundError():
            return "there is no token of the Hub; run `hf auth login`, or set HF_TOKEN"
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set; unset it"
        case _ if http_status(error) == 401:
            return f"the Hub does not accept {token_source(None)}{hub_message(error)}; run `hf auth login`"
        case _ if http_status(error) == 403:
            return f"the Hub refuses {token_source(None)}{hub_message(error)}; see {constants.ENDPOINT}/settings/tokens"
    return f"not uploaded ({type(error).__name__}: {first_line(error)})"
