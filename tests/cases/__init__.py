"""The parity cases: config.json of a tiny model for every family and for each of its switches that change the maths."""

from tests.cases import (
    dense,
    gemma,
    gemma4,
    hybrid,
    idefics3,
    llama,
    llava,
    mistral3,
    mllama,
    moe,
    others,
    paligemma,
    qwen3_vl,
    qwen_vl,
)
from tests.cases.base import Raw
from tests.cases.llama import LLAMA

CASES: dict[str, Raw] = {
    **llama.CASES, **llava.CASES, **mistral3.CASES, **mllama.CASES, **gemma.CASES, **gemma4.CASES, **others.CASES,
    **dense.CASES, **idefics3.CASES, **paligemma.CASES,
    **moe.CASES, **hybrid.CASES, **qwen_vl.CASES, **qwen3_vl.CASES,
}  # fmt: skip

__all__ = ["CASES", "LLAMA"]
