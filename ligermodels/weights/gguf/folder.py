"""Shows a GGUF file as a checkpoint folder: config.json and the tokenizer files made from its metadata, and a link to
the file. Everything that reads folders then reads it; the weights stay where they are.

The folders are in the user's cache, all of which may be deleted at any time.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ligermodels.errors import ConfigError, HubError
from ligermodels.weights.adapter_config import ADAPTER_CONFIG_FILE
from ligermodels.weights.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE
from ligermodels.weights.files import INDEX_FILE, SINGLE_FILE
from ligermodels.weights.gguf.config import hub_config, hub_generation_config
from ligermodels.weights.gguf.fields import metadata_key
from ligermodels.weights.gguf.header import GgufHeader, read_gguf_header
from ligermodels.weights.gguf.names import all_parts, gguf_files, is_gguf
from ligermodels.weights.gguf.tensors import one_tensor
from ligermodels.weights.gguf.tokenizer import Vocabulary, tokenizer_files
from ligermodels.weights.streaming import read_tensors
from ligermodels.weights.user_cache import code_hash, fill_once, user_cache

HASH_CHARACTERS = 16


def shown_folder(path: Path) -> Path:
    """A folder itself; one that has only a GGUF file, or such a file, as the folder that shows it. Raises HubError for
    another file, CheckpointError for a GGUF file that is damaged or not supported."""
    if not path.is_dir():
        if not is_gguf(path):
            raise HubError(f"{path}: is a file; pass the folder that contains it, or a .gguf file")
        return gguf_folder(path)
    if any((path / name).exists() for name in (CONFIG_FILE, ADAPTER_CONFIG_FILE, SINGLE_FILE, INDEX_FILE)):
        return path
    files = gguf_files(path)
    return gguf_folder(files[0]) if files else path


def gguf_folder(file: Path) -> Path:
    """The folder that shows a GGUF file, or a split one by any of its parts, as a checkpoint. Raises CheckpointError if
    the file is damaged or not supported."""
    parts = all_parts(file)
    folder = user_cache("gguf") / f"{file.stem}-{version_of(parts)}"
    if not folder.exists():
        content = gguf_content(parts)  # before the folder is made: errors of the cache have a remedy of their own
        fill_once(folder, lambda temporary: write_gguf_folder(content, parts, temporary))
    return folder


def gguf_content(parts: Sequence[Path]) -> dict[str, str]:
    """The files of the folder, by their paths in it. Raises CheckpointError."""
    header = read_gguf_header(parts)
    vocabulary = Vocabulary(header)
    configs = {
        CONFIG_FILE: hub_config(header, vocabulary, partial(read_metadata, header)),
        GENERATION_CONFIG_FILE: hub_generation_config(vocabulary),
    }
    written = {name: json.dumps(config, indent=2, ensure_ascii=False) + "\n" for name, config in configs.items()}
    return written | tokenizer_files(header, vocabulary)


def read_metadata(header: GgufHeader, name: str) -> np.ndarray:
    """The values of a tensor of the file, fp32. Raises CheckpointError."""
    return read_tensors({name: one_tensor(header.tensors[name])})[name].float().numpy().ravel()


def write_gguf_folder(content: Mapping[str, str], parts: Sequence[Path], folder: Path) -> None:
    for name, text in content.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for part in parts:
        (folder / part.name).symlink_to(part.absolute())


def shown_file(folder: Path) -> Path | None:
    """The GGUF file that a folder of `gguf_folder` shows, the first of its parts; None for any other folder."""
    return gguf_files(folder)[0].readlink() if folder.parent == user_cache("gguf") else None


def in_terms_of_gguf(error: ConfigError, model_type: str, origin: str | Path) -> ConfigError:
    """An error of a config.json that was made from a GGUF file, with the file and its keys in place of config.json and
    its fields; any other error itself. origin: the path of the config.json, if it is one."""
    file = shown_file(Path(origin).parent)
    if file is None:
        return error
    prefix = read_gguf_header([file]).require("general.architecture", str)
    message = str(error).removeprefix(f"{CONFIG_FILE}: ")
    message = re.sub(r"\w+", lambda word: metadata_key(prefix, model_type, word[0]), message)
    return ConfigError(f"{file}: {message}")


def version_of(files: Sequence[Path]) -> str:
    """A hash of the paths, sizes and times of files, and of the code that reads them."""
    status = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    content = json.dumps([status, code_hash(Path(__file__).parent)]).encode()
    return hashlib.sha256(content).hexdigest()[:HASH_CHARACTERS]
