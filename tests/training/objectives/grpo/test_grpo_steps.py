"""Steps of reinforcement learning beside a loop over completions, written by hand: one plain forward pass for each.

The loop knows the formulas of docs/losses.md, and nothing of rows, shared prompts or `ligermodels.losses`.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ligermodels.distributed import World
from ligermodels.kernels.losses.linear_logprobs import linear_logprobs
from ligermodels.kernels.losses.linear_logprobs_loss import LogProbsLoss
from ligermodels.layers import lm_head
from ligermodels.layers.lora import lora_disabled
from ligermodels.training import TrainConfig
from ligermodels.training.checkpoints import Progress
from ligermodels.training.data import embedded
from ligermodels.training.objectives import RunSetup
from ligermodels.training.objectives.grpo.policy import POLICY_LOSSES, PolicyOptions, policy_options
from ligermodels.training.objectives.grpo.sampling import Sampler
from ligermodels.training.preparing import prepare

REWARDS = "def even(completion_ids, **_):\n    return [sum(t % 2 for t in ids) / len(ids) for ids in completion_ids]\n"
GENERATIONS, LONGEST, TEMPERATURE = 3, 6, 0.7
SUMS = embedded.EmbeddedSplit("sums", seed=0, size=200), embedded.EmbeddedSplit("sums", seed=1, size=20)  # of 8,480
SECOND = Progress(step=1, rows=2)  # the second update of the first generation: ratios are not 1


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes an objective and its model, behind one generation of two prompts with three completions each."""
    folder = tmp_path_factory.mktemp("grpo")
    (folder / "rewards.py").write_text(REWARDS)

    def make(**changes):
        given = {
            "model": "qwen2", "objective": "grpo", "data": ("sums",), "prompts": 2, "generations": GENERATIONS,
            "max_completion_length": LONGEST, "iterations": 2, "steps": 4, "temperature": TEMPERATURE,
            "reward": (f"{folder}/rewards.py:even",), "completions_every": 0, "sequence_length": 128,
        }  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
            patch.setitem(embedded.EMBEDDED_GROUPS, "sums", SUMS)
            run = prepare(TrainConfig(**(given | changes)), World(torch.device("cpu")))
            model, objective = run.model.to_empty(device="cpu"), run.objective
            model.initialize(0)
            generator = torch.Generator().manual_seed(1)
            for parameter in model.parameters():  # LoRA's B is 0 at the start, and the policy its reference
                if parameter.requires_grad and not parameter.any():
                    parameter.data.normal_(std=0.02, generator=generator)
            objective.prepare(model, RunSetup(Path()))
            model.train()
            objective.work(model, Progress())
        # As if an update had been made: the policy that the ratios compare with is another one.
        moved = objective.rollouts.old_logprobs
        moved = moved + 0.4 * torch.randn(moved.shape, generator=generator)
        objective.rollouts = replace(objective.rollouts, old_logprobs=moved)
        return objective, model

    return make


@pytest.fixture(scope="module")
def full(made):
    return made()


def completions_of(objective):
    """(prompt, completion, advantage, log-probabilities before the update) of each completion, as lists."""
    rollouts = objective.rollouts
    for number, advantage in enumerate(rollouts.advantages.tolist()):
        begin, end = rollouts.prompt_offsets[number // GENERATIONS : number // GENERATIONS + 2].tolist()
        first, last = rollouts.offsets[number : number + 2].tolist()
        ids = rollouts.prompts[begin:end].tolist(), rollouts.ids[first:last].tolist()
        yield *ids, advantage, rollouts.old_logprobs[first:last]


def plain_logprobs(model, prompt, completion):
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].float() / TEMPERATURE
    return logits.log_softmax(-1)[range(len(completion)), completion]


def clipped(w, a, low=0.2, high=0.2):
    return -torch.minimum(w * a, w.clamp(1 - low, 1 + high) * a)


def one(name, new, old, a):
    """The loss of one completion, before it is divided."""
    w = (new - old).exp()
    if name in ("grpo", "dapo", "bnpo", "dr_grpo"):
        terms = clipped(w, a)
        return terms.mean() if name == "grpo" else terms.sum()
    if name == "luspo":
        return clipped((new - old).mean().exp(), a) * len(new)
    if name == "cispo":
        return -(w.detach().clamp(max=5.0) * a * new).sum()
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return (-a * torch.sigmoid(tau * (w - 1)) * 4 / tau).mean()
    if name == "vespo":
        k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        whole = (new - old).sum().detach()
        return -((decay + k * whole - decay * whole.exp()).exp() * a * new).sum()
    if name == "gmpo":
        logs = (new - old).clamp(max=0.4) if a > 0 else (new - old).clamp(min=-0.4)
        return -a * logs.mean().exp()
    return clipped((new - old).sum().exp(), a)  # rloo


def divided(name, total, lengths):
    unit = {"dr_grpo": len(lengths) * LONGEST, "dapo": sum(lengths), "bnpo": sum(lengths), "cispo": sum(lengths),
            "vespo": sum(lengths)}  # fmt: skip
    return total / unit.get(name, len(lengths))


def loss_of_step(objective, model):
    work = objective.work(model, SECOND)
    return sum(objective.loss(model, batch, work).loss for batch in work.batches)


def assert_equal_steps(model, loss, expected):
    """Both losses, and their gradients, relative to the largest of each parameter."""
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    mine, theirs = (torch.autograd.grad(value, trained) for value in (loss, expected))
    assert max(float(gradient.abs().max()) for gradient in mine) > 1e-4
    for one_gradient, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one_gradient, other, rtol=0, atol=1e-4 * float(other.abs().max()) + 1e-7)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_step_of_each_loss_is_a_loop_over_completions(full, name):
    objective, model = full
    objective.policy = policy_options(replace(objective.config, loss=(name,)))
    found = list(completions_of(objective))
    assert len({math.copysign(1, a) for _, _, a, _ in found}) == 2  # some are better, some are worse
    parts = [one(name, plain_logprobs(model, p, c), old, a) for p, c, a, old in found]
    expected = divided(name, sum(parts), [len(c) for _, c, _, _ in found])
    assert_equal_steps(model, loss_of_step(objective, model), expected)


CHUNK = 7  # tokens; no divisor of a completion's


@pytest.fixture(scope="module")
def regularised(made):
    """With all that can be added to a loss of tokens: KL divergence, entropy, its mask, the sampler's correction."""
    added = {"beta": 0.3, "reference": "base", "lora_rank": 4, "entropy_coef": 0.05, "top_entropy": 0.6,
             "sampler_correction": "token_truncate"}  # fmt: skip
    return made(**added)


def test_the_entropy_bonus_is_the_mean_over_the_tokens_of_high_entropy(made):
    """--entropy-target watches the same tokens."""
    objective, model = made(top_entropy=0.5, entropy_coef=0.25, entropy_target=7.0)
    objective.entropy.values[1] = 0.0  # the entropy of the step before: the bonus counts
    rollouts = objective.rollouts
    work = objective.work(model, SECOND)
    with torch.no_grad():
        shares = [objective.loss(model, batch, work) for batch in work.batches]
        objective.entropy.values[0] = 0.0
        without = sum(objective.loss(model, batch, work).loss for batch in work.batches)
        entropies = []
        for prompt, completion, *_ in completions_of(objective):
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            entropies.append(torch.distributions.Categorical(logits=logits.float()).entropy())
    expected = torch.cat(entropies)[rollouts.token_mask.bool()].mean()
    assert 0.3 < rollouts.token_mask.mean() < 0.7 and rollouts.kept.all()
    torch.testing.assert_close(without - sum(share.loss for share in shares), 0.25 * expected, rtol=1e-3, atol=0)
    sums = {name: float(sum(share.sums[name] for share in shares)) for name in shares[0].sums}
    objective.metrics(sums, {name: float(value) for name, value in shares[0].maxima.items()}, 1)
    assert objective.entropy.values[1].item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_of_tokens_is_the_sum_of_those_of_chunks(regularised, monkeypatch, name):
    """The head forms the gradients of such a loss chunk by chunk; that of completions gets all log-probabilities."""
    objective, model = regularised
    objective.policy = policy_options(replace(objective.config, loss=(name,)))
    chunks = []

    def in_chunks(hidden, weight, targets, row_loss, **options):
        found = linear_logprobs(hidden, weight, targets, **options)
        parts = [slice(begin, min(begin + CHUNK, len(targets))) for begin in range(0, len(targets), CHUNK)]
        chunks.extend(parts)
        loss = sum(row_loss(found.logprobs[part], found.entropy[part], part) for part in parts)
        return LogProbsLoss(loss, found.map(torch.detach))

    monkeypatch.setattr(lm_head, "linear_logprobs_loss", in_chunks)
    loss = loss_of_step(objective, model)
    assert (len(chunks) > 5) == (name in ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo"))
    monkeypatch.setattr(PolicyOptions, "reads_tokens_alone", lambda *_: False)
    assert_equal_steps(model, loss, loss_of_step(objective, model))


@pytest.mark.parametrize(
    "changes, alone",
    [
        ({}, True),
        ({"importance_sampling_level": "sequence"}, False),
        ({"off_policy_threshold": 0.5}, False),
        ({"sampler_correction": "sequence_mask"}, True),  # the policy before the update is another one
        ({"sampler_correction": "sequence_mask", "iterations": 1}, False),
        ({"sampler_correction": "token_mask", "iterations": 1}, True),
    ],
)
def test_what_reads_whole_completions_gets_all_log_probabilities(full, changes, alone):
    objective, model = full
    row, *_ = objective.work(model, SECOND).batches
    row = replace(row, old_logprobs=None) if changes.get("iterations") == 1 else row
    assert policy_options(replace(objective.config, **changes)).reads_tokens_alone(row) == alone


def test_a_step_with_lora_compares_with_the_base(made):
    """Samples come from the weights with their updates; β times the KL divergence compares with those without."""
    objective, model = made(lora_rank=2, beta=0.3)
    found, rollouts = list(completions_of(objective)), objective.rollouts
    with torch.no_grad():
        sampled = torch.cat([plain_logprobs(model, prompt, completion) for prompt, completion, _, _ in found])
        torch.testing.assert_close(rollouts.sampling_logprobs, sampled, rtol=0, atol=2e-4)
        with lora_disabled(model):
            base = [plain_logprobs(model, prompt, completion) for prompt, completion, _, _ in found]
    assert (torch.cat(base) - sampled).abs().max() > 0.01
    parts = []
    for (prompt, completion, advantage, old), reference in zip(found, base, strict=True):
        new = plain_logprobs(model, prompt, completion)
        d, w = reference - new, (new - old).exp()
        parts.append((clipped(w, advantage) + 0.3 * w * (d.exp() - d - 1)).sum())
    expected = sum(parts) / sum(len(completion) for _, completion, _, _ in found)
    assert_equal_steps(model, loss_of_step(objective, model), expected)


def test_a_stop_string_ends_completions_and_is_trained_on(made):
    """The text of rewards ends before the string, and the tokens that the update reads end with it."""
    objective, model = made()
    tokenizer = objective.tokenizer
    prompts = objective.data.training.prompts(0, 2, objective.world)
    plan = objective.sampling_plan(TEMPERATURE)
    free = [sample for group in objective.sampler.sample(model, prompts, plan) for sample in group]
    stop = tokenizer.decode(free[0].ids[2:4])
    stopped = objective.sampler.sample(model, prompts, replace(plan, stop=(stop,)))
    for before, after in zip(free, (sample for group in stopped for sample in group), strict=True):
        if stop not in tokenizer.decode(before.ids):
            assert after.ids == before.ids and after.text == before.text
            continue
        assert after.finish_reason == "stop" and after.ids == before.ids[: len(after.ids)]
        assert after.logprobs == before.logprobs[: len(after.ids)]
        assert stop in tokenizer.decode(after.ids) and stop not in tokenizer.decode(after.ids[:-1])
        assert after.text == tokenizer.decode(after.ids).split(stop)[0]
    assert stopped[0][0].ids == free[0].ids[:4]
    objective.config = replace(objective.config, stop=(stop,))
    objective.rollouts = None
    objective.work(model, Progress())
    assert next(completions_of(objective))[1] == free[0].ids[:4]
    check_step(objective, model)


def check_old_log_probabilities(objective, model):
    """In each of two generations they are those of the policy before the first update, in the second update too."""
    objective.rollouts = None
    generator = torch.Generator().manual_seed(2)
    for step in (0, 2):
        objective.work(model, Progress(step=step, rows=step))
        with torch.no_grad():
            before = [plain_logprobs(model, prompt, completion) for prompt, completion, *_ in completions_of(objective)]
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        work = objective.work(model, Progress(step=step + 1, rows=step + 2))
        old = torch.cat([values for *_, values in completions_of(objective)])
        torch.testing.assert_close(old, torch.cat(before), rtol=0, atol=1e-4)
        read = sum(int((batch.old_logprobs[: len(batch.places)] == old[batch.places]).sum()) for batch in work.batches)
        assert read == sum(len(batch.places) for batch in work.batches) > 0


def check_step(objective, model):
    """Of dapo, as the loop above."""
    found = list(completions_of(objective))
    parts = [one("dapo", plain_logprobs(model, p, c), old, a) for p, c, a, old in found]
    expected = divided("dapo", sum(parts), [len(c) for _, c, _, _ in found])
    assert_equal_steps(model, loss_of_step(objective, model), expected)


def test_old_log_probabilities_are_those_before_the_first_update(made):
    check_old_log_probabilities(*made())


def test_one_engine_for_a_run_samples_the_bits_of_a_new_one(full):
    """After updates of the weights, after a validation, and in a run that resumes and has an engine of its own."""
    objective, model = full
    kept, plan = Sampler(objective.tokenizer, objective.sampler.size), objective.sampling_plan(TEMPERATURE)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for first in (0, 2, 4):
        prompts = objective.data.training.prompts(first, 2, objective.world)
        new = Sampler(objective.tokenizer, objective.sampler.size).sample(model, prompts, plan, first)
        same = kept.sample(model, prompts, plan, first)
        engine = kept.engine
        for one_group, other in zip(new, same, strict=True):
            assert [(x.ids, x.logprobs, x.text) for x in one_group] == [(x.ids, x.logprobs, x.text) for x in other]
        greedy = kept.sample(model, objective.data.validation.prompts(objective.world)[:9], objective.sampling_plan(0))
        assert len(greedy) == 9 and kept.engine is engine
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
