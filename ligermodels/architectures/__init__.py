"""The families, one file a model_type. This page is the registry: `config.json`'s model_type to the class."""

from ligermodels.architectures.llama import Llama
from ligermodels.architectures.qwen2 import Qwen2
from ligermodels.layers.decoder import CausalLM

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "llama": Llama,
    "qwen2": Qwen2,
}
