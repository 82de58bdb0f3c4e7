from types import SimpleNamespace

import pytest
import torch

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.training.scaling import micro_batches
from ligermodels.training.scaling.micro_batches import micro_batch_size_of
from tests.training.runs.configs import run_config

GPU, BLOCKS = torch.device("cuda"), 10


@pytest.fixture
def size(monkeypatch):
    """The size on GPUs where a sequence takes 1 without activation checkpointing, a tenth with it, and `memory` is."""

    def size(*flags, memory, ranks=1, length=1024):
        monkeypatch.setattr(micro_batches, "usable_share", lambda total, world: memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=0))
        config = run_config("--model", "a/folder", "--sequence-length", str(length), *flags)
        return micro_batch_size_of(config, World(GPU, size=ranks), BLOCKS, estimate)

    return size


def estimate(batch_size, checkpointed_blocks, kept_tensors=0):
    checkpointed = 0.3 if kept_tensors is None else 0.1
    return SimpleNamespace(peak=batch_size * (1 if checkpointed_blocks == 0 else checkpointed))


AUTO = ("--batch-size", "32", "--activation-checkpointing", "auto")


def test_as_many_sequences_as_fit_and_are_useful_without_checkpointing_unless_they_are_few(size):
    assert size(*AUTO, memory=100) == 16  # 16,384 tokens
    assert size(*AUTO, memory=100, length=64) == 32  # the whole batch
    assert size(*AUTO, memory=100, length=20_000) == 1
    assert size(*AUTO, memory=9) == 8
    assert size(*AUTO, memory=4) == 4  # 4,096 tokens
    assert size(*AUTO, memory=3) == 16  # with checkpointing
    assert size(*AUTO, memory=0.5) == 4
    assert size(*AUTO, memory=0) == 1
    assert size("--batch-size", "24", "--activation-checkpointing", "auto", memory=9, ranks=2) == 6


def test_without_checkpointing_and_with_all_of_it(size):
    assert size("--batch-size", "32", "--activation-checkpointing", "none", memory=3) == 2
    assert size("--batch-size", "32", "--activation-checkpointing", "full", memory=0.9) == 8
    assert size("--batch-size", "32", "--activation-checkpointing", "selective", memory=0.9) == 2


def test_a_given_size_and_that_of_a_tiny_model_are_kept(size):
    assert size(*AUTO, "--micro-batch-size", "4", memory=100) == 4
    assert size("--model", "llama", "--batch-size", "64", memory=0) == 64
    with pytest.raises(InputError, match="--batch-size 3 is not a multiple of 2 ranks"):
        size("--batch-size", "3", memory=1, ranks=2)
    with pytest.raises(InputError, match="--batch-size 32 is not a multiple of 1 rank x --micro-batch-size 5"):
        size(*AUTO, "--micro-batch-size", "5", memory=1)


def test_a_cpu_takes_few_tokens_at_once():
    config = run_config("--model", "a/folder", "--sequence-length", "1024", "--batch-size", "12")
    assert micro_batch_size_of(config, World(torch.device("cpu")), BLOCKS, estimate) == 4
