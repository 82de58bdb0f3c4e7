"""The plan of a step's time beside what was measured of Llama-3-8B, 8 x 2048 tokens."""

import functools
from dataclasses import replace

import pytest
import torch

import ligermodels
from ligermodels.memory.model import training_memory
from ligermodels.training.optimizers import build_optimizer
from ligermodels.training.planning.placement import StepTime, device_rates
from ligermodels.training.planning.plan import state_sizes
from ligermodels.training.reporting.flops import flops_per_token, recomputed_flops

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
LENGTH, TOKENS = 2048, 8 * 2048

# Milliseconds on one H200 with AdamW, parameters rounded to nearest, 2026-11-22 to 26 (docs/performance.md): blocks
# that are checkpointed, results that they keep, states in host memory, the update in the backward pass.
MEASURED = [
    (0, 0, False, False, 1260.6), (32, 0, False, False, 1566.8), (32, 96, False, False, 1461.1),
    (17, 51, False, False, 1369.1), (0, 0, False, True, 1267.2), (0, 0, True, True, 1277.8),
]  # fmt: skip


# Milliseconds on H200s of one host under FSDP2, 2026-11-27: ranks, dtype of the parameters, bytes of the states of one,
# rows of a micro-batch and tokens of one, micro-batches, blocks that are checkpointed.
SHARDED = [
    (2, torch.float32, 4, 4, 2048, 1, 0, 742.7), (2, torch.float32, 4, 2, 2048, 4, 0, 1683.7),
    (4, torch.bfloat16, 6, 2, 4096, 1, 32, 896.6), (4, torch.bfloat16, 6, 2, 8192, 1, 32, 1871.8),
    (4, torch.float32, 8, 2, 8192, 1, 0, 1522.9),
]  # fmt: skip


@functools.cache
def llama(dtype=torch.bfloat16):
    return ligermodels.create("llama", size="8b", dtype=dtype, device="meta")


@functools.cache
def states(name):
    return state_sizes(build_optimizer(llama(), name, param_rounding="nearest"))


def milliseconds(blocks, kept, offloads, in_backward, gpu=H200, optimizer="adamw", tokens=TOKENS, micro_batches=1):
    found = states(optimizer)
    on_device, on_host = (found.on_device, found.on_host) if offloads else (found.all, 0)
    memory = training_memory(
        llama(), 8, LENGTH, torch.bfloat16, optimizer_states=on_device, offloaded_states=on_host,
        step_in_backward=in_backward, checkpointed_blocks=blocks, kept_tensors=kept,
    )  # fmt: skip
    time = StepTime(llama(), LENGTH, device_rates(gpu, "bfloat16"))
    how = {"in_backward": in_backward, "in_8_bits": optimizer == "adamw8bit"}
    return 1e3 * time.seconds(memory, tokens, micro_batches, blocks, kept, **how)


@pytest.mark.parametrize(("blocks", "kept", "offloads", "in_backward", "measured"), MEASURED)
def test_the_time_of_a_step_is_within_three_percent_of_the_measured_one(blocks, kept, offloads, in_backward, measured):
    assert milliseconds(blocks, kept, offloads, in_backward) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("ranks", "dtype", "of_states", "rows", "length", "micro_batches", "blocks", "measured"), SHARDED
)
def test_the_time_of_a_sharded_step(ranks, dtype, of_states, rows, length, micro_batches, blocks, measured):
    model, states = llama(dtype), of_states * sum(parameter.numel() for parameter in llama().parameters())
    memory = training_memory(model, rows, length, torch.bfloat16, shards=ranks, optimizer_states=states)
    time = StepTime(model, length, device_rates(H200, "bfloat16"), ranks)
    seconds = time.seconds(memory, rows * length, micro_batches, blocks, 0, in_backward=False, in_8_bits=False)
    assert 1e3 * seconds == pytest.approx(measured, rel=0.035)


def test_a_micro_batch_takes_at_least_the_time_of_the_copies_of_offloaded_weights():
    memory = training_memory(llama(), 1, LENGTH, torch.bfloat16, checkpointed_blocks=32)
    time = StepTime(llama(), LENGTH, device_rates(H200, "bfloat16"))
    usual, short, long, twice = (
        time.seconds(replace(memory, offloaded_weights=size), 2048, 2, 32, 0, in_backward=False, in_8_bits=False)
        for size in (0, 2**20, 2**36, 2**37)
    )
    assert usual == short < long and twice - long == pytest.approx(2 * 2**37 / 46e9)


def test_states_that_come_and_go_take_time_where_the_backward_pass_does_not_hide_them():
    beside = milliseconds(0, 0, True, True) - milliseconds(0, 0, False, True)
    alone = milliseconds(0, 0, True, False) - milliseconds(0, 0, False, False)
    rates, moved = device_rates(H200, "bfloat16"), states("adamw").on_host
    assert beside == pytest.approx(2e3 * moved / rates.copy, rel=0.2)  # and the ring is a state too
    assert alone - beside == pytest.approx(1e3 * moved / rates.host)


def test_micro_batches_cost_their_fixed_part_and_the_accumulation_of_gradients():
    plain = functools.partial(milliseconds, 0, 0, False, False)
    whole, parts = plain(), plain(tokens=TOKENS // 4, micro_batches=4)
    rates = device_rates(H200, "bfloat16")
    gradients = 3 * 3 * 2 * sum(parameter.numel() for parameter in llama().parameters()) / rates.copy
    fixed = 3 * 200 * flops_per_token(llama(), LENGTH) / rates.flops
    assert parts - whole == pytest.approx(1e3 * (gradients + fixed))


def test_what_a_block_computes_again_is_its_forward_pass_without_the_last_product():
    (block,) = ligermodels.create("llama", size="8b", device="meta").blocks[:1]
    products = 2 * 4096 * (4096 + 2 * 1024 + 4096 + 2 * 14336)
    assert recomputed_flops(block, LENGTH) == products + 2 * 2 * 32 * 128 * (LENGTH + 1) / 2


def test_devices_that_are_not_known_have_the_proportions_of_others():
    known, other = device_rates(H100, "bfloat16"), device_rates("Some GPU", "bfloat16")
    assert (known.copy, known.flops) == (3e12, other.flops) and other.host < known.host
    assert device_rates("NVIDIA A100-SXM4-80GB", "bfloat16").copy == pytest.approx(312e12 / 250)
    assert device_rates(H100, "float32").flops * 16 == known.flops > device_rates(H100, "tf32").flops
