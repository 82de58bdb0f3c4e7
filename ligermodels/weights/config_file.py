"""config.json as a dict: validated when read, and written so that transformers 4 and transformers 5 both understand it.

transformers 5 reads the old and the new field names. transformers 4 silently uses its defaults for fields that only
have the new name, so an export adds the old fields: `rope_theta`, `rope_scaling` and `partial_rotary_factor` beside
`rope_parameters`, and `torch_dtype` beside `dtype`. If a file has both, transformers 5 prefers `rope_scaling`, so both
must be complete.

    rope_parameters                        old fields
    one for all layers                     rope_theta, partial_rotary_factor; rope_scaling has the rest, null if none
    {full_attention, sliding_attention}    the same from full_attention; rope_local_base_freq is the sliding theta
    of type longrope                       without original_max_position_embeddings if the top level has it

Settings that the old fields cannot express are written in the new fields only. transformers 4 then silently ignores a
scaling of the sliding layers, gives the sliding layers of OLMo 3 the theta of the full ones, and gives all layers of
Qwen 2 MoE the window of some. It refuses values that it does not know: OLMo 2 with a scaling other than {type: linear
or dynamic, factor}, and LongRoPE with its own factor.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.weights.reading import read_json, safe_file

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
DTYPE_KEYS = ("dtype", "torch_dtype")
PARTS = ("text_config", "vision_config", "audio_config")  # sub-configurations of a multimodal model
ROPES = ("rope_parameters", "rope_scaling")


def read_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json. Raises CheckpointError naming the file and the field."""
    return read_checked(Path(folder), CONFIG_FILE)


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """The folder's generation_config.json; empty if it has none. Raises CheckpointError as read_config does."""
    if not os.path.lexists(Path(folder) / GENERATION_CONFIG_FILE):
        return {}
    return read_checked(Path(folder), GENERATION_CONFIG_FILE)


def read_checked(folder: Path, name: str) -> dict[str, Any]:
    """A configuration whose end-of-text tokens are valid: they are used long after the file was read."""
    file = safe_file(folder, name)
    raw = read_json(file)
    end_of_text_ids(raw, file)
    return raw


def end_of_text_ids(raw: Mapping[str, Any], origin: Path | str) -> list[int]:
    """The token ids in the field eos_token_id; none if it is missing or null.

    origin: names the configuration in errors. Raises CheckpointError.
    """
    field = raw.get("eos_token_id")
    ids = [] if field is None else field if isinstance(field, list) else [field]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise CheckpointError(f"{origin}: eos_token_id is {field!r}; must be a token id, or a list of them")
    return ids


def both_spellings(raw: dict[str, Any], alternative_names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`raw` and its sub-configurations, plus the old fields that transformers 4 needs where they are absent or null.

    The keys stay sorted if they were. alternative_names: further fields that transformers 5 renamed, old name -> new.
    """
    old = {before: raw[now] for before, now in (alternative_names or {}).items() if now in raw}
    if raw.get("rope_parameters"):
        old |= old_rope(raw)
    if "dtype" in raw:
        old["torch_dtype"] = raw["dtype"]
    both = raw | {key: value for key, value in old.items() if raw.get(key) is None}
    both |= {part: both_spellings(raw[part]) for part in PARTS if raw.get(part) is not None}
    return dict(sorted(both.items())) if list(raw) == sorted(raw) else both


def old_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of transformers 4 that are equivalent to `rope_parameters`."""
    parameters = raw["rope_parameters"]
    scaling = dict(parameters.get("full_attention", parameters))
    sliding = parameters.get("sliding_attention", {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("axial", "proportional"):  # transformers 4 has no field for them; of axial towers Pixtral's has a theta
        return {key: scaling[key] for key in ("rope_theta",) if kind == "axial" and key in scaling}
    if kind == "longrope":
        # Phi-3 in transformers 4 refuses a scaling with other keys than type, short_factor and long_factor.
        redundant = {"rope_type", "type"} | ({"original_max_position_embeddings"} & raw.keys())
        scaling = {"type": kind} | {key: value for key, value in scaling.items() if key not in redundant}
    old = {key: scaling.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in scaling}
    if "rope_theta" in sliding:
        old["rope_local_base_freq"] = sliding["rope_theta"]
    return old | {"rope_scaling": None if scaling.keys() <= {"rope_type", "type"} else scaling}


def with_dtype(raw: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """`raw` with its dtype fields, and those of its sub-configurations, set to `dtype`. The fields that exist are set;
    if `raw` has none, `torch_dtype` is added."""
    keys = [key for key in DTYPE_KEYS if key in raw] or ["torch_dtype"]
    parts = [part for part in PARTS if any(key in (raw.get(part) or ()) for key in DTYPE_KEYS)]
    both = raw | {part: with_dtype(raw[part], dtype) for part in parts}
    return both | dict.fromkeys(keys, str(dtype).removeprefix("torch."))


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
            by_layer_type = ((kind, value[kind]) for kind in (FULL_ATTENTION, SLIDING_ATTENTION) if kind in value)
            inner = objects(value) if name in PARTS else by_layer_type
            yield from ((f"{name}.{field}", content) for field, content in inner)
