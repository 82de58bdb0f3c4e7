"""Reads a settings file, TOML or YAML, into a dict. Its size is bounded, and so is the time that reading it takes."""

import tomllib
from pathlib import Path
from typing import Any

import yaml

from ligermodels.errors import InputError, first_line
from ligermodels.weights.reading import open_for_reading

MAX_SETTINGS_BYTES = 40_000  # tomllib takes the square of the time for a key of many parts: five seconds for this many
YAML_SUFFIXES = (".yaml", ".yml")
# Other scalars stay texts, which settings are read from: YAML takes 1e-4 for a text, 010 for 8 and 1:30 for 90.
RESOLVED_TAGS = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:null")


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
