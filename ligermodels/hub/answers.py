"""Checks what a Hub answers before huggingface_hub makes paths of it.

The library joins commit hashes and ETags to the cache's folder as they come, and HF_ENDPOINT may name any server: one
that answers with `../../x` would write outside of the cache.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils import _http

from ligermodels.errors import HubError

COMMIT = re.compile(r"[0-9a-f]{40}")
PLAIN_NAME = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)
ETAG = re.compile(rf'(W/)?"?({PLAIN_NAME.pattern})"?', re.ASCII)


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
