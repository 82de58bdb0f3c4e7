"""Resume is bit-exact; a checkpoint that does not fit the run is rejected with an error that names the difference."""

import errno
import gc
import math
import os
import resource
import threading

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from ligermodels.errors import CheckpointError
from ligermodels.training.checkpoints import Checkpoints, Progress, files
from ligermodels.training.checkpoints import state as training_state
from ligermodels.weights.files import read_header
from tests.training.checkpoints.checkpointing import (
    Net,
    assert_same,
    flip,
    new_run,
    new_sharded_run,
    restore,
    save,
    state_of,
    train,
)

# saving.py ignores it too, but pytest resets the filters.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


RUNS = {
    "adamw": {},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 state": {"state_dtype": torch.bfloat16},
    "fp32 state": {"dtype": torch.bfloat16, "state_dtype": torch.float32},
    "muon": {"optimizer": "muon"},
    "8 bit": {"optimizer": "adamw8bit", "width": 256},
    "8 bit, stochastic": {
        "optimizer": "adamw8bit",
        "width": 256,
        "dtype": torch.bfloat16,
        "param_rounding": "stochastic",
    },
    "nearest": {"dtype": torch.bfloat16, "param_rounding": "nearest"},
    "8 bit, exact": {"optimizer": "adamw8bit", "width": 256, "dtype": torch.bfloat16},
    "muon, exact": {"optimizer": "muon", "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_resume_is_bit_exact(options, tmp_path):
    run = new_run(**options)
    train(*run, range(3))
    save(tmp_path, *run, step=3)
    train(*run, range(3, 6))
    expected = state_of(*run)

    resumed = new_run(**options, seed=2)
    assert restore(tmp_path, *resumed) == Progress(step=3, rows=30, tokens=21, seconds=0.5)
    train(*resumed, range(3, 6))
    assert_same(state_of(*resumed), expected)


def test_a_checkpoint_before_the_first_step_is_restored(tmp_path):
    run, resumed = new_run(), new_run(seed=2)
    save(tmp_path, *run, step=0)
    assert restore(tmp_path, *resumed) == Progress(seconds=0.5)
    assert_same(state_of(*resumed), state_of(*run))


def test_without_a_checkpoint_nothing_is_restored(tmp_path):
    run = new_run()
    before = state_of(*run)
    assert restore(tmp_path / "absent", *run) is None
    assert_same(state_of(*run), before)


# Saving in the background


@pytest.fixture
def write_event(monkeypatch):
    """An event that writing waits for."""
    event, write_data = threading.Event(), files.CheckpointWriter.write_data
    monkeypatch.setattr(files.CheckpointWriter, "write_data", lambda *given: (event.wait(600), write_data(*given))[1])
    yield event
    event.set()


def test_save_returns_before_anything_is_written_and_later_steps_do_not_change_it(tmp_path, write_event):
    run = new_run()
    train(*run, range(1))
    saved = state_of(*run)
    with Checkpoints(tmp_path, 2, {}) as checkpoints:
        checkpoints.save(*run, Progress(step=1))
        train(*run, range(1, 3))
        assert checkpoints.latest() is None and not checkpoints.failed
        write_event.set()
        checkpoints.wait()
        assert checkpoints.latest() == tmp_path / "step-000001"
    resumed = new_run(seed=2)
    restore(tmp_path, *resumed)
    assert_same(state_of(*resumed), saved)


def test_a_second_save_waits_for_the_first_and_reuses_its_memory(tmp_path, write_event):
    run = new_run()
    train(*run, range(1))
    with Checkpoints(tmp_path, 5, {}) as checkpoints:
        checkpoints.save(*run, Progress(step=1))
        memory = {key: copy.data_ptr() for key, copy in checkpoints.copies.memory.items()}
        threading.Timer(0.05, write_event.set).start()
        checkpoints.save(*run, Progress(step=2))
        assert checkpoints.latest() == tmp_path / "step-000001"
        assert {key: copy.data_ptr() for key, copy in checkpoints.copies.memory.items()} == memory


def test_a_save_in_progress_is_committed_when_the_run_fails(tmp_path):
    run = new_run()
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, 2, {}) as checkpoints:
        checkpoints.save(*run, Progress(step=1))
        raise ZeroDivisionError
    assert files.committed_steps(tmp_path) == [tmp_path / "step-000001"]


# How many checkpoints stay


def test_the_newest_checkpoints_stay_and_unfinished_ones_are_removed(tmp_path):
    (tmp_path / "step-000009.tmp").mkdir()
    (tmp_path / "step-000009.tmp/rank-00000.safetensors").touch()
    run = new_run()
    with Checkpoints(tmp_path, 2, {}) as checkpoints:
        assert list(tmp_path.iterdir()) == []
        for step in range(1, 5):
            checkpoints.save(*run, Progress(step=step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_a_protected_checkpoint_stays_beside_the_newest(tmp_path):
    run = new_run()
    with Checkpoints(tmp_path, 1, {}) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(*run, Progress(step=step))
            checkpoints.protected = 2 if step < 4 else 4
        checkpoints.wait()
        assert checkpoints.steps() == [4, 5]


def test_the_trained_weights_of_an_older_checkpoint_are_restored_alone(tmp_path):
    run = new_run(trained="blocks.1")
    train(*run, range(1))
    before = state_of(*run)
    with Checkpoints(tmp_path, 2, {}) as checkpoints:
        checkpoints.save(*run, Progress(step=1))
        train(*run, range(1, 3))
        checkpoints.save(*run, Progress(step=3))
        after = state_of(*run)
        checkpoints.restore_weights(run[0], 1)
        checkpoints.save(*run, Progress(step=3))  # is saved: does nothing
    weights = dict(run[0].named_parameters()).keys()
    assert_same(state_of(*run), after | {name: before[name] for name in weights})
    assert not torch.equal(before["blocks.1.mlp.down_proj.weight"], after["blocks.1.mlp.down_proj.weight"])
    flip(tmp_path / "step-000001/rank-00000.safetensors", -3)
    with pytest.raises(CheckpointError, match=r"step-000001/rank-00000\.safetensors: damaged"):
        Checkpoints(tmp_path, 2, {}).restore_weights(run[0], 1)
    assert_same(state_of(*run), after | {name: before[name] for name in weights})


def test_older_checkpoints_are_removed_after_the_new_one_is_committed(tmp_path, monkeypatch):
    removed = []
    monkeypatch.setattr(
        files, "remove_checkpoint", lambda old: removed.append((old.name, files.committed_steps(tmp_path)[-1].name))
    )
    run = new_run()
    with Checkpoints(tmp_path, 1, {}) as checkpoints:
        for step in (1, 2):
            checkpoints.save(*run, Progress(step=step))
    assert removed == [("step-000001", "step-000002")]


def test_a_committed_step_is_not_written_again_and_one_of_another_run_is_rejected(tmp_path):
    run = new_run()
    save(tmp_path, *run, step=3)
    before = (tmp_path / "step-000003").stat().st_ino
    with Checkpoints(tmp_path, 2, {}) as checkpoints:
        progress = checkpoints.restore(*run, print)
        checkpoints.save(*run, progress)
    assert (tmp_path / "step-000003").stat().st_ino == before
    for step in (2, 3):
        with pytest.raises(CheckpointError, match=r"step-000003: belongs to another run"):
            save(tmp_path, *run, step=step)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


# A full disk


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["write_safetensors", "write_json", "commit"])
def test_on_a_full_disk_the_previous_checkpoint_stays_and_the_error_names_it(where, tmp_path, monkeypatch):
    run = new_run()
    train(*run, range(1))
    save(tmp_path, *run, step=1)
    saved = state_of(*run)
    train(*run, range(1, 2))
    with monkeypatch.context() as broken:
        broken.setattr(files, where, no_space)
        with Checkpoints(tmp_path, 1, {}) as checkpoints:
            checkpoints.save(*run, Progress(step=2))
            checkpoints.thread.shutdown()
            assert checkpoints.failed
            with pytest.raises(CheckpointError) as error:
                checkpoints.wait()
            assert not checkpoints.failed
    assert str(error.value) == (
        f"{tmp_path}/step-000002: not written: No space left on device; make room there, then --resume continues from "
        "step-000001"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    resumed = new_run(seed=2)
    restore(tmp_path, *resumed)
    assert_same(state_of(*resumed), saved)


@pytest.mark.parametrize(
    "keep, protected, before, after",
    [(1, None, [1], [1]), (2, None, [1, 2], [2, 3]), (3, None, [1, 2], [1, 2]), (2, 1, [1, 2], [1, 2])],
)
def test_on_a_full_disk_checkpoints_to_be_replaced_are_removed_first(
    keep, protected, before, after, tmp_path, monkeypatch
):
    """The disk has room for `before` alone. The newest checkpoint and those that stay are never removed."""
    run = new_run()
    with Checkpoints(tmp_path, keep, {}) as checkpoints:
        checkpoints.protected = protected
        for step in before:
            checkpoints.save(*run, Progress(step=step))
        checkpoints.wait()
        room, write = len(before), files.write_safetensors
        monkeypatch.setattr(
            files,
            "write_safetensors",
            lambda *x: write(*x) if len(files.committed_steps(tmp_path)) < room else no_space(),
        )
        checkpoints.save(*run, Progress(step=3))
        if after == before:
            with pytest.raises(CheckpointError, match="not written: No space left on device"):
                checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:06d}" for step in after]


def test_a_truncated_file_is_an_error(tmp_path):
    run = new_run()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large; make room there, and start again: there is"):
            save(tmp_path, *run, step=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_save_after_a_failed_save_raises_the_error_of_that_save(tmp_path, monkeypatch):
    run = new_run()
    monkeypatch.setattr(files, "write_safetensors", no_space)
    with Checkpoints(tmp_path, 2, {}) as checkpoints:
        checkpoints.save(*run, Progress(step=1))
        with pytest.raises(CheckpointError, match="step-000001: not written"):
            checkpoints.save(*run, Progress(step=2))


# Another configuration


@pytest.mark.parametrize(
    "other, message",
    [
        ({"width": 32}, r"misshapen: weights\.embed\.weight is \[37, 16\] instead of \[37, 32\]"),
        ({"dtype": torch.bfloat16}, r"weights\.embed\.weight is torch\.float32 instead of torch\.bfloat16"),
        ({"optimizer": "muon"}, r"its optimizer is AdamW, not Muon; give the same --optimizer"),
        (
            {"state_dtype": torch.bfloat16},
            r"14 in another dtype: optimizer\.blocks\S+exp_avg is torch\.float32 instead of",
        ),
        ({"trained": "blocks"}, r"other frozen weights: embed\.weight, scale, unused"),
    ],
)
def test_another_model_or_optimizer_is_rejected(other, message, tmp_path):
    run = new_run()
    train(*run, range(1))
    save(tmp_path, *run, step=1)
    with pytest.raises(CheckpointError, match=message):
        restore(tmp_path, *new_run(**other))


def test_missing_and_unexpected_tensors_are_rejected(tmp_path):
    more = new_run()
    more[0].more = nn.Parameter(torch.zeros(2))
    save(tmp_path / "more", *more, step=1)
    save(tmp_path / "less", *new_run(), step=1)
    with pytest.raises(CheckpointError, match=r"1 unexpected: weights\.more"):
        restore(tmp_path / "more", *new_run())
    with pytest.raises(CheckpointError, match=r"1 missing: weights\.more"):
        restore(tmp_path / "less", *more)


def test_settings_are_stored_and_a_damaged_file_is_an_error(tmp_path):
    settings = {"learning_rate": 1e-3, "data": ["a.jsonl"], "model": "llama"}
    save(tmp_path, *new_run(), step=1, settings=settings)
    assert Checkpoints(tmp_path, 2, {}).saved_settings() == settings
    assert Checkpoints(tmp_path / "absent", 2, {}).saved_settings() is None
    flip(tmp_path / "step-000001/training.json", -3)
    with pytest.raises(CheckpointError, match=r"training\.json: damaged"):
        Checkpoints(tmp_path, 2, {}).saved_settings()


# Frozen weights


def test_frozen_weights_are_not_saved_but_must_be_equal(tmp_path):
    run = new_run(trained="blocks.1")
    train(*run, range(2))
    save(tmp_path, *run, step=2)
    stored = read_header(tmp_path / "step-000002/rank-00000.safetensors")
    assert {name.split(".", 1)[1] for name in stored if name.startswith("weights.")} == {
        f"blocks.1.mlp.{layer}.weight" for layer in ("gate_up_proj", "down_proj")
    }
    with pytest.raises(CheckpointError, match=r"weights: blocks\.0\.mlp\.down_proj\.weight, .*, unused; give"):
        restore(tmp_path, *new_run(trained="blocks.1", seed=2))
    resumed = new_run(trained="blocks.1")
    train(*resumed, range(1))
    assert restore(tmp_path, *resumed).step == 2
    assert_same(state_of(*resumed), state_of(*run))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (2, 3, 4)])
def test_a_fingerprint_depends_on_values_and_positions(shape, dtype):
    value = torch.randn(shape).to(dtype)
    known = training_state.fingerprint(value)
    assert training_state.fingerprint(value.clone()) == known
    bits = value.clone().view(training_state.INTEGERS[value.element_size()])
    bits[(0,) * len(shape)] ^= 1
    assert training_state.fingerprint(bits.view(dtype)) != known
    for dim in range(len(shape)):
        assert training_state.fingerprint(value.roll(1, dim)) != known


def test_the_test_model_has_tied_weights_and_a_parameter_without_a_gradient():
    model, optimizer = new_run()
    train(model, optimizer, range(1))
    assert model.head.weight is model.embed.weight and model.unused.grad is None
    assert isinstance(model, Net)


# Ranks

SHARDED_RUNS = "muon", "8 bit", "8 bit, exact", "muon, exact"


def test_ranks_save_together_and_any_number_of_ranks_can_resume(launcher, tmp_path, monkeypatch):
    """The checks that run on two ranks are in checkpoint_ranks.py."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # no rank has a GPU
    one = new_run()
    train(*one, range(2))
    save(tmp_path / "one", *one, step=2)
    torch.save(state_of(*one), tmp_path / "one.pt")
    launcher.succeed(tmp_path, ranks=2, module="tests.training.checkpoints.checkpoint_ranks")

    for folder in ("two", "hybrid", *SHARDED_RUNS):
        options = RUNS.get(folder, {})
        lines, run = [], new_run(**options, seed=2)
        random = torch.get_rng_state()
        assert restore(tmp_path / folder, *run, lines.append) == Progress(step=2, rows=20, tokens=14, seconds=0.5)
        assert len(lines) == 1 and "random numbers (dropout) start anew" in lines[0]
        assert_same(state_of(*run), torch.load(tmp_path / f"{folder}.pt") | {"random": random})
    sizes = {name: elements_per_rank(tmp_path / name / "step-000002") for name in ("two", "hybrid")}
    assert sum(sizes["hybrid"]) == sum(sizes["two"])  # replicas of the model are not saved twice
    assert max(sizes["hybrid"]) < 0.7 * sum(sizes["hybrid"])  # and both ranks write


@pytest.fixture
def mesh_of_one():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    gc.collect()  # sharded models hold the group in reference cycles
    distributed.destroy_process_group()


def test_a_single_process_resumes_with_a_sharded_or_an_unsharded_model(tmp_path, mesh_of_one):
    run = new_sharded_run(mesh_of_one)
    train(*run, range(2))
    save(tmp_path, *run, step=2)
    for resumed in (new_run(seed=2), new_sharded_run(mesh_of_one, seed=2)):
        restore(tmp_path, *resumed)  # bit-exact: otherwise it would report a line, which fails here
        assert_same(state_of(*resumed), state_of(*run))


def elements_per_rank(checkpoint):
    """The number of elements in each rank's file, without random number states."""
    return [
        sum(math.prod(x.shape) for name, x in read_header(file).items() if not name.startswith("rank-"))
        for file in sorted(checkpoint.glob("*.safetensors"))
    ]
