"""Placers: which tokens of a batch stand for its images, and what the vision tower reads of their pixels.

A placer uses the configuration alone and works on the CPU, but for the pixels: a data loader may call it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ligermodels.errors import InputError
from ligermodels.generation.image_features import SeenAhead
from ligermodels.vision.patch_positions import Grid, PatchLayout, patch_layout
from ligermodels.vision.token_places import Documents, TokenGrid, documents_of, place_images, read_grids, split_by_row


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
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Sequence[float] | Tensor | None = None,
        **others: Any,
    ) -> Images:
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
            pixels, placed = squares[order.to(pixels.device)].view_as(pixels), placed.reordered(order)
        return Images(pixels, layout, *placed)

    def frame_interval(self, seconds: float) -> float:
        """What time advances from one frame of a video to the next, in positions. seconds: between them."""
        return 1.0

    def split_by_row(self, pixels: Mapping[str, Any], ids: Tensor) -> list[dict[str, Any]]:
        return split_by_row(pixels, ids, self.config)

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
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        **others: Any,
    ) -> Images:
        unknown = [name for name in others if name not in self.other_inputs]
        if pixel_values is None or unknown:
            names = " and ".join(("pixel_values", *self.other_inputs))
            raise InputError(f"{', '.join(unknown) or 'images'}: the model takes {names} alone")
        documents = documents_of(input_ids.cpu(), attention_mask, position_ids, cu_seqlens)
        return self.place(documents, pixel_values, **others)

    @abstractmethod
    def place(self, documents: Documents, pixels: Tensor, **others: Any) -> Images:
        """The images of these pixel_values, which the documents' tokens stand for. others: `other_inputs`."""
