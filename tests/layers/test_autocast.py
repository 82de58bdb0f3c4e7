"""Models under `torch.autocast` with fp32 parameters, as Hugging Face's Trainer runs them with bf16=True."""

import copy

import pytest
import torch

import ligermodels
from ligermodels.kernels import launch
from ligermodels.layers.decoder import CausalLM
from tests.cases import CASES
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, FACTOR, relative_error
from tests.layers.adapters import adapt
from tests.suites import slow

HALF = DTYPES[-1]


CHANGES = {"gemma2": None, "qwen2_moe": None, "llama-tied": adapt, "llama": CausalLM.checkpoint_activations}


def build(name):
    return ligermodels.create(CASES[name] | {"num_hidden_layers": 1})


def step(model, enabled=True):
    """The loss, and the gradients of the trained parameters."""
    device = next(model.parameters()).device
    ids = torch.randint(3, 99, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.autocast(device.type, HALF, enabled=enabled):
        loss = model(ids, ids).loss
    return loss, torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def error(gradients, exact):
    """The root mean square of the relative errors of all gradients."""
    errors = [relative_error(got.cpu(), expected) for got, expected in zip(gradients, exact, strict=True)]
    return torch.tensor(errors).square().mean().sqrt().item()


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_is_within_the_error_budget_of_plain_pytorch(name, monkeypatch):
    model = build(name)
    if CHANGES[name] is not None:
        CHANGES[name](model)
    plain_loss, plain = step(model)  # on the CPU, where no kernels run
    exact_loss, exact = step(copy.deepcopy(model).double(), enabled=False)
    monkeypatch.setattr(launch, "interpreting", DEVICE == "cpu")
    loss, gradients = step(model.to(DEVICE))
    assert {loss.dtype, *(x.dtype for x in gradients)} == {torch.float32}
    assert error(gradients, exact) <= FACTOR * error(plain, exact)
    allowed = max(FACTOR * relative_error(plain_loss, exact_loss), torch.finfo(HALF).eps / 4)
    assert relative_error(loss.cpu(), exact_loss) <= allowed


@slow
@pytest.mark.usefixtures("kernels")
def test_a_training_step_compiles_to_one_graph_with_equal_gradients():
    model = build("llama").to(DEVICE)
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(step(compiled), step(model), rtol=1e-3, atol=1e-5)
