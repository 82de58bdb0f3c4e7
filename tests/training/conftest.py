import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ligermodels import distributed
from ligermodels.training.objectives import evaluation
from tests.conftest import DEVICE
from tests.training.launching import loop


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    distributed.stop()


@pytest.fixture
def rank_of_four():
    """Makes this process believe it is one rank of four; nothing is communicated."""

    def pretend(rank):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        # Meshes compare equal whatever the rank, unless their names differ, and DTensor caches by mesh.
        return init_device_mesh(DEVICE, (4,), mesh_dim_names=(f"rank {rank}",))

    yield pretend
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_group_is_left():
    """A run in this process may make a process group of its own, which a later test would find."""
    yield
    distributed.stop()


@pytest.fixture(scope="module", autouse=True)
def short_ends_of_runs():
    """As in runs of the launcher: curves.png and the sample of a validation take longer than a few small steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_curves", lambda *_: None)
        patch.setattr(evaluation, "SAMPLE_TOKENS", 10)
        yield


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory, monkeypatch):
    """What a test has tokenised is not found by another, nor in the user's home."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
