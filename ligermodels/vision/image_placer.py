"""Which tokens of a batch stand for its images, and what the vision tower reads of their pixels.

A placer uses the configuration alone and works on the CPU, but for the pixels: a data loader may call it.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ligermodels.configs.vision import VisionConfig
from ligermodels.errors import InputError
from ligermodels.generation.image_features import SeenAhead
from ligermodels.layers.row_layout import PackedRows, row_layout
from ligermodels.vision.patch_positions import Grid, PatchLayout, PlacedGrid, patch_layout, text_positions


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


class Images(NamedTuple):
    """The images and videos of a batch [B, T], as the model reads them.

    pixels: [P, values of a patch], the patches of all images, then of all videos, in the order of the tower's windows.
    layout: of these patches. places: int64 [N], of the tokens of their features in the flattened batch.
    rope_ids: int64 [3, B, T], the positions of all tokens, from 0 in each row or packed document.
    rope_offsets: int64 [B, 1], of unpacked rows: what positions behind them are ahead of the number of tokens.
    These two are None where the tokens' own positions are those of RoPE.
    ahead: which tokens of the flattened batch see others behind them; None for none.
    """

    pixels: Tensor
    layout: PatchLayout
    places: Tensor
    rope_ids: Tensor | None = None
    rope_offsets: Tensor | None = None
    ahead: SeenAhead | None = None

    def continuing(self, offsets: Sequence[int], prefixes: Sequence[int | None]) -> Self:
        """Places images where packed documents share prefixes: a document's positions go on from those of its prefix.

        offsets: of the documents. prefixes: for each, the number of the document whose keys it reads before its own.
        """
        if self.rope_ids is None:
            return self
        rope_ids = self.rope_ids.clone()
        for document, prefix in enumerate(prefixes):
            if prefix is not None:
                behind = self.rope_ids[..., offsets[prefix] : offsets[prefix + 1]].max() + 1
                rope_ids[..., offsets[document] : offsets[document + 1]] += behind
        return self._replace(rope_ids=rope_ids)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=non_blocking), self)


class ImagePlacer(ABC):
    """Base class.

    config: of the model. as_transformers: see `VisionLanguageModel`.
    image_processor_type: of the Hub's files.
    sees_prompt_ahead: whether tokens of a prompt see those behind them; `prepare` then takes labels and token_type_ids.
    """

    image_processor_type: ClassVar[str]
    sees_prompt_ahead: ClassVar[bool] = False

    def __init__(self, config: Any, as_transformers: bool = False) -> None:
        self.config, self.as_transformers = config, as_transformers

    @abstractmethod
    def prepare(self, input_ids: Tensor, **inputs: Any) -> Images:
        """The images of a batch. inputs: attention_mask, position_ids and cu_seqlens, as those of the model's forward,
        and pixel inputs.

        Raises InputError if the images are not those that the tokens of each row or packed document stand for.
        """

    @abstractmethod
    def split_by_row(self, pixels: Mapping[str, Any], ids: Tensor) -> list[dict[str, Any]]:
        """The pixel inputs of a batch, for each of its rows alone. ids: [B, T] on the CPU, other ids at padding."""

    @property
    @abstractmethod
    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a new processor must know: the fields of preprocessor_config.json, and of processor_config.json."""

    @abstractmethod
    def example(self, rows: int) -> tuple[int, dict[str, Tensor]]:
        """Random pixel inputs of one image a row, and the image tokens of each."""

    def layout(self, grids: Sequence[Grid]) -> tuple[PatchLayout, Tensor | None]:
        """The layout of the patches of images with these grids, and the order of their squares in it."""
        return patch_layout(grids, self.config.vision.spatial_merge_size)

    @property
    def smallest_grid(self) -> Grid:
        side = self.config.vision.spatial_merge_size
        return Grid(1, side, side)


class GridPlacer(ImagePlacer):
    """Places images and videos that are patches with grids, as those of Qwen.

    splits_videos: whether text stands between the frames of a video.
    """

    image_processor_type = "Qwen2VLImageProcessor"
    splits_videos: ClassVar[bool] = False

    def prepare(
        self, input_ids: Tensor, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None, pixel_values: Tensor | None = None, image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None, video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Sequence[float] | Tensor | None = None, **others: Any,
    ) -> Images:  # fmt: skip
        if others:
            raise InputError(f"{', '.join(others)}: the model takes pixels with grids; leave it out")
        vision, ids = self.config.vision, input_ids.cpu()
        pictures = read_grids("image_grid_thw", image_grid_thw, pixel_values, vision)
        videos = read_grids("video_grid_thw", video_grid_thw, pixel_values_videos, vision)
        seconds = [1.0] * len(videos) if second_per_grid_ts is None else [float(x) for x in second_per_grid_ts]
        if len(seconds) != len(videos):
            raise InputError(f"second_per_grid_ts: has {len(seconds)} numbers for {len(videos)} videos")
        side = vision.spatial_merge_size
        grids = [TokenGrid(self.config.image_token_id, grid.merged(side)) for grid in pictures]
        for grid, second in zip(videos, seconds, strict=True):
            if self.splits_videos:
                grids += [TokenGrid(self.config.video_token_id, Grid(1, *grid[1:]).merged(side))] * grid.t
            else:
                grids.append(TokenGrid(self.config.video_token_id, grid.merged(side), self.frame_interval(second)))
        documents = documents_of(ids, attention_mask, position_ids, cu_seqlens)
        placed = place_images(documents, grids, self.as_transformers)
        given = [x for x in (pixel_values, pixel_values_videos) if x is not None]
        pixels = given[0] if len(given) == 1 else torch.cat(given)
        layout, order = self.layout([*pictures, *videos])
        if order is not None:
            squares = pixels.view(-1, vision.patches_per_feature * vision.pixels_per_patch)
            pixels = squares[order.to(pixels.device)].view_as(pixels)
            placed = placed._replace(places=placed.places[order])
        return Images(pixels, layout, *placed)

    def frame_interval(self, seconds: float) -> float:
        """What time advances from one frame of a video to the next, in positions. seconds: between them."""
        return 1.0

    def split_by_row(self, pixels: Mapping[str, Any], ids: Tensor) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [{} for _ in ids]
        kinds = (
            (self.config.image_token_id, "pixel_values", "image_grid_thw"),
            (self.config.video_token_id, "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
        )
        for token, values, grid_name, *more in kinds:
            grids = read_grids(grid_name, pixels.get(grid_name), pixels.get(values), self.config.vision)
            first = begin = 0
            for number, row in enumerate(rows if grids else ()):
                last, patches = first, 0
                count = int(torch.isin(ids[number], torch.tensor(token)).sum())
                while last < len(grids) and patches < count * self.config.vision.patches_per_feature:
                    patches += grids[last].patches
                    last += 1
                if last > first:
                    row |= {values: pixels[values][begin : begin + patches], grid_name: pixels[grid_name][first:last]}
                    row |= {name: pixels[name][first:last] for name in more if name in pixels}
                first, begin = last, begin + patches
            if first < len(grids):
                raise InputError(
                    f"images: {len(grids) - first} of {len(grids)} of {grid_name} have no tokens in the text"
                )
        return rows

    @property
    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        vision = self.config.vision
        return {
            "image_processor_type": self.image_processor_type, "patch_size": vision.patch_size,
            "merge_size": vision.spatial_merge_size, "temporal_patch_size": vision.temporal_patch_size,
        }, {}  # fmt: skip

    def example(self, rows: int) -> tuple[int, dict[str, Tensor]]:
        vision, side = self.config.vision, self.config.vision.spatial_merge_size
        grid = Grid(1, 2 * side, 3 * side)
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(rows * grid.patches, vision.pixels_per_patch, generator=generator)
        return grid.merged(side).patches, {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid] * rows)}


class PixelPlacer(ImagePlacer):
    """Places images that are pixels, of which `place` makes patches. other_inputs: arguments beside pixel_values."""

    other_inputs: ClassVar[tuple[str, ...]] = ()

    def prepare(
        self, input_ids: Tensor, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None, pixel_values: Tensor | None = None, **others: Any,
    ) -> Images:  # fmt: skip
        unknown = [name for name in others if name not in self.other_inputs]
        if pixel_values is None or unknown:
            names = " and ".join(("pixel_values", *self.other_inputs))
            raise InputError(f"{', '.join(unknown) or 'images'}: the model takes {names} alone")
        documents = documents_of(input_ids.cpu(), attention_mask, position_ids, cu_seqlens)
        return self.place(documents, pixel_values, **others)

    @abstractmethod
    def place(self, documents: Documents, pixels: Tensor, **others: Any) -> Images:
        """The images of these pixel_values, which the documents' tokens stand for. others: `other_inputs`."""
