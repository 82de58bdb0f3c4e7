"""The parity cases: config.json of a tiny model for every family and for each of its switches that change the maths."""

from tests.cases import dense, gemma, llama, mistral3, moe, others, qwen3_vl, qwen_vl
from tests.cases.base import Raw
from tests.cases.llama import LLAMA

CASES: dict[str, Raw] = (
    llama.CASES | mistral3.CASES | gemma.CASES | others.CASES | dense.CASES | moe.CASES | qwen_vl.CASES | qwen3_vl.CASES
)

__all__ = ["CASES", "LLAMA"]
