"""Without a GPU the Triton kernels are built for the interpreter, so this must run before anything imports triton."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # tensors here are too small to share, and processes share the cores

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

from ligermodels.kernels import launch, rescale
from tests import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# Needs tens of GiB: one at a time, under `--dist loadgroup`.
BEYOND_INT32 = pytest.mark.xdist_group("beyond int32")


def pytest_configure():
    if DEVICE == "cpu":
        interpreter.hasten()
        rescale.IN_PLACE_TILE = rescale.SpanTile(block=512, span=2048, warps=8)  # the GPU's takes 32 steps for any row


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def reference_on_cpu(monkeypatch):
    """CPU tensors take the plain PyTorch reference, as they do for users; `kernels` turns the kernels on."""
    monkeypatch.setattr(launch, "interpreting", False)
    torch.manual_seed(0)


@pytest.fixture
def kernels(reference_on_cpu, monkeypatch):
    """Runs the Triton kernels: natively on a GPU, under the interpreter on a CPU."""
    monkeypatch.setattr(launch, "interpreting", DEVICE == "cpu")


@pytest.fixture
def poisoned():
    """Every torch.empty is filled with NaN, so that an element no kernel wrote is noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
