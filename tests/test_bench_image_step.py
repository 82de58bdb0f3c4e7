"""The inputs of the benchmark of steps with images: both sides read the same of them."""

import pytest
import torch

import ligermodels
from benchmarks import image_step
from tests.cases import CASES
from tests.reference_model import save_reference


@pytest.mark.parametrize("tiles", [1, 4])
def test_tiles_give_the_loss_of_the_reference(tiles, tmp_path, monkeypatch):
    """Two images a row. Without the reference's departures from the training the loss is another."""
    reference = save_reference(CASES["mllama"], tmp_path)
    model = ligermodels.load(tmp_path)
    words = torch.randint(10, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(image_step.torch, "randint", lambda *_: words)
    inputs = image_step.make_inputs(model, tiles, 2, 2, 7)
    assert inputs["pixel_values"].shape == (2, 2, 4, 3, 6, 6) and inputs["aspect_ratio_mask"].sum() == 4 * tiles
    expected = reference(**inputs).loss.item()
    pixels = {key: inputs.pop(key) for key in inputs.keys() - {"input_ids", "labels"}}

    def loss():
        return model(**inputs, images=model.prepare_images(inputs["input_ids"], **pixels)).loss.item()

    assert abs(loss() - expected) > 1e-2
    model.as_transformers = True
    assert loss() == pytest.approx(expected, rel=1e-6)


def test_prompts_with_images_give_the_loss_of_the_reference(tmp_path, monkeypatch):
    """PaliGemma's, of two images a row."""
    reference = save_reference(CASES["paligemma"], tmp_path)
    model = ligermodels.load(tmp_path)
    words = torch.randint(10, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(image_step.torch, "randint", lambda *_: words)
    inputs = image_step.make_inputs(model, None, 2, 2, 7)
    assert (inputs["labels"] >= 0).sum() == 14 and inputs["token_type_ids"].sum() == 14
    expected = reference(**inputs).loss.item()
    pixels = {key: inputs.pop(key) for key in inputs.keys() - {"input_ids", "labels"}}
    images = model.prepare_images(inputs["input_ids"], **pixels)
    assert model(**inputs, images=images).loss.item() == pytest.approx(expected, rel=1e-5)


def test_modules_with_a_forward_of_liger_count_as_patched():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert image_step.patched_modules(model) == 0

    def forward(x):
        return x

    forward.__module__ = "liger_kernel.transformers"
    model[1].forward = forward
    assert image_step.patched_modules(model) == 1
