"""Features of images, as the decoder takes them: in place of the embeddings at some tokens.

What models and generation see of each other of images. Must not know what made the features, nor any family.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ligermodels.generation.cross_features import CrossFeatures, CrossPrompt, cross_features_of_pieces


class ImageFeatures(NamedTuple):
    """values [N, H]: the features. places: int64 [N], of their tokens in the flattened batch, each once.

    deepstack: further features [N, H], the first of which are added behind the first block, and so on.
    """

    values: Tensor
    places: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def insert(self, embeddings: Tensor) -> Tensor:
        """Embeddings [B, T, H] with the features at their places. The host does not wait for the device."""
        values = self.values.to(embeddings.dtype)
        return embeddings.flatten(0, 1).index_copy(0, self.places, values).unflatten(0, embeddings.shape[:2])

    def add(self, block: int, hidden: Tensor) -> Tensor:
        """The output [B, T, H] of a block, by its number, plus the features that are added behind it."""
        values = self.deepstack[block].to(hidden.dtype)
        return hidden.flatten(0, 1).index_add(0, self.places, values).unflatten(0, hidden.shape[:2])


class PromptImages(NamedTuple):
    """The images of one prompt of T tokens.

    features [N, H] and deepstack, see `ImageFeatures`, on the model's device. places: int64 [N], of their tokens in the
    prompt, ascending, and rope_ids: int64 [3, T], both on the CPU. rope_offset: what positions behind the prompt are
    ahead of the number of tokens.
    """

    features: Tensor
    places: Tensor
    rope_ids: Tensor
    rope_offset: int
    deepstack: tuple[Tensor, ...] = ()


def no_features(features: ImageFeatures) -> ImageFeatures:
    """The same for no token, which depends on the features all the same: their gradients are then zeros."""
    places = torch.empty(0, dtype=torch.int64, device=features.values.device)
    return ImageFeatures(features.values[:0], places, tuple(values[:0] for values in features.deepstack))


def features_of_pieces(
    images: Sequence[PromptImages | CrossPrompt | None], spans: Sequence[tuple[int, int]], device: torch.device
) -> ImageFeatures | CrossFeatures:
    """The features of a packed row of pieces of prompts, of which one or more have images.

    images: of each piece's prompt. spans: the first and the last place of each piece in its prompt.
    """
    if any(isinstance(prompt, CrossPrompt) for prompt in images):
        return cross_features_of_pieces(cast(Sequence[CrossPrompt | None], images), spans, device)
    values, places, deepstack, begin = [], [], [], 0
    for prompt, (start, stop) in zip(cast(Sequence[PromptImages | None], images), spans, strict=True):
        if prompt is not None:
            first, last = torch.searchsorted(prompt.places, torch.tensor([start, stop])).tolist()
            values.append(prompt.features[first:last])
            deepstack.append([features[first:last] for features in prompt.deepstack])
            places.append(prompt.places[first:last] - start + begin)
        begin += stop - start
    added = tuple(torch.cat(features) for features in zip(*deepstack, strict=True))
    return ImageFeatures(torch.cat(values), torch.cat(places).to(device), added)


def rope_of_pieces(
    images: Sequence[PromptImages | CrossPrompt | None], spans: Sequence[tuple[int, int]]
) -> Tensor | None:
    """The positions for RoPE of such a row, int64 [3, 1, N] on the CPU; None where they are those of the tokens."""
    given = [None if prompt is None else prompt.rope_ids for prompt in images]
    if all(rope_ids is None for rope_ids in given):
        return None
    pieces = (
        torch.arange(start, stop).expand(3, -1) if rope_ids is None else rope_ids[:, start:stop]
        for rope_ids, (start, stop) in zip(given, spans, strict=True)
    )
    return torch.cat(list(pieces), 1)[:, None]
