"""The form of a run: the fields of TrainConfig for the page, and the settings that it sends back.

Names of files and folders in settings must lie in the board's folders.
"""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ligermodels.aliases import flag_of
from ligermodels.board.folders import is_within, links_stay_within
from ligermodels.errors import InputError
from ligermodels.hub import base_of_adapter, list_architectures
from ligermodels.hub.models import is_adapter
from ligermodels.tokenizer.built_in_templates import BUILT_IN_TEMPLATES
from ligermodels.training.data.formats.sources import find_files, named_splits
from ligermodels.training.data.formats.specs import BUILT_IN_SOURCES, parse_spec
from ligermodels.training.data.formats.tables import HUB_PREFIX
from ligermodels.training.settings.config import FIELDS, TrainConfig, type_of
from ligermodels.training.settings.fields import help_text
from ligermodels.training.settings.settings import parsed_value
from ligermodels.training.settings.values import choices_of

NOT_IN_FORM = ("output", "resume", "allow_changes")  # the board chooses the folder
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
MAX_VALUE_CHARACTERS = 4000


def form_fields() -> list[dict[str, Any]]:
    """What the page needs to draw the form: one entry for each setting, in their order."""
    return [
        {
            "name": name, "flag": flag_of(name), "group": field.metadata["group"], "help": help_text(field),
            "kind": "switch" if kind is bool else "number" if kind in (int, float) else "text", "several": several,
            "choices": choices_of(kind), "on": field.default is True, "objectives": field.metadata["objectives"],
        }
        for name, field in FIELDS.items() if name not in NOT_IN_FORM
        for kind, several in [type_of(name)]
    ]  # fmt: skip


def given_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a form has sent, in the types of TrainConfig. Raises InputError, which names the flag."""
    known = FIELDS.keys() - set(NOT_IN_FORM)
    for name, value in values.items():
        texts = value if isinstance(value, list) else [value]
        if name not in known:
            raise InputError(f"{name!r}: is no setting of the form")
        if any(not isinstance(text, str | bool) or len(str(text)) > MAX_VALUE_CHARACTERS for text in texts):
            raise InputError(f"{flag_of(name)}: must be text")
    return {name: parsed_value(name, value, flag_of(name)) for name, value in values.items() if value not in ("", [])}


def refuse_outside(config: TrainConfig, folders: Sequence[Path]) -> None:
    """Raises InputError for a setting that names a file or folder outside the board's folders."""
    for name in ("data", "validation_data"):
        for source in getattr(config, name) or ():
            refuse_data_outside(parse_spec(source).name, flag_of(name), folders)
    for flag, model in models_of(config):
        refuse_model_outside(model, flag, folders)
    if config.chat_template is not None and config.chat_template not in BUILT_IN_TEMPLATES:
        refuse_path_outside(config.chat_template, "--chat-template", folders)
    for function in config.reward or ():
        if ".py" in function:
            refuse_path_outside(function.partition(".py")[0] + ".py", "--reward", folders)


def models_of(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """The flags that name a model, with its name, where it is not a new one."""
    if config.model is not None and config.model not in list_architectures():
        yield "--model", config.model
    if config.adapter is not None:
        yield "--adapter", config.adapter
    if config.teacher is not None and config.teacher != "top-k":
        yield "--teacher", config.teacher
    kind, _, folder = (config.reference or "").partition(":")
    if kind == "model" and folder:
        yield "--reference", folder


def refuse_data_outside(name: str, flag: str, folders: Sequence[Path]) -> None:
    if name in BUILT_IN_SOURCES or name.startswith(HUB_PREFIX):
        return
    refuse_path_outside(name, flag, folders)
    for file in itertools.chain(find_files(name), *named_splits(name).values()):
        refuse_path_outside(str(file), flag, folders)


def refuse_model_outside(name: str, flag: str, folders: Sequence[Path]) -> None:
    """A name that is no path is one of the Hub. An adapter's base is looked at too."""
    path = Path(os.path.expanduser(name))
    if not path.exists():
        if not HUB_NAME.fullmatch(name):
            raise InputError(f"{flag} {name}: is neither a folder that exists nor a name of the Hub")
        return
    refuse_path_outside(name, flag, folders)
    refuse_links_outside(path, folders)
    if path.is_dir() and is_adapter(path):
        base = base_of_adapter(path, "give a folder that names it").name
        if base is not None and base != name:
            refuse_model_outside(base, f"{flag} {name}: its base", folders)


def refuse_links_outside(folder: Path, folders: Sequence[Path]) -> None:
    """Raises InputError where a folder, or a file in it, is a link that leads out: a loader would follow it."""
    if folder.is_dir() and not links_stay_within(folder, folders):
        raise InputError(f"{folder}: has links that lead outside of the folders of this board; copy the files")


def refuse_path_outside(name: str, flag: str, folders: Sequence[Path]) -> None:
    if not is_within(name, folders):
        shown = ", ".join(map(str, folders))
        raise InputError(f"{flag} {name}: is outside of the folders of this board ({shown}); give it --also FOLDER")


def checked_name(name: Any) -> str:
    """The name of a new run's folder. Raises InputError."""
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise InputError(
            "name: must be letters, digits, dots, dashes and underscores, and begin with a letter or digit"
        )
    return name
