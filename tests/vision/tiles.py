"""Batches with random images in tiles for the tiny models of tests/cases/mllama.py, as a processor would make them."""

import torch
from torch import Tensor

from ligermodels.images.processors import seeing_tokens
from ligermodels.images.resizing import tile_grids
from tests.cases import CASES
from tests.vision.batches import padded

# An image of one tile, one of two, one of four in a square.
ONE, WIDE, SQUARE = (1, 1), (1, 2), (2, 2)
# Two images in a row with text between; text before and none; two that follow one another; rows of unequal length.
BATCH = [[WIDE, 4, SQUARE, 2], [3, ONE, 1], [2, ONE, WIDE, 3]]
PATTERNS = {"images": BATCH, "row": [[2, WIDE, 4, SQUARE, 3]], "first": [[ONE, 3]], "none": [[7], [7]]}


def batch_of(name: str, patterns: list[list], seed: int = 3) -> dict[str, Tensor]:
    """A batch of rows, padded on the right with an attention mask. A number stands for so many random tokens."""
    raw, generator = CASES[name], torch.Generator().manual_seed(seed)
    rows = []
    for pattern in patterns:
        row: list[int] = []
        for part in pattern:
            random = isinstance(part, int)
            row += torch.randint(3, 90, (part,), generator=generator).tolist() if random else [raw["image_token_index"]]
        rows.append(row)
    batch = padded(rows)
    ids = batch["input_ids"]
    images = [[part for part in pattern if isinstance(part, tuple)] for pattern in patterns]
    most, side = max(map(len, images)), raw["vision_config"]["image_size"]
    if not most:
        return batch
    pixels, ratios = torch.zeros(len(rows), most, 4, 3, side, side), torch.zeros(len(rows), most, dtype=torch.int64)
    real, seen = torch.zeros(len(rows), most, 4, dtype=torch.int64), torch.zeros(*ids.shape, most, 4, dtype=torch.int64)
    real[:, :, 0] = 1
    for row, grids in enumerate(images):
        places = (ids[row] == raw["image_token_index"]).nonzero()[:, 0].tolist()
        spans = seeing_tokens(places, len(rows[row]))
        for number, (grid, (start, stop)) in enumerate(zip(grids, spans, strict=True)):
            count = grid[0] * grid[1]
            pixels[row, number, :count] = torch.randn(count, 3, side, side, generator=generator)
            ratios[row, number] = tile_grids(4).index(grid) + 1
            real[row, number, :count] = 1
            seen[row, start:stop, number, :count] = 1
    return batch | {
        "pixel_values": pixels, "aspect_ratio_ids": ratios, "aspect_ratio_mask": real, "cross_attention_mask": seen,
    }  # fmt: skip
