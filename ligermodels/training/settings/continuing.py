"""Runs that continue an adapter: its base model, and settings that contradict it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ligermodels.aliases import flag_of
from ligermodels.errors import InputError
from ligermodels.hub import adapter_folder, base_of_adapter
from ligermodels.training.settings.config import FIELDS, TrainConfig
from ligermodels.weights.adapter_config import ADAPTER_CONFIG_FILE, read_adapter_config

# Settings that an adapter has already, by their fields in adapter_config.json.
ADAPTER_FIELDS = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_targets": "target_modules",
    "modules_to_save": "modules_to_save",
}


def with_base_of_adapter(config: TrainConfig) -> TrainConfig:
    """The settings with the model that the adapter names as its base, unless they name one.

    Raises InputError for settings that contradict the adapter, or if it names no base; HubError if it cannot be read.
    """
    if config.adapter is None:
        return config
    folder = adapter_folder(config.adapter)
    refuse_other_lora(config, folder)
    if config.model is not None:
        return config
    base = base_of_adapter(folder, "give it by --model")
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
