"""A run's settings as a file, the one that `--config` reads, and the train.toml that a run leaves; and beside an
adapter that it continues.

It is TOML or YAML; its size is bounded, and so is the time that reading it takes. Its keys are the fields of
TrainConfig. Here is which fields are not settings of a run, and which leave the result of training unchanged.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ligermodels import hub
from ligermodels.aliases import flag_of
from ligermodels.errors import InputError, first_line
from ligermodels.hub.names import SETTINGS_FILE
from ligermodels.training.settings.config import FIELDS, TrainConfig, type_of
from ligermodels.training.settings.fields import hint_of_key, parsed_item, text_of_value
from ligermodels.weights.adapter_config import ADAPTER_CONFIG_FILE, read_adapter_config
from ligermodels.weights.reading import open_for_reading

MAX_SETTINGS_BYTES = 40_000  # tomllib takes the square of the time for a key of many parts: five seconds for this many
YAML_SUFFIXES = (".yaml", ".yml")
# Other scalars stay texts, which settings are read from: YAML takes 1e-4 for a text, 010 for 8 and 1:30 for 90.
RESOLVED_TAGS = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:null")
# These tell a process what to do and do not describe the run; a run's folder is the one that holds its train.toml.
NOT_SETTINGS = ("output", "resume", "allow_changes")
# These leave a step's result unchanged, except for rounding where sums are taken in another order.
WITHOUT_EFFECT_ON_RESULT = (
    *("allow_bad_lines", "micro_batch_size", "activation_checkpointing", "compile", "lora_export", "checkpoint_every"),
    *("checkpoint_minutes", "keep_checkpoints", "best_checkpoint", "early_stopping", "no_export", "push_to_hub"),
    *("on_nan", "dp_replicate", "context_parallel", "expert_parallel", "eval_every", "log_every", "log_to", "profile"),
    *("deterministic", "offload"),
)
# A run may be lengthened. Its number of steps is known, and compared, once the data are open: run/resuming.py.
LENGTH_SETTINGS = ("steps", "epochs")
# Settings that an adapter has already, by their fields in adapter_config.json.
ADAPTER_FIELDS = {
    "lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_targets": "target_modules",
    "modules_to_save": "modules_to_save",
}  # fmt: skip


def read_settings(file: Path) -> dict[str, Any]:
    """The content of a file: YAML where its name ends so, else TOML. Raises InputError, with the line of the fault."""
    with open_for_reading(file) as stream:
        content = stream.read(MAX_SETTINGS_BYTES + 1)
    if len(content) > MAX_SETTINGS_BYTES:
        raise InputError(f"{file}: has more than {MAX_SETTINGS_BYTES:,} bytes; settings are a few lines")
    is_yaml = file.suffix.lower() in YAML_SUFFIXES
    try:
        text = content.decode("utf-8-sig")  # some editors write a byte order mark
        return read_yaml(text) if is_yaml else tomllib.loads(text)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InputError(f"{file}: {line}is not YAML for settings: {error.problem}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"{file}: is not {'YAML' if is_yaml else 'TOML'}: {first_line(error)}") from error


class SettingsLoader(yaml.SafeLoader):
    """Reads one mapping. Refuses repeated keys, and references, by which a few lines become gigabytes."""

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's own name
        first: [(tag, pattern) for tag, pattern in resolvers if tag in RESOLVED_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            problem = "references (*name) are not supported; write the value"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, TypeError) as error:  # PyYAML's, of a tag such as !!timestamp
            problem = f"{node.tag.rpartition(':')[2]!r} is a tag that does not fit its value; leave the tag out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():  # for others super() raises
            key = key_node.value
            if not isinstance(key, str) or key in keys:
                problem = f"{key!r} is given twice" if isinstance(key, str) else "a key is not a text"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> dict[str, Any]:
    """The mapping in a text; empty if there is nothing in it. Raises yaml.YAMLError, ValueError."""
    content = yaml.load(text, SettingsLoader)  # a safe loader: it makes no objects
    if not isinstance(content, dict | None):
        raise ValueError("it has no `key: value` lines")
    return {str(key): value for key, value in (content or {}).items()}


def config_from_file(file: Path, **changes: Any) -> TrainConfig:
    """The settings of a TOML or YAML file, with `changes` in their place.

    Raises InputError that names the file and the key.
    """
    values = read_values(file)
    for name, other in (("epochs", "steps"), ("steps", "epochs")):
        if changes.get(name) is not None:
            values.pop(other, None)  # both set the length
    if ":" in (changes.get("model") or ""):
        values.pop("size", None)  # the name brings its size
    return TrainConfig(**(values | changes))


def config_of_run(folder: Path, **changes: Any) -> TrainConfig:
    """The settings that resume the run in `folder`: those of its train.toml, with `changes` in their place.

    Raises InputError if the folder has no train.toml: a run writes it before it loads weights or takes a step.
    """
    file = folder / SETTINGS_FILE
    if not os.path.lexists(file):
        raise InputError(f"{file}: is missing: there is no run to resume; start one with --output {folder}")
    if not file.is_file():
        raise InputError(f"{file}: is not a regular file; replace it by the file")
    return config_from_file(folder / SETTINGS_FILE, **changes, resume=folder)


def read_values(file: Path) -> dict[str, Any]:
    """The values of a settings file, in the types of TrainConfig's fields. A key without a value is as if left out."""
    content = read_settings(file)
    known = FIELDS.keys() - {"resume"}
    for key, value in content.items():
        if key not in known:
            raise InputError(f"{file}: {key}: no such flag{hint_of_key(key, value, known)}")
    return {key: parsed_value(key, value, f"{file}: {key}") for key, value in content.items() if value is not None}


def parsed_value(name: str, value: Any, place: str) -> Any:
    """A value of a settings file, read as the flag reads it on the command line."""
    field, (kind, several) = FIELDS[name], type_of(name)
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not several:
        raise InputError(f"{place} is a list; must be one value")
    if several and not values and not field.metadata["may_be_empty"]:
        raise InputError(f"{place} is empty; give at least one value, or leave it out")
    if any(not isinstance(item, str | bool | int | float) for item in values):
        raise InputError(f"{place} is {value!r}; must be text, a number, true or false")
    if kind in (str, Path) and any(isinstance(item, bool) for item in values):
        raise InputError(f"{place} is on or off, but must be text; put it into quotes")
    try:
        items = [parsed_item(field, kind, text_of_value(item)) for item in values]
    except ValueError as error:
        raise InputError(f"{place} {error}") from error
    return tuple(items) if several else items[0]


def settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that describe a run, in the values of JSON and TOML.

    Fields that are None are left out, and those without effect under the objective.
    """
    names = [
        name for name, field in FIELDS.items()
        if name not in NOT_SETTINGS and config.objective in field.metadata["objectives"]
    ]  # fmt: skip
    values = {name: getattr(config, name) for name in names}
    return {name: as_json_value(value) for name, value in values.items() if value is not None}


def as_json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def write_settings(config: TrainConfig, file: Path) -> None:
    """Writes a run's train.toml. It is enough to start the same run again from the same working directory.

    Raises InputError for the name of a file that is not UTF-8: TOML cannot hold it.
    """
    from ligermodels.weights.writing import replace_file  # imports torch, which reading settings does not need

    lines = [f"{name} = {as_toml(value)}" for name, value in settings(config).items()]
    header = "# All settings of this run. The same run in a new folder: ligermodels train --config train.toml"
    try:
        content = "\n".join([header, *lines, ""]).encode()
    except UnicodeEncodeError as error:
        line = error.object.count("\n", 0, error.start)
        raise InputError(f"{lines[line - 1]!a}: is a name that is not UTF-8; rename the file or folder") from error
    replace_file(file, content)


def as_toml(value: str | bool | int | float | list[str]) -> str:
    if isinstance(value, float):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML allows no control character


def differences(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """The settings that change the result of training and differ, as "learning_rate: 0.001, was 0.01".

    The length of the run is not among them. saved: what `settings` or `read_settings` returned for the run that is
    resumed.
    """
    now = settings(config)
    names = [name for name in {**now, **saved} if name not in (*WITHOUT_EFFECT_ON_RESULT, *LENGTH_SETTINGS)]
    return [
        f"{name}: {shown_value(now.get(name))}, was {shown_value(saved.get(name))}"
        for name in names
        if now.get(name) != saved.get(name)
    ]


def shown_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else " ".join(value) if isinstance(value, list) else str(value)


def with_base_of_adapter(config: TrainConfig) -> TrainConfig:
    """The settings with the model that the adapter names as its base, unless they name one.

    Raises InputError for settings that contradict the adapter, or if it names no base; HubError if it cannot be read.
    """
    if config.adapter is None:
        return config
    folder = hub.adapter_folder(config.adapter)
    refuse_other_lora(config, folder)
    if config.model is not None:
        return config
    base = hub.base_of_adapter(folder, "give it by --model")
    return replace(config, model=base.name, revision=config.revision or base.revision)


def refuse_other_lora(config: TrainConfig, folder: Path) -> None:
    """Raises InputError if the settings describe another LoRA than that of the adapter in `folder`."""
    adapter = read_adapter_config(folder)
    for name, key in ADAPTER_FIELDS.items():
        given, there = getattr(config, name), adapter.get(key)
        if given != FIELDS[name].default and comparable(given) != comparable(there):
            raise InputError(
                f"{flag_of(name)} {shown(given)}: {folder / ADAPTER_CONFIG_FILE} has {key} {shown(there)}, "
                "which --adapter continues: leave the flag out"
            )


def comparable(value: Any) -> Any:
    return set(value or ()) if isinstance(value, list | tuple | None) else value


def shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
