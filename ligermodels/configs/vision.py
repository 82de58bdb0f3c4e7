"""The vision_config of a multimodal config.json. Must not know layers."""

from collections.abc import Mapping
from typing import Any

from ligermodels.configs.fields import read_field
from ligermodels.errors import ConfigError

VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}


def read_vision_config(raw: Mapping[str, Any]) -> dict[str, int]:
    """The sizes in the vision_config of `raw`, a whole config.json. Raises ConfigError."""
    vision = raw.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ConfigError(f"config.json: vision_config is {vision!r}; must be an object")
    sizes = {
        name: read_field(name, vision.get(name, default), type(default)) for name, default in VISION_DEFAULTS.items()
    }
    if sizes["vision_use_head"]:
        raise ConfigError("config.json: vision_config: vision_use_head must be false; a pooling head is not supported")
    return sizes
