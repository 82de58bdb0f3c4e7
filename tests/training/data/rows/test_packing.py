import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch

import ligermodels
from ligermodels.training.data.rows import packing
from ligermodels.training.data.rows.packing import best_fit, split_documents
from ligermodels.training.data.rows.run_rows import count_supervised
from tests.training.data.documents import CPU, distinct, document, rows, stored, validation

LENGTHS = (3, 7, 8, 9, 15, 22, 2, 2, 5, 1, 30)
IGNORED = -100


def targets_of(batch):
    """(previous token, target) for each supervised token, read from a batch by the model's convention."""
    ends = batch.cu_seqlens.tolist() if batch.cu_seqlens is not None else None
    for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        starts = set(ends or [0])
        for place in range(1, len(ids)):
            if labels[place] != IGNORED and place not in starts:
                assert labels[place] == ids[place]
                yield ids[place - 1], ids[place]


@pytest.mark.parametrize("packing", [True, False])
def test_every_token_but_the_first_of_a_document_is_a_target_exactly_once_after_its_predecessor(packing):
    documents = distinct(*LENGTHS)
    batches = list(validation(documents, 8, packing).batches(3, CPU))
    targets = Counter(pair for batch in batches for pair in targets_of(batch))
    assert targets == Counter(pair for document in documents for pair in itertools.pairwise(document.ids))
    assert sum(int(count_supervised(batch)) for batch in batches) == sum(LENGTHS) - len(LENGTHS)
    assert sum(int((batch.labels != IGNORED).sum()) for batch in batches) == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize("packing", [True, False])
def test_cutting_and_packing_keep_the_mask(packing):
    draw = random.Random(0)
    documents = [document(d.ids, [draw.random() < 0.4 for _ in d.ids]) for d in distinct(*LENGTHS)]
    documents.append(document([9001, 9002, 9003]))  # without a mask, among documents that have one
    targets = [t for batch in validation(documents, 8, packing).batches(4, CPU) for _, t in targets_of(batch)]
    expected = [i for d in documents[:-1] for i, due in zip(d.ids[1:], d.supervised[1:], strict=True) if due]
    assert sorted(targets) == [*sorted(expected), 9002, 9003]


@pytest.mark.parametrize("packing", [True, False])
def test_a_segment_without_a_supervised_token_is_left_out(packing):
    prompt, chat, text = distinct(30, 9, 20)
    documents = [
        document(prompt.ids, [False] * 29 + [True]), document(chat.ids, [True] * 8 + [False]), document(text.ids)
    ]  # fmt: skip
    batches = list(validation(documents, 8, packing).batches(1, CPU))
    assert all(count_supervised(batch) for batch in batches)
    targets = [target for batch in batches for _, target in targets_of(batch)]
    assert sorted(targets) == [prompt.ids[-1], *chat.ids[1:8], *text.ids[1:]]


def split_lengths(documents, fraction):
    return [sorted((part.ends - part.begins).tolist()) for part in split_documents(stored(documents), fraction)]


def test_a_document_with_a_mask_is_never_cut_for_validation():
    short, long, other = (document(d.ids, [False] * (len(d.ids) - 1) + [True]) for d in distinct(9, 40, 30))
    assert split_lengths([long] * 5, 0.05) == [[40] * 5, []]
    assert split_lengths([long], 0.5) == [[40], []]
    assert split_lengths([long, other, short], 0.01) == [[30, 40], [9]]
    assert split_lengths([long] * 20 + [short] * 20, 0.9) in ([[40] * 20, [9] * 20], [[9] * 20, [40] * 20])


def test_copies_of_one_text_are_not_split_and_a_single_text_is():
    [text] = distinct(40)
    assert split_lengths([text] * 5, 0.05) == [[40] * 5, []]
    assert split_lengths([text], 0.25) == [[31], [10]]  # one token is the last target of one, and context in the other


def test_cu_seqlens_has_every_document_and_the_padding_of_every_row():
    (batch,) = validation(distinct(5, 3, 6, 1, 4), 8).batches(3, CPU)
    assert batch.cu_seqlens.dtype == torch.int32 and batch.max_seqlen == 8
    assert batch.cu_seqlens.tolist() == [0, 6, 8, 13, 16, 20, 24]  # 6 + 2 of padding, 5 + 3, 4 + 4 of padding
    assert batch.input_ids.shape == batch.labels.shape == (1, 24)
    assert (batch.input_ids[0, 6:8] == 0).all() and (batch.labels[0, 20:] == IGNORED).all()


def naive_best_fit(lengths, room):
    left = []
    for size in lengths:
        fits = [(space, row) for row, space in enumerate(left) if space >= size]
        if not fits:
            fits, left = [(room, len(left))], [*left, room]
        space, row = min(fits)
        left[row] = space - size
    return left


def test_best_fit_leaves_the_same_room_as_the_plain_algorithm():
    assert best_fit(np.array([6, 5, 4, 4, 3, 2]), 8)[1] == 3
    draw = random.Random(1)
    for _ in range(20):
        lengths = sorted((draw.randint(1, 40) for _ in range(200)), reverse=True)
        row_of, count = best_fit(np.array(lengths), 40)
        left = [40] * count
        for row, size in zip(row_of.tolist(), lengths, strict=True):
            left[row] -= size
        assert sorted(left) == sorted(naive_best_fit(np.array(lengths), 40))


def test_the_number_of_tokens_excludes_padding_and_includes_one_token_of_context_for_each_cut():
    assert rows(distinct(5, 3, 6), 8).tokens == 14
    assert rows(distinct(22), 8).tokens == 22 + 2  # three segments of 8, each overlapping the one before by one token


@pytest.fixture(scope="module")
def model():
    model = ligermodels.create("qwen2", size="tiny", seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # sharp attention, so that a leak between documents is visible
    return model


def summed_losses(model, documents, length, packing, rows=2):
    total = torch.zeros(())
    for ids, labels, cu_seqlens, longest, *_ in validation(documents, length, packing).batches(rows, CPU):
        total += model(ids, labels, cu_seqlens=cu_seqlens, max_seqlen=longest, num_items_in_batch=1).loss
    return total


def chats(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(2, 50) for _ in range(12)]
    return [
        document([draw.randrange(1024) for _ in range(n)], [draw.random() < 0.7 for _ in range(n)] if n % 2 else None)
        for n in lengths
    ]


def test_packing_does_not_change_the_summed_loss(model):
    documents = chats(seed=5)
    with torch.no_grad():
        on, off = (float(summed_losses(model, documents, 32, packing)) for packing in (True, False))
    assert on > 1000
    assert on == pytest.approx(off, rel=1e-6)


def test_document_masking_editing_one_document_does_not_change_the_losses_of_others_in_its_row(model):
    """Documents a, b and c share a row; the losses are those of b and c."""
    a, b, c = (document([draw.randrange(1024) for _ in range(10)], None) for draw in map(random.Random, (1, 2, 3)))

    def loss_behind_first(*documents):
        [(ids, labels, cu_seqlens, longest, *_)] = validation(documents, 30).batches(1, CPU)
        labels[:, :10] = IGNORED
        return model(ids, labels, cu_seqlens=cu_seqlens, max_seqlen=longest, num_items_in_batch=1).loss

    edited, other_last = (document([1023 - i for i in d.ids]) for d in (a, c))
    with torch.no_grad():
        before, after, other = (loss_behind_first(*row) for row in ((a, b, c), (edited, b, c), (a, b, other_last)))
    assert len(rows([a, b, c], 30)) == 1
    assert torch.equal(before, after) and not torch.equal(before, other)


def test_the_steps_of_best_fit_grow_with_the_number_of_lengths_not_of_segments(monkeypatch):
    taken = []
    take = packing.OpenRows.take
    monkeypatch.setattr(packing.OpenRows, "take", lambda rows, size: taken.append(size) or take(rows, size))
    lengths = np.sort(np.random.default_rng(0).integers(2, 257, 1_000_000))[::-1]
    row_of, count = best_fit(lengths, 256)
    assert np.bincount(row_of, lengths, count).max() <= 256 and count <= 1.002 * lengths.sum() / 256
    assert len(taken) < 4 * 256


def test_rows_are_planned_once_for_the_same_documents_length_and_packing(monkeypatch):
    documents = distinct(*LENGTHS)
    first = rows(documents, 8).parts[0]
    monkeypatch.setattr(packing, "cut_documents", None)  # makes planning impossible
    again = rows(documents, 8).parts[0]
    assert again.fingerprint == first.fingerprint
    assert all(isinstance(array, np.memmap) for array in (again.starts, again.lengths, again.ends))
    assert [again.segments(row)[0].start for row in range(len(again))] == [
        first.segments(row)[0].start for row in range(len(first))
    ]
    for others, length, packed in ((documents[1:], 8, True), (documents, 9, True), (documents, 8, False)):
        with pytest.raises(TypeError):
            rows(others, length, packed)
