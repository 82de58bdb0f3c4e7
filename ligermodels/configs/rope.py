"""The rotary embedding that a config.json asks for, read from both spellings (transformers 4 and 5).

Version 4: `rope_theta`, `rope_scaling` and `partial_rotary_factor` at the top level. Version 5: all of it in
`rope_parameters`, which families with two kinds of rotary layers nest by layer type. Knows no family and no maths.
"""

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligermodels.configs.fields import checked
from ligermodels.errors import ConfigError, hint

FULL, SLIDING = "full_attention", "sliding_attention"  # the layer types
# The supported scalings of RoPE, and what a file must say for each.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
FORMER_NAMES = {"su": "longrope"}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: theta and the scaling applied to its frequencies (layers/rope.py has the maths)."""

    rope_theta: float
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def stretch(self) -> float:
        """The factor, by which most scalings stretch the wavelengths."""
        return 1.0 if self.factor is None else self.factor


def read_rope(
    raw: Mapping[str, Any],
    default_theta: float,
    default_partial: float = 1.0,
    former_names: Mapping[str, str] = FORMER_NAMES,
) -> Rope:
    """rope_scaling wins over rope_parameters; what the dict lacks is looked up at the top level."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
    if isinstance(scaling, Mapping) and any(isinstance(value, Mapping) for value in scaling.values()):
        raise ConfigError("config.json: rope_parameters by layer type are not supported here; give one for all layers")
    return rope_of(scaling, raw, default_theta, default_partial, former_names)


def read_ropes(raw: Mapping[str, Any], full_theta: float, sliding_theta: float) -> dict[str, Rope]:
    """By layer type, as rope_parameters are. In the old spelling theta and the scaling are those of the full layers."""
    nested = mapping("rope_parameters", raw.get("rope_parameters"))
    if not nested.keys() <= {FULL, SLIDING}:
        raise ConfigError(f"config.json: rope_parameters must be given by layer type here, {FULL!r} and {SLIDING!r}")
    full = {**mapping(FULL, nested.get(FULL)), **mapping("rope_scaling", raw.get("rope_scaling"))}
    without_theta = {key: value for key, value in raw.items() if key != "rope_theta"}
    return {
        FULL: rope_of(full, raw, full_theta),
        SLIDING: rope_of(nested.get(SLIDING), without_theta, sliding_theta),
    }


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """`value`, empty where it is null."""
    if not isinstance(value or {}, Mapping):
        raise ConfigError(f"config.json: {name} is {value!r}; must be an object or null")
    return value or {}


def rope_of(
    scaling: Any, raw: Mapping[str, Any], default_theta: float, default_partial: float = 1.0,
    former_names: Mapping[str, str] = FORMER_NAMES,
) -> Rope:  # fmt: skip
    """One rotary embedding from its dict, and the top level of the file for what the dict lacks."""
    scaling = mapping("rope_scaling", scaling)
    values: dict[str, Any] = {"rope_theta": default_theta, "partial_rotary_factor": default_partial}
    annotations = typing.get_type_hints(Rope)
    for source in (raw, scaling):
        values |= {k: checked(k, source[k], annotations[k]) for k in annotations if source.get(k) is not None}
    trained = "original_max_position_embeddings"
    if raw.get(trained) is not None:  # the one key whose top level wins
        values[trained] = raw[trained]
    named = scaling.get("rope_type", scaling.get("type", "default"))
    values["rope_type"] = former_names.get(str(named), named)
    if values["rope_type"] not in list(ROPE_TYPES):
        raise ConfigError(f"config.json: rope_scaling: type {named!r} is not supported{hint(str(named), ROPE_TYPES)}")
    missing = [key for key in ROPE_TYPES[values["rope_type"]] if key not in values]
    if missing:
        raise ConfigError(f"config.json: rope_scaling of type {named!r} lacks {', '.join(missing)}; add it")
    return Rope(**values)
