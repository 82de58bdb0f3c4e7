"""Pixels, grids and masks are those of the processors of transformers, bit for bit."""

import itertools
import random

import numpy as np
import pytest
import torch
from PIL import Image

from ligermodels.errors import InputError
from ligermodels.images.resizing import resize
from tests.images.reference import SMALL, our_processor, their_processor, with_torchvision

__all__ = ["with_torchvision"]
RATIOS = {"Qwen2VL": 200, "CLIP": 30, "Llava": 30, "Pixtral": 60}  # beyond, the reference fails or needs minutes


def random_sizes(kind, count, seed):
    draw = random.Random(seed)
    ranges = [((1, 300), (1, 300)), ((1, 60), (1, 60)), ((1, 9), (60, 400)), ((60, 400), (5, 9))]
    least = 5 if kind == "Pixtral" else 1  # of narrower pictures the reference takes the width for the channels
    while count:
        height, width = (max(least, draw.randint(*side)) for side in draw.choice(ranges))
        if max(height, width) <= RATIOS.get(kind, 1000) * min(height, width):
            count -= 1
            yield height, width


def random_pixels(height, width):
    generator = torch.Generator().manual_seed(1000 * height + width)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


def as_pil(pixels):
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def theirs(processor, kind, rows):
    pictures = [[as_pil(pixels) for pixels in row] for row in rows]
    nested = kind in ("Mllama", "SmolVLM", "Idefics3")
    more = {"return_row_col_info": True} if kind in ("SmolVLM", "Idefics3") else {}
    return processor(pictures if nested else list(itertools.chain(*pictures)), return_tensors="pt", **more)


def ours(processor, rows):
    plans = [[processor.plan(*pixels.shape[1:]) for pixels in row] for row in rows]
    prepared = [
        [(plan, processor.pixels(pixels, plan)) for plan, pixels in zip(*row, strict=True)]
        for row in zip(plans, rows, strict=True)
    ]
    tokens = torch.zeros(len(rows), 5, dtype=torch.bool)
    for row, images in enumerate(rows):
        tokens[row, : len(images)] = True
    inputs = processor.collate(prepared, tokens)
    inputs.pop("cross_attention_mask", None)
    return inputs, [plan for row in plans for plan in row]


def assert_equal(inputs, expected):
    for name, value in inputs.items():
        assert torch.equal(value, torch.as_tensor(expected[name])), name


def check_sizes(name, count):
    """Compares the pixels and the plans of images of `count` random sizes."""
    kind, image, text = SMALL[name]
    processor, reference = our_processor(kind, image, text), their_processor(kind, image)
    for size in random_sizes(kind, count, seed=name):
        rows = [[random_pixels(*size)]]
        expected = theirs(reference, kind, rows)
        inputs, [plan] = ours(processor, rows)
        assert_equal(inputs, expected)
        if "rows" in expected:
            assert plan.grid == (expected["rows"][0][0], expected["cols"][0][0]), size
        if "num_crops" in expected:
            assert len(plan.crops) == expected["num_crops"][0], size


@pytest.mark.parametrize("name", SMALL)
def test_pixels_of_200_sizes(name, with_torchvision):
    check_sizes(name, 200)


@pytest.mark.parametrize("name", SMALL)
def test_images_of_unequal_sizes_in_two_rows(name, with_torchvision):
    kind, image, text = SMALL[name]
    rows = [[random_pixels(90, 61)], [random_pixels(50, 200), random_pixels(33, 34)]]
    inputs, _ = ours(our_processor(kind, image, text), rows)
    assert_equal(inputs, theirs(their_processor(kind, image), kind, rows))


@pytest.mark.parametrize(("how", "resample"), [("bilinear", 2), ("bicubic", 3), ("lanczos", 1)])
def test_a_filter_is_pillows_but_for_rounding(how, resample):
    pixels = random_pixels(90, 70)
    for size in ((40, 31), (200, 111)):
        pillow = np.asarray(as_pil(pixels).resize(size[::-1], resample)).astype(int)
        difference = np.abs(resize(pixels, size, how).permute(1, 2, 0).numpy() - pillow)
        assert difference.max() <= 2 and (difference > 0).mean() < 0.02


def test_sizes_that_no_model_takes():
    qwen, pixtral = (our_processor(*SMALL[name]) for name in ("qwen2", "pixtral"))
    with pytest.raises(InputError, match="is 4 x 900 pixels; one side must not be over 200 times the other"):
        qwen.plan(900, 4)
    with pytest.raises(InputError, match="nothing is left of it within 128 x 128 pixels"):
        pixtral.plan(900, 1)


def test_pixtral_has_at_most_the_tokens_of_its_limit():
    processor = our_processor(*SMALL["pixtral"])
    assert processor.token_range == (1, 25)  # a side of 128 pixels has 5 features of 28
    limited = processor.with_token_range(1, 11)
    plans = [limited.plan(*size) for size in random_sizes("Pixtral", 200, seed="limit")]
    assert max(plan.features for plan in plans) == 9 and limited.plan(20, 50).features == 2
    with pytest.raises(InputError, match="never enlarged; give the most tokens alone"):
        processor.with_token_range(2, 11)


@pytest.mark.parametrize("name", ["llava", "pixtral", "smolvlm"])
def test_the_size_of_a_picture_is_that_of_its_pixels(name):
    """Of LLaVA the crop, of SmolVLM a tile, from which a plan counts patches."""
    processor, image = our_processor(*SMALL[name]), random_pixels(80, 200)
    plan = processor.plan(80, 200)
    assert processor.picture_size(plan) == processor.pixels(image, plan).shape[-2:]
