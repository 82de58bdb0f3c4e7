"""Where the patches of images are: their rows and columns, the spans in which they attend, their place in the text.

A grid (t, h, w) is the number of patches of an image or a video over time (t = 1 for an image), height and width.
Patches come in merged order: the m × m patches of a square, which become one feature of the text model, follow one
another; squares go row by row, frame by frame. Everything here is integers on the CPU, so that a data loader can do it.
Source of the order and the windows: Qwen2.5-VL, https://arxiv.org/abs/2502.13923; of the positions in the text (M-RoPE)
Qwen2-VL, https://arxiv.org/abs/2409.12191.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.attention.shared_keys import SharedKeys


class Grid(NamedTuple):
    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w

    def merged(self, side: int) -> "Grid":
        return Grid(self.t, self.h // side, self.w // side)


class Spans(NamedTuple):
    """Patches that attend to each other: cu_seqlens int32 [spans + 1], offsets; max_seqlen: the longest span."""

    cu_seqlens: Tensor
    max_seqlen: int


class PatchLayout(NamedTuple):
    """What a vision tower needs to know of the patches of a batch.

    positions: int64 [2, P], row and column of each patch, in the order of the blocks; there may be rows of no patch.
    frames: the spans of full attention. windows: those of windowed attention, None without.
    table: of a learned table of positions, the entries that each patch reads; None without.
    keys: the patches that those of a frame see; None for all of it.
    """

    positions: Tensor
    frames: Spans
    windows: Spans | None = None
    table: "TableReads | None" = None
    keys: SharedKeys | None = None


class TableReads(NamedTuple):
    """Entries of a table of positions, int64 [P, n], and their weights, fp32 [P, n]: interpolation of n entries."""

    entries: Tensor
    weights: Tensor


def offsets_from(lengths: Tensor) -> Tensor:
    """int64 or int32 [n] -> int32 [n + 1], from 0."""
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def make_spans(lengths: Sequence[int]) -> Spans:
    return Spans(offsets_from(torch.tensor(lengths, dtype=torch.int64)), max(lengths, default=0))


def patch_layout(
    grids: Iterable[Grid], side: int, window: int | None = None, table: int | None = None
) -> tuple[PatchLayout, Tensor | None]:
    """The layout of the patches of images and videos with these grids; the order of their squares in it, int64 [N].

    The order is None if it is that of the images. side: of a square, in patches. window: the side of the windows of
    windowed attention, in squares; None for none. table: the side of a square table of learned positions; None for
    none.
    """
    grids = list(grids)
    positions = torch.cat([patch_positions(grid, side) for grid in grids], 1)
    frames = make_spans([grid.h * grid.w for grid in grids for _ in range(grid.t)])
    if window is None:
        reads = None if table is None else table_reads(positions, grids, table)
        return PatchLayout(positions, frames, table=reads), None
    first, orders, lengths = 0, [], []
    for grid in grids:
        merged = grid.merged(side)
        order, counts = window_order(merged, window)
        orders.append(order + first)
        lengths += [count * side * side for count in counts]
        first += merged.patches
    order = torch.cat(orders)
    positions = positions.unflatten(1, (-1, side * side))[:, order].flatten(1)
    return PatchLayout(positions, frames, make_spans(lengths)), order


def class_token_layout(images: int, side: int) -> PatchLayout:
    """The layout of images of side × side patches, each with a class token before them.

    A learned table has the position of the class token, then those of the patches.
    """
    row = torch.arange(side * side + 1)
    patch = (row - 1).clamp(min=0)
    positions = torch.stack([patch // side, patch % side]).repeat(1, images)
    entries = row.repeat(images)[:, None]
    return PatchLayout(positions, make_spans([len(row)] * images), table=TableReads(entries, torch.ones(entries.shape)))


def patch_positions(grid: Grid, side: int) -> Tensor:
    """Row and column of each patch, int64 [2, t h w], in merged order."""
    place = torch.stack(torch.meshgrid(torch.arange(grid.h), torch.arange(grid.w), indexing="ij"))  # [2, h, w]
    squares = place.view(2, grid.h // side, side, grid.w // side, side).transpose(2, 3)
    return squares.flatten(1).repeat(1, grid.t)


def table_reads(positions: Tensor, grids: Iterable[Grid], side: int) -> TableReads:
    """How patches at these rows and columns [2, P] read a table of side × side positions that is stretched over each
    image, its corners on the image's corners."""
    sizes = torch.tensor([[grid.h, grid.w] for grid in grids for _ in range(grid.patches)]).T
    place = positions.float() * (side - 1) / (sizes - 1).clamp(min=1)  # [2, P]
    below, offsets = place.floor(), torch.arange(2)
    taps = (below.long()[..., None] + offsets).clamp(max=side - 1)  # [2, P, 2]
    weights = (1 - (place[..., None] - below[..., None] - offsets).abs()).clamp(min=0)
    entries = taps[0][:, :, None] * side + taps[1][:, None]
    return TableReads(entries.flatten(1), (weights[0][:, :, None] * weights[1][:, None]).flatten(1))


def window_order(grid: Grid, window: int) -> tuple[Tensor, list[int]]:
    """Squares [t, h, w] frame by frame, window by window -> (their order, int64 [t h w]; the squares of each window).

    Windows have window × window squares; those at the right and the bottom edge may be smaller.
    """
    squares = torch.arange(grid.patches).view(grid)
    windows = [part.flatten() for frame in squares for band in frame.split(window, 0) for part in band.split(window, 1)]
    return torch.cat(windows), [len(part) for part in windows]


class PlacedGrid(NamedTuple):
    """A grid of features whose tokens begin at `start` of their document.

    interval: what time advances from frame to frame, in positions.
    """

    start: int
    grid: Grid
    interval: float = 1.0


def text_positions(length: int, placed: Iterable[PlacedGrid], as_transformers: bool = False) -> tuple[Tensor, int]:
    """(time, row and column of the tokens of a document, int64 [3, length]; the offset of the tokens after it).

    Text counts all three on. An image begins at the next count: its time stays there, its rows and columns count from
    there. What follows goes on behind its largest position. offset: that position less the number of tokens.
    as_transformers: what follows goes on behind the image's rows and columns, even if a video's times go further.
    """
    parts, position, end = [], 0, 0
    for start, grid, interval in placed:
        parts.append(torch.arange(position, position + start - end).expand(3, -1))
        position += start - end
        axes = (torch.arange(grid.t) * interval).long(), torch.arange(grid.h), torch.arange(grid.w)
        parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + position)
        position = position + max(grid.h, grid.w) if as_transformers else int(parts[-1].max()) + 1
        end = start + grid.patches
    parts.append(torch.arange(position, position + length - end).expand(3, -1))
    return torch.cat(parts, 1), position - end
