"""Batches with random images for the tiny vision-language models of tests/cases, as a processor would make them."""

import torch
from torch import Tensor

from tests.cases import CASES

# Patches over time, height and width: odd numbers of squares, ragged windows, unequal sizes.
GRIDS = [(1, 6, 10), (1, 2, 4), (1, 8, 6)]
VIDEO = [(2, 4, 8)]
SECONDS = 1.5  # between frames

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "llava")
VISION_CASES = [name for name in CASES if name.partition("-")[0] in FAMILIES]


def takes_pictures(name: str) -> bool:
    """Whether images have one size, and the model no grids."""
    return "image_size" in CASES[name]["vision_config"]


def tokens_of(raw, grid: tuple[int, int, int], side: int = 2) -> int:
    vision = raw["vision_config"]
    if "image_size" in vision:
        return raw.get("mm_tokens_per_image", (vision["image_size"] // vision["patch_size"]) ** 2)
    return grid[0] * grid[1] * grid[2] // side**2


def image_token(raw) -> int:
    return raw.get("image_token_id", raw.get("image_token_index"))


def pixels_of(name: str, grids: list[tuple[int, int, int]], seed: int = 1) -> Tensor:
    vision = CASES[name]["vision_config"]
    if takes_pictures(name):
        side = vision["image_size"]
        return torch.randn(len(grids), 3, side, side, generator=torch.Generator().manual_seed(seed))
    width = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    patches = sum(t * h * w for t, h, w in grids)
    return torch.randn(patches, width, generator=torch.Generator().manual_seed(seed))


def row_of(raw, pattern: list, generator: torch.Generator) -> list[int]:
    """Token ids of a row. pattern: a number stands for so many random tokens, a grid for an image, its list a video."""
    ids: list[int] = []
    for part in pattern:
        if isinstance(part, int):
            ids += torch.randint(3, 90, (part,), generator=generator).tolist()
        elif isinstance(part, list) and raw["model_type"].startswith("qwen3"):  # text between the frames
            frame = [raw["video_token_id"]] * tokens_of(raw, (1, *part[0][1:]))
            ids += [token for number in range(part[0][0]) for token in (*frame, 5 + number)]
        elif isinstance(part, list):
            ids += [raw["video_token_id"]] * tokens_of(raw, part[0])
        else:
            ids += [image_token(raw)] * tokens_of(raw, part)
    return ids


def batch_of(name: str, patterns: list[list], seed: int = 3) -> dict[str, Tensor]:
    """A batch of rows, padded on the right with an attention mask; patterns as those of `row_of`."""
    raw, generator = CASES[name], torch.Generator().manual_seed(seed)
    rows = [row_of(raw, pattern, generator) for pattern in patterns]
    length = max(map(len, rows))
    images = [part for pattern in patterns for part in pattern if isinstance(part, tuple)]
    videos = [part[0] for pattern in patterns for part in pattern if isinstance(part, list)]
    batch = {"input_ids": torch.tensor([row + [0] * (length - len(row)) for row in rows])}
    if len({*map(len, rows)}) > 1:
        batch["attention_mask"] = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    if images:
        batch["pixel_values"] = pixels_of(name, images)
        batch |= {} if takes_pictures(name) else {"image_grid_thw": torch.tensor(images)}
    if videos:
        batch |= {"pixel_values_videos": pixels_of(name, videos, seed=2), "video_grid_thw": torch.tensor(videos)}
        if "tokens_per_second" in raw["vision_config"]:
            batch["second_per_grid_ts"] = torch.full((len(videos),), SECONDS)
    return batch


def images_between(name: str, batch: dict[str, Tensor], grids: list, first: int, last: int) -> dict[str, Tensor]:
    """The pixel inputs of some of the images of a batch, which have these grids."""
    if takes_pictures(name):
        return {"pixel_values": batch["pixel_values"][first:last]}
    begin, end = (sum(t * h * w for t, h, w in grids[:number]) for number in (first, last))
    return {"pixel_values": batch["pixel_values"][begin:end], "image_grid_thw": batch["image_grid_thw"][first:last]}


def for_reference(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same for transformers, whose positions need the kind of every token."""
    raw, ids = CASES[name], batch["input_ids"]
    if raw["model_type"] == "llava":
        return batch
    kinds = (ids == image_token(raw)) + 2 * (ids == raw.get("video_token_id"))
    return batch | {"token_type_ids" if takes_pictures(name) else "mm_token_type_ids": kinds}


def labels_for(name: str, batch: dict[str, Tensor]) -> Tensor:
    """Labels: the ids, -100 at padding, at the tokens of images and at every fifth token."""
    raw, ids = CASES[name], batch["input_ids"]
    labels = ids.masked_fill((ids == image_token(raw)) | (ids == raw.get("video_token_id")), -100)
    labels[:, ::5] = -100
    return labels.masked_fill(batch.get("attention_mask", torch.ones_like(ids)) == 0, -100)
