"""The tests of image processors detect bugs: each listed break of the code makes the named processor differ."""

import pytest

from ligermodels.errors import InputError
from tests.images.reference import with_torchvision
from tests.images.test_processors import check_sizes
from tests.sabotage import Sabotage

__all__ = ["with_torchvision"]
SIZES = "ligermodels.images.resizing"
PROCESSORS = "ligermodels.images.processors"

BREAKS = {
    "rescaled after the mean is subtracted": Sabotage(
        f"{SIZES}:normalize",
        "pixels.to(torch.float32).sub_(shift).div_(scale)",
        "(pixels.to(torch.float32) * rescale_factor).sub_(shift * rescale_factor).div_(scale * rescale_factor)",
        "clip",
    ),
    "mean and deviation of another order of channels": Sabotage(
        f"{SIZES}:normalize", "torch.tensor(values)", "torch.tensor(values).flip(0)", "clip"
    ),
    "resized without antialiasing": Sabotage(f"{SIZES}:resize", "antialias=True", "antialias=False", "gemma3"),
    "halves rounded up": Sabotage(
        f"{SIZES}:smart_size", "round(height / factor)", "math.floor(height / factor + 0.6)", "qwen2"
    ),
    "too large an image rounded up": Sabotage(f"{SIZES}:smart_size", "math.floor(side", "math.ceil(side", "qwen2"),
    "merged patches in raster order": Sabotage(
        f"{PROCESSORS}:QwenImages.pixels", "permute(1, 4, 2, 5, 0, 3, 6)", "permute(1, 2, 4, 5, 0, 3, 6)", "qwen2"
    ),
    "rows and columns of a patch swapped": Sabotage(
        f"{PROCESSORS}:QwenImages.pixels", "permute(1, 4, 2, 5, 0, 3, 6)", "permute(1, 4, 2, 5, 0, 6, 3)", "qwen3"
    ),
    "crops overlap": Sabotage(
        f"{SIZES}:pan_and_scan",
        "Box(0, number * step, height",
        "Box(0, number * step // 2, height",
        "gemma3 with crops",
    ),
    "one crop too many": Sabotage(f"{SIZES}:pan_and_scan", "+ 0.5)", "+ 1)", "gemma3 with crops"),
    "tile ratios transposed": Sabotage(
        f"{SIZES}:best_grid",
        "min(rows * tile / height, columns * tile / width)",
        "min(columns * tile / height, rows * tile / width)",
        "mllama",
    ),
    "of equal scales the largest grid": Sabotage(f"{SIZES}:best_grid", "min((grid for", "max((grid for", "mllama"),
    "normalised before the canvas is padded": Sabotage(
        f"{PROCESSORS}:MllamaImages.pixels",
        "self.normalized(tiles(F.pad(resize(image, size, self.how), (0, right, 0, bottom)), self.tile))",
        "tiles(F.pad(self.normalized(resize(image, size, self.how)), (0, right, 0, bottom)), self.tile)",
        "mllama",
    ),
    "enlarged to its canvas": Sabotage(
        f"{SIZES}:in_canvas", "min(max(width, tile), canvas.width)", "canvas.width", "mllama"
    ),
    "an id of a grid too low": Sabotage(
        f"{PROCESSORS}:MllamaImages.collate", ".index(plan.grid) + 1", ".index(plan.grid)", "mllama"
    ),
    "tiles column by column": Sabotage(
        f"{PROCESSORS}:tiles", "permute(1, 3, 0, 2, 4)", "permute(3, 1, 0, 2, 4)", "smolvlm"
    ),
    "the whole image first": Sabotage(
        f"{PROCESSORS}:SmolVlmImages.pixels",
        "[tiles(cut, self.tile), whole[None]]",
        "[whole[None], tiles(cut, self.tile)]",
        "smolvlm",
    ),
    "sides down to multiples": Sabotage(
        f"{SIZES}:within", "((height - 1) // unit + 1)", "(height // unit or 1)", "pixtral"
    ),
    "cut from a corner": Sabotage(f"{PROCESSORS}:ClipImages.pixels", "// 2", "* 0", "llava"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_makes_its_processor_differ(name, monkeypatch, with_torchvision):
    sabotage = BREAKS[name]
    sabotage.apply(monkeypatch)
    with pytest.raises((AssertionError, InputError, RuntimeError)):
        check_sizes(sabotage.case, 200)
