"""Pixels, grids and masks are those of the processors of transformers, bit for bit."""

import itertools
import random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_transforms import resize as transformers_resize
from transformers.image_utils import PILImageResampling

from ligermodels.errors import CheckpointError, InputError
from ligermodels.images import resizing
from ligermodels.images.resizing import TORCH_HAS_LANCZOS, resize
from ligermodels.images.settings import RANGES
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


@pytest.mark.parametrize("size", [(40, 31), (200, 111), (1, 1), (90, 35)])
def test_without_lanczos_in_torch_it_is_pillows(size, monkeypatch):
    pixels = random_pixels(90, 70)
    monkeypatch.setattr(resizing, "TORCH_HAS_LANCZOS", False)
    monkeypatch.setattr(resizing.F, "interpolate", lambda *_, mode, **__: pytest.fail(f"torch has no {mode}"))
    theirs = transformers_resize(pixels.numpy(), size, PILImageResampling.LANCZOS, data_format="channels_first")
    assert torch.equal(resize(pixels, size, "lanczos"), torch.from_numpy(theirs))


@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_without_lanczos_in_torch_tiles_differ_from_torchvisions_in_roundings(name, monkeypatch, with_torchvision):
    kind, image, text = SMALL[name]
    rows = [[random_pixels(90, 61)], [random_pixels(50, 200), random_pixels(33, 34)]]
    expected = theirs(their_processor(kind, image), kind, rows)
    monkeypatch.setattr(resizing, "TORCH_HAS_LANCZOS", False)
    inputs, _ = ours(our_processor(kind, image, text), rows)
    levels = (inputs.pop("pixel_values") - expected["pixel_values"]).mul(255 / 2).abs().round()
    assert_equal(inputs, expected)
    # Where torch has no Lanczos filter, the reference resizes by Pillow too.
    assert levels.max() == (2 if TORCH_HAS_LANCZOS else 0) and (levels > 0).float().mean() < 0.02


def test_sizes_that_no_model_takes():
    qwen, pixtral = (our_processor(*SMALL[name]) for name in ("qwen2", "pixtral"))
    with pytest.raises(InputError, match="is 4 x 900 pixels; one side must not be over 200 times the other"):
        qwen.plan(900, 4)
    with pytest.raises(InputError, match="nothing is left of it within 128 x 128 pixels"):
        pixtral.plan(900, 1)


@pytest.mark.parametrize("size", [(1, 65_535), (65_535, 1), (1, 3000), (1, 446)])
def test_an_image_too_narrow_for_a_centre_crop_is_refused_by_its_plan(size):
    square = {"height": 336, "width": 336}
    llava = our_processor("Llava", {"size": {"shortest_edge": 336}, "crop_size": square}, {"patch_size": 14})
    assert llava.plan(1, 445).resized == (336, 336 * 445)
    width, height = (336 * side for side in reversed(size))
    with pytest.raises(InputError, match=f"resized to {width} x {height} pixels, more than 50,331,648; crop the image"):
        llava.plan(*size)


MANY_PIXELS = {
    "frames": ("qwen2", {"max_pixels": 2**24, "min_pixels": 2**24, "temporal_patch_size": 4}, "67,765,824"),
    "patches": ("qwen2", {"patch_size": 4096, "merge_size": 1, "temporal_patch_size": 16}, "268,435,456"),
    "tiles": ("smolvlm", {"size": {"longest_edge": 4096}, "max_image_size": {"longest_edge": 4095}}, "83,845,125"),
}


@pytest.mark.parametrize("fault", MANY_PIXELS)
def test_an_image_is_not_read_as_more_pixels_than_it_may_be_resized_to(fault):
    name, image, pixels = MANY_PIXELS[fault]
    kind, *files = SMALL[name]
    with pytest.raises(InputError, match=f"^would be read as {pixels} pixels, more than 50,331,648; make the image sm"):
        our_processor(kind, files[0] | image, files[1]).plan(1024, 1024)


# Of each fault: the case of SMALL, the changed fields of its two files, and the error.
IMPOSSIBLE = {
    "least pixels": ("qwen2", {"min_pixels": 10**12}, {}, "min_pixels is 10+; must be an integer from 1 to 16,777,216"),
    "most pixels": ("qwen2", {"max_pixels": 10**12}, {}, "max_pixels is 10+; must be an integer from 1 to 67,108,864"),
    "no pixels between": ("qwen3", {"min_pixels": 32769}, {}, "min_pixels is 32769; must be at most max_pixels, 32768"),
    "frames": ("qwen2", {"temporal_patch_size": 17}, {}, "temporal_patch_size is 17; must be an integer from 1 to 16"),
    "stretched": ("gemma3", {"size": {"height": 30_000, "width": 1}}, {}, "size.height is 30000; .* from 1 to 4,096"),
    "features": ("gemma3", {}, {"image_seq_length": 6 * 10**7}, "text.json: field image_seq_length .* 1 to 16,384"),
    "crops": ("gemma3 with crops", {"pan_and_scan_max_num_crops": 17}, {}, "max_num_crops is 17; .* from 1 to 16"),
    "pixels of crops": (
        "gemma3 with crops", {"size": {"height": 4096, "width": 4096}, "pan_and_scan_max_num_crops": 5}, {},
        "max_num_crops is 5; pictures of 4096 x 4096 pixels must have at most 50,331,648 in all; lower it or size",
    ),
    "tiles": ("mllama", {"max_image_tiles": 10**9}, {}, "max_image_tiles is 10+; must be an integer from 1 to 16"),
    "pixels of tiles": (
        "mllama", {"size": {"height": 4096, "width": 4096}, "max_image_tiles": 5}, {},
        "max_image_tiles is 5; pictures of 4096 x 4096 pixels must have at most 50,331,648 in all; lower it or size",
    ),
    "features of a tile": ("smolvlm", {}, {"image_seq_len": 10**7}, "image_seq_len is 10+; .* from 1 to 16,384"),
    "negative features": ("clip", {}, {"num_additional_image_tokens": -9999}, "is -9999; must be an integer from 0 to"),
    "patches": ("clip", {}, {"patch_size": 1000}, "text.json: field patch_size is 1000; must be at most crop_size, 56"),
}  # fmt: skip


@pytest.mark.parametrize("fault", IMPOSSIBLE)
def test_numbers_that_no_processor_has_are_refused_with_their_field(fault):
    name, image, text, message = IMPOSSIBLE[fault]
    kind, *files = SMALL[name]
    with pytest.raises(CheckpointError, match=message):
        our_processor(kind, files[0] | image, files[1] | text)


MANY_FEATURES = {
    "tiles of a pixel": ("smolvlm", {"max_image_size": {"longest_edge": 1}}, {}, "65,540"),
    "enlarged": ("qwen2", {"min_pixels": 2**24, "max_pixels": 2**26, "patch_size": 7}, {}, "85,849"),
    "patches of a pixel": (
        "pixtral",
        {"size": {"longest_edge": 1024}},
        {"patch_size": 1, "spatial_merge_size": 1},
        "490,000",
    ),
    "none": ("clip", {}, {"patch_size": 56, "vision_feature_select_strategy": "default"}, "0"),
}


@pytest.mark.parametrize("fault", MANY_FEATURES)
def test_an_image_takes_from_1_to_65536_tokens(fault):
    name, image, text, features = MANY_FEATURES[fault]
    kind, *files = SMALL[name]
    processor = our_processor(kind, files[0] | image, files[1] | text)
    with pytest.raises(InputError, match=f"takes {features} image tokens, must take from 1 to 65,536; make the image"):
        processor.plan(700, 700)


# The largest number of LLaVA, PaliGemma, Pixtral, Mistral 3, Idefics 3, SmolVLM, Llama 3.2 Vision, Gemma 3, Qwen3-VL.
PUBLISHED = {
    "min_pixels": 65_536, "max_pixels": 16_777_216, "size.height": 896, "size.width": 896, "size.shortest_edge": 336,
    "size.longest_edge": 2048, "max_image_size.longest_edge": 512, "crop_size.height": 336, "crop_size.width": 336,
    "patch_size": 16, "merge_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "max_image_tiles": 4,
    "image_seq_length": 4096, "image_seq_len": 169, "num_additional_image_tokens": 1,
    "pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2,
}  # fmt: skip


def test_published_numbers_are_at_most_a_quarter_of_the_largest():
    assert all(4 * value <= RANGES[field][1] for field, value in PUBLISHED.items())
    assert RANGES.keys() - PUBLISHED == {"rescale_factor", "image_mean", "image_std"}


def test_a_factor_of_1_is_a_number():
    kind, image, text = SMALL["clip"]
    processor = our_processor(kind, image | {"rescale_factor": 1, "image_mean": [0] * 3, "image_std": [1] * 3}, text)
    pixels = random_pixels(56, 56)
    assert torch.equal(processor.pixels(pixels, processor.plan(56, 56)), pixels.float())


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
