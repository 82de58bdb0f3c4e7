import itertools
from collections import Counter

import pytest
import torch

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import next_tokens
from ligermodels.training.data.rows.run_rows import TrainingRows, count_supervised, split_global_batch
from tests.conftest import DEVICE
from tests.training.data.documents import CPU, distinct, document, rows, training, validation

LENGTHS = [8] * 12 + [3, 5, 7, 6, 2, 30, 21]  # fill more than 12 rows of 8 tokens; some rows are shared


def worlds(ranks):
    return [World(torch.device("cpu"), rank, ranks) for rank in range(ranks)]


def rows_in(batch):
    """The rows of a batch, as tuples of tokens."""
    return [tuple(row) for row in batch.input_ids.view(-1, 8).tolist()]


def step_of(cursor, ranks, micro, packing):
    data = training(distinct(*LENGTHS), 8, packing, seed=7)
    return sorted(row for w in worlds(ranks) for b in data.micro_batches(cursor, 8, micro, w) for row in rows_in(b))


@pytest.mark.parametrize("packing", [True, False])
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks_or_micro_batches(packing):
    steps = [step_of(cursor, 1, None, packing) for cursor in (0, 8, 16)]
    assert all(len(step) == 8 for step in steps) and len(set(map(tuple, steps))) == 3
    for ranks, micro in [(1, 2), (2, None), (2, 1), (4, 2), (4, 1)]:
        assert [step_of(cursor, ranks, micro, packing) for cursor in (0, 8, 16)] == steps


def test_the_rows_of_a_step_are_ordered_by_micro_batch_then_rank():
    data = training(distinct(*LENGTHS), 8, packing=False)
    (whole,) = data.micro_batches(0, 8, None, CPU)
    shares = [data.micro_batches(0, 8, 2, world) for world in worlds(2)]
    assert [row for number in range(2) for share in shares for row in rows_in(share[number])] == rows_in(whole)


def test_resuming_at_any_cursor_gives_the_batches_of_an_uninterrupted_run():
    def run(start, stop):
        data = training(distinct(*LENGTHS), 8, seed=2)
        return [data.micro_batches(step * 4, 4, 2, CPU) for step in range(start, stop)]

    whole = run(0, 12)
    for start in (1, 5, 11):
        for expected, got in zip(whole[start:], run(start, 12), strict=True):
            for a, b in itertools.product(range(2), range(3)):
                assert torch.equal(expected[a][b], got[a][b])


def test_batches_prefetched_for_another_step_are_not_used():
    data = training(distinct(*LENGTHS), 8, seed=2)
    first = data.micro_batches(0, 4, None, CPU)
    for arguments in [(8, 4, None, CPU), (12, 4, 2, CPU), (16, 2, None, CPU), (0, 4, None, CPU)]:
        fresh = training(distinct(*LENGTHS), 8, seed=2).micro_batches(*arguments)
        again = data.micro_batches(*arguments)
        assert [rows_in(batch) for batch in again] == [rows_in(batch) for batch in fresh]
    assert rows_in(again[0]) == rows_in(first[0])


def test_validation_visits_every_row_once_with_the_same_number_of_batches_on_each_rank():
    targets, counts = Counter(), []
    for world in worlds(2):
        batches = list(validation(distinct(*[6] * 7), 6).batches(2, world))
        assert [tuple(batch.input_ids.shape) for batch in batches] == [(1, 12), (1, 12)]
        targets.update(int(label) for batch in batches for label in batch.labels[batch.labels != -100])
        counts += [int(count_supervised(batch)) for batch in batches]
    assert targets == Counter(i for d in distinct(*[6] * 7) for i in d.ids[1:])
    assert counts == [10, 10, 10, 5]


def test_the_sample_prompt_of_a_chat_ends_before_its_first_answer_and_that_of_a_text_has_a_few_tokens():
    mask = [False] * 5 + [True] * 3 + [False] * 2 + [True]
    chats, texts = validation([document(list(range(1, 12)), mask)], 16), validation(distinct(40), 64)
    assert chats.completion_only and chats.sample_prompt() == [1, 2, 3, 4, 5]
    assert not texts.completion_only and texts.sample_prompt() == list(range(1, 17))
    cut_before_answer = validation([document(list(range(1, 12)), [False] * 8 + [True] * 3)], 6)
    assert cut_before_answer.sample_prompt() == [6, 7, 8]


def test_the_fingerprint_depends_on_the_tokens_and_on_how_they_are_packed():
    documents = distinct(6, 3, 3)
    known = training(documents, 6).fingerprint
    assert training(distinct(6, 3, 3), 6, seed=1).fingerprint == known
    others = [
        training(distinct(6, 3, 2), 6), training(documents[::-1], 6), training(documents, 9),
        training(documents, 6, packing=False),
    ]  # fmt: skip
    assert len({known, *(other.fingerprint for other in others)}) == 5


def test_a_row_of_padding_counts_zero():
    batch = validation(distinct(8), 8).collate(range(1, 2), 1, CPU)
    assert int(count_supervised(batch)) == 0 and (batch.labels == -100).all()


def test_a_global_batch_that_ranks_cannot_divide_equally_is_refused():
    assert split_global_batch(64, 4, World(torch.device("cpu"), 0, 8)) == (2, 4)
    assert split_global_batch(64, None, World(torch.device("cpu"), 0, 8)) == (1, 8)
    for batch_size, micro, ranks in [(4, 3, 1), (4, None, 8), (6, 2, 2), (6, None, 4)]:
        with pytest.raises(InputError, match=f"--batch-size {batch_size} is not a multiple of {ranks} ranks?(:| x)"):
            split_global_batch(batch_size, micro, World(torch.device("cpu"), 0, ranks))


def test_places_are_those_of_the_documents_in_the_rows_of_a_step():
    documents = distinct(*LENGTHS)
    data = training(documents, 8, seed=4)
    (batch,) = data.micro_batches(8, 4, None, CPU)
    begins = [start for start in batch.cu_seqlens[:-1].tolist() if batch.input_ids[0, start]]
    owner = {token: d.place for d in documents for token in d.ids}
    assert data.places(8, 4) == [owner[int(batch.input_ids[0, start])] for start in begins]


def test_a_batch_has_rows_of_each_source_by_its_weight():
    parts = [rows(distinct(*[8] * 40), 8), rows([document([5000 + i] * 8) for i in range(40)], 8)]
    data = TrainingRows(parts, [3.0, 1.0], 0, True)
    assert len(data) == 80 and data.tokens == 640
    (batch,) = data.micro_batches(0, 64, None, CPU)
    assert sum(row[0] >= 5000 for row in rows_in(batch)) == 16


@pytest.mark.gpu
def test_batches_are_copied_to_a_gpu_without_blocking_the_host():
    data, world = training(distinct(*LENGTHS), 8, seed=2), World(torch.device(DEVICE))
    expected = training(distinct(*LENGTHS), 8, seed=2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps = [data.micro_batches(cursor, 4, 2, world) for cursor in range(0, 80, 4)]
        counts = [count_supervised(batch) for step in steps for batch in step]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu = [batch for cursor in range(0, 80, 4) for batch in expected.micro_batches(cursor, 4, 2, CPU)]
    for got, want in zip((batch for step in steps for batch in step), on_cpu, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got[:3], want[:3], strict=True))
    assert [int(count) for count in counts] == [int(count_supervised(batch)) for batch in on_cpu]


def chat(length, supervised):
    """A document whose last `supervised` tokens are supervised."""
    return document(list(range(1, length + 1)), [i >= length - supervised for i in range(length)])


@pytest.mark.parametrize("packing", [True, False])
def test_rows_of_a_batch_are_the_places_whose_next_token_is_supervised(packing):
    data = training([chat(60, 9), chat(100, 30), chat(30, 29), chat(90, 1)] * 3, 100, packing)
    for batch in data.micro_batches(0, 4, 2, CPU):
        targets = next_tokens(batch.labels, batch.cu_seqlens).flatten()
        expected = (targets != -100).nonzero()[:, 0]
        assert len(batch.rows) == 128 and 0 < len(expected) < 128
        assert torch.equal(batch.rows[: len(expected)], expected)
        assert (batch.rows[len(expected) :] == 199).all() and targets[199] == -100  # padding adds nothing


def test_ranks_that_share_rows_have_the_places_in_their_parts():
    data = training([chat(60, 9), chat(100, 30), chat(30, 29), chat(90, 1)] * 6, 400)
    (whole,) = data.micro_batches(0, 2, None, CPU)
    targets = next_tokens(whole.labels, whole.cu_seqlens).flatten().chunk(2)
    for rank, part in enumerate(targets):
        (batch,) = data.micro_batches(0, 2, None, World(torch.device("cpu"), rank, 2, context=2))
        assert all(torch.equal(a, b) for a, b in zip(batch[:3], whole[:3], strict=True))
        expected = (part != -100).nonzero()[:, 0]
        assert torch.equal(batch.rows[: len(expected)], expected) and len(batch.rows) % 128 == 0
        padding = batch.rows[len(expected) :].unique()
        assert len(padding) == 1 and part[padding] == -100


def test_a_batch_has_no_rows_where_they_would_not_be_fewer_or_documents_have_no_mask():
    batches = {
        "few tokens": training([chat(60, 5)] * 2, 60),
        "most supervised": training([chat(200, 190)] * 2, 200),
        "no mask": training(distinct(200, 20), 200),
    }
    for name, data in batches.items():
        assert data.micro_batches(0, 1, None, CPU)[0].rows is None, name
    (batch,) = training([chat(200, 0)] * 2, 200).micro_batches(0, 1, None, CPU)
    assert batch.rows.tolist() == [199] * 128  # a batch without supervised tokens
