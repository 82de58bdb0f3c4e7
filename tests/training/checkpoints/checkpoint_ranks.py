"""Checks of checkpoints that two ranks save and restore together. Usage, under torchrun: checkpoint_ranks.py FOLDER.

FOLDER/one is a checkpoint of a single process, FOLDER/one.pt its state. The script adds checkpoints of two ranks to
FOLDER, each with its state.
"""

import errno
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import ligermodels
from ligermodels.distributed import World
from ligermodels.errors import CheckpointError, InputError
from ligermodels.training.checkpoints import Checkpoints, Progress, files
from ligermodels.training.checkpoints import state as training_state
from ligermodels.training.parallel.fsdp import shard
from ligermodels.training.run.folder import locked
from ligermodels.training.run.stopping import signals
from ligermodels.weights.sharding import full_tensor
from tests.training.checkpoints.checkpointing import (
    assert_same,
    new_optimizer,
    new_run,
    new_sharded_run,
    restore,
    save,
    state_of,
    train,
)
from tests.training.parallel.test_fsdp import config


def check_bit_exact_resume(folder, mesh, **options):
    """Writes the saved state to a .pt file next to the checkpoint."""
    run = new_sharded_run(mesh, **options)
    train(*run, range(2))
    with torch.no_grad():
        run[0](torch.tensor([1]))  # leaves the root's weights unsharded, in bf16
    save(folder, *run, step=2)
    saved = state_of(*run)
    if distributed.get_rank() == 0:
        torch.save(saved, folder.with_suffix(".pt"))
    train(*run, range(2, 4))
    resumed = new_sharded_run(mesh, seed=1 if "trained" in options else 2, **options)
    torch.manual_seed(7)
    assert restore(folder, *resumed).step == 2
    train(*resumed, range(2, 4))
    assert_same(state_of(*resumed), state_of(*run))


def check_resume_of_one_process_on_two_ranks(folder, mesh):
    lines = []
    run = new_sharded_run(mesh, seed=2)
    random = torch.get_rng_state()
    assert restore(folder / "one", *run, lines.append).rows == 20
    assert lines == [
        "step-000002 was saved on 1 x cpu: weights, optimizer state and data order are exact on 2 x cpu, random "
        "numbers (dropout) start anew"
    ]
    assert_same(state_of(*run), torch.load(folder / "one.pt") | {"random": random})


def check_restore_of_the_weights_of_one_process_on_two_ranks(folder, mesh):
    run = new_sharded_run(mesh, seed=2)
    with Checkpoints(folder / "one", 2, {}) as checkpoints:
        checkpoints.restore_weights(run[0], 2)
    expected = torch.load(folder / "one.pt")
    for name, parameter in run[0].named_parameters():
        assert torch.equal(full_tensor(parameter), expected[name]), name


def check_restore_into_a_model_from_the_meta_device(folder):
    """The checkpoint sets every value: the parameters are NaN before."""
    world = World(torch.device("cpu"), distributed.get_rank(), distributed.get_world_size())

    def sharded_model():
        made = ligermodels.create(config("qwen2", tied=True), dtype=torch.float32, device="meta")
        shard(made, world, torch.float32)
        made.to_empty(device="cpu")
        return made

    run, resumed = sharded_model(), sharded_model()
    run.initialize(1)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.fill_(torch.nan)
    save(folder / "meta", run, new_optimizer(run), step=1)
    restore(folder / "meta", resumed, new_optimizer(resumed))
    assert_same(state_of(resumed, new_optimizer(resumed)), state_of(run, new_optimizer(run)))


def check_that_all_ranks_raise_if_one_fails(folder, mesh):
    def no_space(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run, sync = new_sharded_run(mesh), files.sync
    save(folder / "full", *run, step=1)
    try:
        with Checkpoints(folder / "full", 1, {}) as checkpoints:
            if distributed.get_rank() == 1:
                files.sync = no_space
            checkpoints.save(*run, Progress(step=2))
            checkpoints.wait()
    except CheckpointError as error:
        assert str(error).startswith(f"{folder}/full/step-000002: not written: No space left on device"), error
    else:
        raise AssertionError("nothing was raised")
    finally:
        files.sync = sync
    distributed.barrier()  # until rank 0 has removed the temporary folder
    assert [path.name for path in (folder / "full").iterdir()] == ["step-000001"]


def check_that_ranks_make_room_together(folder, mesh):
    """The second rank's disk is full while there are two checkpoints."""
    run, sync = new_sharded_run(mesh), files.sync
    full = folder / "full"

    def room_for_one(path):
        if len(files.committed_steps(full)) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    with Checkpoints(full, 2, {}) as checkpoints:
        checkpoints.save(*run, Progress(step=2))
        checkpoints.wait()
        if distributed.get_rank() == 1:
            files.sync = room_for_one
        checkpoints.save(*run, Progress(step=3))
    files.sync = sync
    distributed.barrier()
    assert sorted(path.name for path in full.iterdir()) == ["step-000002", "step-000003"]


def check_that_all_ranks_reject_a_damaged_file(folder, mesh):
    run = new_sharded_run(mesh)
    save(folder / "damaged", *run, step=1)
    file = folder / "damaged/step-000001/rank-00001.safetensors"
    if distributed.get_rank() == 0:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    distributed.barrier()
    try:
        restore(folder / "damaged", *run)
    except CheckpointError as error:
        assert str(error).startswith(f"{file}: damaged"), error
    else:
        raise AssertionError("nothing was raised")


def check_that_fingerprints_do_not_depend_on_sharding(mesh):
    sharded = training_state.frozen_weights(new_sharded_run(mesh, trained="blocks.1")[0])
    assert sharded == training_state.frozen_weights(new_run(trained="blocks.1")[0]) and len(sharded) == 5


def check_that_a_signal_to_one_rank_reaches_all():
    with signals() as stop:
        stop.takes_steps = True
        if distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        asked = torch.tensor(float(stop.requested))
        distributed.all_reduce(asked)
    assert asked == 1.0


def check_that_the_first_rank_locks_for_all(folder):
    with locked(folder / "run"):
        try:
            with locked(folder / "run"):
                pass
        except InputError as error:
            assert "in use by process" in str(error)
        else:
            raise AssertionError("nothing was raised")


def main(folder):
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    check_that_the_first_rank_locks_for_all(folder)
    check_that_a_signal_to_one_rank_reaches_all()
    check_resume_of_one_process_on_two_ranks(folder, mesh)
    check_restore_of_the_weights_of_one_process_on_two_ranks(folder, mesh)
    check_restore_into_a_model_from_the_meta_device(folder)
    check_that_all_ranks_raise_if_one_fails(folder, mesh)
    check_that_ranks_make_room_together(folder, mesh)
    check_that_all_ranks_reject_a_damaged_file(folder, mesh)
    check_that_fingerprints_do_not_depend_on_sharding(mesh)
    check_that_fingerprints_do_not_depend_on_sharding(hybrid)
    check_bit_exact_resume(folder / "two", mesh)
    check_bit_exact_resume(folder / "hybrid", hybrid)
    check_bit_exact_resume(folder / "frozen", mesh, trained="blocks.1")
    check_bit_exact_resume(folder / "muon", mesh, optimizer="muon")
    check_bit_exact_resume(folder / "8 bit", mesh, optimizer="adamw8bit", width=256)
    check_bit_exact_resume(folder / "8 bit, exact", mesh, optimizer="adamw8bit", width=256, dtype=torch.bfloat16)
    check_bit_exact_resume(folder / "muon, exact", mesh, optimizer="muon", dtype=torch.bfloat16)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
