"""Groups in packed rows: documents, positions, keys, rows of the head, and what the losses read."""

import numpy as np
import pytest
import torch

from ligermodels import losses
from ligermodels.distributed import World
from ligermodels.layers.decoder import IGNORE_INDEX, next_tokens
from ligermodels.training.data.preferences import Group, collate_groups, empty_batch
from ligermodels.training.data.preferences.layout import GroupPiece, split_group
from ligermodels.training.data.preferences.store import Teacher
from ligermodels.training.data.rows.packing import deal_units, pack_units


def group(prompt, *lengths, first=1):
    """Tokens count up from `first`, so that each one is known."""
    ends = np.cumsum([prompt, *lengths])
    ids = np.arange(first, first + ends[-1])
    return Group(ids[:prompt], tuple(np.split(ids[prompt:], ends[:-1] - prompt))[1:], (None,) * len(lengths))


def row(*groups, share=True):
    [batch] = collate_groups(groups, range(len(groups)), 512, share_prompts=share)
    return batch


def test_completions_follow_one_copy_of_their_prompt():
    batch = row(group(3, 2, 1))  # prompt 1 2 3, completions 4 5 and 6
    assert batch.input_ids[0, :8].tolist() == [1, 2, 3, 4, 5, 3, 6, 0] and batch.input_ids.shape == (1, 128)
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 7, 128] and batch.max_seqlen == 121
    assert batch.position_ids[0, :9].tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 1]
    assert batch.rows.tolist() == [2, 3, 5] + [127] * 125 and batch.supervised == 3
    assert batch.completions.tolist() == [0, 2, 3] and batch.last_tokens.tolist() == [4, 6]
    assert (batch.units.tolist(), batch.sides.tolist(), batch.numbers.tolist()) == ([0, 0], [0, 1], [-1, -1])
    assert (batch.tokens, batch.tokens_unshared) == (7, 9)
    keys = batch.shared_keys
    assert keys.cu_seqlens.tolist() == [0, 2, 7, 11, 132] and keys.max_seqlen == 121
    tokens = torch.arange(128).repeat_interleave(keys.offsets.diff())
    index = torch.empty(132, dtype=torch.int64).scatter(0, keys.places.long(), tokens)
    assert index[:12].tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7]


@pytest.mark.parametrize("share", [True, False])
def test_the_rows_of_the_head_predict_the_completions(share):
    masked = group(4, 3, 5, first=40)._replace(supervised=(np.array([True, False, True]), None))
    groups = [group(3, 2, 1), masked, group(2, 6, first=80)]
    batch = row(*groups, share=share)
    targets = next_tokens(batch.labels, batch.cu_seqlens)[0, batch.rows]
    expected = [4, 5, 6, 44, 46, *range(47, 52), *range(82, 88)]
    assert targets.tolist() == [*expected, *[IGNORE_INDEX] * (len(batch.rows) - len(expected))]
    assert batch.input_ids[0, batch.rows[: batch.supervised]].tolist()[:3] == [3, 4, 3]
    assert (next_tokens(batch.labels, batch.cu_seqlens) != IGNORE_INDEX).sum() == batch.supervised == len(expected)
    assert losses.segment_sums(torch.ones(len(batch.rows)), batch.completions).tolist() == [2, 1, 2, 5, 6]
    assert (batch.shared_keys is None) != share


def test_groups_end_between_rows_of_the_head():
    batch = row(group(3, 2, 1), group(2, 6, 4, first=80), group(2, 3, 1, first=90))
    assert batch.borders(2) == [0, 3, 13, 128] and batch.borders(1) == [0, 2, 3, 9, 13, 16, 128]
    for rows, inside, offsets in [
        (slice(0, 3), slice(0, 2), [0, 2, 3]),
        (slice(3, 128), slice(2, 6), [0, 6, 10, 13, 14]),
        (slice(0, 128), slice(0, 6), batch.completions.tolist()),
    ]:
        got, found = batch.completions_in(rows, 2)
        assert (got, found.tolist()) == (inside, offsets)


def test_ranks_that_share_a_row_have_the_rows_of_their_parts():
    groups = [group(30, 20, 40), group(60, 7, 150, first=100)]
    whole = row(*groups)
    worlds = [World(torch.device("cpu"), rank, 3, context=3) for rank in range(3)]
    parts = [collate_groups(groups, range(2), 512, world=world)[0] for world in worlds]
    length, sizes = parts[0].input_ids.shape[1], parts[0].parts
    assert length == 384 and sizes == (60, 105, 52) and sum(sizes) == whole.supervised
    places = [part.rows[:size] + rank * 128 for rank, (part, size) in enumerate(zip(parts, sizes, strict=True))]
    assert torch.equal(torch.cat(places), whole.rows[: whole.supervised])
    assert [part.rows[size:].unique().tolist() for part, size in zip(parts, sizes, strict=True)] == [[127]] * 3


def test_a_row_of_padding_supervises_nothing():
    batch = empty_batch()
    assert batch.borders(2) == [0, 128] and batch.completions_in(slice(0, 128), 2)[1].tolist() == [0]
    assert batch.input_ids.shape == (1, 128) and batch.cu_seqlens.tolist() == [0, 128]
    assert batch.rows.tolist() == [127] * 128 and batch.completions.tolist() == [0]
    assert batch.supervised == batch.tokens == len(batch.units) == 0 and batch.shared_keys is None


def test_a_group_that_is_longer_than_a_row_is_split_with_a_prompt_in_each():
    pieces = split_group(GroupPiece(group(10, 5, 5, 30, 5), 7), 24, share=True)
    assert [(piece.first, piece.group.lengths, piece.unit) for piece in pieces] == [
        (0, [5, 5], 7), (2, [30], 7), (3, [5], 7),
    ]  # fmt: skip
    batches = collate_groups([group(10, 5, 5, 30, 5)], [7], 24)
    assert sorted(side for batch in batches for side in batch.sides.tolist()) == [0, 1, 2, 3]
    assert sum(batch.supervised for batch in batches) == 45


def test_a_teachers_rows_are_those_of_the_supervised_tokens():
    ids = np.arange(6).reshape(3, 2)
    taught = group(2, 3)._replace(teacher=(Teacher(ids, -ids.astype(np.float32)),))
    batch = row(taught)
    assert batch.teacher_ids[:4].tolist() == [[0, 1], [2, 3], [4, 5], [0, 0]]
    assert torch.equal(batch.teacher_logprobs, -batch.teacher_ids.float()) and len(batch.teacher_ids) == len(batch.rows)


def test_units_are_dealt_by_tokens_and_packed_by_best_fit():
    assert deal_units([5, 9, 4, 4], 2) == [[1, 3], [0, 2]]
    assert deal_units([3], 2) == [[0], []]
    assert pack_units([60, 30, 40, 70, 200], 100) == [[4], [1, 3], [0, 2]]
    assert pack_units([], 100) == []
