"""The number of blocks with activation checkpointing, and the error message for an out-of-memory error."""

import functools
import math

import pytest
import torch

import ligermodels
from ligermodels.adapters.lora_targets import add_lora
from ligermodels.adapters.quantising import quantise
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.checkpointing.kept_tensors import ATTENTION, choose_kept
from ligermodels.memory.model import training_memory
from ligermodels.training.parallel import activation_checkpointing
from ligermodels.training.parallel.out_of_memory import out_of_memory_advice, out_of_memory_message
from ligermodels.training.settings.config import TrainConfig
from ligermodels.units import memory_size
from tests.conftest import DEVICE
from tests.layers.saved_bytes import saved_bytes
from tests.memory.test_memory import BASE

CPU = World(torch.device("cpu"))
BLOCKS = 6
ONE_BLOCK = activation_checkpointing.Checkpointing(blocks=1, kept_tensors=0)


def estimator(model, **changes):
    settings = {"batch_size": 64, "sequence_length": 64, "dtype": torch.bfloat16} | changes
    return functools.partial(training_memory, model, **settings)


@pytest.fixture
def model():
    return ligermodels.create(BASE | {"num_hidden_layers": BLOCKS}, dtype=torch.bfloat16, device="meta")


def checkpointed(model):
    return [block.activation_checkpointing for block in model.model.layers]


RESULTS = 3  # that a block can keep: attention, qkv and o


def applied(model, mode, estimate, usable=math.inf):
    model.activation_checkpointing_disable()
    chosen = activation_checkpointing.checkpointing_of(model, mode, estimate, usable)
    model.checkpoint_activations(*chosen, 64)
    return chosen


@pytest.mark.parametrize("count", range(BLOCKS + 1))
def test_auto_checkpoints_as_few_blocks_as_fit_into_memory_and_these_keep_all_they_can(count, model):
    estimate = estimator(model)
    peaks = [estimate(checkpointed_blocks=number, kept_tensors=None).peak for number in range(BLOCKS + 1)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == BLOCKS + 1
    assert applied(model, "auto", estimate, peaks[count]) == (count, RESULTS * count)
    assert checkpointed(model) == [True] * count + [False] * (BLOCKS - count)
    assert {len(block.kept) for block in model.model.layers[:count]} <= {RESULTS}


@pytest.mark.parametrize("kept", [2, 3, 7, RESULTS * BLOCKS - 1])
def test_where_all_blocks_must_be_checkpointed_auto_keeps_as_many_results_as_fit(kept, model):
    estimate = functools.partial(estimator(model), checkpointed_blocks=BLOCKS)
    peaks = [estimate(kept_tensors=number).peak for number in range(RESULTS * BLOCKS + 1)]
    # What the last block keeps costs nothing: it is recomputed while all others still have theirs.
    assert peaks == sorted(peaks) and len(peaks) - len(set(peaks)) == RESULTS and peaks[0] == peaks[2]
    assert applied(model, "auto", estimator(model), peaks[kept]) == (BLOCKS, kept)
    assert sum(len(block.kept) for block in model.model.layers) == kept


def test_auto_keeps_nothing_if_memory_is_too_small_and_everything_on_a_cpu(model):
    for mode in ("auto", "none"):
        assert applied(model, mode, estimator(model)) == (0, 0)
    assert not any(checkpointed(model))
    assert activation_checkpointing.usable_memory(CPU) == math.inf
    assert applied(model, "auto", estimator(model), 1.0) == applied(model, "full", estimator(model)) == (BLOCKS, 0)
    assert not any(block.kept for block in model.model.layers)
    assert applied(model, "selective", estimator(model)) == (BLOCKS, RESULTS * BLOCKS)


def test_what_saves_most_flops_an_element_is_kept_first_in_the_last_blocks_first(model):
    """At 4 keys attention costs least, at 8,192 most. A row of qkv costs as much as one of o, which has H rows."""
    blocks = model.blocks[:2]
    for length, first in ((4, (256, 512)), (2**13, ATTENTION)):
        ((), (kept,)) = choose_kept(blocks, 1, length)
        assert kept.size == first
    early, late = choose_kept(blocks, 3, 2**13)
    assert [len(early), len(late)] == [1, 2]


def test_blocks_reshard_after_forward_only_if_memory_is_too_small(model):
    estimate = estimator(model, shards=2)
    found = functools.partial(
        activation_checkpointing.must_reshard_after_forward, checkpointing=ONE_BLOCK, replicate_quantised=False
    )
    assert found(math.inf, estimate) is True
    both = [estimate(checkpointed_blocks=1, keep_unsharded=keep).peak for keep in (False, True)]
    one_block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    assert both[1] - both[0] == (BLOCKS - 1) * one_block  # the last block never reshards
    for usable, expected in ((both[1], False), (both[1] - 1, True)):
        assert found(usable, estimate) is expected


@pytest.mark.parametrize("shards", [2, 4])
def test_bytes_of_quantised_weights_are_replicated_where_they_fit(shards, model, monkeypatch):
    monkeypatch.setattr(activation_checkpointing, "SHARDS_INTEGERS", True)
    quantise(model, "nf4")
    add_lora(model, rank=2, dtype=torch.float32)
    estimate = estimator(model, shards=shards)
    sharded, replicated = (
        estimate(checkpointed_blocks=1, replicate_quantised=each, kept_tensors=2) for each in (False, True)
    )
    whole = sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8)
    assert replicated.weights - sharded.weights == whole * (shards - 1) // shards > 0
    of_block = whole // BLOCKS  # the last block is gathered at the start of backward, at its end two
    assert sharded.unsharded_at_start - replicated.unsharded_at_start == of_block
    assert sharded.unsharded_at_end - replicated.unsharded_at_end == 2 * of_block
    assert sharded.gathered - replicated.gathered == whole
    checkpointing = activation_checkpointing.Checkpointing(blocks=1, kept_tensors=2)
    assert activation_checkpointing.replicates_quantised(math.inf, estimate, checkpointing) is False
    for usable, expected in ((replicated.peak, True), (replicated.peak - 1, False)):
        assert activation_checkpointing.replicates_quantised(usable, estimate, checkpointing) is expected


def test_a_single_process_has_fp32_updates_in_the_compute_dtype_and_gathers_nothing(model):
    quantise(model, "nf4")
    add_lora(model, rank=2, dtype=torch.float32)
    found = estimator(model)(dtype=torch.bfloat16)
    updates = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (found.unsharded_at_start, found.unsharded_at_end) == (2 * updates, 0)
    assert activation_checkpointing.replicates_quantised(math.inf, estimator(model), ONE_BLOCK) is True


def test_bytes_of_quantised_weights_are_replicated_where_fsdp_does_not_shard_integers(model, monkeypatch):
    monkeypatch.setattr(activation_checkpointing, "SHARDS_INTEGERS", False)
    quantise(model, "nf4")
    add_lora(model, rank=2, dtype=torch.float32)
    assert activation_checkpointing.replicates_quantised(1, estimator(model, shards=2), ONE_BLOCK) is True


def test_the_usable_fraction_covers_the_largest_error_and_the_largest_reservation_that_were_measured():
    """The estimate was up to 3 % too low. On two H200s 130.1 GiB were reserved when 109.4 were allocated."""
    assert activation_checkpointing.USABLE_MEMORY_SHARDED * 1.03 * 130.1 / 109.4 <= 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("count", "results"), [(1, 0), (2, 0), (2, 1), (2, 3), (3, None)])
def test_the_estimate_matches_the_tensors_that_are_saved_with_some_blocks_checkpointed(count, results):
    layers, tokens, dtype = 3, 16, torch.bfloat16 if DEVICE == "cuda" else torch.float32

    def change(model):
        model.checkpoint_activations(count, results, tokens)

    kept = saved_bytes(BASE, layers, dtype, change, 1, tokens)
    model = ligermodels.create(BASE | {"num_hidden_layers": layers}, device="meta")
    vocab, hidden = model.lm_head.weight.shape
    estimate = training_memory(model, 1, tokens, dtype, checkpointed_blocks=count, kept_tensors=results).activations
    gradients_of_head = (tokens + vocab) * hidden * 4  # fp32
    assert estimate + gradients_of_head == pytest.approx(kept, rel=0.03)


def test_the_message_names_batch_size_length_estimate_and_flags_that_use_less_memory(model):
    config = TrainConfig(sequence_length=2**17, dtype="bfloat16", optimizer="adamw", offload=())
    estimate = estimator(model, sequence_length=2**17)
    error = torch.OutOfMemoryError("tried 2 GiB\nmore")
    text = out_of_memory_message(error, config, estimate, micro_batch_size=8, checkpointed_blocks=2, blocks=BLOCKS)
    assert "--micro-batch-size 8 --sequence-length 131072, activation checkpointing on 2 of 6 blocks" in text
    assert f"needs about {memory_size(estimate(checkpointed_blocks=2).peak)} (" in text
    assert f"--activation-checkpointing full ({memory_size(estimate(checkpointed_blocks=6).peak)})" in text
    half = estimate(checkpointed_blocks=2, batch_size=4).peak
    assert f"--micro-batch-size 4 ({memory_size(half)})" in text and half < estimate(checkpointed_blocks=2).peak
    assert f"--low-memory-loss ({memory_size(estimate(checkpointed_blocks=2, low_memory_loss=True).peak)})" in text
    assert "--sequence-length 65536" in text and "--lora-rank 16" in text and "adamw8bit" in text
    assert text.endswith("tried 2 GiB") and "\n" not in text


def test_an_out_of_memory_error_ends_the_run_with_the_message_and_other_errors_pass_unchanged(model):
    config = TrainConfig(sequence_length=64, dtype="bfloat16", lora_rank=8, offload=())
    place = "GPU" if DEVICE == "cuda" else "host"
    line = rf"^out of {place} memory with --micro-batch-size 4 .*, activation checkpointing on 1 of 6 blocks: .*2 GiB$"
    cases = ((torch.OutOfMemoryError, InputError, line), (RuntimeError, RuntimeError, "^tried 2"))
    for error, raised, message in cases:
        with pytest.raises(raised, match=message), out_of_memory_advice(config, estimator(model), 4, 1, BLOCKS):
            raise error("tried 2 GiB")


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**58), lambda: bytearray(2**60)], ids=["torch", "Python"])
def test_host_memory_that_the_system_does_not_give_ends_the_run_with_the_message(allocate, model):
    config = TrainConfig(sequence_length=64, offload=())
    advice = out_of_memory_advice(config, estimator(model), 4, 1, BLOCKS)
    with pytest.raises(InputError, match=r"^out of host memory") as refused, advice:
        allocate()
    assert "\n" not in str(refused.value)
    assert DEVICE == "cuda" or "--micro-batch-size 2 (" in str(refused.value)


def test_the_message_names_no_flag_that_is_already_set(model):
    config = TrainConfig(sequence_length=64, optimizer="adamw8bit", lora_rank=8, dp_replicate=2, offload=())
    error, estimate = torch.OutOfMemoryError("tried 2 GiB"), estimator(model)
    sizes = {"micro_batch_size": 1, "checkpointed_blocks": BLOCKS, "blocks": BLOCKS}
    text = out_of_memory_message(error, config, estimate, **sizes)
    less = text.partition("to use less: ")[2]
    assert not any(
        flag in less for flag in ("--activation-checkpointing", "--micro-batch-size", "adamw8bit", "--lora-rank")
    )
    assert "--dtype bfloat16" in less and "--dp-replicate 1" in less
    assert (
        " 0.0 GiB" not in text and f"about {memory_size(estimate(checkpointed_blocks=BLOCKS).peak)} (weights " in text
    )
