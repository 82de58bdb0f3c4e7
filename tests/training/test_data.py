import itertools
import json
from collections import Counter

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.training.corpus import stories
from ligermodels.training.data import rows as data
from ligermodels.training.parallel import World
from ligermodels.training.tokens import save_tokenizer, train_tokenizer

CPU = torch.device("cpu")
IGNORED = data.IGNORED


def distinct_documents(*lengths):
    """Documents in which every token occurs once, so that targets can be counted."""
    numbers = iter(range(1, 10_000))
    return [[next(numbers) for _ in range(length)] for length in lengths]


def test_every_token_but_a_documents_first_is_a_target_exactly_once_after_its_predecessor():
    documents = distinct_documents(3, 7, 8, 9, 15, 22, 2, 2, 5)
    rows = data.pack(documents, 8, padding=0)
    predecessors = {b: a for document in documents for a, b in itertools.pairwise(document)}
    targets = Counter()
    for tokens, labels in zip(rows.input_ids.tolist(), rows.labels.tolist(), strict=True):
        assert labels[0] == IGNORED
        for before, token, label in zip(tokens, tokens[1:], labels[1:], strict=False):
            assert label in (token, IGNORED)
            if label != IGNORED:
                assert predecessors[token] == before
                targets[token] += 1
    assert targets == Counter(predecessors.keys())


def test_best_fit_leaves_no_gap_where_pieces_fit_exactly():
    rows = data.pack(distinct_documents(5, 3, 6, 2, 4, 4), 8, padding=0)
    assert len(rows) == 3
    assert (rows.input_ids != 0).all()


def test_a_step_has_the_same_rows_whatever_the_ranks_and_each_epoch_every_row_once():
    rows = data.Rows(torch.arange(12).repeat(4, 1).T.int(), torch.zeros(12, 4, dtype=torch.int32))

    def rows_of_step(step, ranks, accumulate, batch_size):
        worlds = [World(CPU, rank, ranks) for rank in range(ranks)]
        batches = [b for w in worlds for b in data.micro_batches(rows, 7, step, accumulate, batch_size, w)]
        return sorted(int(i) for input_ids, _ in batches for i in input_ids[:, 0])

    steps = [rows_of_step(step, 1, 1, 8) for step in range(3)]
    for ranks, accumulate, batch_size in [(2, 1, 4), (4, 2, 1), (1, 8, 1)]:
        assert [rows_of_step(step, ranks, accumulate, batch_size) for step in range(3)] == steps
    assert Counter(steps[0] + steps[1] + steps[2]) == Counter(2 * list(range(12)))
    assert len(set(map(tuple, steps))) == 3


def test_validation_visits_every_row_once_on_equally_many_batches_a_rank():
    rows = data.pack(distinct_documents(*[6] * 7), 6, padding=0)
    targets = Counter()
    for rank in range(2):
        batches = list(data.validation_batches(rows, 2, World(CPU, rank, 2)))
        assert [tuple(labels.shape) for _, labels in batches] == [(2, 6), (2, 6)]
        targets.update(int(label) for _, labels in batches for label in labels[labels != IGNORED])
    assert targets == Counter(rows.labels[rows.labels != IGNORED].tolist())


def test_the_floor_is_the_nats_of_the_validation_stories_over_their_predicted_tokens(monkeypatch):
    monkeypatch.setattr(data, "TRAINING_STORIES", 300)
    monkeypatch.setattr(data, "VALIDATION_STORIES", 30)
    corpus = data.corpus(128)
    unseen = list(stories(1, 30))
    tokens = sum(len(corpus.new_tokenizer.encode(text, add_special_tokens=False)) + 1 for text, _ in unseen)
    assert corpus.floor == pytest.approx(sum(nats for _, nats in unseen) / tokens, rel=1e-12)
    assert 0.45 < corpus.floor < 0.8
    assert not {text for text, _ in unseen} & {text for text, _ in stories(0, 300)}
    again = data.corpus(128)
    assert corpus.new_tokenizer.tokenizer.to_str() == again.new_tokenizer.tokenizer.to_str()
    assert torch.equal(corpus.training.input_ids, again.training.input_ids)


def write(path, *lines):
    path.write_bytes(b"\n".join(lines))
    return str(path)


@pytest.mark.parametrize(
    "line, complaint",
    [
        (b'{"text": "a"', r":2:13: not JSON"),
        (b'{"txt": "a"}', r":2: needs a field text"),
        (b"[1]", ":2: needs a field text"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    path = write(tmp_path / "d.jsonl", b'{"text": "fine"}', line)
    with pytest.raises(InputError, match=rf"d\.jsonl{complaint}"):
        data.text_file(path, None, 300, 16)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"short"])
def test_a_file_without_two_rows_of_text_is_refused(tmp_path, content):
    path = write(tmp_path / "d.txt", content)
    with pytest.raises(InputError, match=r"d\.txt"):
        data.text_file(path, None, 300, 16)
    with pytest.raises(InputError, match=r"missing\.txt"):
        data.text_file(str(tmp_path / "missing.txt"), None, 300, 16)


def test_a_file_is_tokenised_by_the_models_tokenizer_or_by_a_new_one(tmp_path):
    texts = [text for text, _ in stories(1, 30)]
    path = write(tmp_path / "d.jsonl", *[json.dumps({"text": text}).encode() for text in texts])
    given = train_tokenizer([text for text, _ in stories(0, 50)], 300)
    save_tokenizer(given, tmp_path)
    write(tmp_path / "config.json", b'{"eos_token_id": [7, 8]}')
    read = data.text_file(path, tmp_path, 300, 512)
    assert read.new_tokenizer is None
    rows = torch.cat([read.training.input_ids, read.validation.input_ids])
    assert all([*given.encode(text), 7] in windows(rows, len(given.encode(text)) + 1) for text in texts[:3])
    with pytest.raises(InputError, match=r"d\.jsonl: token id \d+ .* vocabulary of 200"):
        data.text_file(path, tmp_path, 200, 64)
    assert (
        data.text_file(path, None, 300, 64).new_tokenizer.tokenizer.to_str()
        == train_tokenizer(texts, 300).tokenizer.to_str()
    )


def windows(rows, length):
    return rows.unfold(1, length, 1).flatten(0, 1).tolist()


def test_random_tokens_stay_within_the_vocabulary():
    random = data.synthetic(vocab_size=50, length=32)
    assert (int(random.training.input_ids.min()), int(random.training.input_ids.max())) == (0, 49)
    assert random.floor == pytest.approx(3.912, abs=1e-3)
    assert random.new_tokenizer is None
