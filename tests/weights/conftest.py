import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def read_lengths(monkeypatch):
    """The number of bytes that each positional read (preadv) returned."""
    lengths, preadv = [], os.preadv

    def counted(descriptor, views, offset):
        lengths.append(preadv(descriptor, views, offset))
        return lengths[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return lengths


@pytest.fixture
def rank_of():
    """Makes this process a rank of a fake process group, in which nothing is communicated."""

    def pretend(rank, mesh_shape):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        world = torch.Size(mesh_shape).numel()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        # Meshes of different ranks compare equal unless their names differ, and DTensor caches by mesh.
        return init_device_mesh("cpu", mesh_shape, mesh_dim_names=[f"{rank}/{dim}" for dim in range(len(mesh_shape))])

    yield pretend
    torch.distributed.destroy_process_group()
