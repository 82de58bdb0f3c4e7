"""Every optimizer: weight decay groups, gradient clipping, and the step that is skipped on non-finite gradients."""

import copy

import pytest
import torch
from torch import nn

import ligermodels
from ligermodels.errors import InputError
from ligermodels.training.optimizers.building import (
    OPTIMIZERS,
    build_optimizer,
    clip_and_step,
    decay_groups,
    set_learning_rate,
)
from tests.conftest import DEVICE


class Small(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed_tokens = nn.Embedding(6, 4)
        self.mlp = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.randn(2, 4, 4))
        self.experts_bias = nn.Parameter(torch.randn(2, 4))
        self.norm = nn.RMSNorm(4)
        self.lm_head = nn.Linear(4, 6, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


@pytest.mark.parametrize("tied", [False, True])
def test_weight_decay_is_not_applied_to_norms_biases_and_embeddings(tied):
    model = Small(tied)
    decayed, not_decayed = (set(map(id, group)) for group in decay_groups(model))
    with_decay = {model.mlp.weight, model.experts} | ({model.lm_head.weight} if not tied else set())
    without_decay = {model.embed_tokens.weight, model.mlp.bias, model.experts_bias, model.norm.weight}
    assert decayed == set(map(id, with_decay))
    assert not_decayed == set(map(id, without_decay))


def test_with_a_zero_gradient_only_weight_decay_changes_weights():
    model = Small(tied=False)
    optimizer = build_optimizer(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.5)
    optimizer.step()
    torch.testing.assert_close(model.mlp.weight, before["mlp.weight"] * (1 - 0.5 * 0.1))
    assert torch.equal(model.norm.weight, before["norm.weight"])
    assert torch.equal(model.embed_tokens.weight, before["embed_tokens.weight"])


def test_frozen_parameters_are_in_no_group():
    model = Small(tied=False)
    model.mlp.weight.requires_grad_(False)
    assert all(parameter is not model.mlp.weight for group in decay_groups(model) for parameter in group)


# Rows of 256 elements, so that most parameters have 8-bit state.
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 17, "hidden_size": 256, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def model_and_optimizer(name, dtype=torch.float32):
    model = ligermodels.create(MIXTRAL, dtype=dtype, device=DEVICE)
    model.initialize(0)
    optimizer = build_optimizer(model, name)
    set_learning_rate(optimizer, 1e-2)
    return model, optimizer


def give_gradients(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = scale * torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter)


def scalars(*values):
    return torch.tensor(values, device=DEVICE).unbind()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scale", [1e-4, 10.0])
def test_clip_and_step_equals_clipping_followed_by_a_step(name, scale):
    """Gradients with a norm below max_grad_norm are unchanged, others are scaled down to it."""
    (ours, optimizer), (theirs, plain) = model_and_optimizer(name), model_and_optimizer(name)
    for seed, factor in enumerate((1, 5, 0.2)):  # different clipping factors: Muon ignores a constant one
        for model in (ours, theirs):
            give_gradients(model, seed, scale * factor)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        plain.step()
        clip_and_step(optimizer, *scalars(1.0), norm, 0.5)
    moved = [(a - b).norm() for a, b in zip(ours.parameters(), model_and_optimizer(name)[0].parameters(), strict=True)]
    differences = [(a - b).norm() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
    # Muon multiplies in bf16; in 8 bits, a change in the last bit of a gradient can change the code.
    allowed = {"adamw": 1e-5, "adamw8bit": 1e-3, "muon": 2e-2}[name]
    assert all(difference <= allowed * distance for difference, distance in zip(differences, moved, strict=True))


def bits(model, optimizer):
    """Returns the bytes of all weights and states, which differ even between equal numbers such as 0 and -0."""
    tensors = [x for p in model.parameters() for x in (p.detach(), *optimizer.state[p].values())]
    return [x.reshape(-1).view(torch.uint8).clone() for x in tensors]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_a_non_finite_loss_or_gradient_weights_and_state_stay_bit_identical(name, dtype):
    model, optimizer = model_and_optimizer(name, dtype)
    with torch.no_grad():
        model.model.layers[0].self_attn.qkv_proj.weight[:3] = -0.0
    for seed in range(2):
        give_gradients(model, seed)
        clip_and_step(optimizer, *scalars(1.0, 1.0), 1.0)
    before = bits(model, optimizer)
    for loss, norm in [(float("nan"), 1.0), (1.0, float("inf")), (1.0, float("nan"))]:
        give_gradients(model, 9)
        for parameter in model.parameters():
            parameter.grad.flatten()[::5] = float("nan")
        clip_and_step(optimizer, *scalars(loss, norm), 1.0)
        assert all(map(torch.equal, bits(model, optimizer), before))
    give_gradients(model, 9)
    clip_and_step(optimizer, *scalars(1.0, 1.0), 1.0)
    for name, after, old in zip("weights", bits(model, optimizer), before, strict=False):
        assert not torch.equal(after, old), name


@pytest.mark.parametrize("loss", [1.0, float("nan")])
def test_a_skipped_step_of_the_kernel_changes_neither_weights_nor_the_step_count(kernels, loss):
    model = Small(tied=False).to(DEVICE)
    optimizer = build_optimizer(model)
    set_learning_rate(optimizer, 1e-2)
    for seed, value in enumerate((1.0, 1.0, loss)):
        before = bits(model, optimizer)
        give_gradients(model, seed)
        clip_and_step(optimizer, *scalars(value, 5.0), 1.0)
    assert all(map(torch.equal, bits(model, optimizer), before)) == (loss != loss)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0 if loss != loss else 3.0}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_continues_from_its_state_dict(name):
    model, optimizer = model_and_optimizer(name)
    give_gradients(model, 0)
    optimizer.step()
    resumed = copy.deepcopy(model)
    other = build_optimizer(resumed, name)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for trained, its_optimizer in ((model, optimizer), (resumed, other)):
        give_gradients(trained, 1)
        its_optimizer.step()
    assert all(map(torch.equal, bits(model, optimizer), bits(resumed, other)))


def test_unknown_names_and_a_state_dtype_for_adamw8bit_are_rejected():
    model = Small(tied=False)
    with pytest.raises(InputError, match=r"'adam': unknown; did you mean 'adamw'.*muon"):
        build_optimizer(model, "adam")
    with pytest.raises(InputError, match=r"adamw8bit keeps its state in 8 bits, not in torch.bfloat16"):
        build_optimizer(model, "adamw8bit", state_dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_host_does_not_wait_for_the_device(name):
    model, optimizer = model_and_optimizer(name, torch.bfloat16)
    loss, norm = scalars(1.0, 5.0)
    for seed in range(2):  # the first compiles the kernels
        give_gradients(model, seed)
        torch.cuda.set_sync_debug_mode("error" if seed else "default")
        try:
            clip_and_step(optimizer, loss, norm, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
