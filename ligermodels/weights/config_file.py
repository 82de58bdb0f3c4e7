"""config.json as a dict: read safely, written so that both transformers 4 and transformers 5 understand it.

Version 5 reads either spelling. Version 4 silently takes its defaults for what only the new one says, so an export
adds the old one: `rope_theta`, `rope_scaling` and `partial_rotary_factor` beside `rope_parameters`, and `torch_dtype`
beside `dtype`. Version 5 prefers `rope_scaling` where a file has both, so each spelling must say all there is.

    rope_parameters                        the old spelling
    one for all layers                     its theta, its partial factor; the rest is the scaling, null if default
    {full_attention, sliding_attention}    the same of full_attention; the sliding theta is rope_local_base_freq
    of type longrope                       without original_max_position_embeddings where the top level has it

What has no old spelling is in the new one alone. Version 4 silently leaves out a scaling of the sliding layers, gives
those of OLMo 3 the theta of the full ones, and all layers of Qwen 2 MoE the window of some. It refuses what it does not
know: OLMo 2 scaled otherwise than by {type: linear or dynamic, factor}, a LongRoPE with a factor of its own.
Knows field names; no family.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ligermodels.weights.files import read_json, safe_file

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
PARTS = ("text_config", "vision_config")  # of a multimodal model: configurations of their own
DTYPE_KEYS = ("dtype", "torch_dtype")


def read_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json. Raises CheckpointError naming the file and the field."""
    return read_json(safe_file(Path(folder), CONFIG_FILE))


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """The folder's generation_config.json, empty where it has none. Raises CheckpointError as read_config does."""
    if not os.path.lexists(Path(folder) / GENERATION_CONFIG_FILE):
        return {}
    return read_json(safe_file(Path(folder), GENERATION_CONFIG_FILE))


def both_spellings(raw: dict[str, Any], also_named: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`raw`, with its parts, and the fields that version 4 needs where they are absent or null; sorted fields stay so.

    also_named: fields that version 5 renamed and writes under the new name alone, old name -> new name.
    """
    old = {before: raw[now] for before, now in (also_named or {}).items() if now in raw}
    if raw.get("rope_parameters"):
        old |= old_rope(raw)
    if "dtype" in raw:
        old["torch_dtype"] = raw["dtype"]
    both = raw | {key: value for key, value in old.items() if raw.get(key) is None}
    both |= {part: both_spellings(raw[part]) for part in PARTS if part in raw}
    return dict(sorted(both.items())) if list(raw) == sorted(raw) else both


def old_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of version 4 that say what `rope_parameters` says."""
    parameters = raw["rope_parameters"]
    scaling = dict(parameters.get("full_attention", parameters))
    sliding = parameters.get("sliding_attention", {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "longrope":
        # Phi-3's reader of version 4 refuses a scaling of any other keys than type, short_factor and long_factor.
        said = {"rope_type", "type"} | ({"original_max_position_embeddings"} & raw.keys())
        scaling = {"type": kind} | {key: value for key, value in scaling.items() if key not in said}
    old = {key: scaling.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in scaling}
    if "rope_theta" in sliding:
        old["rope_local_base_freq"] = sliding["rope_theta"]
    return old | {"rope_scaling": None if kind == "default" else scaling}


def with_dtype(raw: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """`raw` and those of its parts that name a dtype, for weights stored in `dtype`, in whichever spelling they use.

    Where `raw` uses none it is `torch_dtype`.
    """
    keys = [key for key in DTYPE_KEYS if key in raw] or ["torch_dtype"]
    parts = [part for part in PARTS if any(key in raw.get(part, ()) for key in DTYPE_KEYS)]
    both = raw | {part: with_dtype(raw[part], dtype) for part in parts}
    return both | dict.fromkeys(keys, str(dtype).removeprefix("torch."))
