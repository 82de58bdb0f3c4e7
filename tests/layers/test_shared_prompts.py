"""Completions that share their prompt in a packed row: log-probabilities and gradients of separate sequences."""

import numpy as np
import pytest
import torch

import ligermodels
from ligermodels.kernels.attention.shared_keys import SharedKeys
from ligermodels.training.data.preferences import Group, collate_groups
from tests.cases import CASES
from tests.kernels.error_budget import relative_error

NAMES = ["qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "glm"]
PROMPTS, LENGTHS = (23, 1, 2, 9), ((5, 1, 12), (3, 4), (6, 2), (7,))  # windows of the models have 5 to 8 keys


def draw_groups(vocabulary, seed=0):
    """Groups with a prompt of one token, of two, and with one completion; some tokens are not supervised."""
    generator = np.random.default_rng(seed)

    def tokens(count):
        return generator.integers(3, vocabulary, count)

    groups = [
        Group(tokens(p), tuple(map(tokens, sizes)), (None,) * len(sizes))
        for p, sizes in zip(PROMPTS, LENGTHS, strict=True)
    ]
    masked = np.array([True] * 5 + [False] * 4 + [True] * 3)
    groups[0] = groups[0]._replace(supervised=(None, None, masked))
    return groups


def logprobs(model, batch):
    """[M], by completion."""
    inputs = batch.model_inputs
    rows, labels = inputs.pop("rows")[: batch.supervised], inputs.pop("labels")
    logits = model(**inputs, skip_logits=False).logits[0, rows]
    return logits.log_softmax(-1).gather(1, labels[0, rows + 1, None])[:, 0]


def sharpened(name, dtype):
    """A model with sharp attention, so that a token that should not be seen shows."""
    model = ligermodels.create(CASES[name]).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_shared_prompts_give_the_log_probabilities_and_gradients_of_separate_sequences(name):
    model = sharpened(name, torch.float64)
    groups = draw_groups(CASES[name]["vocab_size"])
    results = []
    for share in (True, False):
        [batch] = collate_groups(groups, range(4), 512, share_prompts=share)
        assert (batch.shared_keys is not None) == share
        values = logprobs(model, batch)
        loss = (values * torch.linspace(-1, 1, len(values), dtype=torch.float64)).sum()
        results.append([values.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)])
    for shared, separate in zip(*results, strict=True):
        torch.testing.assert_close(shared, separate, rtol=1e-9, atol=1e-11)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2"])
def test_shared_prompts_are_as_exact_as_separate_sequences_in_bf16(name):
    groups = draw_groups(CASES[name]["vocab_size"])
    shared, separate = (collate_groups(groups, range(4), 512, share_prompts=share)[0] for share in (True, False))
    exact = logprobs(sharpened(name, torch.float64), separate).detach()
    model = sharpened(name, torch.bfloat16).to("cuda")
    errors = [relative_error(logprobs(model, b.to("cuda")).cpu(), exact) for b in (shared, separate)]
    assert errors[0] <= 1.5 * errors[1]


def test_shared_keys_without_offsets_or_positions_are_refused():
    model = ligermodels.create(CASES["qwen2"])
    keys = SharedKeys(*(torch.zeros(2, dtype=torch.int32) for _ in range(3)), 1)
    with pytest.raises(ValueError, match="shared_keys need cu_seqlens and position_ids"):
        model(torch.zeros(1, 1, dtype=torch.int64), shared_keys=keys)
