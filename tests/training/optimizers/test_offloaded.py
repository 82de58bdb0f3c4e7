"""Optimizer states in host memory. On a CPU the ring and the copies are those of a GPU, without streams."""

import signal
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from ligermodels.training import TrainConfig, loop, train
from ligermodels.training.optimizers import OPTIMIZERS, OptimizerInBackward
from ligermodels.training.optimizers import offloaded as module
from ligermodels.training.run.stopping import Stop
from ligermodels.training.settings.settings import config_of_run
from tests.conftest import DEVICE
from tests.training.launching import weights
from tests.training.optimizers.test_in_backward import IDS, assert_equal, new_run, steps_in_backward, usual_steps


def assert_equal_states(made, other):
    """The states of two optimizers, by the order of their parameters."""
    every, others = made.state_dict()["state"], other.state_dict()["state"]
    assert every.keys() == others.keys() != set()
    for index, state in every.items():
        assert state.keys() == others[index].keys()
        assert all(torch.equal(value.cpu(), others[index][name].cpu()) for name, value in state.items())


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_states_have_the_bits_of_states_on_the_device(optimizer, in_backward):
    runs = [new_run(optimizer) for _ in range(2)]
    runs[1][1].offload_states()
    for model, made in runs:
        if in_backward:
            steps_in_backward(model, OptimizerInBackward(made, 1.0), IDS)
        else:
            usual_steps(model, made, IDS)
    assert_equal(runs[0][0], runs[1][0])
    assert_equal_states(runs[0][1], runs[1][1])


@pytest.mark.parametrize("offloads", [(False, True), (True, False)])
def test_a_state_dict_continues_in_either_place(offloads):
    whole, made = new_run("adamw8bit")
    usual_steps(whole, made, IDS)
    before, after = (new_run("adamw8bit") for _ in range(2))
    for (_, optimizer), offload in zip((before, after), offloads, strict=True):
        if offload:
            optimizer.offload_states()
    usual_steps(*before, IDS[:2])
    usual_steps(*after, IDS[3:])  # what is loaded replaces other states
    after[0].load_state_dict(before[0].state_dict())
    after[1].load_state_dict(before[1].state_dict())
    usual_steps(*after, IDS[2:])
    assert_equal(whole, after[0])
    assert_equal_states(made, after[1])


def counting_states(sizes):
    """Parameters of these sizes, and states that count updates."""
    params = [nn.Parameter(torch.zeros(size, device=DEVICE)) for size in sizes]
    zeros = {p: {"step": torch.zeros((), device=DEVICE), "moment": torch.zeros_like(p)} for p in params}
    return params, module.OffloadedStates([params], zeros.__getitem__)


def test_the_next_states_are_fetched_while_one_is_updated():
    params, states = counting_states([64] * 5)
    assert len(states.ring) == 3 * 256 and len(states.memory) == 5 * 256
    fetched = []
    for _ in range(3):
        for p in params:
            with states.on_device(p) as state:
                fetched.append([index for index, q in enumerate(params) if q in states.fetched])
                assert state["moment"].device == p.device
    assert fetched[:5] == [[]] * 5  # the order is not known yet
    assert fetched[5:] == [[1, 2], [2, 3], [3, 4], [0, 4], [0, 1]] * 2
    states.synchronize()
    assert not states.fetched


def test_the_states_of_an_embedding_and_a_head_stay_on_the_device():
    params, states = counting_states([4096, *[64, 128] * 3, 4096])
    assert len(states.ring) == 4 * (128 + 64 + 128) and len(states.memory) == 3 * 4 * (64 + 128)
    for _ in range(2):
        for p in params:
            with states.on_device(p) as state:
                state["moment"] += 1
    states.synchronize()
    assert all((states.states[p]["moment"] == 2).all() for p in params)
    assert states.packed.keys() == set(params[1:-1])
    assert {states.states[p]["moment"].device for p in (params[0], params[-1])} == {params[0].device}
    states.reset()
    assert not any(states.states[p]["moment"].any() for p in params)


@pytest.mark.parametrize(
    ("groups", "staying", "ring"),
    [
        ([[100, 5, 6, 7, 100], [1, 1]], [(0, 0), (0, 4)], 18),
        ([[100, 5, 6, 7], [1, 1]], [(0, 0)], 18),  # one of the two largest
        ([[5, 20, 1, 1, 1, 20, 100]], [(0, 6)], 40),  # the largest of the others twice
        ([[18, 5, 6, 7, 9], [1]], [], 36),  # not larger than its neighbours together
        ([[40, 4, 40, 4, 40]], [], 84),  # one of many
        ([[100]], [], 200),
    ],
)
def test_what_would_not_fit_into_a_ring_for_all_others_stays(groups, staying, ring):
    assert module.find_staying(groups) == staying
    assert module.ring_bytes(groups, staying) == ring


@pytest.mark.parametrize("sizes", [(64, 128, 256, 64, 512), (512, 512, 512, 64, 64), (64,) * 5])
def test_states_of_any_sizes_and_parameters_left_out_of_a_step_share_the_ring(sizes):
    params, states = counting_states(sizes)
    for left_out in (None, 2, 3, 0, None, 1, None):
        for index, p in enumerate(params):
            if index != left_out:
                with states.on_device(p) as state:
                    state["moment"] += 1
    states.synchronize()
    assert [states.states[p]["moment"].unique().tolist() for p in params] == [[6], [6], [6], [6], [7]]
    assert all(states.states[p]["moment"].device.type == "cpu" for p in states.packed)


def test_a_run_resumes_with_the_same_bits_wherever_the_states_are(tmp_path, monkeypatch):
    settings = {
        "model": "llama", "data": ("random",), "steps": 4, "batch_size": 4, "sequence_length": 32, "warmup": 0,
        "optimizer": "adamw8bit", "optimizer_in_backward": True, "checkpoint_every": 2, "eval_every": 4,
    }  # fmt: skip
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(TrainConfig(**settings, output=straight))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "signals", lambda: nullcontext(Stop(signal.SIGTERM)))  # as after a signal in the first step
        train(TrainConfig(**settings, offload=("optimizer",), output=stopped))
        train(config_of_run(stopped, offload=()))
    train(config_of_run(stopped, offload=("optimizer",)))
    assert weights(straight) == weights(stopped)
