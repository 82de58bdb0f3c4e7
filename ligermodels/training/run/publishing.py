"""The upload of a run's export to the Hub (`--push-to-hub`), with its model card."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from huggingface_hub import HfApi, constants, errors
from huggingface_hub.utils import validate_repo_id

from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import HubError, first_line
from ligermodels.hub.download import http_status, hub_message, hub_page, token_source, with_retries
from ligermodels.training.run.folder import ADAPTER
from ligermodels.training.settings.config import SUPERVISED, UNIT_SETTINGS, RunConfig, TrainConfig
from ligermodels.units import counted, loss_text
from ligermodels.weights.writing import failure

UPLOAD_TIMEOUT = timedelta(days=2)  # for the other ranks to wait
MODEL_CARD = "README.md"


def check_hub_access(config: TrainConfig, world: World) -> None:
    """Raises HubError on all ranks, before anything is trained, where the export could not be uploaded."""
    if config.push_to_hub is not None:
        error = failure(refuse_unwritable, config.push_to_hub) if world.is_first else None
        distributed.raise_on_all(error)


def refuse_unwritable(name: str) -> None:
    try:
        writable_repository(name)
    except HubError as error:
        raise HubError(f"--push-to-hub {error}") from error


def publish(
    config: RunConfig, exported: Path | None, step: int, loss: float | None, world: World, say: Callable[[str], None]
) -> None:
    """Uploads the export. Every rank calls; rank 0 uploads, the others wait. A failure is a warning with a remedy.

    exported: its folder; None for a run that was stopped. step: of the exported weights. loss: their validation loss,
    if it is known.
    """
    name = config.push_to_hub
    if name is None or exported is None:
        return
    with distributed.waiting_group(UPLOAD_TIMEOUT) as group:
        if world.is_first:
            try:
                say(f"Uploaded to {upload_folder(exported, name, model_card(config, exported, step, loss))}")
            except HubError as error:
                say(f"warning: --push-to-hub {error}. To upload it by hand:")
                say(f"  hf upload {shlex.quote(name)} {shlex.quote(str(exported))} . --private")
        distributed.gather_objects(None, group)


def model_card(config: RunConfig, exported: Path, step: int, loss: float | None) -> str:
    """README.md of the repository: what the weights are, and how they were trained. It names no file of the user."""
    base = None if config.has_new_weights or Path(str(config.model)).expanduser().exists() else config.model
    library = "peft" if exported.name == ADAPTER else "transformers"
    header = [f"library_name: {library}", "pipeline_tag: text-generation", "tags:", "- ligermodels"]
    lora = f"LoRA of rank {config.lora_rank}" if config.lora_rank else "LoRA"
    trained = f"{lora} on" if config.with_lora else "All weights of"
    base = base and str(base).partition(":")[0]  # of a GGUF file, its repository
    origin = f"[{base}](https://huggingface.co/{base})" if base else "a local model"
    described = f"New weights: {config.title}" if config.has_new_weights else f"{trained} {origin}"
    unit = " nats per token" if config.objective == "sft" else ""
    validation = "" if loss is None else f", validation loss {loss_text(loss)}{unit}"
    lines = [
        *("---", *header, *([f"base_model: {base}"] if base else []), "---", ""),
        *(f"# {str(config.push_to_hub).rpartition('/')[2]}", ""),
        f"{described}. Trained with ligermodels: {counted(step, 'step')} of {trained_units(config)}{validation}.",
    ]
    return "\n".join(lines) + "\n"


def trained_units(config: RunConfig) -> str:
    """What a step of the run takes."""
    if config.objective in SUPERVISED:
        return f"{counted(config.units, 'sequence')} of {config.sequence_length:,} tokens"
    return f"{counted(config.units, UNIT_SETTINGS[config.objective].removesuffix('s'))} ({config.objective.upper()})"


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
