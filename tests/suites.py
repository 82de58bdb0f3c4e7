"""What the quick suite runs, which is the default, and what `pytest -m ""` adds to it."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

slow = pytest.mark.slow
# Families that together have every kind of block, mixer, cache and position; padding and generation know no others.
KINDS_OF_MODELS = [
    "llama", "mistral", "gemma2", "gemma3_text", "gemma4_text", "gemma4", "smollm3", "cohere2", "phi3", "olmo2",
    "hunyuan_v1_dense", "gpt_oss", "qwen2_moe", "deepseek_v3", "qwen3_next", "qwen3_5", "lfm2", "granitemoehybrid",
    "qwen2_vl", "mllama",
]  # fmt: skip


def quick(names: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Parameters of a test, each a name or a tuple; those that are not chosen are slow."""
    return [
        name if name in chosen else pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=slow)
        for name in names
    ]


def of_families(names: Iterable[str]) -> list[str]:
    """Of the names of parity cases those of a family as it is, without the cases of its switches: llama-rope-linear."""
    return [name for name in names if "-" not in name]
