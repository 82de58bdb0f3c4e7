"""The form of a run: the fields of TrainConfig for the page, and the settings that it sends back.

What settings name, as their fields declare it, must lie in the board's folders or on the Hub.
"""

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ligermodels.aliases import flag_of
from ligermodels.board.folders import is_within, links_stay_within
from ligermodels.errors import InputError
from ligermodels.hub import base_of_adapter
from ligermodels.hub.models import is_adapter
from ligermodels.hub.names import exported_by_run
from ligermodels.training.data.formats.sources import find_files, named_splits
from ligermodels.training.data.formats.specs import BUILT_IN_SOURCES, parse_spec
from ligermodels.training.data.formats.tables import COLON_OUTSIDE_BRACKETS, HUB_PREFIX
from ligermodels.training.objectives.grpo.reward_specs import parse_reward
from ligermodels.training.objectives.preference.references import parse_reference
from ligermodels.training.settings.config import FIELDS, TrainConfig, type_of
from ligermodels.training.settings.fields import Named, choices_of, help_text
from ligermodels.training.settings.settings import parsed_value
from ligermodels.weights.gguf.names import all_parts, is_gguf

NOT_IN_FORM = ("output", "resume", "allow_changes", "push_to_hub")  # the board chooses the folder, and uploads nothing
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
    """Raises InputError for a setting that names what is outside of the board's folders, or what it does not do."""
    for name, field in FIELDS.items():
        kind, value = field.metadata["names"], getattr(config, name)
        if kind is None or value is None:
            continue
        for text in value if isinstance(value, tuple) else (str(value),):
            if text not in field.metadata["built_in"]:
                REFUSALS[kind](text, flag_of(name), folders)


def refuse_data_outside(text: str, flag: str, folders: Sequence[Path]) -> None:
    name = parse_spec(text).name
    if name in BUILT_IN_SOURCES:
        return
    if name.startswith(HUB_PREFIX):  # `datasets` also reads a folder, or a kind of files as "json", of this machine
        path = COLON_OUTSIDE_BRACKETS.split(name.removeprefix(HUB_PREFIX))[0]
        if "/" not in path or not HUB_NAME.fullmatch(path) or os.path.exists(path):
            raise InputError(f"{flag} {name}: must be {HUB_PREFIX}OWNER/NAME of the Hub, where no folder has this name")
        return
    refuse_path_outside(name, flag, folders)
    for file in itertools.chain(find_files(name), *named_splits(name).values()):
        refuse_path_outside(str(file), flag, folders)


def refuse_model_outside(name: str, flag: str, folders: Sequence[Path]) -> None:
    """A name that is no path is one of the Hub. An adapter's base is looked at too."""
    refuse_checkpoint_outside(name, flag, folders)
    path = exported_by_run(Path(os.path.expanduser(name)))
    if path.is_dir() and is_adapter(path):
        base = base_of_adapter(path, "give a folder that names it").name
        if base is not None:
            refuse_checkpoint_outside(base, f"{flag} {name}: its base", folders)


def refuse_checkpoint_outside(name: str, flag: str, folders: Sequence[Path]) -> None:
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):
        for part in all_parts(path) if is_gguf(path) else [path]:
            refuse_path_outside(str(part), flag, folders)
        refuse_links_outside(path, folders)
        refuse_links_outside(exported_by_run(path), folders)
    elif not HUB_NAME.fullmatch(name):
        raise InputError(f"{flag} {name}: is neither a folder that exists nor a name of the Hub")


def refuse_reference_outside(text: str, flag: str, folders: Sequence[Path]) -> None:
    model = parse_reference(text).folder
    if model is not None:
        refuse_model_outside(model, flag, folders)


def refuse_reward_outside(text: str, flag: str, folders: Sequence[Path]) -> None:
    spec = parse_reward(text)
    if spec.model is not None:
        refuse_model_outside(spec.model, flag, folders)
    if spec.file is not None:
        refuse_path_outside(str(spec.file), flag, folders)


def refuse_upload(name: str, flag: str, folders: Sequence[Path]) -> None:
    raise InputError(f"{flag} {name}: the board uploads nothing; give it to `ligermodels train`, also with --resume")


def refuse_links_outside(folder: Path, folders: Sequence[Path]) -> None:
    """Raises InputError where a folder, or a file in it, is a link that leads out: a loader would follow it."""
    if folder.is_dir() and not links_stay_within(folder, folders):
        raise InputError(f"{folder}: has links that lead outside of the folders of this board; copy the files")


def refuse_path_outside(name: str, flag: str, folders: Sequence[Path]) -> None:
    if not is_within(name, folders):
        shown = ", ".join(map(str, folders))
        raise InputError(f"{flag} {name}: is outside of the folders of this board ({shown}); give it --also FOLDER")


# By what a field says that its texts name.
REFUSALS: Mapping[Named, Callable[[str, str, Sequence[Path]], None]] = {
    "data": refuse_data_outside, "model": refuse_model_outside, "reference": refuse_reference_outside,
    "reward": refuse_reward_outside, "folder": refuse_path_outside, "repository": refuse_upload,
    "template": lambda name, flag, folders: refuse_path_outside(os.path.expanduser(name), flag, folders),
}  # fmt: skip


def checked_name(name: Any) -> str:
    """The name of a new run's folder. Raises InputError."""
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise InputError(
            "name: must be letters, digits, dots, dashes and underscores, and begin with a letter or digit"
        )
    return name
