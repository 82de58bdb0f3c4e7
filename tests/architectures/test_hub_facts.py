"""Real Hub models, built on the meta device: their parameter counts, tensor names and shapes are exact."""

import itertools
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from ligermodels.architectures import ARCHITECTURES
from ligermodels.hub.models import build_on_meta
from ligermodels.weights.loading import STALE_BUFFERS
from ligermodels.weights.mapping import plan_pieces

DATA = Path(__file__).parent.parent / "data"
COUNTS = json.loads((DATA / "parameter_counts.json").read_text())
KEPT = json.loads((DATA / "kept_counts.json").read_text())
CONFIGS = {file.stem: json.loads(file.read_text()) for file in (DATA / "configs").iterdir()}
CONFIGS = {name: raw for name, raw in CONFIGS.items() if raw["model_type"] in ARCHITECTURES}


def facts(folder: str) -> list:
    """A test parameter for each model in a data folder: its name and the content of its file."""
    files = sorted((DATA / folder).iterdir())
    return [pytest.param(f.stem, json.loads(f.read_text()), id=f.stem) for f in files if f.stem in CONFIGS]


def build(name):
    architecture = ARCHITECTURES[CONFIGS[name]["model_type"]]
    return build_on_meta(architecture, architecture.Config.from_dict(CONFIGS[name]))


@cache
def parameters(name):
    """The shapes of a model's parameters by name, and its weight rules. The models themselves would take GiB."""
    model = build(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    return {name: parameter.shape for name, parameter in model.named_parameters()}, model.weight_rules()


def hub_tensors(name) -> dict[str, list[int]]:
    """Names and shapes of the checkpoint's tensors."""
    return {piece.tensor: list(piece.shape) for piece in plan_pieces(*parameters(name))}


def expanded(template: str) -> list[str]:
    """layers.{0..1,4}.norm -> layers.0.norm, layers.1.norm, layers.4.norm."""
    *parts, rest = re.split(r"\{([\d.,]+)\}", template)
    every = [[number for span in listed.split(",") for number in numbers_of(span)] for listed in parts[1::2]]
    return ["{}".join([*parts[::2], rest]).format(*numbers) for numbers in itertools.product(*every)]


def numbers_of(span: str) -> range:
    """2..4 -> 2, 3, 4; 2 -> 2."""
    first, _, last = span.partition("..")
    return range(int(first), int(last or first) + 1)


def test_every_data_file_has_its_config():
    names = {file.stem for file in (DATA / "configs").iterdir()}
    assert set(COUNTS) == names
    assert {file.stem for folder in ("tensor_names", "tensor_shapes") for file in (DATA / folder).iterdir()} <= names


def test_every_data_file_is_tested():
    assert {file.stem for folder in ("tensor_names", "tensor_shapes") for file in (DATA / folder).iterdir()} <= {
        *CONFIGS
    }


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_parameter_count_is_exact(name):
    shapes, _ = parameters(name)
    assert sum(shape.numel() for shape in shapes.values()) + KEPT.get(name, 0) == COUNTS[name]


@pytest.mark.parametrize(("name", "index"), facts("tensor_names"))
def test_tensor_names_and_total_bytes_are_those_of_the_index(name, index):
    stored = {tensor for template in index["names"] for tensor in expanded(template)}
    stale = {tensor for tensor in stored if STALE_BUFFERS.fullmatch(tensor)}
    tensors = hub_tensors(name)
    assert (set(tensors) if index.get("complete", True) else stored & set(tensors)) == stored - stale
    head_dim = 128  # of Llama 2, the only model with stale rotary buffers: [head_dim / 2] in fp32
    stored_bytes = sum(2 * torch.Size(shape).numel() for shape in tensors.values()) + len(stale) * head_dim // 2 * 4
    assert stored_bytes == index.get("total_size", stored_bytes)


def test_mxfp4_tensors_have_the_number_and_total_bytes_of_the_index():
    """Of gpt-oss-20b: its model.safetensors.index.json lists 459 tensors and a total_size of 13761264768."""
    model = build("openai--gpt-oss-20b")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    pieces = plan_pieces(shapes, *model.quantised_weight_rules())
    elements = [(torch.Size(piece.shape).numel(), piece.tensor.endswith("_blocks")) for piece in pieces]
    assert len(pieces) + sum(quantised for _, quantised in elements) == 459
    assert sum(n // 2 + n // 32 if quantised else 2 * n for n, quantised in elements) == 13761264768


@pytest.mark.parametrize(("name", "shapes"), facts("tensor_shapes"))
def test_tensor_names_and_shapes_are_exact(name, shapes):
    assert hub_tensors(name) == {tensor: shape for t, shape in shapes.items() for tensor in expanded(t)}
