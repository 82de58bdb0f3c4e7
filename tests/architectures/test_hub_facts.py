"""Real models of the Hub, built on the meta device: their exact sizes and the exact names of their tensors."""

import json
from pathlib import Path

import pytest
import torch

from ligermodels.architectures import ARCHITECTURES
from ligermodels.weights.loading import STALE
from ligermodels.weights.mapping import plan

DATA = Path(__file__).parent.parent / "data"
COUNTS = json.loads((DATA / "parameter_counts.json").read_text())
INDEXED = sorted(file.stem for file in (DATA / "tensor_names").iterdir())


def build(name):
    raw = json.loads((DATA / "configs" / f"{name}.json").read_text())
    architecture = ARCHITECTURES[raw["model_type"]]
    with torch.device("meta"):
        return architecture(architecture.Config.from_dict(raw))


def hub_tensors(model) -> dict[str, int]:
    """Names of the checkpoint's tensors and their numbers of elements."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {piece.tensor: torch.Size(piece.shape).numel() for piece in plan(shapes, model.weight_rules())}


def test_every_config_has_its_count():
    assert {file.stem for file in (DATA / "configs").iterdir()} == set(COUNTS)


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_parameter_count(name):
    model = build(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]


@pytest.mark.parametrize("name", INDEXED)
def test_tensor_names_and_bytes(name):
    facts = json.loads((DATA / "tensor_names" / f"{name}.json").read_text())
    stored = {template.format(layer) for template in facts["names"] for layer in range(facts["layers"])}
    stale = {tensor for tensor in stored if STALE.fullmatch(tensor)}
    tensors = hub_tensors(build(name))
    assert set(tensors) == stored - stale
    head_dim = 128  # of Llama 2, the only one with stale buffers: [head_dim / 2] in fp32
    assert 2 * sum(tensors.values()) + len(stale) * head_dim // 2 * 4 == facts["total_size"]
