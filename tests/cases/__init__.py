"""The parity cases: for every switch of every family that changes the maths, the config.json of a tiny model."""

from tests.cases import gemma, llama, moe, others
from tests.cases.base import Raw
from tests.cases.llama import LLAMA

CASES: dict[str, Raw] = llama.CASES | gemma.CASES | others.CASES | moe.CASES

__all__ = ["CASES", "LLAMA"]
