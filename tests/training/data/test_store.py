import numpy as np
import pytest

from ligermodels.errors import InputError
from tests.training.data.documents import Document, stored

DOCUMENTS = [
    Document([5, 70_000, 7], None, "a.jsonl:1"),
    Document([9, 8], [False, True], "ä b.jsonl:2"),
    Document([5, 70_000, 7], None, "a.jsonl:3"),
]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("vocab_size, dtype", [(2**16, np.uint16), (2**16 + 1, np.uint32), (100_000, np.uint32)])
def test_a_store_holds_its_documents(vocab_size, dtype, masked):
    documents = [
        Document([min(i, vocab_size - 1) for i in d.ids], d.supervised if masked else None, d.place) for d in DOCUMENTS
    ]
    store = stored(iter(documents), vocab_size)
    assert store.tokens.dtype == dtype and len(store) == 3
    assert store.offsets.tolist() == [0, 3, 5, 8]
    assert store.tokens.tolist() == [i for d in documents for i in d.ids]
    assert (store.supervised is None) is not masked
    assert not masked or store.supervised.tolist() == [True] * 3 + [False, True] + [True] * 3
    assert [store.place(token) for token in range(8)] == ["a.jsonl:1"] * 3 + ["ä b.jsonl:2"] * 2 + ["a.jsonl:3"] * 3
    assert store.hashes[0] == store.hashes[2] != store.hashes[1]


def test_a_hash_is_the_contents_alone():
    narrow, wide = stored(DOCUMENTS[1:2], 10), stored(DOCUMENTS[1:2], 100_000)
    assert narrow.tokens.dtype != wide.tokens.dtype
    assert narrow.hashes.tolist() == wide.hashes.tolist() == [15464793929636159193]


@pytest.mark.parametrize("vocab_size", [70_000, 300])
def test_a_token_outside_the_vocabulary_is_named_with_its_place(vocab_size):
    with pytest.raises(InputError, match=rf"a\.jsonl:1: token 1 has the id 70000, .* vocabulary of {vocab_size}"):
        stored(DOCUMENTS, vocab_size)
