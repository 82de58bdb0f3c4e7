"""How many blocks are computed again, and what is said when memory was not enough all the same."""

import functools
from argparse import Namespace

import pytest
import torch

import ligermodels
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.memory import training_memory
from ligermodels.training.scaling import activation_checkpointing
from ligermodels.training.scaling.out_of_memory import explain_out_of_memory, explained
from ligermodels.units import memory_size
from tests.conftest import DEVICE
from tests.layers.saved_bytes import saved_bytes
from tests.test_memory import BASE

CPU = World(torch.device("cpu"))
BLOCKS = 6


def needs_of(model, **changes):
    settings = {"batch_size": 64, "sequence_length": 64, "dtype": torch.bfloat16} | changes
    return functools.partial(training_memory, model, **settings)


@pytest.fixture
def model():
    return ligermodels.create(BASE | {"num_hidden_layers": BLOCKS}, dtype=torch.bfloat16, device="meta")


def recomputing(model):
    return [block.activation_checkpointing for block in model.model.layers]


@pytest.mark.parametrize("wanted", range(BLOCKS + 1))
def test_auto_computes_again_no_more_blocks_than_memory_demands(wanted, model, monkeypatch):
    needs = needs_of(model)
    peaks = [needs(checkpointed_blocks=count).peak for count in range(BLOCKS + 1)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == BLOCKS + 1
    monkeypatch.setattr(activation_checkpointing, "usable_memory", lambda world: peaks[wanted])
    assert activation_checkpointing.recompute(model, "auto", CPU, needs) == wanted
    assert recomputing(model) == [True] * wanted + [False] * (BLOCKS - wanted)


def test_without_enough_memory_auto_computes_all_blocks_again_and_on_a_cpu_none(model, monkeypatch):
    assert activation_checkpointing.recompute(model, "auto", CPU, needs_of(model)) == 0
    assert activation_checkpointing.recompute(model, "none", CPU, needs_of(model)) == 0
    assert not any(recomputing(model))
    monkeypatch.setattr(activation_checkpointing, "usable_memory", lambda world: 1.0)
    assert activation_checkpointing.recompute(model, "auto", CPU, needs_of(model)) == BLOCKS


def test_gathered_weights_are_kept_where_there_is_room(model, monkeypatch):
    needs = needs_of(model, shards=2)
    assert activation_checkpointing.keeps_gathered(CPU, needs, 1) is False
    both = [needs(checkpointed_blocks=1, keep_unsharded=keep).peak for keep in (False, True)]
    one_block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    assert both[1] - both[0] == (BLOCKS - 1) * one_block  # the last one's are kept in any case
    for room, expected in ((both[1], True), (both[1] - 1, False)):
        monkeypatch.setattr(activation_checkpointing, "usable_memory", lambda world, room=room: room)
        assert activation_checkpointing.keeps_gathered(CPU, needs, 1) is expected


def test_what_fits_still_does_where_the_estimate_is_as_low_and_as_much_is_reserved_as_was_ever_seen():
    """On two H200s 130.1 GiB were reserved where 109.4 were allocated."""
    assert activation_checkpointing.USABLE_SHARDED * 1.03 * 130.1 / 109.4 <= 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("count", [1, 2])
def test_what_autograd_keeps_with_some_blocks_computed_again_is_what_was_estimated(count):
    layers, tokens, dtype = 3, 16, torch.bfloat16 if DEVICE == "cuda" else torch.float32
    kept = saved_bytes(BASE, layers, dtype, lambda model: model.checkpoint_activations(count), 1, tokens)
    model = ligermodels.create(BASE | {"num_hidden_layers": layers}, device="meta")
    vocab, hidden = model.lm_head.weight.shape
    estimate = training_memory(model, 1, tokens, dtype, checkpointed_blocks=count).activations
    gradients_of_head = (tokens + vocab) * hidden * 4  # fp32
    assert estimate + gradients_of_head == pytest.approx(kept, rel=0.03)


def test_out_of_memory_names_batch_length_estimate_and_the_flags_that_lower_it(model):
    args = Namespace(
        sequence_length=2**17, dtype="bfloat16", weights=None, optimizer="adamw", lora_rank=None, replicas=1
    )
    needs = needs_of(model, sequence_length=2**17)
    explain = functools.partial(explain_out_of_memory, torch.OutOfMemoryError("tried 2 GiB\nmore"), args, needs)
    text = explain(micro_batch_size=8, recomputed=2, blocks=BLOCKS)
    assert "--micro-batch-size 8 --sequence-length 131072, 2 of 6 blocks recomputed" in text
    assert f"needs about {memory_size(needs(checkpointed_blocks=2).peak)} (" in text
    assert f"--activation-checkpointing full ({memory_size(needs(checkpointed_blocks=6).peak)})" in text
    half = needs(checkpointed_blocks=2, batch_size=4).peak
    assert f"--micro-batch-size 4 ({memory_size(half)})" in text and half < needs(checkpointed_blocks=2).peak
    assert "--sequence-length 65536" in text and "--lora-rank 16" in text and "adamw8bit" in text
    assert text.endswith("tried 2 GiB") and "\n" not in text


def test_out_of_memory_ends_a_run_with_that_line_and_another_error_is_left_alone(model):
    args = Namespace(sequence_length=64, dtype="bfloat16", weights=None, optimizer="adamw", lora_rank=8, replicas=1)
    line = r"^out of GPU memory with --micro-batch-size 4 .*, 1 of 6 blocks recomputed: .*tried 2 GiB$"
    for error, raised, said in ((torch.OutOfMemoryError, InputError, line), (RuntimeError, RuntimeError, "^tried 2")):
        with pytest.raises(raised, match=said), explained(args, needs_of(model), 4, 1, BLOCKS):
            raise error("tried 2 GiB")


def test_out_of_memory_names_no_flag_that_is_set_already(model):
    args = Namespace(sequence_length=64, dtype="float32", weights=None, optimizer="adamw8bit", lora_rank=8, replicas=2)
    error = torch.OutOfMemoryError("tried 2 GiB")
    text = explain_out_of_memory(error, args, needs_of(model), micro_batch_size=1, recomputed=BLOCKS, blocks=BLOCKS)
    less = text.partition("less need: ")[2]
    assert not any(
        flag in less for flag in ("--activation-checkpointing", "--micro-batch-size", "adamw8bit", "--lora-rank")
    )
    assert "--dtype bfloat16" in less and "--dp-replicate 1" in less
    assert (
        " 0.0 GiB" not in text
        and f"about {memory_size(needs_of(model)(checkpointed_blocks=BLOCKS).peak)} (weights " in text
    )
