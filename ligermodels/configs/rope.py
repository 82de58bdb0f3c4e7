"""The rotary embedding in a config.json, read from both spellings (transformers 4 and 5).

Version 4 has `rope_theta`, `rope_scaling` and `partial_rotary_factor` at the top level. Version 5 has all of it in
`rope_parameters`; families with two kinds of rotary layers nest that by layer type. The maths is in layers/rope.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ligermodels.configs.fields import read_field, type_hints
from ligermodels.errors import ConfigError, suggest

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"  # layer types
LLAMA3_ROPE = {  # of Llama 3.1
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# The supported scalings of RoPE, and the keys that each one requires.
ROPE_TYPES = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"), "proportional": (),
}  # fmt: skip
OLD_ROPE_TYPES = {"su": "longrope"}
MULTIMODAL_ROPE_TYPES = OLD_ROPE_TYPES | {"mrope": "default"}  # of families whose positions have several axes


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding: theta and the scaling of its frequencies."""

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
    llama_4_scaling_beta: float = 0.0  # see QueryScale
    mrope_section: tuple[int, ...] = ()  # see `position_axes`
    mrope_interleaved: bool = False

    @property
    def position_axes(self) -> tuple[int, ...]:
        """Returns the axis of the positions that each rotated pair turns with; empty if positions have one axis.

        mrope_section is the number of pairs of each axis. They stand in blocks, or interleaved: pair j then turns with
        axis j % 3 as long as that has pairs left, and with the first axis behind them.
        """
        axes = range(len(self.mrope_section))
        if not self.mrope_interleaved:
            return tuple(axis for axis in axes for _ in range(self.mrope_section[axis]))
        turns = (pair % len(axes) for pair in range(sum(self.mrope_section)))
        return tuple(axis if pair < len(axes) * self.mrope_section[axis] else 0 for pair, axis in enumerate(turns))

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated. Proportional RoPE rotates all, some of them by an angle of 0."""
        return head_dim if self.rope_type == "proportional" else int(head_dim * self.partial_rotary_factor)

    @property
    def factor_or_one(self) -> float:
        """The factor by which most scalings stretch the wavelengths; 1 if the file has none."""
        return 1.0 if self.factor is None else self.factor


@dataclass(frozen=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta log(1 + ⌊p / length⌋)."""

    beta: float
    length: int


def read_rope(
    raw: Mapping[str, Any], default_theta: float, default_partial: float = 1.0,
    old_names: Mapping[str, str] = OLD_ROPE_TYPES,
) -> Rope:  # fmt: skip
    """The one rotary embedding of all layers.

    rope_scaling takes precedence over rope_parameters. Keys missing there are read from the top level.
    old_names: former names of rope types -> their names today. Raises ConfigError.
    """
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
    if isinstance(scaling, Mapping) and any(isinstance(value, Mapping) for value in scaling.values()):
        raise ConfigError("config.json: rope_parameters by layer type are not supported here; give one for all layers")
    return parse_rope(scaling, raw, default_theta, default_partial, old_names)


def read_ropes_by_layer_type(raw: Mapping[str, Any], full_theta: float, sliding_theta: float) -> dict[str, Rope]:
    """The rotary embeddings of full and sliding-window layers, as in nested rope_parameters. In the version-4 spelling,
    top-level theta and scaling belong to the full-attention layers. Raises ConfigError."""
    nested = object_or_empty("rope_parameters", raw.get("rope_parameters"))
    if not nested.keys() <= {FULL_ATTENTION, SLIDING_ATTENTION}:
        raise ConfigError(
            "config.json: rope_parameters must be given by layer type here, "
            f"{FULL_ATTENTION!r} and {SLIDING_ATTENTION!r}"
        )
    full = {
        **object_or_empty(FULL_ATTENTION, nested.get(FULL_ATTENTION)),
        **object_or_empty("rope_scaling", raw.get("rope_scaling")),
    }
    without_theta = {key: value for key, value in raw.items() if key != "rope_theta"}
    return {
        FULL_ATTENTION: parse_rope(full, raw, full_theta),
        SLIDING_ATTENTION: parse_rope(nested.get(SLIDING_ATTENTION), without_theta, sliding_theta),
    }


def object_or_empty(name: str, value: Any) -> Mapping[str, Any]:
    """`value`, or an empty mapping if it is null. Raises ConfigError for anything but an object."""
    if not isinstance(value or {}, Mapping):
        raise ConfigError(f"config.json: {name} is {value!r}; must be an object or null")
    return value or {}


def parse_rope(
    scaling: Any, raw: Mapping[str, Any], default_theta: float, default_partial: float = 1.0,
    old_names: Mapping[str, str] = OLD_ROPE_TYPES,
) -> Rope:  # fmt: skip
    """One rotary embedding from its object; keys missing there are read from `raw`, the top level of the file."""
    scaling = object_or_empty("rope_scaling", scaling)
    values: dict[str, Any] = {"rope_theta": default_theta, "partial_rotary_factor": default_partial}
    annotations = type_hints(Rope)
    for source in (raw, scaling):
        values |= {k: read_field(k, source[k], annotations[k]) for k in annotations if source.get(k) is not None}
    trained = "original_max_position_embeddings"
    if raw.get(trained) is not None:  # the only key where the top level takes precedence
        values[trained] = raw[trained]
    named = scaling.get("rope_type", scaling.get("type", "default"))
    values["rope_type"] = old_names.get(str(named), named)
    if values["rope_type"] not in list(ROPE_TYPES):
        raise ConfigError(
            f"config.json: rope_scaling: type {named!r} is not supported{suggest(str(named), ROPE_TYPES)}"
        )
    null_factor = "factor" in scaling and scaling["factor"] is None
    longest, before = raw.get("max_position_embeddings"), values.get(trained)
    if values["rope_type"] == "yarn" and null_factor and longest is not None and before is not None:
        values["factor"] = longest / before
    missing = [key for key in ROPE_TYPES[values["rope_type"]] if key not in values]
    if missing:
        raise ConfigError(f"config.json: rope_scaling of type {named!r} lacks {', '.join(missing)}; add it")
    return Rope(**values)
