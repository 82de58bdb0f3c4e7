"""What ranks save together and restore together. Usage, under torchrun: checkpoint_ranks.py FOLDER.

FOLDER/one is a checkpoint of one process, FOLDER/one.pt its state; it leaves folders of its own with theirs.
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
from ligermodels.training.runs.folder import locked
from ligermodels.training.runs.stopping import signals
from ligermodels.training.scaling.fsdp import shard
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
from tests.training.scaling.test_fsdp import config


def goes_on_to_the_bit(folder, mesh, **options):
    """Leaves the state that was saved beside the checkpoint."""
    run = new_sharded_run(mesh, **options)
    train(*run, range(2))
    with torch.no_grad():
        run[0](torch.tensor([1]))  # leaves the root's weights whole, and rounded
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


def one_becomes_two(folder, mesh):
    said = []
    run = new_sharded_run(mesh, seed=2)
    random = torch.get_rng_state()
    assert restore(folder / "one", *run, said.append).rows == 20
    assert said == [
        "step-000002 is of 1 x cpu: weights, optimizer and data order are exact on 2 x cpu, random numbers (dropout) "
        "begin anew"
    ]
    assert_same(state_of(*run), torch.load(folder / "one.pt") | {"random": random})


def a_model_from_meta_is_filled(folder):
    """Nothing but the checkpoint gives it values."""
    world = World(torch.device("cpu"), distributed.get_rank(), distributed.get_world_size())

    def model():
        made = ligermodels.create(config("qwen2", tied=True), dtype=torch.float32, device="meta")
        shard(made, world, torch.float32)
        made.to_empty(device="cpu")
        return made

    run, resumed = model(), model()
    run.initialize(1)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.fill_(torch.nan)
    save(folder / "meta", run, new_optimizer(run), step=1)
    restore(folder / "meta", resumed, new_optimizer(resumed))
    assert_same(state_of(resumed, new_optimizer(resumed)), state_of(run, new_optimizer(run)))


def one_rank_fails_and_all_say_so(folder, mesh):
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
    distributed.barrier()  # rank 0 has removed what was written
    assert [path.name for path in (folder / "full").iterdir()] == ["step-000001"]


def ranks_make_room_together(folder, mesh):
    """The disk of the second is full while there are two checkpoints."""
    run, sync = new_sharded_run(mesh), files.sync
    there = folder / "full"

    def room_for_one(path):
        if len(files.committed_steps(there)) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    with Checkpoints(there, 2, {}) as checkpoints:
        checkpoints.save(*run, Progress(step=2))
        checkpoints.wait()
        if distributed.get_rank() == 1:
            files.sync = room_for_one
        checkpoints.save(*run, Progress(step=3))
    files.sync = sync
    distributed.barrier()
    assert sorted(path.name for path in there.iterdir()) == ["step-000002", "step-000003"]


def damage_is_refused_by_all(folder, mesh):
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


def frozen_weights_are_known_however_they_are_split(mesh):
    sharded = training_state.frozen_weights(new_sharded_run(mesh, trained="blocks.1")[0])
    assert sharded == training_state.frozen_weights(new_run(trained="blocks.1")[0]) and len(sharded) == 5


def a_signal_to_one_rank_is_known_to_all():
    with signals() as stop:
        if distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        asked = torch.tensor(float(stop.requested))
        distributed.all_reduce(asked)
    assert asked == 1.0


def the_first_rank_locks_for_all(folder):
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
    mesh, copies = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    the_first_rank_locks_for_all(folder)
    a_signal_to_one_rank_is_known_to_all()
    one_becomes_two(folder, mesh)
    a_model_from_meta_is_filled(folder)
    one_rank_fails_and_all_say_so(folder, mesh)
    ranks_make_room_together(folder, mesh)
    damage_is_refused_by_all(folder, mesh)
    frozen_weights_are_known_however_they_are_split(mesh)
    frozen_weights_are_known_however_they_are_split(copies)
    goes_on_to_the_bit(folder / "two", mesh)
    goes_on_to_the_bit(folder / "hybrid", copies)
    goes_on_to_the_bit(folder / "frozen", mesh, trained="blocks.1")
    goes_on_to_the_bit(folder / "muon", mesh, optimizer="muon")
    goes_on_to_the_bit(folder / "8 bit", mesh, optimizer="adamw8bit", width=256)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
