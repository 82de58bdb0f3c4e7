"""The optimizer step in the backward pass: the bits of the usual step, few gradients at a time, clipping, resuming."""

import math
import signal
from contextlib import nullcontext

import pytest
import torch

import ligermodels
from ligermodels.errors import InputError
from ligermodels.memory.model import elements, training_memory
from ligermodels.training import TrainConfig, loop, plan, train
from ligermodels.training.optimizers import (
    OPTIMIZERS,
    OptimizerInBackward,
    build_optimizer,
    clip_and_step,
    set_learning_rate,
)
from ligermodels.training.parallel.fsdp import gradient_norm
from ligermodels.training.planning.contradictions import refuse_unfit_optimizer_in_backward
from ligermodels.training.run.stopping import Stop
from ligermodels.training.settings.config import RunConfig
from ligermodels.training.settings.settings import config_of_run
from tests.training.launching import weights
from tests.training.small_models import RAW

IDS = torch.randint(RAW["vocab_size"], (4, 2, 16), generator=torch.Generator().manual_seed(0))


def new_run(optimizer, **fields):
    model = ligermodels.create(RAW | {"hidden_size": 64} | fields, seed=0)
    model.checkpoint_activations()
    made = build_optimizer(model, optimizer)
    set_learning_rate(made, 1e-2)
    return model, made


def usual_steps(model, optimizer, batches, norms=None, max_grad_norm=math.inf):
    """norms: by which each step is clipped; None for its own. Returns the norms of the steps."""
    found = []
    for number, ids in enumerate(batches):
        loss = model(ids, labels=ids).loss
        loss.backward()
        found.append(gradient_norm(model))
        clip_and_step(optimizer, loss.detach(), norms[number] if norms else found[-1], max_grad_norm)
        optimizer.zero_grad()
    return found


def steps_in_backward(model, stepper, batches):
    norms = []
    for ids in batches:
        loss = model(ids, labels=ids).loss
        stepper.begin(loss)
        loss.backward()
        norms.append(stepper.finish())
    return norms


def assert_equal(model, other):
    parameters = dict(other.named_parameters())
    assert all(torch.equal(p, parameters[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_clipping_weights_and_states_have_the_bits_of_the_usual_step(optimizer, tied):
    model, made = new_run(optimizer, tie_word_embeddings=tied)
    other, stepped = new_run(optimizer, tie_word_embeddings=tied)
    norms = usual_steps(model, made, IDS)
    torch.testing.assert_close(steps_in_backward(other, OptimizerInBackward(stepped), IDS), norms)  # summed otherwise
    assert_equal(model, other)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert all(torch.equal(value, stepped.state[q][name]) for name, value in made.state[p].items())


def test_gradients_are_clipped_by_the_running_norm_of_the_steps_before():
    model, made = new_run("adamw")
    other, stepped = new_run("adamw")
    stepper = OptimizerInBackward(stepped, max_grad_norm=0.5)
    first, second, third, _ = steps_in_backward(other, stepper, IDS)
    assert min(first, second, third) > 0.5  # so that clipping changes something
    running = 0.9 * first + 0.1 * second
    by = [torch.zeros(()), first, running, 0.9 * running + 0.1 * third]
    usual_steps(model, made, IDS, by, 0.5)
    assert_equal(model, other)


def test_the_gradients_of_at_most_one_block_exist_at_a_time():
    model, optimizer = new_run("adamw", num_hidden_layers=3)
    stepper = OptimizerInBackward(optimizer)
    seen = []

    def count(p):
        seen.append(elements(q.grad for q in model.parameters() if q.grad is not None))
        stepper.step_parameter(p)

    for p in model.parameters():
        p._post_accumulate_grad_hooks.clear()
        p.register_post_accumulate_grad_hook(count)
    steps_in_backward(model, stepper, IDS[:1])
    assert len(seen) == len(list(model.parameters())) and all(p.grad is None for p in model.parameters())
    planned = training_memory(model, 2, 16, torch.float32, step_in_backward=True).gradients
    assert max(seen) * 4 <= planned < elements(model.parameters()) * 4 / 2


def test_a_loss_that_is_not_finite_changes_nothing():
    model, optimizer = new_run("adamw8bit")
    stepper = OptimizerInBackward(optimizer, 1.0)
    steps_in_backward(model, stepper, IDS[:1])
    before = [p.detach().clone() for p in model.parameters()]
    running, states = optimizer.running_norm.clone(), [dict(optimizer.state[p]) for p in model.parameters()]
    moments = [{name: value.clone() for name, value in state.items()} for state in states]
    loss = model(IDS[1], labels=IDS[1]).loss * math.inf
    stepper.begin(loss)
    loss.backward()
    assert not stepper.finish().isfinite() and torch.equal(optimizer.running_norm, running)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    for state, old in zip(states, moments, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in state.items())


def test_a_backward_pass_outside_of_a_step_is_refused():
    model, optimizer = new_run("adamw")
    stepper = OptimizerInBackward(optimizer)
    steps_in_backward(model, stepper, IDS[:1])
    with pytest.raises(RuntimeError, match="without begin"):
        model(IDS[0], labels=IDS[0]).loss.backward()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 4, "micro_batch_size": 2}, "not 2 micro-batches; give --micro-batch-size 4"),
        ({"dtype": "bfloat16", "param_dtype": "float32"}, "add --param-dtype bfloat16"),
        ({"on_nan": "skip"}, "--on-nan skip: --optimizer-in-backward has updated some parameters"),
        ({"objective": "dpo"}, "--optimizer-in-backward has no effect under --objective dpo"),
    ],
)
def test_what_one_backward_pass_cannot_do_is_refused(settings, words):
    run = {"model": "llama", "data": ("random",), "steps": 4, "sequence_length": 32, "optimizer_in_backward": True}
    with pytest.raises(InputError, match=words):
        plan(TrainConfig(**run | settings))


def test_several_ranks_are_refused():
    config = RunConfig(
        optimizer_in_backward=True, sequence_length=32, steps=4, learning_rate=1e-3, warmup=0, dtype="float32",
        param_dtype="float32", activation_checkpointing="none", eval_every=1, optimizer="adamw", offload=(),
    )  # fmt: skip
    refuse_unfit_optimizer_in_backward(config, 1, 1)
    with pytest.raises(InputError, match="one process, not on 2 ranks"):
        refuse_unfit_optimizer_in_backward(config, 2, 1)


def test_a_run_resumes_with_the_same_bits_and_its_plan_knows_the_gradients(tmp_path, monkeypatch):
    settings = {
        "model": "llama", "data": ("random",), "steps": 4, "batch_size": 4, "sequence_length": 32, "warmup": 0,
        "optimizer_in_backward": True, "max_grad_norm": 0.1, "checkpoint_every": 2, "eval_every": 4,
    }  # fmt: skip
    usual = plan(TrainConfig(**settings | {"optimizer_in_backward": False})).memory
    assert plan(TrainConfig(**settings)).memory.gradients < usual.gradients / 2
    straight = train(TrainConfig(**settings, output=tmp_path / "straight"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "signals", lambda: nullcontext(Stop(signal.SIGTERM)))  # as after a signal in the first step
        train(TrainConfig(**settings, output=tmp_path / "stopped"))
    resumed = train(config_of_run(tmp_path / "stopped"))
    assert_equal(straight.model, resumed.model)
    assert weights(tmp_path / "straight") == weights(tmp_path / "stopped")


def test_a_run_goes_on_without_it_where_that_is_allowed(tmp_path):
    """As on several ranks, where it cannot be."""
    settings = {
        "model": "llama", "data": ("random",), "batch_size": 4, "sequence_length": 32, "eval_every": 9,
        "checkpoint_every": 1,
    }  # fmt: skip
    train(TrainConfig(**settings, steps=1, optimizer_in_backward=True, output=tmp_path / "run"))
    changed = {"optimizer_in_backward": False, "steps": 2}
    with pytest.raises(InputError, match="optimizer_in_backward: off, was on: keep the setting"):
        train(config_of_run(tmp_path / "run", **changed))
    result = train(config_of_run(tmp_path / "run", **changed, allow_changes=True))
    assert [record["step"] for record in result.metrics if "loss" in record] == [1, 2]
