"""The base config of the tiny test models.

The sizes are chosen to reveal mix-ups: fewer key-value heads than query heads, head_dim other than hidden / heads,
sequences longer than the windows and than the trained length, an odd vocabulary.
"""

from collections.abc import Mapping
from typing import Any

Raw = dict[str, Any]

TINY: Raw = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN: Raw = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
FULL, SLIDING = "full_attention", "sliding_attention"


def family(base: Raw, switches: Mapping[str, Raw]) -> dict[str, Raw]:
    """The cases of a family: `<model_type>` is the base config, `<model_type>-<switch>` has the changes of a switch."""
    name = base["model_type"]
    return {name: base} | {f"{name}-{switch}": base | changes for switch, changes in switches.items()}
