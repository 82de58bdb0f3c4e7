"""The image processors of transformers, with the arithmetic of torchvision where torchvision is not installed.

Each has two classes of the same sizes, crops, tiles and patches: one computes with torchvision and is the default where
that is installed, the other with Pillow and numpy. Only three functions differ, and are written here in torch.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from transformers import image_processing_backends as backends
from transformers.utils.import_utils import is_torchvision_available

from ligermodels.images.inputs import IMAGE_FAMILIES
from ligermodels.images.resizing import TORCH_HAS_LANCZOS
from ligermodels.images.settings import ImageSettings
from ligermodels.tokenizer.files import JsonFields

FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
RESCALE_FACTOR = 1 / 255
# Settings that make small pictures, and all branches, of images of a few hundred pixels.
SMALL = {
    "qwen2": ("Qwen2VL", {"size": {"shortest_edge": 3136, "longest_edge": 50176}}, {}),
    "qwen3": (
        "Qwen2VL",
        {"min_pixels": 4096, "max_pixels": 32768, "patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        {},
    ),
    "gemma3": ("Gemma3", {"size": {"height": 42, "width": 56}}, {"image_seq_length": 4}),
    "gemma3 with crops": (
        "Gemma3",
        {
            "size": {"height": 56, "width": 56}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 40,
            "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2,
        }, {"image_seq_length": 4},
    ),
    "paligemma": ("Siglip", {"size": {"height": 42, "width": 56}, "image_seq_length": 4}, {}),
    "mllama": ("Mllama", {"size": {"height": 56, "width": 56}}, {}),
    "pixtral": (
        "Pixtral", {"size": {"longest_edge": 128}, "patch_size": {"height": 28, "width": 28}},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "pixtral not merged": (
        "Pixtral", {"size": {"longest_edge": 100}, "patch_size": {"height": 16, "width": 16}}, {"patch_size": 16},
    ),
    "clip": ("CLIP", {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}, {"patch_size": 14}),
    "llava": ("Llava", {"size": {"shortest_edge": 61}, "crop_size": {"height": 56, "width": 56}}, {"patch_size": 14}),
    "smolvlm": (
        "SmolVLM", {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}, {"image_seq_len": 4},
    ),
    "smolvlm not split": (
        "SmolVLM",
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": False},
        {"image_seq_len": 4},
    ),
    "idefics3": (
        "Idefics3", {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}, {"image_seq_len": 4},
    ),
}  # fmt: skip


def our_processor(kind, image, text):
    settings = ImageSettings(JsonFields(Path("image.json"), image), JsonFields(Path("text.json"), text))
    return IMAGE_FAMILIES[f"{kind}ImageProcessor"].processor.from_settings(settings)


def their_processor(kind, image):
    ending = "" if is_torchvision_available() else "Pil"
    return getattr(transformers, f"{kind}ImageProcessor{ending}")(**image)


def resized(image, size, resample, **_):
    pixels = torch.from_numpy(image).contiguous()[None]
    if pixels.dtype != torch.uint8:
        raise TypeError(f"resizes {pixels.dtype}: the order of the reference's steps has changed")
    if tuple(pixels.shape[2:]) != tuple(size):
        if FILTERS[int(resample)] == "lanczos" and not TORCH_HAS_LANCZOS:  # as transformers resizes by Pillow
            picture = Image.fromarray(image.transpose(1, 2, 0)).resize(tuple(size)[::-1], Image.Resampling.LANCZOS)
            return np.asarray(picture).transpose(2, 0, 1)
        pixels = F.interpolate(pixels, tuple(map(int, size)), mode=FILTERS[int(resample)], antialias=True)
    return pixels[0].numpy()


def normalized(self, image, mean, std, **_):
    """As `_fuse_mean_std_and_rescale_factor`, to pixels that were not rescaled before."""
    mean, std = (torch.tensor(values)[:, None, None] * (1.0 / RESCALE_FACTOR) for values in (mean, std))
    return ((torch.from_numpy(image).float() - mean) / std).numpy()


@pytest.fixture
def with_torchvision(monkeypatch):
    """The processors of transformers compute as with torchvision."""
    if not is_torchvision_available():
        monkeypatch.setattr(backends, "np_resize", resized)
        monkeypatch.setattr(backends.PilBackend, "rescale", lambda self, image, scale, **_: image)
        monkeypatch.setattr(backends.PilBackend, "normalize", normalized)
