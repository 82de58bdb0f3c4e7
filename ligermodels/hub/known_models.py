"""Ids of Hub models that this package loads, and the one that a mistyped name most likely means.

The list is used only for suggestions in error messages. It need not be complete.
"""

import difflib
import re
from collections.abc import Iterable

NAMES_BY_OWNER = {
    "meta-llama": """
        Llama-2-7b-hf Llama-2-7b-chat-hf Llama-2-13b-hf Llama-2-13b-chat-hf Llama-2-70b-hf Llama-2-70b-chat-hf
        Meta-Llama-3-8B Meta-Llama-3-8B-Instruct Meta-Llama-3-70B Meta-Llama-3-70B-Instruct
        Llama-3.1-8B Llama-3.1-8B-Instruct Llama-3.1-70B Llama-3.1-70B-Instruct Llama-3.1-405B Llama-3.1-405B-Instruct
        Llama-3.2-1B Llama-3.2-1B-Instruct Llama-3.2-3B Llama-3.2-3B-Instruct Llama-3.3-70B-Instruct
        Llama-3.2-11B-Vision Llama-3.2-11B-Vision-Instruct Llama-3.2-90B-Vision Llama-3.2-90B-Vision-Instruct""",
    "codellama": """
        CodeLlama-7b-hf CodeLlama-7b-Python-hf CodeLlama-7b-Instruct-hf
        CodeLlama-13b-hf CodeLlama-13b-Python-hf CodeLlama-13b-Instruct-hf
        CodeLlama-34b-hf CodeLlama-34b-Python-hf CodeLlama-34b-Instruct-hf
        CodeLlama-70b-hf CodeLlama-70b-Python-hf CodeLlama-70b-Instruct-hf""",
    "TinyLlama": "TinyLlama-1.1B-Chat-v1.0",
    "HuggingFaceTB": """
        SmolLM-135M SmolLM-135M-Instruct SmolLM-360M SmolLM-360M-Instruct SmolLM-1.7B SmolLM-1.7B-Instruct
        SmolLM2-135M SmolLM2-135M-Instruct SmolLM2-360M SmolLM2-360M-Instruct SmolLM2-1.7B SmolLM2-1.7B-Instruct
        SmolLM3-3B SmolLM3-3B-Base SmolVLM-256M-Instruct SmolVLM-500M-Instruct SmolVLM-Instruct
        SmolVLM2-256M-Video-Instruct SmolVLM2-500M-Video-Instruct SmolVLM2-2.2B-Instruct""",
    "HuggingFaceM4": "Idefics3-8B-Llama3",
    "LiquidAI": "LFM2-350M LFM2-700M LFM2-1.2B LFM2-2.6B LFM2-8B-A1B",
    "deepseek-ai": """
        DeepSeek-R1-Distill-Llama-8B DeepSeek-R1-Distill-Llama-70B
        DeepSeek-R1-Distill-Qwen-1.5B DeepSeek-R1-Distill-Qwen-7B DeepSeek-R1-Distill-Qwen-14B
        DeepSeek-R1-Distill-Qwen-32B DeepSeek-R1 DeepSeek-V3 DeepSeek-V3.1""",
    "mistralai": """
        Mistral-7B-v0.1 Mistral-7B-v0.3 Mistral-7B-Instruct-v0.1 Mistral-7B-Instruct-v0.2 Mistral-7B-Instruct-v0.3
        Mistral-Nemo-Base-2407 Mistral-Nemo-Instruct-2407 Mistral-Small-Instruct-2409
        Mistral-Small-24B-Base-2501 Mistral-Small-24B-Instruct-2501
        Mistral-Large-Instruct-2407 Mistral-Large-Instruct-2411 Devstral-Small-2507
        Mistral-Small-3.1-24B-Base-2503 Mistral-Small-3.1-24B-Instruct-2503 Mistral-Small-3.2-24B-Instruct-2506
        Ministral-3-3B-Instruct-2512 Ministral-3-8B-Instruct-2512 Ministral-3-14B-Instruct-2512
        Devstral-Small-2-24B-Instruct-2512 Devstral-2-123B-Instruct-2512
        Mixtral-8x7B-v0.1 Mixtral-8x7B-Instruct-v0.1 Mixtral-8x22B-v0.1 Mixtral-8x22B-Instruct-v0.1""",
    "Qwen": """
        Qwen3-Next-80B-A3B-Instruct Qwen3-Next-80B-A3B-Thinking
        Qwen3.5-0.8B Qwen3.5-2B Qwen3.5-4B Qwen3.5-9B Qwen3.5-27B Qwen3.5-35B-A3B Qwen3.5-122B-A10B Qwen3.5-397B-A17B
        Qwen1.5-0.5B Qwen1.5-0.5B-Chat Qwen1.5-1.8B Qwen1.5-1.8B-Chat Qwen1.5-4B Qwen1.5-4B-Chat
        Qwen1.5-7B Qwen1.5-7B-Chat Qwen1.5-14B Qwen1.5-14B-Chat Qwen1.5-32B Qwen1.5-32B-Chat
        Qwen1.5-72B Qwen1.5-72B-Chat Qwen1.5-110B Qwen1.5-110B-Chat Qwen1.5-MoE-A2.7B Qwen1.5-MoE-A2.7B-Chat
        Qwen2-0.5B Qwen2-0.5B-Instruct Qwen2-1.5B Qwen2-1.5B-Instruct Qwen2-7B Qwen2-7B-Instruct
        Qwen2-72B Qwen2-72B-Instruct Qwen2-57B-A14B Qwen2-57B-A14B-Instruct
        Qwen2.5-0.5B Qwen2.5-0.5B-Instruct Qwen2.5-1.5B Qwen2.5-1.5B-Instruct Qwen2.5-3B Qwen2.5-3B-Instruct
        Qwen2.5-7B Qwen2.5-7B-Instruct Qwen2.5-14B Qwen2.5-14B-Instruct Qwen2.5-32B Qwen2.5-32B-Instruct
        Qwen2.5-72B Qwen2.5-72B-Instruct Qwen2.5-7B-Instruct-1M Qwen2.5-14B-Instruct-1M
        Qwen2.5-Coder-0.5B Qwen2.5-Coder-0.5B-Instruct Qwen2.5-Coder-1.5B Qwen2.5-Coder-1.5B-Instruct
        Qwen2.5-Coder-3B Qwen2.5-Coder-3B-Instruct Qwen2.5-Coder-7B Qwen2.5-Coder-7B-Instruct
        Qwen2.5-Coder-14B Qwen2.5-Coder-14B-Instruct Qwen2.5-Coder-32B Qwen2.5-Coder-32B-Instruct
        Qwen2.5-Math-1.5B Qwen2.5-Math-1.5B-Instruct Qwen2.5-Math-7B Qwen2.5-Math-7B-Instruct
        Qwen2.5-Math-72B Qwen2.5-Math-72B-Instruct QwQ-32B-Preview QwQ-32B
        Qwen3-0.6B Qwen3-0.6B-Base Qwen3-1.7B Qwen3-1.7B-Base Qwen3-4B Qwen3-4B-Base Qwen3-8B Qwen3-8B-Base
        Qwen3-14B Qwen3-14B-Base Qwen3-32B Qwen3-4B-Instruct-2507 Qwen3-4B-Thinking-2507
        Qwen3-30B-A3B Qwen3-30B-A3B-Base Qwen3-30B-A3B-Instruct-2507 Qwen3-30B-A3B-Thinking-2507
        Qwen3-235B-A22B Qwen3-235B-A22B-Instruct-2507 Qwen3-235B-A22B-Thinking-2507
        Qwen3-Coder-30B-A3B-Instruct Qwen3-Coder-480B-A35B-Instruct
        Qwen2-VL-2B-Instruct Qwen2-VL-7B-Instruct Qwen2.5-VL-3B-Instruct Qwen2.5-VL-7B-Instruct
        Qwen3-VL-2B-Instruct Qwen3-VL-4B-Instruct Qwen3-VL-30B-A3B-Instruct Qwen3-VL-235B-A22B-Instruct""",
    "google": """
        gemma-2b gemma-2b-it gemma-7b gemma-7b-it gemma-1.1-2b-it gemma-1.1-7b-it
        codegemma-2b codegemma-7b codegemma-7b-it
        gemma-2-2b gemma-2-2b-it gemma-2-2b-jpn-it gemma-2-9b gemma-2-9b-it gemma-2-27b gemma-2-27b-it
        gemma-3-270m gemma-3-270m-it gemma-3-1b-pt gemma-3-1b-it gemma-3-4b-pt gemma-3-4b-it
        gemma-3-12b-pt gemma-3-12b-it gemma-3-27b-pt gemma-3-27b-it gemma-4-E2B-it gemma-4-26B-A4B gemma-4-31B-it
        paligemma-3b-pt-224 paligemma-3b-pt-448 paligemma-3b-pt-896 paligemma-3b-mix-224 paligemma-3b-mix-448
        paligemma2-3b-pt-224 paligemma2-3b-pt-448 paligemma2-10b-pt-224 paligemma2-28b-pt-224
        medgemma-4b-pt medgemma-4b-it medgemma-27b-it medgemma-27b-text-it""",
    "microsoft": """
        Phi-3-mini-4k-instruct Phi-3-mini-128k-instruct Phi-3-medium-4k-instruct Phi-3-medium-128k-instruct
        Phi-3.5-mini-instruct phi-4 Phi-4-mini-instruct Phi-4-mini-reasoning Phi-4-reasoning Phi-4-reasoning-plus""",
    "ibm-granite": """
        granite-3.0-2b-base granite-3.0-2b-instruct granite-3.0-8b-base granite-3.0-8b-instruct
        granite-3.0-1b-a400m-base granite-3.0-1b-a400m-instruct granite-3.0-3b-a800m-base granite-3.0-3b-a800m-instruct
        granite-3.1-2b-base granite-3.1-2b-instruct granite-3.1-8b-base granite-3.1-8b-instruct
        granite-3.1-1b-a400m-base granite-3.1-1b-a400m-instruct granite-3.1-3b-a800m-base granite-3.1-3b-a800m-instruct
        granite-3.2-2b-instruct granite-3.2-8b-instruct
        granite-3.3-2b-base granite-3.3-2b-instruct granite-3.3-8b-base granite-3.3-8b-instruct
        granite-4.0-micro granite-4.0-h-micro granite-4.0-1b granite-4.0-h-1b granite-4.0-h-tiny granite-4.0-h-small
        granite-3b-code-base-2k granite-3b-code-instruct-2k granite-3b-code-base-128k granite-3b-code-instruct-128k
        granite-8b-code-base-4k granite-8b-code-instruct-4k granite-8b-code-base-128k granite-8b-code-instruct-128k""",
    "allenai": """
        OLMo-2-0425-1B OLMo-2-0425-1B-Instruct OLMo-2-1124-7B OLMo-2-1124-7B-Instruct
        OLMo-2-1124-13B OLMo-2-1124-13B-Instruct OLMo-2-0325-32B OLMo-2-0325-32B-Instruct
        Olmo-3-1025-7B Olmo-3-7B-Instruct Olmo-3-7B-Think Olmo-3-1125-32B Olmo-3-32B-Think
        Olmo-3.1-32B-Instruct Olmo-3.1-32B-Think OLMoE-1B-7B-0924 OLMoE-1B-7B-0924-Instruct""",
    "ByteDance-Seed": "Seed-OSS-36B-Base Seed-OSS-36B-Instruct",
    "CohereLabs": "c4ai-command-r7b-12-2024 c4ai-command-a-03-2025",
    "LGAI-EXAONE": "EXAONE-4.0-1.2B EXAONE-4.0-32B",
    "llava-hf": "llava-1.5-7b-hf llava-1.5-13b-hf",
    "mistral-community": "pixtral-12b",
    "openai": "gpt-oss-20b gpt-oss-120b",
    "tencent": "Hunyuan-1.8B-Instruct Hunyuan-7B-Instruct",
    "zai-org": "GLM-4.5 GLM-4.5-Air GLM-4.6 GLM-4.7 GLM-4.7-Flash",
    "baidu": "ERNIE-4.5-0.3B-PT ERNIE-4.5-0.3B-Base-PT",
    "THUDM": """
        glm-4-9b-hf glm-4-9b-chat-hf glm-4-9b-chat-1m-hf
        GLM-4-9B-0414 GLM-4-32B-0414 GLM-4-32B-Base-0414 GLM-Z1-9B-0414 GLM-Z1-32B-0414""",
}
KNOWN_MODELS = tuple(f"{owner}/{name}" for owner, names in NAMES_BY_OWNER.items() for name in names.split())


def nearest_model(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to `name`, or None; the first one of several that are equal.

    Owner, case and separators are ignored.
    """
    spelled = {normalized_name(candidate): candidate for candidate in reversed(list(candidates))}
    alike = difflib.get_close_matches(normalized_name(name), spelled, n=1, cutoff=0.65)
    return spelled[alike[0]] if alike else None


def normalized_name(name: str) -> str:
    """The name without owner, separators and case: meta-llama/Meta-Llama-3-8B -> llama38b."""
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return re.sub(r"[^a-z0-9]", "", last)
