"""Batches with random images for the tiny vision-language models of tests/cases, as a processor would make them."""

import torch
from torch import Tensor

from tests.cases import CASES

# Patches over time, height and width: odd numbers of squares, ragged windows, unequal sizes.
GRIDS = [(1, 6, 10), (1, 2, 4), (1, 8, 6)]
VIDEO = [(2, 4, 8)]
SECONDS = 1.5  # between frames

FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "llava", "mistral3", "pixtral", "idefics3"),
    *("smolvlm", "paligemma"),
)
ROW_END, IMAGE_END = 96, 97  # text behind the rows of images that have sizes, and behind the last
VISION_CASES = [name for name in CASES if name.partition("-")[0] in FAMILIES]


def takes_pictures(name: str) -> bool:
    """Whether images have one size, and the model no grids."""
    return "image_size" in CASES[name]["vision_config"] and not takes_sizes(name)


def takes_sizes(name: str) -> bool:
    """Whether images are padded to one size, and the model takes the sizes before."""
    return CASES[name]["vision_config"].get("model_type") == "pixtral"


def takes_videos(name: str) -> bool:
    return "video_token_id" in CASES[name]


def side_of(raw) -> int:
    """Patches along a side of what becomes a feature."""
    return raw.get("spatial_merge_size", 1 if raw["model_type"] == "llava" else 2)


def takes_tiles(name: str) -> bool:
    """Whether the pictures are tiles, as many of each row as of the row with most, and have a mask."""
    return "scale_factor" in CASES[name]


def tokens_of(raw, grid: tuple[int, int, int], side: int = 2) -> int:
    vision = raw["vision_config"]
    if "image_size" in vision:
        return raw.get(
            "mm_tokens_per_image", (vision["image_size"] // vision["patch_size"] // raw.get("scale_factor", 1)) ** 2
        ) + (raw.get("vision_feature_select_strategy") == "full")  # the class token
    return grid[0] * grid[1] * grid[2] // side**2


def ids_of(raw, grid: tuple[int, int, int]) -> list[int]:
    """The tokens of an image."""
    if raw["vision_config"].get("model_type") != "pixtral":
        return [image_token(raw)] * tokens_of(raw, grid)
    height, width = (length // side_of(raw) for length in grid[1:])
    return ([image_token(raw)] * width + [ROW_END]) * (height - 1) + [image_token(raw)] * width + [IMAGE_END]


def image_token(raw) -> int:
    return raw.get("image_token_id", raw.get("image_token_index"))


def pixels_of(name: str, grids: list[tuple[int, int, int]], seed: int = 1) -> Tensor:
    vision = CASES[name]["vision_config"]
    if takes_pictures(name):
        side = vision["image_size"]
        return torch.randn(len(grids), 3, side, side, generator=torch.Generator().manual_seed(seed))
    if takes_sizes(name):  # what is beside an image is not zero, so that it would show
        size = sizes_of(name, grids).amax(0).tolist()
        return torch.randn(len(grids), 3, *size, generator=torch.Generator().manual_seed(seed))
    width = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    patches = sum(t * h * w for t, h, w in grids)
    return torch.randn(patches, width, generator=torch.Generator().manual_seed(seed))


def tiles_of(name: str, rows: list[list[tuple[int, int, int]]]) -> dict[str, Tensor]:
    """A tile for each grid, of which the patches of the grid that fit are not padding; of rows, padded with zeros."""
    vision, most = CASES[name]["vision_config"], max(map(len, rows))
    side, patch = vision["image_size"], vision["patch_size"]
    pixels, mask = (
        torch.zeros(len(rows), most, 3, side, side),
        torch.zeros(len(rows), most, side, side, dtype=torch.int64),
    )
    given = pixels_of(name, [grid for row in rows for grid in row])
    for row, grids in enumerate(rows):
        pixels[row, : len(grids)], given = given[: len(grids)], given[len(grids) :]
        for number, (_, height, width) in enumerate(grids):
            mask[row, number, : height * patch, : width * patch] = 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


def sizes_of(name: str, grids: list[tuple[int, int, int]]) -> Tensor:
    return torch.tensor(grids)[:, 1:] * CASES[name]["vision_config"]["patch_size"]


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
            ids += ids_of(raw, part)
    return ids


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """Token ids, padded on the right, with an attention mask if rows are of unequal length."""
    length = max(map(len, rows))
    batch = {"input_ids": torch.tensor([row + [0] * (length - len(row)) for row in rows])}
    if len({*map(len, rows)}) > 1:
        batch["attention_mask"] = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return batch


def batch_of(name: str, patterns: list[list], seed: int = 3) -> dict[str, Tensor]:
    """A batch of rows, padded on the right with an attention mask; patterns as those of `row_of`."""
    raw, generator = CASES[name], torch.Generator().manual_seed(seed)
    rows = [row_of(raw, pattern, generator) for pattern in patterns]
    images = [part for pattern in patterns for part in pattern if isinstance(part, tuple)]
    videos = [part[0] for pattern in patterns for part in pattern if isinstance(part, list)]
    batch = padded(rows)
    if images and takes_tiles(name):
        batch |= tiles_of(name, [[part for part in pattern if isinstance(part, tuple)] for pattern in patterns])
    elif images:
        batch["pixel_values"] = pixels_of(name, images)
        if takes_sizes(name):
            batch["image_sizes"] = sizes_of(name, images)
        elif not takes_pictures(name):
            batch["image_grid_thw"] = torch.tensor(images)
    if videos:
        batch |= {"pixel_values_videos": pixels_of(name, videos, seed=2), "video_grid_thw": torch.tensor(videos)}
        if "tokens_per_second" in raw["vision_config"]:
            batch["second_per_grid_ts"] = torch.full((len(videos),), SECONDS)
    return batch


def join_pixels(parts: list[Tensor]) -> Tensor:
    """Patches or images one after another; images of several sizes get random padding, which would show."""
    if parts[0].ndim == 2:
        return torch.cat(parts)
    height, width = (max(part.shape[axis] for part in parts) for axis in (2, 3))
    padded = torch.randn(sum(map(len, parts)), parts[0].shape[1], height, width, dtype=parts[0].dtype)
    for number, image in enumerate(image for part in parts for image in part):
        padded[number, :, : image.shape[1], : image.shape[2]] = image
    return padded


def images_between(name: str, batch: dict[str, Tensor], grids: list, first: int, last: int) -> dict[str, Tensor]:
    """The pixel inputs of some of the images of a batch, which have these grids."""
    if takes_tiles(name):
        real = batch["pixel_attention_mask"].flatten(2).any(-1)
        return {key: batch[key][real][None, first:last] for key in ("pixel_values", "pixel_attention_mask")}
    if takes_pictures(name):
        return {"pixel_values": batch["pixel_values"][first:last]}
    if takes_sizes(name):
        return {key: batch[key][first:last] for key in ("pixel_values", "image_sizes")}
    begin, end = (sum(t * h * w for t, h, w in grids[:number]) for number in (first, last))
    return {"pixel_values": batch["pixel_values"][begin:end], "image_grid_thw": batch["image_grid_thw"][first:last]}


def types_of(name: str, batch: dict[str, Tensor]) -> Tensor:
    """1 for the tokens behind each row's prompt, which ends two tokens behind its last image; 1 in rows without one."""
    ids = batch["input_ids"]
    is_image = ids == image_token(CASES[name])
    last = ids.shape[1] - is_image.flip(1).int().argmax(1) - 1
    end = torch.where(is_image.any(1), last + 3, 0)
    types = (torch.arange(ids.shape[1]) >= end[:, None]).long()
    return types.masked_fill(batch.get("attention_mask", types + 1) == 0, 0)


def for_reference(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same for transformers, whose positions need the kind of every token."""
    raw, ids = CASES[name], batch["input_ids"]
    if raw["model_type"] in ("llava", "mistral3") or takes_tiles(name):
        return batch
    if raw["model_type"] == "paligemma":
        return batch | {"token_type_ids": types_of(name, batch)}
    kinds = (ids == image_token(raw)) + 2 * (ids == raw.get("video_token_id"))
    return batch | {"token_type_ids" if takes_pictures(name) else "mm_token_type_ids": kinds}


def labels_for(name: str, batch: dict[str, Tensor]) -> Tensor:
    """Labels: the ids, -100 at padding, at the tokens of images and at every fifth token."""
    raw, ids = CASES[name], batch["input_ids"]
    labels = ids.masked_fill((ids == image_token(raw)) | (ids == raw.get("video_token_id")), -100)
    labels[:, ::5] = -100
    return labels.masked_fill(batch.get("attention_mask", torch.ones_like(ids)) == 0, -100)


def completion_labels(name: str, batch: dict[str, Tensor]) -> Tensor:
    """The same for a model that takes the tokens before the first label for a prompt: -100 at prompts with images."""
    labels = labels_for(name, batch)
    return labels.masked_fill(types_of(name, batch) == 0, -100) if name.startswith("paligemma") else labels
