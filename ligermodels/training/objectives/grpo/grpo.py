"""Reinforcement learning on sampled completions: GRPO and its descendants. `--loss` names one.

A generation samples completions of its prompts from the weights as they are, calls reward functions on them, and
serves `--steps-per-generation` x `--iterations` updates, one a step. Its rollouts are in every checkpoint: a run that
ends between two of its updates resumes to the bit.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.generation.requests import GeneratedSample
from ligermodels.kernels.losses.linear_logprobs import LogProbs
from ligermodels.layers.decoder import CausalLM
from ligermodels.losses import entropy_sum, segment_sums, top_entropy_mask
from ligermodels.memory.blocks import HeadOp
from ligermodels.memory.model import TrainingMemory
from ligermodels.training.checkpoints import Progress
from ligermodels.training.data.preferences import GroupOptions, GroupPrompt, PreferenceData, open_preferences
from ligermodels.training.objectives.grpo.judging import (
    GenerationWatch,
    RewardedGeneration,
    advantages_of,
    completion_lines,
    generation_metrics,
    kept_completions,
    mean,
    pass_fraction,
    reward_completions,
    weighted_totals,
)
from ligermodels.training.objectives.grpo.policy import (
    EntropyControl,
    PolicyOptions,
    metric_sums,
    policy_loss,
    policy_options,
    step_metrics,
)
from ligermodels.training.objectives.grpo.reward_worker import TrainerState
from ligermodels.training.objectives.grpo.rewards import check_columns, named_rewards, open_rewards, with_limit
from ligermodels.training.objectives.grpo.rollouts import (
    MiniBatch,
    RolloutBatch,
    Rollouts,
    Scores,
    mini_batch,
    pack_rollouts,
    with_values,
)
from ligermodels.training.objectives.grpo.sampling import (
    Sampler,
    SamplingPlan,
    VLLMSampler,
    completion_limit,
    engine_size,
    import_vllm,
    most_prompt_tokens,
)
from ligermodels.training.objectives.objective import Objective, RunSetup, Share, Work
from ligermodels.training.objectives.preference.groups import one_of
from ligermodels.training.objectives.preference.references import (
    Reference,
    ReferenceSpec,
    default_reference,
    make_reference,
    parse_reference,
    refuse_base_that_is_trained,
)
from ligermodels.training.optimizers.schedules import default_learning_rate
from ligermodels.training.parallel.fsdp import dp_shard_size
from ligermodels.training.planning.defaults import (
    TORCH_DTYPES,
    WARMUP_FRACTION,
    Choice,
    counted_epochs,
    validation_interval,
    with_choices,
)
from ligermodels.training.reporting.metrics import COMPLETIONS_FILE, CompletionsFile, Validation
from ligermodels.training.reward_function import ModelReward
from ligermodels.training.run.stopping import Stop
from ligermodels.training.settings.config import RunConfig, TrainConfig
from ligermodels.units import counted

MOST_VALIDATION_PROMPTS = 512
MOST_PROMPTS, TINY_PROMPTS = 16, 4
LEARNING_RATE = 5e-6  # five times TRL's, at which a reward rises little in 60 steps; ten times that for LoRA
MOST_ROW_TOKENS = 8192  # of a packed row, where no single completion needs more


class GRPO(Objective):
    """The loss is that of `--loss` over the completions of the step, on all ranks, divided by their number."""

    data: PreferenceData
    config: RunConfig
    sampler: Sampler | VLLMSampler
    columns: list[str]  # of all prompts
    began: float  # when the step did, by the clock

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        self.policy = policy_options(config)
        self.entropy = EntropyControl(config.entropy_coef, config.entropy_target)
        self.rewards = named_rewards(config.reward or (), config.longest_completion)
        self.weights = [function.weight for function in self.rewards]
        self.reward_models = [made.function for made in self.rewards if isinstance(made.function, ModelReward)]
        if config.lora_dropout:
            raise InputError(
                f"--lora-dropout {config.lora_dropout:g}: would change the probabilities between sampling and update; "
                "leave it out"
            )
        if config.generations < 2:
            raise InputError(f"--generations {config.generations}: a group needs 2 completions or more to compare")
        if config.sampler == "vllm":
            import_vllm()
        self.rollouts: Rollouts | None = None
        self.file: CompletionsFile | None = None
        self.watch = GenerationWatch(config.keep_zero_spread)
        self.reference: Reference | None = None
        self.spec = reference_spec(config, self.policy, world)

    # -- before the run

    def run_code(self) -> None:
        if self.world.is_first:  # --resume and --config may have settings of someone else
            for file in {function.file: None for function in self.rewards if function.file}:
                print(f"--reward: runs {file.absolute()}", flush=True)
        open_rewards(self.rewards, self.config.reward_timeout)

    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        config = self.config
        self.share_prompts = config.share_prompts and model.shares_keys
        self.positions = model.config.max_position_embeddings
        longest = most_prompt_tokens(config, self.positions)
        if self.spec is not None and self.spec.kind == "base":
            refuse_base_that_is_trained(model)
        options = GroupOptions(kind="prompts", max_length=longest, max_prompt_length=config.max_prompt_length)
        self.data = open_preferences(config, options, folder, model.config.vocab_size, adapter)
        training, held_out = self.data.training.groups, self.data.validation.groups
        self.columns = list(dict.fromkeys([*training.column_names, *held_out.column_names]))
        check_columns(self.rewards, self.columns)

    @property
    def head_op(self) -> HeadOp:
        return HeadOp("linear_logprobs_loss")

    @property
    def temperature(self) -> float:
        return self.config.temperature or 1.0

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return TORCH_DTYPES[self.config.dtype]

    @property
    def longest_prompt(self) -> int:
        """The tokens of the longest prompt of the training data."""
        return self.data.training.groups.longest_prompt

    def choices(self, hidden_size: int) -> dict[str, Choice]:
        limit = completion_limit(self.config, self.positions, self.data)
        config, _ = with_choices(self.config, limit)
        count, held_out = len(self.data.training), len(self.data.validation)
        return limit | grpo_choices(config, count, held_out, self.longest_prompt, hidden_size)

    def complete(self, config: RunConfig) -> None:
        super().complete(config)
        self.policy = replace(self.policy, longest=config.longest_completion)
        self.rewards = [with_limit(function, config.longest_completion) for function in self.rewards]
        if self.spec is not None:
            self.reference = make_reference(self.spec, config, self.world, self.data.tokenizer)
        if len(self.data.training) < self.prompts_per_generation:
            raise InputError(
                f"--data {self.data.names}: has {counted(len(self.data.training), 'prompt')} for training, but a "
                f"generation takes {self.prompts_per_generation}; lower --prompts or --steps-per-generation"
            )
        own = -(-self.prompts_per_generation // self.world.size)
        longest = max(self.longest_prompt, self.data.validation.groups.longest_prompt)
        size = engine_size(longest, own, self.sampling_plan(self.temperature))
        own_sampler = config.sampler == "own"
        self.sampler = Sampler(self.tokenizer, size) if own_sampler else VLLMSampler(self.tokenizer, size, self.dtype)

    @property
    def prompts_per_generation(self) -> int:
        return self.config.units * self.config.steps_per_generation

    @property
    def updates(self) -> int:
        """The number of updates that a generation serves."""
        return self.config.steps_per_generation * self.config.iterations

    @property
    def tokens_per_step(self) -> int:
        """An upper bound: every completion has its full length."""
        config = self.config
        group = self.longest_prompt - 1 + config.generations * (config.longest_completion + 1)
        return config.units * group

    def bytes_beside(self, model: CausalLM) -> int:
        """What the sampler keeps during updates, reward models, and the reference."""
        scoring = sum(reward.bytes(self.dtype)[0] for reward in self.reward_models)
        beside = self.sampler.memory(model, self.dtype).kept + scoring
        if self.reference is None:
            return beside
        return beside + self.reference.bytes_beside(model, dp_shard_size(self.world, self.config.dp_replicate))

    def phases(self, model: CausalLM, train: TrainingMemory) -> Mapping[str, int]:
        """The phase "generate" holds the gathered weights and the logits of all rows; "reward" is a pass of a reward
        model, "score" one without a graph."""
        resident = train.weights + train.optimizer_states + train.beside
        gathered = train.gathered if self.world.size > 1 and self.config.sampler == "own" else 0
        generation = self.sampler.memory(model, self.dtype).generation
        phases = {"generate": resident + gathered + generation}
        if self.reward_models:
            phases["reward"] = resident + max(reward.bytes(self.dtype)[1] for reward in self.reward_models)
        if self.scores:
            phases["score"] = train.forward_peak
        return phases | {"train": train.peak}

    def prepare(self, model: CausalLM, run: RunSetup) -> None:
        super().prepare(model, run)
        if self.reference is not None:
            self.reference.prepare(model, run)
        for reward in self.reward_models:
            reward.load(self.world.device, self.dtype)
        if self.world.is_first and self.config.completions_every:
            self.file = CompletionsFile(run.folder / COMPLETIONS_FILE)

    # -- a generation

    def sampling_plan(self, temperature: float) -> SamplingPlan:
        config = self.config
        count = config.generations if temperature else 1
        return SamplingPlan(count, temperature, config.longest_completion, tuple(config.stop), config.seed)

    @property
    def scores(self) -> bool:
        """Whether log-probabilities are computed before the first update: with one update they are the update's own."""
        return self.updates > 1 or self.config.top_entropy < 1 or self.policy.beta > 0

    def generate(self, model: CausalLM, progress: Progress) -> tuple[Rollouts, dict[str, float]]:
        """Samples completions of the next prompts, with their rewards; the rollouts are those of all ranks."""
        config, began = self.config, time.perf_counter()
        prompts = self.data.training.prompts(progress.rows, self.prompts_per_generation, self.world)
        plan = self.sampling_plan(self.temperature)
        samples = self.sampler.sample(model, prompts, plan, first=progress.rows)
        sampled = time.perf_counter()
        generation = self.reward(prompts, samples, progress.step)
        rewarded = time.perf_counter()
        metrics = generation_metrics(generation, self.rewards)
        rollouts = replace(
            pack_rollouts(generation.groups, progress.step), kept=kept_completions(config, generation, self.weights)
        )
        kl = torch.zeros(len(rollouts.kept))
        if self.scores:
            scores = self.score(model, rollouts)
            rollouts = self.with_scores(rollouts, scores)
            if self.policy.subtracts_kl:
                kl = segment_sums(scores.logprobs - scores.reference, rollouts.offsets)
                metrics["kl"] = float(kl.sum()) / max(1, len(rollouts.read_tokens))
        advantages = advantages_of(config, self.policy.name, generation, self.weights, kl)
        rollouts = replace(rollouts, advantages=advantages)
        if self.file is not None and progress.step % config.completions_every < self.updates:
            lines = completion_lines(generation, self.rewards, advantages.tolist(), progress.step + 1)
            self.file.write(lines, progress.step)
        metrics |= {
            "time/sample": sampled - began, "time/reward": rewarded - sampled,
            "time/score": time.perf_counter() - rewarded,
        }  # fmt: skip
        self.watch.look(generation, self.rewards)
        self.watch.refuse_useless(metrics)
        return rollouts, metrics

    @property
    def tokenizer(self) -> Any:
        assert self.data.tokenizer is not None  # prompts are texts
        return self.data.tokenizer

    @torch.no_grad()
    def score(self, model: CausalLM, rollouts: Rollouts) -> Scores:
        """Scores rollouts by the policy before the first update, over the very rows that the updates take."""
        device, count = self.world.device, len(rollouts.ids)
        found = torch.zeros(3, count, device=device)
        model.eval()
        for number in range(self.config.steps_per_generation):
            for row in with_values(rollouts, self.mini_batch(rollouts, number), device):
                result = self.logprobs(model, row)
                size, places = len(row.places), row.places.to(device)
                assert result.entropy is not None
                found[0, places], found[1, places] = result.logprobs[:size], result.entropy[:size]
                if self.reference is not None:
                    found[2, places] = self.reference.logprobs(model, row.batch, self.temperature)
        model.train()
        return Scores(*(distributed.total(found) / self.world.context).cpu())

    def with_scores(self, rollouts: Rollouts, scores: Scores) -> Rollouts:
        """The rollouts with what the loss reads of the scores."""
        none = torch.zeros(0)
        mask = none
        if self.config.top_entropy < 1:
            mask = torch.zeros(len(rollouts.ids))
            mask[rollouts.read_tokens] = top_entropy_mask(scores.entropy[rollouts.read_tokens], self.config.top_entropy)
        return replace(
            rollouts, old_logprobs=scores.logprobs if self.updates > 1 else none, token_mask=mask,
            ref_logprobs=scores.reference if self.policy.penalises_kl else none,
        )  # fmt: skip

    def mini_batch(self, rollouts: Rollouts, number: int) -> MiniBatch:
        config = self.config
        prompts = range(number * config.units, (number + 1) * config.units)
        return mini_batch(rollouts, prompts, config.sequence_length, share=self.share_prompts, world=self.world)

    def logprobs(self, model: CausalLM, row: RolloutBatch) -> LogProbs:
        extras, entropy = ((), True) if self.entropy.is_used else (("entropy",), False)
        inputs = self.model_inputs(row)
        return self.of_all_rows(
            model.logprobs(**inputs, temperature=self.temperature, entropy=entropy, extras=extras), row
        )

    def model_inputs(self, row: RolloutBatch) -> dict[str, Any]:
        """The arguments of `forward`, which returns what this rank's part of the row has."""
        return row.batch.model_inputs | {"context": self.run.context}

    def of_all_rows(self, found: LogProbs, row: RolloutBatch) -> LogProbs:
        """What the whole row has, on each of the ranks that share it."""
        return found.map(lambda x: row.batch.of_all_rows(x, self.run.context))

    # -- a step

    def work(self, model: CausalLM, progress: Progress) -> Work:
        self.began = time.perf_counter()
        generated: Mapping[str, float] = {}
        begins = self.rollouts is None or not self.place(progress) < self.updates
        if begins:
            self.rollouts, generated = self.generate(model, progress)
        assert self.rollouts is not None
        number = self.place(progress) % self.config.steps_per_generation
        rows = self.mini_batch(self.rollouts, number)
        divisor = self.policy.divisor(rows.completions, rows.supervised)
        counts = torch.tensor([divisor, max(1, rows.unmasked)], dtype=torch.float32, device=self.world.device)
        # The cursor moves with a generation's first step: one that is lost is followed by other prompts.
        units = self.prompts_per_generation if begins else 0
        measured = {**generated, "tokens_saved": 1 - rows.tokens / max(1, rows.tokens_unshared)}
        return Work(list(with_values(self.rollouts, rows, self.world.device)), counts, units, rows.tokens, measured)

    def place(self, progress: Progress) -> int:
        """How many updates of its rollouts are done."""
        assert self.rollouts is not None
        return progress.step - int(self.rollouts.first_step)

    def loss(self, model: CausalLM, batch: RolloutBatch, work: Work) -> Share:
        if self.policy.reads_tokens_alone(batch):  # its gradients are formed in the forward, a chunk at a time
            options = {"row_loss": partial(self.loss_of_rows, batch, work.counts), "entropy": True}
            out = model(**self.model_inputs(batch), logprobs=options | {"temperature": self.temperature})
            assert out.loss is not None and out.logprobs is not None
            sums, maxima = metric_sums(self.policy, batch, self.of_all_rows(out.logprobs, batch))
            of_whole_row = one_of(self.world.context, Share(out.loss, sums, maxima))
            return of_whole_row._replace(loss=out.loss)  # which is that of this rank's part
        found = self.logprobs(model, batch)
        loss = self.loss_of_tokens(batch, work.counts, found.logprobs, found.entropy)
        return one_of(self.world.context, Share(loss, *metric_sums(self.policy, batch, found)))

    def loss_of_tokens(
        self, batch: RolloutBatch, counts: Tensor, logprobs: Tensor, entropy: Tensor | None, only: Tensor | None = None
    ) -> Tensor:
        """Returns the loss of a micro-batch, or of the tokens in `only`, divided by the counts of the step."""
        loss = policy_loss(self.policy, batch, logprobs, only) / counts[0]
        if self.entropy.applied:
            assert entropy is not None
            bonus = entropy_sum(entropy, batch.batch.completions, batch.token_mask)
            loss = loss - self.entropy.applied * bonus / counts[1]
        return loss

    def loss_of_rows(
        self, batch: RolloutBatch, counts: Tensor, logprobs: Tensor, entropy: Tensor | None, rows: slice
    ) -> Tensor:
        """Returns the loss of the tokens `rows`, whose log-probabilities and entropies are given alone."""
        size, parts, rank = len(batch.sampling_logprobs), batch.batch.parts, self.world.context_rank
        if rows.stop - rows.start == size and len(parts) == 1:
            return self.loss_of_tokens(batch, counts, logprobs, entropy)
        kept = slice(0, max(0, parts[rank] - rows.start))  # the others are padding of this rank's part
        logprobs, entropy = logprobs[kept], None if entropy is None else entropy[kept]
        before = min(sum(parts[:rank]) + rows.start, size)
        around = before, size - before - len(logprobs)
        logprobs, only = pad(logprobs, around), pad(torch.ones_like(logprobs), around)
        return self.loss_of_tokens(batch, counts, logprobs, None if entropy is None else pad(entropy, around), only)

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], step: int) -> dict[str, float]:
        found = step_metrics(sums, maxima) | {"step_time": time.perf_counter() - self.began}
        if self.entropy.is_used:
            found["entropy_coef"] = self.entropy.applied
            self.entropy.finish_step(sums["unmasked_entropy"] / max(1.0, sums["unmasked_tokens"]))
        return found

    def warnings(self, values: Mapping[str, float], step: int) -> list[str]:
        return self.watch.warnings(values)

    def finish_step(self, model: CausalLM, step: int) -> None:
        if self.reference is not None:
            self.reference.finish_step(model, step)

    def validate(self, model: CausalLM, step: int, stop: Stop) -> Validation | None:
        """Computes the mean reward of greedy completions of held-out prompts; its negative is the loss. With --pass-at
        K, sampled ones give pass@K."""
        generation = self.reward_held_out(model, step, self.sampling_plan(0))
        rewards = generation.rewards
        values = {"reward": mean(weighted_totals(rewards, self.weights))}
        for function, column in zip(self.rewards, rewards.T, strict=True):
            values[f"rewards/{function.name}/mean"] = mean(column)
        if count := self.config.pass_at:
            sampled = self.reward_held_out(model, step, replace(self.sampling_plan(self.temperature), n=count))
            values[f"pass@{count}"] = pass_fraction(sampled.rewards[:, 0], count)
        first = generation.groups[0]
        sample = f"{self.tokenizer.decode(first.prompt.ids)} | {first.samples[0].text}"
        return Validation(-values["reward"], values, per_token=False, sample=sample)

    def reward_held_out(self, model: CausalLM, step: int, plan: SamplingPlan) -> RewardedGeneration:
        prompts = [p for p in self.data.validation.prompts(self.world) if p.unit < MOST_VALIDATION_PROMPTS]
        return self.reward(prompts, self.sampler.sample(model, prompts, plan), step)

    def reward(
        self, prompts: Sequence[GroupPrompt], samples: Sequence[Sequence[GeneratedSample]], step: int
    ) -> RewardedGeneration:
        """Returns the completions of all ranks with their rewards."""
        state = TrainerState(step, self.config.steps)
        return reward_completions(self.rewards, prompts, samples, self.columns, state, self.config.reward_timeout)

    # -- in a checkpoint

    def tensors(self) -> dict[str, Tensor]:
        reference = {} if self.reference is None else self.reference.tensors()
        return reference | self.entropy.tensors()

    def state(self) -> dict[str, Tensor]:
        return {} if self.rollouts is None else self.rollouts.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.rollouts = Rollouts.from_state(state) if state else None


def reference_spec(config: TrainConfig, policy: PolicyOptions, world: World) -> ReferenceSpec | None:
    """What --reference says; None without a KL divergence. Raises InputError for a kind that does not fit."""
    if not policy.beta:
        if config.reference is not None:
            raise InputError(f"--reference {config.reference} goes with --beta, which is missing")
        return None
    kind = default_reference(config)
    spec = parse_reference(config.reference or ("model" if kind == "precomputed" else kind))
    if spec.kind == "precomputed":
        raise InputError(
            "--reference precomputed: completions are sampled during the run; take base with LoRA, model, or ema"
        )
    make_reference(spec, config, world)
    return spec


def grpo_choices(
    config: TrainConfig, count: int, held_out: int, longest_prompt: int, hidden_size: int
) -> dict[str, Choice]:
    """The settings that were not given, for `count` prompts of which the longest has so many tokens, and others that
    are held out. Sampling takes most of the time of a step: a validation is compared with it by completions."""
    prompts = min(TINY_PROMPTS if config.is_tiny else MOST_PROMPTS, max(1, count))
    epochs = config.epochs or 1.0
    steps = math.ceil(epochs * count / (config.prompts or prompts)) * config.iterations
    taken = config.steps or steps
    rate = LEARNING_RATE * 10 if config.with_lora else LEARNING_RATE
    if config.has_new_weights:
        rate = default_learning_rate(hidden_size, pretrained=False, lora=config.with_lora)
    group = longest_prompt - 1 + config.generations * (config.longest_completion + 1)
    length = max(longest_prompt + config.longest_completion, min(group, MOST_ROW_TOKENS))
    return {
        "sequence_length": Choice(length, "a group of the longest prompt" if length == group else ""),
        "prompts": Choice(prompts),
        "steps": Choice(steps, counted_epochs(epochs)),
        "learning_rate": Choice(rate, "grpo"),
        "warmup": Choice(min(math.ceil(WARMUP_FRACTION * taken), taken - 1), f"{WARMUP_FRACTION:.0%} of the steps"),
        "eval_every": validation_interval(
            config, taken, (config.prompts or prompts) * config.generations, held_out * (1 + (config.pass_at or 0))
        ),
        "activation_checkpointing": Choice("auto", "as much as memory demands"),
    }
