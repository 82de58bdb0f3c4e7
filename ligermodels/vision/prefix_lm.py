"""Prompts that are seen as a whole: each token of a text with pictures sees all of its prompt.

What follows the prompt is causal. A text without pictures is causal from its start. Source: PaliGemma,
https://arxiv.org/abs/2407.07726.
"""

from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.image_features import SeenAhead
from ligermodels.layers.decoder import IGNORE_INDEX
from ligermodels.vision.image_placer import Images
from ligermodels.vision.siglip import SiglipPlacer
from ligermodels.vision.token_places import Documents, documents_of


class PrefixPlacer(SiglipPlacer):
    """Places pictures for SigLIP in prompts that see ahead, a feature for each patch."""

    image_processor_type = "SiglipImageProcessor"
    sees_prompt_ahead = True

    def prepare(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **inputs: Any,
    ) -> Images:
        """Does what `PixelPlacer.prepare` does.

        The prompt of a row or packed document are its first tokens: those of token_type_ids 0, int [B, T], followed by
        1; without them, and with pictures, those before its first label, int [B, T]; without labels all of it.
        Raises InputError for a picture behind the prompt, which the model never saw in its training.
        """
        given: dict[str, Any] = {
            "attention_mask": attention_mask, "position_ids": position_ids, "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        images = SiglipPlacer.prepare(self, input_ids, **given, **inputs)
        documents = documents_of(input_ids.cpu(), **given)
        behind = torch.zeros(input_ids.shape, dtype=torch.bool)
        if token_type_ids is not None:
            behind = token_type_ids.cpu() != 0
            check_types(documents, behind.flatten())
        elif labels is not None:
            behind = labels.cpu() != IGNORE_INDEX
        token = None if token_type_ids is not None else self.config.image_token_id
        ahead = prompts_seen(documents, behind.flatten(), token)
        check_pictures(images.places, ahead.places)
        self.check_window(ahead)
        return images._replace(ahead=ahead)

    def check_window(self, ahead: SeenAhead) -> None:
        """Raises InputError for a prompt longer than the window of a layer, which would not be seen as a whole."""
        window, longest = self.config.shortest_window, int(ahead.counts.max()) + 1 if len(ahead.counts) else 0
        if window is not None and longest > window:
            raise InputError(
                f"images: a prompt has {longest} tokens with those of its pictures, more than sliding_window "
                f"{window} of text_config, which is not supported; shorten it, or take a model of smaller pictures"
            )

    @property
    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return super().settings[0] | {"image_seq_length": self.config.vision.features_per_picture}, {}


def prompts_seen(documents: Documents, behind: Tensor, token: int | None) -> SeenAhead:
    """The tokens of prompts, with how many of them are behind each. behind: bool [B T], those that are no prompt,
    of each document from the first one on. token: documents without it see nothing ahead; None for all."""
    places, counts = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for first, last in zip(documents.offsets, documents.offsets[1:], strict=False):
        if token is not None and not bool((documents.ids[first:last] == token).any()):
            continue
        mine = documents.places[first:last]
        others = behind[mine].nonzero()[:, 0]
        length = int(others[0]) if len(others) else len(mine)
        places.append(mine[:length])
        counts.append(torch.arange(length - 1, -1, -1))
    return SeenAhead(torch.cat(places), torch.cat(counts))


def check_pictures(pictures: Tensor, prompts: Tensor) -> None:
    """Raises InputError if the tokens of a picture are not among those of prompts."""
    outside = pictures[~torch.isin(pictures, prompts)]
    if len(outside):
        raise InputError(
            f"images: token {int(outside[0])} of the batch is a picture's, but behind the prompt; the labels of "
            "pictures and of what comes before them must be -100, their token_type_ids 0"
        )


def check_types(documents: Documents, behind: Tensor) -> None:
    """Raises InputError if a token of a prompt follows one that is none."""
    for number, (first, last) in enumerate(zip(documents.offsets, documents.offsets[1:], strict=False)):
        mine = behind[documents.places[first:last]].int()
        if bool((mine.diff() < 0).any()):
            raise InputError(f"token_type_ids: row or document {number} has 0 behind 1; the prompt, of 0, is first")
