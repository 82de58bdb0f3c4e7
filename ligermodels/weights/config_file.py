"""config.json as a dict: read safely, written so that both transformers 4 and transformers 5 understand it.

Version 5 reads either spelling. Version 4 silently takes its defaults for what only the new one says, so an export
adds the old one: `rope_theta`, `rope_scaling` and `partial_rotary_factor` beside `rope_parameters`, and `torch_dtype`
beside `dtype`. Knows field names that all families share; no family.
"""

from pathlib import Path
from typing import Any

import torch

from ligermodels.weights.files import read_json, safe_file

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"


def read_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json. Raises CheckpointError naming the file and the field."""
    return read_json(safe_file(Path(folder), CONFIG_FILE))


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """The folder's generation_config.json, empty where it has none. Raises CheckpointError as read_config does."""
    if not (Path(folder) / GENERATION_CONFIG_FILE).exists():
        return {}
    return read_json(safe_file(Path(folder), GENERATION_CONFIG_FILE))


def both_spellings(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` and the fields that version 4 needs; where the fields were sorted, they stay so."""
    rope = dict(raw.get("rope_parameters") or {})
    old = {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if raw.get("rope_parameters"):
        old["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    if "dtype" in raw:
        old["torch_dtype"] = raw["dtype"]
    both = raw | {key: value for key, value in old.items() if key not in raw}
    return dict(sorted(both.items())) if list(raw) == sorted(raw) else both


def with_dtype(raw: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """`raw` for weights stored in `dtype`, in whichever spelling it uses; `torch_dtype` where it uses none."""
    keys = [key for key in ("dtype", "torch_dtype") if key in raw] or ["torch_dtype"]
    return raw | dict.fromkeys(keys, str(dtype).removeprefix("torch."))
