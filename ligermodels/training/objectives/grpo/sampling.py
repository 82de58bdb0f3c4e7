"""Completions of prompts, sampled by the generation engine from the weights as they are. Must not know rewards.

The random numbers of a completion depend on the seed, on the prompt's number in the order of the run and on the
completion's number alone: not on ranks, nor on what else is sampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ligermodels import distributed
from ligermodels.errors import InputError
from ligermodels.generation.capacity import cache_bytes, tokens_that_fit
from ligermodels.generation.engine import DEFAULT_ROWS, Engine
from ligermodels.generation.paged_cache import PAGE_SIZE, pages_for
from ligermodels.generation.requests import GeneratedSample
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.preferences import GroupPrompt
from ligermodels.training.parallel import fsdp

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


class EngineSize(NamedTuple):
    """Of a rank's engine: tokens of its cache, of its longest request, and rows that run at a time.

    It depends on the settings and the data alone, so that a resumed run samples with the same.
    """

    tokens: int
    longest: int
    rows: int

    def cache_bytes(self, model: CausalLM, dtype: torch.dtype) -> int:
        """Of the cache, which stays between generations. dtype: of keys and values."""
        return cache_bytes(model, self.tokens, self.rows, self.longest, dtype)

    def step_bytes(self, model: CausalLM) -> int:
        """Of the logits of all rows, in the model's dtype and in fp32."""
        return self.rows * model.config.vocab_size * (model.dtype.itemsize + 4)


def engine_size(longest_prompt: int, prompts: int, plan: SamplingPlan) -> EngineSize:
    """For `prompts` prompts of a rank at a time, all of them with as many tokens as the longest."""
    length = longest_prompt + plan.max_new_tokens
    whole, shared = pages_for(length), longest_prompt // PAGE_SIZE
    pages = prompts * (shared + plan.n * (whole - shared))
    return EngineSize(pages * PAGE_SIZE, length, max(plan.n, min(DEFAULT_ROWS, plan.n * prompts)))


class Sampler:
    """Samples with one engine for a whole run, which reads the weights as they are in each generation.

    The engine's cache and CUDA graphs stay; where the weights lie elsewhere than before, graphs are captured anew.
    vocab_size: as that of `Engine`.
    """

    def __init__(self, tokenizer: Tokenizer, size: EngineSize, vocab_size: int | None = None) -> None:
        self.tokenizer, self.size, self.vocab_size = tokenizer, size, vocab_size
        self.engine: Engine | None = None

    def memory(self, model: CausalLM, dtype: torch.dtype) -> tuple[int, int]:
        """(bytes that stay, more bytes of a generation) of a rank, without gathered weights. dtype: of the cache."""
        return self.size.cache_bytes(model, dtype), self.size.step_bytes(model)

    def sample(
        self, model: CausalLM, prompts: Sequence[GroupPrompt], plan: SamplingPlan, first: int = 0
    ) -> list[list[GeneratedSample]]:
        """The samples of each prompt, in order. first: the number of the step's first prompt in the order of the run.

        Under FSDP every rank must call it: weights are gathered once, and no forward pass communicates, so that ranks
        may take different numbers of steps.
        """
        was_training = model.training
        model.eval()
        with fsdp.gathered(model):
            samples = self.run_engine(model, prompts, plan, first) if prompts else []
        model.train(was_training)
        distributed.raise_on_all(not_finite(prompts, samples))
        return samples

    def run_engine(
        self, model: CausalLM, prompts: Sequence[GroupPrompt], plan: SamplingPlan, first: int
    ) -> list[list[GeneratedSample]]:
        self.engine = engine = self.engine or self.start_engine(model)
        for prompt in prompts:
            engine.submit(
                prompt.ids.tolist(), max_new_tokens=plan.max_new_tokens, n=plan.n, temperature=plan.temperature,
                stop=plan.stop, seed=plan.seed, stream=first + prompt.unit,
            )  # fmt: skip
        found = sorted(engine, key=lambda sample: (sample.request, sample.sample))
        return [found[begin : begin + plan.n] for begin in range(0, len(found), plan.n)]

    def start_engine(self, model: CausalLM) -> Engine:
        """Within `fsdp.gathered`, so that the engine sees whole weights."""
        tokens, longest, rows = self.size
        if model.device.type == "cuda":
            tokens = min(tokens, tokens_that_fit(model, rows))
        return Engine(
            model, tokenizer=self.tokenizer, max_tokens=tokens, max_length=longest, max_rows=rows,
            vocab_size=self.vocab_size,
        )  # fmt: skip


def not_finite(prompts: Sequence[GroupPrompt], samples: Sequence[Sequence[GeneratedSample]]) -> InputError | None:
    """What to raise where a token was drawn from logits that are NaN or infinite; None if they were all finite."""
    for prompt, group in zip(prompts, samples, strict=True):
        for sample in group:
            place = next((i for i, value in enumerate(sample.logprobs) if not math.isfinite(value)), None)
            if place is not None:
                return InputError(
                    f"{prompt.place}: token {place + 1} of a completion was sampled from logits that are NaN or "
                    "infinite: the weights are damaged, or a step was too large: lower --learning-rate and resume from "
                    "an earlier checkpoint"
                )
    return None


def as_completion(prompt: str | list[ChatMessage], text: str) -> str | list[ChatMessage]:
    """A completion as reward functions get it: of a conversation, a list with one message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
