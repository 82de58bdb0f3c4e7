"""Batches of groups: packed rows as tensors, for a model's `forward` and for `ligermodels.losses`.

This module knows models only by the arguments of their `forward`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ligermodels.kernels.attention.shared_keys import SharedKeys
from ligermodels.training.data.preferences.dealing import pack_units
from ligermodels.training.data.preferences.formats import GroupKind
from ligermodels.training.data.preferences.groups import Group, unshared
from ligermodels.training.data.preferences.layout import GroupPiece, RowLayout, lay_out, split_group
from ligermodels.training.data.rows.decoding import ImageDecoder

ROW_MULTIPLE = 128  # of tokens in a row, and of rows that meet the head: a tile of a matrix product


@dataclass(frozen=True)
class PreferenceBatch:
    """A packed row of T tokens with D documents, S completions and M supervised tokens: one micro-batch of a rank.

    For the model:
    input_ids, labels, position_ids: int64 [1, T]. labels: aligned with input_ids, -100 where not supervised; never of a
    prompt. cu_seqlens: int32 [D + 1], offsets of the documents; the padding is the last one. max_seqlen: length of the
    longest. shared_keys: what documents read where prompts are shared; None where none is.
    rows: int64 [N], the places whose next token is supervised, by completion, in order; N is a multiple of 128, and
    what is beyond M is padding, the last place, whose next token is not supervised. Values of N tokens, such as
    log-probabilities, are in this order.
    images: those of the row, in order, under the names of arguments of `forward`; empty if there are none. An image of
    a prompt that is shared is there once.

    For the losses:
    completions: int32 [S + 1], offsets of the completions in the first M of N values: `cu_seqlens` of the losses. Of
    pairs, chosen and rejected alternate. last_tokens: int64 [S], the place of each completion's last token, which a
    reward model reads. units: int64 [S], the number of each completion's unit in the step, from 0; sides: int64 [S],
    its number in its group: of pairs 0 for chosen and 1 for rejected.
    margins: fp32 [S / 2] of pairs, 0 for a pair without one; None where no pair of the row has one. desirable: bool [S]
    of judged completions; else None.
    teacher_ids int64 [N, k], teacher_logprobs fp32 [N, k]: zeros in the padding; None where no completion of the row
    has a teacher.

    On the host:
    numbers: int64 [S], of the completions among all of the data, to find what was precomputed for them; -1 for those
    that were sampled. supervised: M. tokens: of the row without padding. tokens_unshared: what they would be with a
    prompt for each completion.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    shared_keys: SharedKeys | None
    rows: Tensor
    completions: Tensor
    last_tokens: Tensor
    units: Tensor
    sides: Tensor
    margins: Tensor | None
    desirable: Tensor | None
    teacher_ids: Tensor | None
    teacher_logprobs: Tensor | None
    numbers: np.ndarray
    supervised: int
    tokens: int
    tokens_unshared: int
    images: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def model_inputs(self) -> dict[str, Any]:
        """The arguments of `CausalLM.logprobs`, or of `forward`."""
        names = ("input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen", "shared_keys", "rows")
        return {name: getattr(self, name) for name in names} | dict(self.images)

    def to(self, device: torch.device) -> "PreferenceBatch":
        """Copies the batch to a device; copies from pinned memory do not block the host."""
        return self.map_tensors(lambda x: x.to(device, non_blocking=True))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "PreferenceBatch":
        changed: dict[str, Any] = {"images": tree_map_only(Tensor, function, dict(self.images))}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = function(value)
            elif isinstance(value, SharedKeys):
                changed[field.name] = value.map_tensors(function)
        return dataclasses.replace(self, **changed)


def collate_groups(
    groups: Sequence[Group], units: Sequence[int], length: int, *, share_prompts: bool = True, pinned: bool = False
) -> list[PreferenceBatch]:
    """The rows of completions that were sampled: groups of any size, in rows of at most `length` tokens.

    units: the number of each group in the step. A group that is longer than a row is split, with a prompt in each row.
    `units` and `sides` of a batch say which group and which of its completions each one is. Ranks may get different
    numbers of rows; `empty_batch` fills up.
    """
    whole = [GroupPiece(group, unit) for group, unit in zip(groups, units, strict=True)]
    pieces = [part for piece in whole for part in split_group(piece, length, share_prompts)]
    rows = pack_units([piece.tokens(share_prompts) for piece in pieces], length)
    return [collate_row([pieces[number] for number in row], share_prompts, pinned=pinned) for row in rows]


def empty_batch(like: PreferenceBatch | None = None) -> PreferenceBatch:
    """A row of padding, for a rank with fewer rows than others; nothing is supervised. On the device of `like`."""
    batch = collate_row([], False)
    return batch if like is None else batch.to(like.input_ids.device)


def collate_row(
    pieces: Sequence[GroupPiece],
    share: bool,
    *,
    values: Sequence[float] = (),
    kind: GroupKind | None = None,
    pinned: bool = False,
    decoder: ImageDecoder | None = None,
) -> PreferenceBatch:
    """A row in host memory. values: of each piece, its margin or label, as `kind` says; NaN for no margin.

    decoder: of the images; None if no group has any. Raises InputError as `ImageDecoder.prepare` does.
    """
    layout = lay_out(pieces, share, ROW_MULTIPLE)
    groups = [piece.group for piece in pieces]
    supervised = len(layout.rows)
    counts = [len(group.completions) for group in groups]
    sides = [piece.first + side for piece, count in zip(pieces, counts, strict=True) for side in range(count)]
    value = torch.tensor(values, dtype=torch.float32)
    teacher_ids, teacher_logprobs = teachers(groups, padded(supervised))
    batch = PreferenceBatch(
        **{name: torch.from_numpy(getattr(layout, name))[None] for name in ("input_ids", "labels", "position_ids")},
        cu_seqlens=torch.from_numpy(layout.cu_seqlens), max_seqlen=int(np.diff(layout.cu_seqlens).max()),
        shared_keys=shared_keys(layout), rows=padded_rows(layout),
        completions=torch.from_numpy(layout.completions), last_tokens=torch.from_numpy(layout.last_tokens),
        units=torch.tensor(np.repeat([piece.unit for piece in pieces], counts), dtype=torch.int64),
        sides=torch.tensor(sides, dtype=torch.int64),
        margins=value.nan_to_num(0.0) if kind == "pairs" and not value.isnan().all() else None,
        desirable=value == 1 if kind == "judged" else None,
        teacher_ids=teacher_ids, teacher_logprobs=teacher_logprobs,
        numbers=completion_numbers(pieces), supervised=supervised,
        tokens=sum(piece.tokens(share) for piece in pieces), tokens_unshared=unshared(groups),
        images=image_arguments(layout, decoder) if decoder else {},
    )  # fmt: skip
    return batch.map_tensors(Tensor.pin_memory) if pinned else batch


def image_arguments(layout: RowLayout, decoder: ImageDecoder) -> dict[str, Any]:
    """Those of `forward` for the images of a row."""
    images = [(image.store, image.number) for image in layout.images]
    ids, cu_seqlens = torch.from_numpy(layout.input_ids)[None], torch.from_numpy(layout.cu_seqlens)
    arguments = decoder.arguments([images], ids, None, cu_seqlens, pinned=False)
    if layout.shares and "images" in arguments:
        arguments["images"] = arguments["images"].continuing(layout.cu_seqlens.tolist(), layout.prefixes)
    return arguments


def padded(count: int) -> int:
    return max(1, -(-count // ROW_MULTIPLE)) * ROW_MULTIPLE


def padded_rows(layout: RowLayout) -> Tensor:
    rows = torch.full((padded(len(layout.rows)),), len(layout.input_ids) - 1, dtype=torch.int64)
    rows[: len(layout.rows)] = torch.from_numpy(layout.rows)
    return rows


def shared_keys(layout: RowLayout) -> SharedKeys | None:
    if not layout.shares:
        return None
    offsets, places, cu_seqlens = (torch.from_numpy(x) for x in (layout.offsets, layout.places, layout.cu_seqlens_k))
    return SharedKeys(offsets, places, cu_seqlens, int(np.diff(layout.cu_seqlens_k).max()))


def completion_numbers(pieces: Sequence[GroupPiece]) -> np.ndarray:
    numbers = [
        np.full(len(piece.group.completions), -1) if piece.number < 0
        else piece.number + np.arange(len(piece.group.completions))
        for piece in pieces
    ]  # fmt: skip
    return np.concatenate([*numbers, np.arange(0)]).astype(np.int64)


def teachers(groups: Sequence[Group], count: int) -> tuple[Tensor | None, Tensor | None]:
    """The rows of all teachers, with zeros up to `count` rows; None where no group has a teacher."""
    found = [teacher for group in groups for teacher in group.teacher or ()]
    if not found:
        return None, None
    ids = torch.zeros(count, found[0].ids.shape[1], dtype=torch.int64)
    logprobs = torch.zeros(ids.shape)
    ids_of, logprobs_of = (np.concatenate([getattr(teacher, name) for teacher in found]) for name in found[0]._fields)
    ids[: len(ids_of)], logprobs[: len(ids_of)] = torch.from_numpy(ids_of), torch.from_numpy(logprobs_of)
    return ids, logprobs
