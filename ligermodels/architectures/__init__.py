"""The model families: one file per model_type. ARCHITECTURES maps the model_type of a config.json to its class."""

from ligermodels.architectures.cohere2 import Cohere2
from ligermodels.architectures.deepseek_v3 import DeepseekV3
from ligermodels.architectures.ernie4_5 import Ernie4_5
from ligermodels.architectures.exaone4 import Exaone4
from ligermodels.architectures.gemma import Gemma
from ligermodels.architectures.gemma2 import Gemma2
from ligermodels.architectures.gemma3 import Gemma3, Gemma3Text
from ligermodels.architectures.gemma4 import Gemma4, Gemma4Text
from ligermodels.architectures.glm import Glm
from ligermodels.architectures.glm4 import Glm4
from ligermodels.architectures.glm4_moe import Glm4Moe
from ligermodels.architectures.glm4_moe_lite import Glm4MoeLite
from ligermodels.architectures.gpt_oss import GptOss
from ligermodels.architectures.granite import Granite
from ligermodels.architectures.granitemoe import GraniteMoe
from ligermodels.architectures.granitemoehybrid import GraniteMoeHybrid
from ligermodels.architectures.hunyuan_v1_dense import HunyuanDense
from ligermodels.architectures.idefics3 import Idefics3, SmolVLM
from ligermodels.architectures.lfm2 import Lfm2
from ligermodels.architectures.lfm2_moe import Lfm2Moe
from ligermodels.architectures.llama import Llama
from ligermodels.architectures.llava import Llava
from ligermodels.architectures.ministral3 import Ministral3
from ligermodels.architectures.mistral import Mistral
from ligermodels.architectures.mistral3 import Mistral3
from ligermodels.architectures.mixtral import Mixtral
from ligermodels.architectures.mllama import Mllama
from ligermodels.architectures.olmo2 import Olmo2
from ligermodels.architectures.olmo3 import Olmo3
from ligermodels.architectures.olmoe import Olmoe
from ligermodels.architectures.paligemma import Paligemma
from ligermodels.architectures.phi3 import Phi3
from ligermodels.architectures.qwen2 import Qwen2
from ligermodels.architectures.qwen2_5_vl import Qwen25VL
from ligermodels.architectures.qwen2_moe import Qwen2Moe
from ligermodels.architectures.qwen2_vl import Qwen2VL
from ligermodels.architectures.qwen3 import Qwen3
from ligermodels.architectures.qwen3_5 import Qwen3_5, Qwen3_5Text
from ligermodels.architectures.qwen3_5_moe import Qwen3_5Moe, Qwen3_5MoeText
from ligermodels.architectures.qwen3_moe import Qwen3Moe
from ligermodels.architectures.qwen3_next import Qwen3Next
from ligermodels.architectures.qwen3_vl import Qwen3VL
from ligermodels.architectures.qwen3_vl_moe import Qwen3VLMoe
from ligermodels.architectures.seed_oss import SeedOss
from ligermodels.architectures.smollm3 import SmolLM3
from ligermodels.layers.decoder import CausalLM

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "cohere2": Cohere2, "deepseek_v3": DeepseekV3, "ernie4_5": Ernie4_5, "exaone4": Exaone4, "gemma": Gemma,
    "gemma2": Gemma2, "gemma3": Gemma3, "gemma3_text": Gemma3Text, "gemma4": Gemma4, "gemma4_text": Gemma4Text,
    "glm": Glm, "glm4": Glm4, "glm4_moe": Glm4Moe, "glm4_moe_lite": Glm4MoeLite, "gpt_oss": GptOss, "granite": Granite,
    "granitemoe": GraniteMoe, "granitemoehybrid": GraniteMoeHybrid, "hunyuan_v1_dense": HunyuanDense,
    "idefics3": Idefics3, "lfm2": Lfm2, "lfm2_moe": Lfm2Moe, "llama": Llama, "llava": Llava, "ministral3": Ministral3,
    "mistral": Mistral, "mistral3": Mistral3, "mixtral": Mixtral, "mllama": Mllama, "olmo2": Olmo2, "olmo3": Olmo3,
    "olmoe": Olmoe, "paligemma": Paligemma, "phi3": Phi3, "qwen2": Qwen2, "qwen2_5_vl": Qwen25VL, "qwen2_moe": Qwen2Moe,
    "qwen2_vl": Qwen2VL, "qwen3": Qwen3, "qwen3_5": Qwen3_5, "qwen3_5_moe": Qwen3_5Moe,
    "qwen3_5_moe_text": Qwen3_5MoeText, "qwen3_5_text": Qwen3_5Text, "qwen3_moe": Qwen3Moe, "qwen3_next": Qwen3Next,
    "qwen3_vl": Qwen3VL, "qwen3_vl_moe": Qwen3VLMoe, "seed_oss": SeedOss, "smollm3": SmolLM3, "smolvlm": SmolVLM,
}  # fmt: skip
