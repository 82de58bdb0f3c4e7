"""A disk cache of derived data: folders that are filled once, however many ranks and runs need them.

They are in $XDG_CACHE_HOME/ligermodels/data, by default ~/.cache/ligermodels/data. A folder's name is a hash of
everything that its content depends on. The cache only saves time: all of it may be deleted at any time.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ligermodels import images, tokenizer
from ligermodels.distributed import local_rank, raise_on_all, waiting_group
from ligermodels.errors import InputError
from ligermodels.weights.user_cache import code_hash, fill_once, user_cache

FILL_TIMEOUT = timedelta(days=2)  # for another rank to fill the folders


def cached_folder(key: dict[str, Any], fill: Callable[[Path], None]) -> Path:
    """The folder of `key`, a JSON object. Every rank must call this; the first rank of each host fills a new folder.

    fill: writes the content to the path that it is given. If it raises an InputError, every rank raises it.
    """
    return cached_folders([(key, fill)])[0]


def cached_folders(requests: Sequence[tuple[dict[str, Any], Callable[[Path], None]]]) -> list[Path]:
    """`cached_folder` for several pairs of key and fill; ranks synchronise once for all of them."""
    folders = [cache_folder() / folder_name(key) for key, _ in requests]
    error = None
    if local_rank() == 0:
        try:
            for folder, (_, fill) in zip(folders, requests, strict=True):
                fill_once(folder, fill)
        except InputError as failure:
            error = failure
    with waiting_group(FILL_TIMEOUT) as group:
        raise_on_all(error, group)
    return folders


def folder_name(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key | {"code": code_of_data()}, sort_keys=True).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    return user_cache("data")


def code_of_data() -> str:
    """A hash of the modules that make data, so that folders written by another version of them are not used."""
    return code_hash(
        Path(__file__).parents[1], *(Path(path) for module in (images, tokenizer) for path in module.__path__)
    )
