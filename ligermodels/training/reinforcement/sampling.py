"""Completions of prompts, sampled by the generation engine from the weights as they are. Must not know rewards.

The random numbers of a completion depend on the seed, on the prompt's number in the order of the run and on the
completion's number alone: not on ranks, nor on what else is sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ligermodels.generation.capacity import tokens_that_fit
from ligermodels.generation.engine import DEFAULT_ROWS, Engine
from ligermodels.generation.paged_cache import PAGE_SIZE, pages_for
from ligermodels.generation.requests import GeneratedSample
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.preferences import GroupPrompt
from ligermodels.training.scaling import fsdp

ChatMessage = dict[str, Any]


@dataclass(frozen=True)
class SamplingPlan:
    """n: completions of each prompt. temperature: 0 for greedy decoding. max_new_tokens: of a completion. stop: texts
    that end one, beside the model's stop tokens."""

    n: int
    temperature: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    seed: int = 0


def sample_completions(
    model: CausalLM, tokenizer: Tokenizer, prompts: Sequence[GroupPrompt], plan: SamplingPlan, first: int = 0
) -> list[list[GeneratedSample]]:
    """The samples of each prompt, in order. first: the number of the step's first prompt in the order of the run.

    Under FSDP every rank must call it: weights are gathered once, and no forward pass communicates, so that ranks may
    take different numbers of steps.
    """
    was_training = model.training
    model.eval()
    with fsdp.gathered(model):
        samples = run_engine(model, tokenizer, prompts, plan, first) if prompts else []
    model.train(was_training)
    return samples


@torch.no_grad()
def run_engine(
    model: CausalLM, tokenizer: Tokenizer, prompts: Sequence[GroupPrompt], plan: SamplingPlan, first: int
) -> list[list[GeneratedSample]]:
    longest = max(len(prompt.ids) for prompt in prompts) + plan.max_new_tokens
    rows = max(plan.n, min(DEFAULT_ROWS, plan.n * len(prompts)))
    size = cache_tokens([len(prompt.ids) for prompt in prompts], plan)
    if model.device.type == "cuda":
        size = min(size, tokens_that_fit(model, rows))
    engine = Engine(model, tokenizer=tokenizer, max_tokens=size, max_length=longest, max_rows=rows)
    for prompt in prompts:
        engine.submit(
            prompt.ids.tolist(), max_new_tokens=plan.max_new_tokens, n=plan.n, temperature=plan.temperature,
            stop=plan.stop, seed=plan.seed, stream=first + prompt.unit,
        )  # fmt: skip
    found = sorted(engine, key=lambda sample: (sample.request, sample.sample))
    return [found[begin : begin + plan.n] for begin in range(0, len(found), plan.n)]


def cache_tokens(lengths: Sequence[int], plan: SamplingPlan) -> int:
    """The tokens of the cache that holds all completions of prompts of these lengths, in whole pages."""
    pages = 0
    for length in lengths:
        whole, shared = pages_for(length + plan.max_new_tokens), length // PAGE_SIZE
        pages += shared + plan.n * (whole - shared)
    return pages * PAGE_SIZE


def as_completion(prompt: str | list[ChatMessage], text: str) -> str | list[ChatMessage]:
    """A completion as reward functions get it: of a conversation, a list with one message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
