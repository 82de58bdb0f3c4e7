"""Which tiles of images the tokens of a text see by cross-attention, compared on the CPU.

A token sees the image whose token is before it, up to the next image; of images that follow one another the k-th token
sees the first k, and the text behind them all. Must not know pixels or any family.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ligermodels.generation.image_features import TileSpan

Tiles = tuple[int, ...]


def spans_of_tokens(image_places: Sequence[int], images: Sequence[Tiles]) -> list[TileSpan]:
    """The spans of a document whose image tokens stand at these places. images: the tiles of each."""
    spans = [] if image_places and image_places[0] == 0 else [TileSpan(0, ())]
    seen: Tiles = ()
    for number, place in enumerate(image_places):
        follows = number > 0 and image_places[number - 1] == place - 1
        seen = (*seen, *images[number]) if follows else images[number]
        spans.append(TileSpan(place, seen))
    return spans


def spans_of_mask(mask: Tensor, tiles: Sequence[int], blind: Tiles) -> list[TileSpan]:
    """The spans of a row by a mask [T, tiles] of the tiles that each token sees. tiles: the number of each column, -1
    for a tile that no image has. blind: the tiles that tokens attend to which see none."""
    changes = (mask[1:] != mask[:-1]).any(1).nonzero()[:, 0] + 1
    spans = []
    for first in (0, *changes.tolist()):
        seen = tuple(tiles[column] for column in mask[first].nonzero()[:, 0].tolist() if tiles[column] >= 0)
        spans.append(TileSpan(first, seen or blind, is_blind=not seen))
    return spans


def moved(span: TileSpan, place: int) -> TileSpan:
    return span._replace(first=place)


def as_mask(values: Tensor) -> Tensor:
    """The columns [T, images, tiles] of a mask as [T, images tiles], bool."""
    return values.flatten(1) > torch.zeros((), dtype=values.dtype)
