"""--deterministic: the same bits again, and torch's settings during and after the run."""

import os

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.training import TrainConfig, loop, train
from ligermodels.training.parallel.compilation import CUBLAS_VARIABLE, deterministic_algorithms

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(CUBLAS_VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(CUBLAS_VARIABLE)


def torch_settings():
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return enabled, only_warns, torch.utils.deterministic.fill_uninitialized_memory


def test_a_deterministic_run_has_the_same_bits_again(tmp_path, monkeypatch):
    seen, clip_and_step, before = [], loop.clip_and_step, torch_settings()

    def record(*arguments):
        seen.append((*torch_settings(), os.environ[CUBLAS_VARIABLE]))
        clip_and_step(*arguments)

    monkeypatch.setattr(loop, "clip_and_step", record)
    settings = {"model": "llama", "data": "random", "steps": 2, "batch_size": 2, "sequence_length": 32}
    runs = [train(TrainConfig(**settings, deterministic=True, no_export=True, output=tmp_path / name)) for name in "ab"]
    assert seen == [(True, False, False, ":4096:8")] * 4 and torch_settings() == before
    weights = [list(run.model.parameters()) for run in runs]
    assert weights[0] and all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert [step["loss"] for step in runs[0].metrics if "loss" in step] == [
        step["loss"] for step in runs[1].metrics if "loss" in step
    ]


def test_compiled_code_is_deterministic_as_well():
    from torch._inductor import config

    with deterministic_algorithms(True, compiled=True):
        assert config.deterministic
    assert not config.deterministic


def test_torch_is_left_as_it_was_after_an_error_and_without_the_flag():
    before = torch_settings()
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(True, compiled=False):
        raise ZeroDivisionError
    with deterministic_algorithms(False, compiled=False):
        assert torch_settings() == before
    assert torch_settings() == before


def test_another_workspace_of_cublas_is_refused(monkeypatch):
    monkeypatch.setenv(CUBLAS_VARIABLE, ":0:0")
    message = "--deterministic: CUBLAS_WORKSPACE_CONFIG is ':0:0'; unset it, or set :4096:8"
    with pytest.raises(InputError, match=message), deterministic_algorithms(True, compiled=False):
        pass
