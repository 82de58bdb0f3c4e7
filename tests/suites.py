"""What the quick suite runs, which is the default, and what `pytest -m ""` adds to it."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
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


def few_of_each_switch(cases: Mapping[str, Any]) -> list[str]:
    """Of parity cases {name: config.json} that differ from their families by the same switch, as llama-tied and
    qwen2-tied do, three of text models and three of models with a text_config: its code is that of all families."""
    seen: Counter[tuple[str, bool]] = Counter()
    chosen = []
    for name, raw in cases.items():
        switch = name.partition("-")[2], "text_config" in raw
        seen[switch] += 1
        if not switch[0] or seen[switch] <= 3:
            chosen.append(name)
    return chosen
