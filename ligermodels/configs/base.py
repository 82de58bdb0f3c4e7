"""The part of config.json that all model families share, and presets of it.

Field names are the Hub's. Defaults are those of the reference implementation; they apply where a file omits a key. Keys
without effect on the maths are kept in `raw` and written back. Keys that would change the maths and are not supported
raise a ConfigError that names them.
"""

import copy
import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ligermodels.configs.fields import check_choice, read_field, type_hints
from ligermodels.configs.quantisation import read_quantisation
from ligermodels.configs.rope import FULL_ATTENTION, QueryScale, Rope, read_rope
from ligermodels.errors import ConfigError

# The Hub's name of an activation -> the kernels' name.
KERNEL_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
PLAIN_ACTIVATIONS = KERNEL_ACTIVATIONS | {"quick_gelu": "quick_gelu"}  # of feed-forward layers without a gate


@dataclass(kw_only=True)
class Config:
    """The fields that most families have, with the most common defaults; a family overrides what differs. Not frozen,
    because trainers add fields of their own to a model's config."""

    model_type: str
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int  # default: num_attention_heads
    head_dim: int  # default: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    ropes: Mapping[str, Rope]  # by layer type; only FULL_ATTENTION if all layers share one
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    attention_dropout: float = 0.0
    attention_bias: bool = False
    mlp_bias: bool = False
    raw: Mapping[str, Any] = field(compare=False, repr=False)

    default_rope_theta: ClassVar[float] = 10_000.0
    default_rope_scaling: ClassVar[Mapping[str, Any] | None] = None  # of files that have none, also if it is null
    default_partial_rotary_factor: ClassVar[float] = 1.0
    partial_rotary: ClassVar[bool] = False  # whether the family supports partial_rotary_factor < 1
    alternative_names: ClassVar[Mapping[str, str]] = {}  # field -> its name in the other version of transformers
    only_values: ClassVar[Mapping[str, Any]] = {}  # switch that is no field -> its value in all published files
    # What a class declares beside its bases: fields that must not be set, because they would change the maths, and the
    # supported values of fields.
    unsupported: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[Mapping[str, Collection[Any]]] = {}
    norm_offset: ClassVar[float] = 0.0  # added to the weight of every norm
    layer_norms: ClassVar[bool] = False  # whether the residual stream has LayerNorms instead of RMSNorms
    norm_bias: ClassVar[bool] = False  # whether these have a bias
    activations: ClassVar[Mapping[str, str]] = KERNEL_ACTIVATIONS  # the supported values of hidden_act

    @property
    def norm_eps(self) -> float:
        """The epsilon of the norms over the residual stream."""
        return self.rms_norm_eps

    @property
    def embedded_tokens(self) -> int:
        """How many tokens have an embedding; the head predicts vocab_size of them."""
        return self.vocab_size

    @property
    def embedding_scale(self) -> float:
        """Multiplies the embeddings."""
        return 1.0

    @property
    def logit_scale(self) -> float:
        return 1.0

    @property
    def logit_softcap(self) -> float | None:
        """The softcap of the logits: logits = softcap * tanh(logits / softcap); None for no softcap."""
        return None

    @property
    def query_scale(self) -> QueryScale | None:
        """How queries grow with their position; None if they do not."""
        return None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Reads and validates the content of a config.json. Raises ConfigError, which names the field."""
        fields, annotations = cls.fields_of(raw), type_hints(cls)
        names = [f.name for f in dataclasses.fields(cls) if f.name not in ("ropes", "raw")]
        values = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
        for name in names:
            key = name if name in fields else cls.alternative_names.get(name, name)
            if key in fields:
                values[name] = read_field(key, fields[key], annotations[name])
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = values["num_attention_heads"]
        if values.get("head_dim") is None:
            values["head_dim"] = cls.default_head_dim(values)
        if values["attention_dropout"] is None:
            values["attention_dropout"] = 0.0
        config = cls(**values, ropes=cls.read_ropes(fields), raw=fields)
        config.validate()
        config.raw = dict(raw)
        return config

    @classmethod
    def fields_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The fields under the names of this class; families whose files have them elsewhere override this."""
        return dict(raw)

    @classmethod
    def default_head_dim(cls, values: Mapping[str, Any]) -> int:
        """head_dim of a file that does not name it, from the other fields. Raises ConfigError."""
        return default_head_dim(values["hidden_size"], values["num_attention_heads"])

    def to_dict(self) -> dict[str, Any]:
        """config.json as it was read, with the present values of the fields and the defaults that it omits. The fields
        of a multimodal model are those of its text_config."""
        fields = {name: value for name, value in vars(self).items() if name not in ("ropes", "raw")}
        if "text_config" in self.raw:
            fields = {"text_config": dict(self.raw["text_config"] or {}) | fields}
        return copy.deepcopy(dict(self.raw) | fields)

    def untied(self) -> Self:
        """Returns the config of a model whose embedding and head are two parameters."""
        raw = dict(self.raw) | {"tie_word_embeddings": False}
        if "text_config" in raw:
            raw["text_config"] = dict(raw["text_config"] or {}) | {"tie_word_embeddings": False}
        return dataclasses.replace(self, tie_word_embeddings=False, raw=raw)

    def to_json_string(self) -> str:
        """`to_dict` as JSON, for loggers that record a model's configuration."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        """The rotary embeddings by layer type; families with several override this."""
        if cls.default_rope_scaling is not None and not (raw.get("rope_scaling") or raw.get("rope_parameters")):
            raw = {**raw, "rope_scaling": cls.default_rope_scaling}
        return {FULL_ATTENTION: read_rope(raw, cls.default_rope_theta, cls.default_partial_rotary_factor)}

    def validate(self) -> None:
        """Raises ConfigError for settings that are not supported and for sizes that contradict each other."""
        read_quantisation(self.raw)
        kernel_activation("hidden_act", self.hidden_act, self.activations)
        for name, value in self.only_values.items():
            check_choice(name, self.raw.get(name, value), [value])
        for base in type(self).__mro__:
            self.reject_if_set(*vars(base).get("unsupported", ()))
            for name, known in vars(base).get("choices", {}).items():
                check_choice(name, getattr(self, name), known)
        self.check_divides("num_key_value_heads", "num_attention_heads")
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ConfigError(
                f"config.json: pad_token_id {self.pad_token_id} must be less than vocab_size {self.vocab_size}, or null"
            )
        for kind, rope in self.ropes.items():
            self.validate_rope(rope, self.rope_head_dim(kind))

    def reject_if_set(self, *names: str) -> None:
        """Raises ConfigError if one of these fields is set; each would change the maths."""
        for name in names:
            if getattr(self, name):
                raise ConfigError(f"config.json: {name} {getattr(self, name)!r} is not supported; remove it")

    def check_divides(self, part: str, whole: str) -> None:
        """Raises ConfigError if a field is set and does not divide another."""
        if getattr(self, whole) % (getattr(self, part) or 1):
            sizes = f"{part} {getattr(self, part)} must divide {whole} {getattr(self, whole)}"
            raise ConfigError(f"config.json: {sizes}")

    def check_one_per_layer(self, name: str, choices: Collection[str] | None = None) -> None:
        """Raises ConfigError if a list with one entry per layer has another length, or another entry than `choices`."""
        values = getattr(self, name)
        if values is not None and len(values) != self.num_hidden_layers:
            raise ConfigError(
                f"config.json: {name} has {len(values)} entries; must have one per layer, {self.num_hidden_layers}"
            )
        if choices is not None:
            for value in values or ():
                check_choice(name, value, choices)

    def rope_head_dim(self, kind: str) -> int:
        """The size of the heads that the rotary embedding of this layer type rotates."""
        return self.head_dim

    def validate_rope(self, rope: Rope, head_dim: int) -> None:
        """Raises ConfigError if a rotary embedding does not fit heads of this size."""
        if rope.partial_rotary_factor != 1.0 and not self.partial_rotary and rope.rope_type != "proportional":
            raise ConfigError(
                f"config.json: partial_rotary_factor {rope.partial_rotary_factor} must be 1: "
                f"{self.model_type} rotates whole heads"
            )
        rotary_dim = rope.rotary_dim(head_dim)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ConfigError(
                f"config.json: head_dim {head_dim} * partial_rotary_factor {rope.partial_rotary_factor} must be "
                "even, positive and at most head_dim: RoPE rotates pairs"
            )
        for name in ("short_factor", "long_factor"):
            factors = getattr(rope, name)
            if factors and len(factors) != rotary_dim // 2:
                raise ConfigError(
                    f"config.json: {name} has {len(factors)} numbers; must have one for each of the "
                    f"{rotary_dim // 2} rotated pairs"
                )

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def attention_biases(self) -> dict[str, Any]:
        """Both biases of attention, as `Attention` takes them."""
        return {"qkv_bias": self.attention_bias, "o_bias": self.attention_bias}

    @property
    def activation(self) -> str:
        """The kernels' name of the activation."""
        return kernel_activation("hidden_act", self.hidden_act, self.activations)

    @property
    def trained_length(self) -> int:
        """The longest sequence that the model is made for: max_position_embeddings, or the length before the scaling of
        RoPE times its factor, which some files do not write there. Source: vLLM's limit of the model length."""
        rope = self.ropes[FULL_ATTENTION]
        if rope.rope_type not in ("linear", "dynamic", "yarn"):
            return self.max_position_embeddings
        before = rope.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, int(before * rope.factor_or_one))

    @property
    def longrope_switch_length(self) -> int | None:
        """The sequence length beyond which LongRoPE uses its long factors, for all tokens; None without LongRoPE."""
        longropes = [rope for rope in self.ropes.values() if rope.rope_type == "longrope"]
        if not longropes:
            return None
        return longropes[0].original_max_position_embeddings or self.max_position_embeddings


def kernel_activation(name: str, value: str, known: Mapping[str, str] = KERNEL_ACTIVATIONS) -> str:
    """The kernels' name of the activation `value` of field `name`. Raises ConfigError if it is not in `known`."""
    check_choice(name, value, known)
    return known[value]


def default_head_dim(hidden_size: int, num_attention_heads: int) -> int:
    """hidden_size / num_attention_heads. Raises ConfigError if that is not a whole number."""
    if hidden_size % num_attention_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {num_attention_heads} must divide hidden_size {hidden_size} "
            "if head_dim is not given"
        )
    return hidden_size // num_attention_heads


def tiny(base: Mapping[str, Any]) -> dict:
    """The smallest preset of every family: a model that trains on a laptop."""
    return preset(base, 128, 384, 4, 4, 2) | {"vocab_size": 1024, "max_position_embeddings": 512}


def preset(base: Mapping[str, Any], hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict:
    """The content of a config.json with these sizes."""
    return dict(base) | {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    }  # fmt: skip
