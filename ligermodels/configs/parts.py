"""The objects inside a config.json: the configurations of a model's parts, and RoPE's. Must not know their fields."""

from collections.abc import Iterator, Mapping
from typing import Any

from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION
from ligermodels.errors import ConfigError

PARTS = ("text_config", "vision_config", "audio_config")  # sub-configurations of a multimodal model
ROPES = ("rope_parameters", "rope_scaling")


def check_objects(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError for a field of a configuration or of its parts that must be an object or null, and is not."""
    for name, value in objects(raw):
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {name} is {value!r}; must be an object")


def objects(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names and the values of these fields that are there, down to RoPE's of single layer types."""
    for name in (*PARTS, *ROPES):
        if (value := raw.get(name)) is None:
            continue
        yield name, value
        if isinstance(value, Mapping):
            inner = objects(value) if name in PARTS else by_layer_type(value)
            yield from ((f"{name}.{field}", content) for field, content in inner)


def by_layer_type(parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((kind, parameters[kind]) for kind in (FULL_ATTENTION, SLIDING_ATTENTION) if kind in parameters)
