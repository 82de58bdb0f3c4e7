"""adapter_config.json of LoRA in PEFT's format: reads it, refuses unsupported settings, and composes it for an export.

Projections have their Hub names, in full or as a suffix of the name that begins after a dot.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ligermodels.errors import CheckpointError, InputError
from ligermodels.weights.reading import read_json, safe_file

ADAPTER_CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
MODULE_NAME = re.compile(r"\^?[\w.-]+")

# Fields that do not change the result: how the update was initialised, and its targets, which the tensors show. Any
# other field that is not in READ_FIELDS is refused if it is set.
IGNORED_FIELDS = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip
READ_FIELDS = {
    "alpha_pattern", "bias", "ensure_weight_tying", "init_lora_weights", "lora_alpha", "lora_dropout",
    "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules", "target_parameters", "use_rslora",
}  # fmt: skip
NEW_ADAPTER_FIELDS = {"init_lora_weights": True, "inference_mode": False}
PEFT_DEFAULTS = {"r": 8, "lora_alpha": 8}
SUPPORTED_INITS = (True, False, "gaussian", "eva", "orthogonal")  # the others also change the base weights


class BaseModel(NamedTuple):
    """Which model an adapter is for: a Hub id and its revision, or the path of a folder; no name if it is not known."""

    name: str | None = None
    revision: str | None = None


Number = TypeVar("Number", int, float)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The folder's adapter_config.json with PEFT's defaults. Raises CheckpointError naming the file and the field."""
    file = safe_file(folder, ADAPTER_CONFIG_FILE)
    config = PEFT_DEFAULTS | read_json(file)
    refuse_unsupported(config, file, CheckpointError)
    return config


def adapter_config_from(config: Any) -> dict[str, Any]:
    """The fields of a PEFT `LoraConfig` for a new adapter, as in adapter_config.json. Raises InputError for the first
    field that is unsupported or has an invalid value."""
    fields = PEFT_DEFAULTS | config.to_dict()
    for name in ("target_modules", "exclude_modules", "target_parameters", "modules_to_save"):
        if isinstance(fields.get(name), set | tuple):
            fields[name] = sorted(fields[name])
    refuse_unsupported(fields, type(config).__name__, InputError)
    for name, value in NEW_ADAPTER_FIELDS.items():
        if fields.get(name, value) is not value:
            raise InputError(f"{type(config).__name__}: {name} is {fields[name]!r}; a new adapter needs {value}")
    return fields


def refuse_unsupported(config: Mapping[str, Any], source: Path | str, error: type[InputError]) -> None:
    """Raises the error for the first field that is unsupported or has an invalid value. source: named in the error."""

    def refuse(field: str, rule: str) -> None:
        raise error(f"{source}: {field} is {config.get(field)!r}; {rule}")

    for field in sorted(config.keys() - READ_FIELDS - IGNORED_FIELDS):
        if config[field]:
            refuse(field, "is not supported")
    if config.get("peft_type") != "LORA":
        refuse("peft_type", "must be 'LORA'")
    if config.get("bias", "none") != "none":
        refuse("bias", "must be 'none': trained biases are not supported")
    if config.get("init_lora_weights", True) not in SUPPORTED_INITS:
        refuse("init_lora_weights", "it changes the base weights; convert the adapter with PEFT's save_pretrained")
    if not isinstance(config.get("use_rslora", False), bool):
        refuse("use_rslora", "must be true or false")
    if not is_number(dropout := config.get("lora_dropout", 0.0)) or not 0 <= dropout < 1:
        refuse("lora_dropout", "must be a number of at least 0 and below 1")
    numbers = (("r", "rank_pattern", is_rank, "whole "), ("lora_alpha", "alpha_pattern", is_positive, ""))
    for field, pattern, fits, whole in numbers:
        if not fits(config[field]):
            refuse(field, f"must be a {whole}number above zero")
        by_name = config.get(pattern) or {}
        if not isinstance(by_name, dict) or not all(MODULE_NAME.fullmatch(name) for name in by_name):
            refuse(pattern, "must be an object with module names as keys; other patterns are not supported")
        if not all(map(fits, by_name.values())):
            refuse(pattern, f"its values must be {whole}numbers above zero")
    for field in ("target_parameters", "modules_to_save"):
        if config.get(field) and not is_list_of_names(config[field]):
            refuse(field, "must be a list of names")
    targets = config.get("target_modules")
    if targets is None and config.get("target_parameters"):
        return
    if not isinstance(targets, str) and not is_list_of_names(targets):
        refuse("target_modules", "must be a list of names or a pattern")


def is_rank(value: Any) -> bool:
    return is_positive(value) and value % 1 == 0


def is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def rank_and_alpha(config: Mapping[str, Any], projection: str) -> tuple[int, float]:
    """Rank and alpha of a projection. With use_rslora, alpha is multiplied by √rank, so the scale is alpha / rank."""
    rank = int(value_for(config.get("rank_pattern"), projection, config["r"]))
    alpha = float(value_for(config.get("alpha_pattern"), projection, config["lora_alpha"]))
    return rank, alpha * rank**0.5 if config.get("use_rslora") else alpha


def value_for(patterns: Mapping[str, float] | None, projection: str, default: float) -> float:
    """The value of the first pattern that matches the projection. A leading ^ means that the full name must match."""
    for name, value in (patterns or {}).items():
        if projection == name.removeprefix("^") or matches_suffix(projection, [name]):
            return value
    return default


def target_names(config: Mapping[str, Any]) -> list[str] | None:
    """target_modules if it is a list of names and no other field restricts the targets, else None."""
    restricted = config.get("exclude_modules") or config.get("layers_to_transform") is not None
    targets = config["target_modules"]
    return targets if isinstance(targets, list) and not restricted else None


def is_targeted(config: Mapping[str, Any], module: str) -> bool:
    """Whether the configuration's target_modules select a module, as PEFT does it. "all-linear" selects all."""
    targets, excluded = config["target_modules"], config.get("exclude_modules") or ()
    if re.fullmatch(excluded, module) if isinstance(excluded, str) else matches_suffix(module, excluded):
        return False
    if isinstance(targets, str):
        return targets.lower() == ALL_LINEAR or re.fullmatch(targets, module) is not None
    layers = config.get("layers_to_transform")
    if not matches_suffix(module, targets or ()) or layers is None or layers == []:
        return matches_suffix(module, targets or ())
    patterns = config.get("layers_pattern") or r"[^.]*"
    names = [patterns] if isinstance(patterns, str) else patterns
    numbered = (re.match(rf"(?:^|.*?\.){name}\.(\d+)\.", module) for name in names)
    index = next((int(found[1]) for found in numbered if found), None)
    return index in ([layers] if isinstance(layers, int) else layers)


def matches_suffix(module: str, names: Collection[str]) -> bool:
    """Whether one of the names is the module's full name, or a suffix of it that begins after a dot."""
    return any(end in names for end in suffixes(module))


def is_saved(module: str, names: Collection[str]) -> bool:
    """Whether one of the names in modules_to_save is the end of the module's name, as PEFT matches them."""
    return any(name and module.endswith(name) for name in names)


def shortest_saved_names(saved: Collection[str], others: Collection[str]) -> list[str]:
    """modules_to_save that matches `saved` and none of `others`."""
    ends = {
        next(end for end in suffixes(name) if end == name or not any(is_saved(other, [end]) for other in others))
        for name in saved
    }
    return sorted(ends)


def suffixes(name: str) -> list[str]:
    """q_proj, self_attn.q_proj, 0.self_attn.q_proj, …"""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def compose_adapter_config(
    ranks: Mapping[str, int], alphas: Mapping[str, float], dropout: float, modules: set[str],
    parameters: Collection[str], saved: Collection[str], tied: bool, base: BaseModel, task: str,
) -> dict[str, Any]:  # fmt: skip
    """adapter_config.json for projections with the given ranks and alphas.

    The most common rank and alpha are written once; deviating ones are written by name.
    modules: the Hub names of all modules of the model. parameters: the names of the projections that are not modules
    but stacked expert weights. saved: the names of the modules that are trained as a whole; tied: whether embedding and
    head are among them as one parameter. task: PEFT's name of what the model is for.
    """
    rank, ranks_by_name = most_common_value(ranks, modules)
    whole = {name: int(alpha) if alpha == int(alpha) else alpha for name, alpha in alphas.items()}  # as readers expect
    alpha, alphas_by_name = most_common_value(whole, modules)
    targets, exclude = shortest_targets(ranks.keys() - parameters, modules - ranks.keys())
    return {
        "alpha_pattern": alphas_by_name, "auto_mapping": None, "base_model_name_or_path": base.name, "bias": "none",
        "exclude_modules": exclude, "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
        "lora_alpha": alpha, "lora_dropout": dropout,
        "modules_to_save": shortest_saved_names(saved, modules - set(saved)) or None, "peft_type": "LORA", "r": rank,
        "rank_pattern": ranks_by_name, "revision": base.revision, "target_modules": targets,
        "target_parameters": sorted({suffixes(name)[2] for name in parameters}) or None, "task_type": task,
        "use_dora": False, "use_rslora": False,
    } | ({"ensure_weight_tying": True} if tied else {})  # fmt: skip


def most_common_value(values: Mapping[str, Number], modules: set[str]) -> tuple[Number, dict[str, Number]]:
    """The most common value, and the deviating values by the shortest suffixes of their names."""
    (usual, _), *others = Counter(values.values()).most_common()
    by_name: dict[str, Number] = {}
    for value, _ in others:
        names = {name for name in values if values[name] == value}
        by_name |= dict.fromkeys(shortest_targets(names, modules - names)[0], value)
    return usual, by_name


def shortest_targets(names: Iterable[str], others: Iterable[str]) -> tuple[list[str], str | None]:
    """target_modules and exclude_modules (or None) that match `names` and none of `others`.

    Parts of the model that contain only others, such as a vision tower, are excluded as a whole, wherever they stand in
    a name. Each name is then cut to its shortest suffix that matches none of the remaining others.
    """
    names = list(names)
    parts = {part for name in names for part in name.split(".")}
    ends = {suffixes(name)[0] for name in names}
    elsewhere = {other.partition(".")[0] for other in others if suffixes(other)[0] in ends} - parts
    taken = {end for other in others if other.partition(".")[0] not in elsewhere for end in suffixes(other)}
    targets = {next(end for end in suffixes(name) if end not in taken) for name in names}
    exclude = rf"(.*\.)?({'|'.join(sorted(elsewhere))})\..*" if elsewhere else None
    return sorted(targets), exclude
