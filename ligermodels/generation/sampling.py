"""Sampling of tokens from logits: temperature, top-k, top-p (nucleus sampling). Must not know models."""

from typing import TypedDict

import torch
from torch import Tensor


class Sampling(TypedDict, total=False):
    """How tokens are chosen; the options of every function that generates.

    temperature: 0, the default, for greedy decoding; otherwise tokens are sampled. top_k: sample from the k most likely
    tokens. top_p: then from the smallest set of them whose probability reaches it. seed: makes sampling reproducible.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None


def sample_tokens(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Samples one token per row: logits [B, V] -> token ids [B]. temperature 0 selects the most likely token."""
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None:
        probability, order = logits.softmax(-1).sort(descending=True)
        preceding = probability.cumsum(-1) - probability  # of the more likely tokens; 0 for the most likely one
        removed = torch.zeros_like(preceding, dtype=torch.bool).scatter_(1, order, preceding >= top_p)
        logits = logits.masked_fill(removed, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingOptions:
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    n: int = 1
    filters: bool = False
