"""Which tokens of a batch stand for which image: grids and token ids, compared on the CPU."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.configs.multimodal import MultimodalConfig
from ligermodels.configs.vision import VisionConfig
from ligermodels.errors import InputError
from ligermodels.layers.row_layout import PackedRows, row_layout
from ligermodels.vision.patch_positions import Grid, PlacedGrid, text_positions


class Documents(NamedTuple):
    """The tokens of a batch, document by document; a row without packed documents is one.

    ids: int64 [n], without padding. places: int64 [n], theirs in the flattened batch. offsets: of the documents in ids.
    shape: (B, T).
    """

    ids: Tensor
    places: Tensor
    offsets: list[int]
    shape: tuple[int, int]


class TokenGrid(NamedTuple):
    """An image or a video: the token that stands for each of its features, their grid, and the seconds of a frame.

    interval: what time advances from frame to frame, in positions.
    """

    token: int
    grid: Grid
    interval: float = 1.0


class PlacedImages(NamedTuple):
    """places int64 [N], rope_ids int64 [3, B, T], rope_offsets int64 [documents, 1]: see `Images`."""

    places: Tensor
    rope_ids: Tensor
    rope_offsets: Tensor

    def reordered(self, order: Tensor) -> "PlacedImages":
        return self._replace(places=self.places[order])


def documents_of(
    ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cu_seqlens: Tensor | None
) -> Documents:
    """The documents of a batch of ids [B, T] on the CPU; arguments as those of a model's forward."""
    shape = ids.shape[0], ids.shape[1]
    places = torch.arange(ids.numel())
    if cu_seqlens is not None:
        return Documents(ids.flatten(), places, cu_seqlens.tolist(), shape)
    mask = None if attention_mask is None else attention_mask[:, -shape[1] :].cpu()
    position_ids = None if position_ids is None else position_ids.cpu()
    layout = row_layout(shape, mask, None if mask is not None else position_ids, None, cached=False)
    if not isinstance(layout, PackedRows):
        return Documents(ids.flatten(), places, list(range(0, ids.numel() + 1, shape[1])), shape)
    return Documents(ids.flatten()[layout.indices], layout.indices, layout.cu_seqlens.tolist(), shape)


def place_images(documents: Documents, grids: Sequence[TokenGrid], as_transformers: bool = False) -> PlacedImages:
    """Gives every grid its tokens, in the order of the tokens of its kind. Raises InputError if they do not fit.

    as_transformers: see `text_positions`.
    """
    waiting = {token: deque(n for n, grid in enumerate(grids) if grid.token == token) for token, *_ in grids}
    tokens = torch.tensor(list(waiting))
    places: list[Tensor] = [torch.empty(0)] * len(grids)
    rope_ids = torch.zeros(3, documents.shape[0] * documents.shape[1], dtype=torch.int64)
    offsets = []
    for number, (first, last) in enumerate(zip(documents.offsets, documents.offsets[1:], strict=False)):
        ids, placed = documents.ids[first:last], []
        special = torch.isin(ids, tokens).nonzero()[:, 0].tolist()
        at = 0
        while at < len(special):
            start = special[at]
            index, grid = next_grid(ids, start, waiting, grids, number)
            places[index] = documents.places[first + start : first + start + grid.grid.patches]
            placed.append(PlacedGrid(start, grid.grid, grid.interval))
            at += grid.grid.patches
        positions, offset = text_positions(len(ids), placed, as_transformers)
        rope_ids[:, documents.places[first:last]] = positions
        offsets.append(offset)
    left = sum(map(len, waiting.values()))
    if left:
        raise InputError(f"images: {left} of {len(grids)} images and videos have no tokens in the text; remove them")
    return PlacedImages(torch.cat(places), rope_ids.unflatten(1, documents.shape), torch.tensor(offsets)[:, None])


def next_grid(
    ids: Tensor, start: int, waiting: dict[int, deque[int]], grids: Sequence[TokenGrid], document: int
) -> tuple[int, TokenGrid]:
    """The number and the grid of the image whose tokens begin at `start`. Raises InputError if they are not there."""
    token = int(ids[start])
    where = f"images: row or document {document}, token {start}"
    if not waiting[token]:
        raise InputError(f"{where}: the text has more tokens {token} than the images and videos fill; remove them")
    index = waiting[token].popleft()
    count = grids[index].grid.patches
    found = int((ids[start : start + count] == token).sum())
    if found < count:
        raise InputError(
            f"{where}: an image or video has {count} features, but only {found} of these tokens are {token}; "
            "let the processor expand the text, and cut no image off"
        )
    return index, grids[index]


def read_grids(name: str, grid_thw: Tensor | None, pixels: Tensor | None, vision: VisionConfig) -> list[Grid]:
    """The grids of image_grid_thw or video_grid_thw, called `name`. Raises InputError if they do not fit the patches.

    pixels: the patches [P, values of a patch], None without images.
    """
    if grid_thw is None or pixels is None:
        if grid_thw is not pixels:
            raise InputError(f"{name}: pixel values and grids go together; pass both")
        return []
    if grid_thw.ndim != 2 or grid_thw.shape[1] != 3:
        raise InputError(f"{name}: has shape {list(grid_thw.shape)}; must be [images, 3]")
    grids, side = [Grid(*map(int, row)) for row in grid_thw.tolist()], vision.spatial_merge_size
    for grid in grids:
        if min(grid) < 1 or grid.h % side or grid.w % side:
            raise InputError(f"{name}: {list(grid)} must be positive, height and width multiples of {side} patches")
    expected = [sum(grid.patches for grid in grids), vision.pixels_per_patch]
    if list(pixels.shape) != expected:
        raise InputError(f"{name}: pixel values have shape {list(pixels.shape)}; the grids need {expected}")
    return grids


def split_by_row(pixels: Mapping[str, Any], ids: Tensor, config: MultimodalConfig) -> list[dict[str, Any]]:
    """The pixel inputs of a batch, for each of its rows alone. ids: [B, T] on the CPU, other ids at padding."""
    rows: list[dict[str, Any]] = [{} for _ in ids]
    kinds = (
        (config.image_token_id, "pixel_values", "image_grid_thw"),
        (config.video_token_id, "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    )
    for token, values, grid_name, *more in kinds:
        grids = read_grids(grid_name, pixels.get(grid_name), pixels.get(values), config.vision)
        first = begin = 0
        for number, row in enumerate(rows if grids else ()):
            last, patches = first, 0
            count = int(torch.isin(ids[number], torch.tensor(token)).sum())
            while last < len(grids) and patches < count * config.vision.patches_per_feature:
                patches += grids[last].patches
                last += 1
            if last > first:
                row |= {values: pixels[values][begin : begin + patches], grid_name: pixels[grid_name][first:last]}
                row |= {name: pixels[name][first:last] for name in more if name in pixels}
            first, begin = last, begin + patches
        if first < len(grids):
            raise InputError(f"images: {len(grids) - first} of {len(grids)} of {grid_name} have no tokens in the text")
    return rows
