"""The loading benchmark without a GPU: generated checkpoints, hashes and memory. Times are not checked."""

import mmap

import pytest
import torch

from benchmarks import loading


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    loading.generate(loading.TINY | {"num_hidden_layers": 2, "vocab_size": 128}, tmp_path / "generated")
    return tmp_path / "generated"


def test_no_two_tensors_of_the_generated_checkpoint_are_equal(folder):
    stored = dict(loading.stored_tensors(folder))
    assert len(loading.weight_files(folder)) == loading.FILES and len(stored) == 2 * 9 + 3
    assert len(set(loading.fingerprints(stored.items()).values())) == len(stored)
    assert all(x.isfinite().all() and x.std() > 0.01 for x in stored.values())


@pytest.mark.parametrize("provider", ["ligermodels", "read and copy, naively", "safetensors"])
def test_providers_load_the_tensors_of_the_files_and_a_difference_is_reported(folder, provider):
    expected = loading.fingerprints(loading.stored_tensors(folder))
    row = loading.measure(provider, folder, expected)
    assert "error" not in row
    expected["lm_head.weight"] += 1
    assert loading.measure(provider, folder, expected)["error"] == "1 tensors differ, such as lm_head.weight"


def test_a_fingerprint_depends_on_bits_and_their_order_but_not_on_the_shape():
    x = torch.randn(8, 5).bfloat16()
    others = x.roll(1, 0), x.roll(1, 1), -x, x.clone().fill_(0), x.float()
    assert len({loading.fingerprint(tensor) for tensor in (x, *others)}) == 6
    assert loading.fingerprint(x) == loading.fingerprint(x.clone().view(5, 8))


def test_host_memory_records_the_peak():
    with loading.HostMemory() as memory:
        held = mmap.mmap(-1, 32 * 2**20)
        held.write(bytes(32 * 2**20))
        while memory.peak < 32 * 2**20:  # until it was sampled
            assert not memory.ended.wait(0.001)
        held.close()
    assert memory.peak < 80 * 2**20


def test_an_error_is_shown_in_the_row_of_the_table():
    row = {"provider": "ligermodels", "cache": "warm", "seconds": 1.5, "error": "2 tensors differ, such as a"}
    expected = "ligermodels warm 1.5 2 tensors differ, such as a"
    assert loading.format_row(row).split() == expected.split()
