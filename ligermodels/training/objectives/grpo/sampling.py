"""Completions of prompts, sampled from the weights as they are: by the generation engine, or by vLLM.

The random numbers of the own engine depend on the seed, on the prompt's number in the order of the run and on the
completion's number alone: not on ranks, nor on what else is sampled.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ligermodels import distributed
from ligermodels.errors import InputError, first_line
from ligermodels.generation.capacity import cache_bytes, tokens_that_fit
from ligermodels.generation.engine import DEFAULT_ROWS, Engine
from ligermodels.generation.paged_cache import PAGE_SIZE, pages_for
from ligermodels.generation.requests import GeneratedSample, Request, Sample
from ligermodels.generation.sampling import SamplingOptions
from ligermodels.generation.texts import RowText, StopStrings, model_stop_tokens
from ligermodels.layers.decoder import CausalLM
from ligermodels.lazy_imports import import_package
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.preferences import GroupPrompt, PreferenceData
from ligermodels.training.parallel import fsdp
from ligermodels.training.planning.defaults import Choice
from ligermodels.training.settings.config import TrainConfig
from ligermodels.weights.exporting import hub_weights, write_config
from ligermodels.weights.mapping import is_lora_parameter

ChatMessage = dict[str, Any]
VLLM_FLAG = "--sampler vllm"


@dataclass(frozen=True)
class SamplingPlan:
    """n completions are sampled of each prompt, of at most max_new_tokens. A temperature of 0 decodes greedily. The
    texts in stop end a completion, beside the model's stop tokens."""

    n: int
    temperature: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    seed: int = 0


def most_prompt_tokens(config: TrainConfig, positions: int) -> int:
    """The most tokens of a prompt in front of completions, of a model of so many positions. The default of
    --max-completion-length takes at most a quarter of them. Raises InputError for a given one that leaves no room."""
    given = config.max_completion_length
    longest = positions - (given or min(config.longest_completion, positions // 4))
    if longest < 2:
        raise InputError(
            f"--max-completion-length {given}: leaves no room for a prompt in the {positions} positions of the model; "
            "lower it"
        )
    return longest


def completion_limit(config: TrainConfig, positions: int, data: PreferenceData) -> dict[str, Choice]:
    """The choice of --max-completion-length: the default, or what the longest prompt leaves of the positions. Raises
    InputError for a given one that does not fit behind that prompt."""
    longest = max(data.training.groups.longest_prompt, data.validation.groups.longest_prompt)
    wanted, room = config.longest_completion, positions - longest
    if config.max_completion_length is not None and wanted > room:
        raise InputError(
            f"--max-completion-length {wanted}: with the longest prompt, of {longest} tokens, more than the "
            f"{positions} positions of the model; lower it"
        )
    reason = f"{positions} positions less the longest prompt" if wanted > room else ""
    return {"max_completion_length": Choice(min(wanted, room), reason)}


class SamplerBytes(NamedTuple):
    """Bytes of a rank. kept stay between generations; a generation takes more of them."""

    kept: int
    generation: int


class EngineSize(NamedTuple):
    """A rank's engine has a cache for so many tokens, a longest request, and rows that run at a time.

    Its size depends on the settings and the data alone, so that a resumed run samples with the same.
    """

    tokens: int
    longest: int
    rows: int

    def cache_bytes(self, model: CausalLM, dtype: torch.dtype) -> int:
        """The bytes of the cache, which stays between generations. dtype is that of keys and values."""
        return cache_bytes(model, self.tokens, self.rows, self.longest, dtype)

    def step_bytes(self, model: CausalLM) -> int:
        """The bytes of the logits of all rows, in the model's dtype and in fp32."""
        return self.rows * model.config.vocab_size * (model.dtype.itemsize + 4)


def engine_size(longest_prompt: int, prompts: int, plan: SamplingPlan) -> EngineSize:
    """The size for `prompts` prompts of a rank at a time, all of them with as many tokens as the longest."""
    length = longest_prompt + plan.max_new_tokens
    whole, shared = pages_for(length), longest_prompt // PAGE_SIZE
    pages = prompts * (shared + plan.n * (whole - shared))
    return EngineSize(pages * PAGE_SIZE, length, max(plan.n, min(DEFAULT_ROWS, plan.n * prompts)))


class Sampler:
    """Samples with one engine for a whole run, which reads the weights as they are in each generation.

    The engine's cache and CUDA graphs stay; where the weights lie elsewhere than before, graphs are captured anew.
    vocab_size limits the tokens that are drawn, where the head is padded.
    """

    def __init__(self, tokenizer: Tokenizer, size: EngineSize, vocab_size: int | None = None) -> None:
        self.tokenizer, self.size, self.vocab_size = tokenizer, size, vocab_size
        self.engine: Engine | None = None

    def memory(self, model: CausalLM, dtype: torch.dtype) -> SamplerBytes:
        """The bytes that it takes beside the gathered weights. dtype is that of the cache."""
        return SamplerBytes(self.size.cache_bytes(model, dtype), self.size.step_bytes(model))

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
        """Starts the engine within `fsdp.gathered`, so that it sees whole weights."""
        tokens, longest, rows = self.size
        if model.device.type == "cuda":
            tokens = min(tokens, tokens_that_fit(model, rows))
        return Engine(
            model, tokenizer=self.tokenizer, max_tokens=tokens, max_length=longest, max_rows=rows,
            vocab_size=self.vocab_size, allow_undefined=True,  # one rank alone must not raise: see `not_finite`
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


def import_vllm() -> ModuleType:
    """Raises InputError where it is not installed."""
    return import_package("vllm", VLLM_FLAG)


class VLLMSampler:
    """Samples with one vLLM engine for a whole run, in its process. dtype is that of its weights and its cache.

    Each rank has a vLLM engine of its own, with a whole copy of the weights. Before a generation it gets the weights as
    they are, tensor by tensor under the Hub's names, LoRA merged; between generations it sleeps, and holds no GPU
    memory. Its numerics are not those of the training: log-probabilities of the same token differ, which
    `--sampler-correction` makes up for. vLLM: arXiv 2309.06180, https://docs.vllm.ai.

    Stop strings are searched for in what the engine returns: it samples on behind them, to a stop token or the limit.
    Random numbers are vLLM's, in the order of its steps.
    """

    def __init__(self, tokenizer: Tokenizer, size: EngineSize, dtype: torch.dtype) -> None:
        self.vllm = import_vllm()
        self.tokenizer, self.size, self.dtype = tokenizer, size, dtype
        self.engine: Any = None

    def sample(
        self, model: CausalLM, prompts: Sequence[GroupPrompt], plan: SamplingPlan, first: int = 0
    ) -> list[list[GeneratedSample]]:
        """The samples of each prompt, in order. Every rank must call it: weights are gathered for the engines of all.

        Raises InputError where vLLM cannot start, such as for a model that it does not know.
        """
        if self.engine is None:
            self.engine = self.start_engine(model)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what PyTorch keeps for itself, vLLM cannot have
        self.engine.wake_up(tags=["weights"])
        self.engine.apply_model(lambda theirs: theirs.load_weights(hub_weights(model, self.dtype)))
        self.engine.reset_prefix_cache()  # of the weights before
        self.engine.wake_up(tags=["kv_cache"])
        samples = self.run_engine(model, prompts, plan) if prompts else []
        self.engine.sleep(level=2)  # forgets the weights too
        distributed.raise_on_all(not_finite(prompts, samples))
        return samples

    def run_engine(
        self, model: CausalLM, prompts: Sequence[GroupPrompt], plan: SamplingPlan
    ) -> list[list[GeneratedSample]]:
        stops = model_stop_tokens(model, self.tokenizer)
        options = self.vllm.SamplingParams(
            n=plan.n, temperature=plan.temperature, max_tokens=plan.max_new_tokens, logprobs=0, ignore_eos=True,
            stop_token_ids=sorted(stops), detokenize=False,
        )  # fmt: skip
        ids = [{"prompt_token_ids": prompt.ids.tolist()} for prompt in prompts]
        found = self.engine.generate(ids, sampling_params=options, use_tqdm=False)
        return [
            [
                self.sample_of(request, number, prompt, output, plan, stops)
                for number, output in enumerate(group.outputs)
            ]
            for request, (prompt, group) in enumerate(zip(prompts, found, strict=True))
        ]

    def sample_of(
        self, request: int, number: int, prompt: GroupPrompt, output: Any, plan: SamplingPlan, stops: set[int]
    ) -> GeneratedSample:
        """What the own engine would return for these tokens: text, stop strings and the reason that it ended."""
        ids, options = prompt.ids.tolist(), SamplingOptions(temperature=plan.temperature, stop=plan.stop)
        asked = Request(request, request, ids, plan.max_new_tokens, frozenset(stops), options, plan.seed, ids)
        sample = Sample(asked, number, [], RowText(self.tokenizer, ids), StopStrings(plan.stop))
        for token, choices in zip(output.token_ids, output.logprobs, strict=True):
            sample.append(token, choices[token].logprob)
            if sample.finish_reason is not None:
                break
        return sample.completion()

    def start_engine(self, model: CausalLM) -> Any:
        """A sleeping engine without weights. It reads the model's configuration alone, from a folder that is then gone.

        Its start draws no random numbers from those of the run.
        """
        distributed.start_alone(model.device)
        with TemporaryDirectory() as folder, torch.random.fork_rng(), launcher_environment():
            write_config(Path(folder), model, self.dtype, None, None)
            try:
                engine = self.vllm.LLM(**self.engine_settings(model, folder))
            except Exception as error:
                raise InputError(
                    f"{VLLM_FLAG}: vLLM cannot start: {first_line(error)}; leave it out to sample with the own engine"
                ) from error
        engine.sleep(level=2)
        return engine

    def engine_settings(self, model: CausalLM, folder: str) -> Mapping[str, Any]:
        return {
            "model": folder,
            "skip_tokenizer_init": True,  # prompts and results are token ids
            "load_format": "dummy",  # the weights come from the run
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.size.longest,
            "max_num_seqs": self.size.rows,
            "kv_cache_memory_bytes": self.size.cache_bytes(model, self.dtype),
            "enable_sleep_mode": True,
            "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are drawn from
            "distributed_executor_backend": "external_launcher",  # in this process
            "seed": distributed.rank(),
            "disable_log_stats": True,
        }

    def memory(self, model: CausalLM, dtype: torch.dtype) -> SamplerBytes:
        """A generation takes a copy of the weights and a cache. Nothing is kept between generations."""
        shapes = {name: x.shape for name, x in model.stored_tensors().items() if not is_lora_parameter(name)}
        weights = sum(shape.numel() for shape in shapes.values()) * self.dtype.itemsize
        cache = self.size.cache_bytes(model, self.dtype)
        return SamplerBytes(0, weights + cache + self.size.step_bytes(model))


@contextmanager
def launcher_environment() -> Iterator[None]:
    """The variables that vLLM reads of a process which a launcher started, while the engine starts."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    missing = {name: value for name, value in alone.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
