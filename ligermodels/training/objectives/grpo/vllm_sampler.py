"""Completions of prompts, sampled by vLLM in the process of the run. Must not know rewards.

Each rank has a vLLM engine of its own, with a whole copy of the weights. Before a generation it gets the weights as
they are, tensor by tensor under the Hub's names, LoRA merged; between generations it sleeps, and holds no GPU memory.
Its numerics are not those of the training: log-probabilities of the same token differ, which `--sampler-correction`
makes up for. vLLM: arXiv 2309.06180, https://docs.vllm.ai.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch

from ligermodels import distributed
from ligermodels.errors import InputError, first_line
from ligermodels.generation.requests import GeneratedSample, Request, Sample
from ligermodels.generation.sampling import SamplingOptions
from ligermodels.generation.texts import RowText, StopStrings, model_stop_tokens
from ligermodels.layers.decoder import CausalLM
from ligermodels.optional_packages import import_package
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.preferences import GroupPrompt
from ligermodels.training.objectives.grpo.sampling import EngineSize, SamplingPlan, not_finite
from ligermodels.weights.exporting import hub_weights, write_config
from ligermodels.weights.mapping import is_lora_parameter

FLAG = "--sampler vllm"


def import_vllm() -> ModuleType:
    """Raises InputError where it is not installed."""
    return import_package("vllm", FLAG)


class VLLMSampler:
    """Samples with one vLLM engine for a whole run, like `Sampler`. dtype: of the engine's weights and of its cache.

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
                    f"{FLAG}: vLLM cannot start: {first_line(error)}; leave it out to sample with the own engine"
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

    def memory(self, model: CausalLM, dtype: torch.dtype) -> tuple[int, int]:
        """As that of `Sampler`: a copy of the weights and a cache for a generation, between them nothing."""
        shapes = {name: x.shape for name, x in model.stored_tensors().items() if not is_lora_parameter(name)}
        weights = sum(shape.numel() for shape in shapes.values()) * self.dtype.itemsize
        cache = self.size.cache_bytes(model, self.dtype)
        return 0, weights + cache + self.size.step_bytes(model)


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
