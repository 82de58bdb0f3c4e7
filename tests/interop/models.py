"""A tiny model with the same weights as three classes: transformers' own, the face for transformers, and bare."""

from transformers import AutoModelForCausalLM

import ligermodels
from ligermodels.integrations.transformers import TransformersModel
from tests.cases import CASES
from tests.reference_model import save_reference

# A dense model, a tied one, one whose layers have windows, one with two kinds of layers, and a mixture of experts.
FAMILIES = ("llama", "qwen2-tied", "mistral", "gemma3_text", "qwen3_moe")
VOCABULARY = 99  # of every case


def load_reference(folder):
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **eager)


KINDS = {"transformers": load_reference, "face": TransformersModel.from_pretrained, "bare": ligermodels.load}
OURS = ("face", "bare")


class Folders:
    """Checkpoints of tiny models, each written once."""

    def __init__(self, root):
        self.root = root

    def __getitem__(self, case):
        folder = self.root / case
        if not folder.exists():
            save_reference(CASES[case], folder)
        return folder
