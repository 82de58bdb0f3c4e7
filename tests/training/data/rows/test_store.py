import hashlib
import random

import numpy as np
import pytest

from ligermodels.errors import InputError
from ligermodels.training.data.rows import store
from tests.training.data.documents import document, stored

DOCUMENTS = [
    document([5, 70_000, 7], None, "a.jsonl:1"),
    document([9, 8], [False, True], "ä b.jsonl:2"),
    document([5, 70_000, 7], None, "a.jsonl:3"),
]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("vocab_size, dtype", [(2**16, np.uint16), (2**16 + 1, np.uint32), (100_000, np.uint32)])
def test_a_store_returns_the_documents_written_to_it(vocab_size, dtype, masked):
    documents = [
        document([min(i, vocab_size - 1) for i in d.ids], d.supervised if masked else None, d.place) for d in DOCUMENTS
    ]
    known = stored(iter(documents), vocab_size)
    assert known.tokens.dtype == dtype and len(known) == 3
    assert known.offsets.tolist() == [0, 3, 5, 8]
    assert known.tokens.tolist() == [i for d in documents for i in d.ids]
    assert (known.supervised is None) is not masked
    assert not masked or known.supervised.tolist() == [True] * 3 + [False, True] + [True] * 3
    assert [known.place(token) for token in range(8)] == ["a.jsonl:1"] * 3 + ["ä b.jsonl:2"] * 2 + ["a.jsonl:3"] * 3
    assert known.hashes[0] == known.hashes[2] != known.hashes[1]


def test_the_hash_of_a_document_depends_only_on_its_tokens():
    narrow, wide = stored(DOCUMENTS[1:2], 10), stored(DOCUMENTS[1:2], 100_000)
    assert narrow.tokens.dtype != wide.tokens.dtype
    assert narrow.hashes.tolist() == wide.hashes.tolist() == [15464793929636159193]


@pytest.mark.parametrize("vocab_size", [70_000, 300])
def test_the_error_for_a_token_outside_the_vocabulary_names_its_place(vocab_size):
    with pytest.raises(InputError, match=rf"a\.jsonl:1: token 1 has the id 70000, .* vocabulary of {vocab_size}"):
        stored(DOCUMENTS, vocab_size)


def in_batches_of(tokens, monkeypatch):
    monkeypatch.setattr(store, "STORE_BATCH_TOKENS", tokens)


def test_the_files_of_a_store_have_the_documented_sizes(tmp_path, monkeypatch):
    in_batches_of(500, monkeypatch)
    texts = [document([7] * 9, None, f"/a/long/path/to/a.jsonl:{line}") for line in range(1, 1001)]
    sizes = {}
    for name, documents in {"texts": texts, "chats": [*texts, document([7] * 9, [True] * 9, "b.jsonl:1")]}.items():
        (tmp_path / name).mkdir()
        store.write_store(documents, 2**16, tmp_path / name)
        sizes[name] = sum(file.stat().st_size for file in (tmp_path / name).iterdir() if file.name != "store.json")
    assert sizes == {"texts": 9000 * 2 + 1000 * 24 + 8, "chats": 9009 * 3 + 1001 * 24 + 8}


@pytest.mark.parametrize("batch", [1, 4, 100])
def test_all_tokens_before_the_first_mask_are_supervised(batch, monkeypatch):
    in_batches_of(batch, monkeypatch)
    mixed = stored([document([1, 2, 3]), document([4, 5]), document([6, 7], [False, True]), document([8])])
    assert mixed.supervised.tolist() == [True] * 5 + [False, True, True]


def test_a_place_is_stored_exactly_whatever_its_format(monkeypatch):
    in_batches_of(2, monkeypatch)
    places = [
        "a:1",
        "a:2",
        "a:10",
        "b: row 7",
        "b",
        "a: element 007",
        "",
        "2024",
        "c:0",
        "c:" + "9" * 30,
        "c:1",
        "c\n:2",
    ]
    known = stored([document([5, 5], None, place) for place in places])
    assert [known.place(2 * number + 1) for number in range(len(places))] == places
    assert len(stored([document([5], None, f"a:{line}") for line in range(9)]).places.origins) == 1


def test_the_hash_of_a_document_does_not_depend_on_the_blocks_it_is_read_in():
    draw = random.Random(0)
    documents = [[draw.randrange(2**16) for _ in range(draw.randint(1, 40))] for _ in range(50)]
    tokens, ends = np.concatenate(documents).astype(np.uint16), np.cumsum([len(d) for d in documents])

    def blocks(size):
        for start in range(0, len(tokens), size):
            block = tokens[start : start + size]
            yield block, [int(end) - start for end in ends if start < end <= start + len(block)]

    assert [list(store.document_hashes(blocks(size))) for size in (1, 7, 5000)] == [
        [hashlib.blake2b(np.array(d, "<u4").tobytes(), digest_size=8).digest() for d in documents]
    ] * 3
