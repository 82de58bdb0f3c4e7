"""Sampling beside the reference, beside a definition in float64 written down token by token, and against probabilities."""

import math

import pytest
import torch

from ligermodels.kernels.philox import draw_bits_reference
from ligermodels.kernels.sample import BLOCK, sample, sample_reference
from tests.conftest import DEVICE

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS = [  # temperature, top_k, top_p, min_p
    *[(0.0, 0, 1.0, 0.0), (0.0, 3, 0.5, 0.2), (1.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.0), (1e-5, 0, 1.0, 0.0)],
    *[(1.0, 1, 1.0, 0.0), (1.0, 7, 1.0, 0.0), (2.0, 100, 1.0, 0.0), (1.0, 10**6, 1.0, 0.0), (1.0, 600, 1.0, 0.0)],
    *[(1.0, 0, 0.9, 0.0), (0.7, 0, 0.3, 0.0), (1.0, 0, 1e-9, 0.0), (5.0, 0, 0.999, 0.0), (1.0, 0, 0.0, 0.0)],
    *[(1.0, 0, 1.0, 0.1), (1.0, 0, 1.0, 1.0), (1.3, 50, 0.8, 0.02), (1.0, 20, 0.999999, 0.0), (1.0, 0, 0.5, 0.3)],
]


def arguments(settings, seed=5):
    """The tensors of `sample` behind the logits: one row for each of `settings`, the same seed, different counters."""
    temperature, top_k, top_p, min_p = (
        torch.tensor(x, dtype=d, device=DEVICE)
        for x, d in zip(
            zip(*settings, strict=True), (torch.float32, torch.int32, torch.float32, torch.float32), strict=True
        )
    )
    row = torch.arange(len(settings), device=DEVICE)
    return temperature, top_k, top_p, min_p, torch.full_like(row, seed), torch.stack([row, 3 * row], 1)


def logits_of(kind, rows, vocabulary):
    if kind == "normal":
        return 3 * torch.randn(rows, vocabulary, device=DEVICE)
    if kind == "ties":
        return torch.randint(-3, 4, (rows, vocabulary), device=DEVICE).float()
    if kind == "equal":
        return torch.zeros(rows, vocabulary, device=DEVICE)
    logits = torch.full((rows, vocabulary), -torch.inf, device=DEVICE)
    chosen = torch.randint(vocabulary, (rows, 1 if kind == "one finite" else vocabulary // 3), device=DEVICE)
    return logits.scatter_(1, chosen, torch.randn(chosen.shape, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [5, 1000, 4 * BLOCK * 4 + 1])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "some infinite", "one finite"])
def test_kernels_draw_what_the_reference_draws(kernels, poisoned, kind, vocabulary, dtype):
    logits = logits_of(kind, len(SETTINGS), vocabulary).to(dtype)
    expected = sample_reference(logits, *arguments(SETTINGS))
    tokens, logprobs = sample(logits, *arguments(SETTINGS))
    assert tokens.tolist() == expected[0].tolist()
    torch.testing.assert_close(logprobs, expected[1], rtol=2e-6, atol=2e-6)
