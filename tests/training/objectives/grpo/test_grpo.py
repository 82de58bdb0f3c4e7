"""Reinforcement learning: a run that learns, its rollouts, and a resume between two updates of a generation."""

import json
import shutil

import pytest
import torch

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig, train
from ligermodels.training.data import embedded
from ligermodels.training.objectives.grpo import grpo, judging
from ligermodels.training.objectives.grpo.judging import pass_fraction
from ligermodels.training.objectives.grpo.policy import policy_loss
from ligermodels.training.preparing import prepare
from ligermodels.training.settings.settings import config_of_run
from tests.suites import quick, slow
from tests.training.small_models import save_model

REWARD = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

def solves(completion_ids, **columns):
    return [float(any(token % 2 == 0 for token in ids[:5])) for ids in completion_ids]

def constant(completions, **columns):
    return [1.0] * len(completions)

def first(prompts, completions, answer, log_extra, log_metric):
    log_extra("answer", answer)
    log_metric("asked", len(prompts))
    return [None] * len(prompts)

"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Makes settings, by default for a few of the embedded sums."""
    few = (embedded.EmbeddedSplit("sums", seed, size) for seed, size in ((0, 240), (1, 16)))
    monkeypatch.setitem(embedded.EMBEDDED_GROUPS, "sums", tuple(few))
    file = tmp_path / "rewards.py"
    file.write_text(REWARD)

    def make(*rewards, **changes):
        given = {
            "model": "qwen2", "objective": "grpo", "data": ("sums",), "prompts": 4, "generations": 8,
            "max_completion_length": 8, "warmup": 0, "learning_rate": 5e-3, "eval_every": 100, "no_export": True,
            "reward": tuple(f"{file}:{name}" for name in rewards or ("even",)), "output": tmp_path / "run",
        }  # fmt: skip
        return TrainConfig(**(given | changes))

    return make


@pytest.mark.parametrize("steps", quick([2, 20], [2]))
def test_random_weights_learn_a_preference_in_twenty_steps(steps, config, tmp_path):
    """The share of even token ids rises from chance to 0.85."""
    found = train(config("even", "first=3", steps=steps, learning_rate=1e-2)).metrics
    rewards = [record["reward"] for record in found if "reward" in record]
    assert len(rewards) == steps and 0.4 < rewards[0] < 0.6
    assert steps < 20 or sum(rewards[-3:]) / 3 >= 0.85
    first = found[0]
    assert first["rewards/even/mean"] == pytest.approx(rewards[0]) and first["asked"] == 32
    assert first["frac_reward_zero_std"] == 0 and first["completions/clipped_ratio"] == 1
    assert first["completions/mean_length"] == first["completions/max_length"] == 8
    assert first["clip_ratio/region_mean"] == 0 and abs(first["loss"]) < 1e-6  # the ratios are 1
    assert first["sampling/sampling_logp_difference/max"] < 1e-4
    assert 6 < first["entropy"] < 7  # nearly uniform over 1024 tokens
    assert 0.7 < first["tokens_saved"] < 0.8

    warned = json.loads((tmp_path / "run" / "run.json").read_text())["warnings"]
    assert [line["step"] for line in warned if line["text"].startswith("--reward first: is None for all 32 c")] == [1]

    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == steps * 32 and lines[-1]["step"] == steps
    assert lines[0]["prompt"][-1]["role"] == "user" and lines[0]["tokens"] == 8 and lines[0]["rewards/first"] is None
    assert lines[0]["answer"].endswith(".")
    group = torch.tensor([line["rewards/even"] for line in lines[:8]], dtype=torch.float64)
    expected = (group - group.mean()) / (group.std() + 1e-4)
    torch.testing.assert_close(torch.tensor([line["advantage"] for line in lines[:8]]), expected.float())


class Killed(Exception):
    pass


@slow
def test_a_run_that_is_killed_between_two_updates_resumes_to_the_bit(config, tmp_path, monkeypatch):
    """Of the second generation's four updates one is done: the resumed run must not sample anew.

    In the first update of a generation the ratios are exactly 1, in the others they are not.
    """
    settings = {
        "steps": 6, "iterations": 2, "steps_per_generation": 2, "prompts": 2, "beta": 0.1, "checkpoint_every": 1,
        "temperature": 0.7,
    }  # fmt: skip
    equal = []

    def watched(options, row, logprobs, only):
        size = len(row.places)
        equal.append(torch.equal(row.old_logprobs[:size], logprobs.detach()[:size]))
        return policy_loss(options, row, logprobs, only)

    monkeypatch.setattr(grpo, "policy_loss", watched)
    whole = train(config(**settings, output=tmp_path / "whole"))
    assert equal == [True, True, *[False] * 6, True, True, False, False]  # two rows a step

    def kill(self, model, step):
        if step == 6:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(grpo.GRPO, "finish_step", kill)
        train(config(**settings))
    monkeypatch.setattr(grpo.GRPO, "generate", lambda *_: pytest.fail("samples anew"))
    resumed = train(config_of_run(tmp_path / "run"))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    numbers = [[(x.get("loss"), x.get("kl"), x.get("validation_reward")) for x in r.metrics] for r in (whole, resumed)]
    assert numbers[0] == numbers[1] and numbers[0][0][1] == 0 < numbers[0][5][1] < 1
    texts = [(tmp_path / name / "completions.jsonl").read_bytes() for name in ("whole", "run")]
    assert (texts[0] == texts[1]) is True and len(texts[0].splitlines()) == 2 * 4 * 8


@pytest.fixture
def few(tmp_path):
    """Settings for data of 40 prompts, which are tokenised at once."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{n} plus {n} is"}) for n in range(40)))
    return {"data": (str(file),), "max_completion_length": 6, "prompts": 2, "generations": 4}


def test_a_default_limit_of_completions_is_what_the_longest_prompt_leaves(config, few, tmp_path):
    """The model has 128 positions, the default is 512; `length` counts to the limit that is chosen."""
    given = few | {"model": str(save_model(tmp_path / "model", ["one plus one is two"] * 9)), "reward": ("length",)}
    run = prepare(config(**given | {"max_completion_length": None}), World(torch.device("cpu")))
    data = run.objective.data
    longest = max(part.groups.longest_prompt for part in (data.training, data.validation))
    limit = 128 - longest
    assert run.config.max_completion_length == run.objective.policy.longest == limit
    line = f"--max-completion-length {limit}: 128 positions less the longest prompt"
    assert line in run.plan.chosen and f"chosen: {line}" in run.plan.notes
    reward = run.objective.rewards[0].function
    assert reward(completion_ids=[[0] * limit, [0] * (limit - limit // 5)]) == [-1.0, 0.0]
    with pytest.raises(InputError, match=r"--max-completion-length 128: leaves no room for a prompt in the 128"):
        prepare(config(**given | {"max_completion_length": 128}), World(torch.device("cpu")))
    with pytest.raises(InputError, match=r"dropped as too long; lower --max-completion-length"):
        prepare(config(**given | {"max_completion_length": 125}), World(torch.device("cpu")))


def test_the_weight_of_the_entropy_follows_its_target_and_is_in_the_checkpoint(config, few, tmp_path):
    """Nearly uniform over less than 1024 tokens, the entropy is below a target of 7: the weight rises from 0.

    TRL's rule: the first step applies none, each step that stays below the target adds 0.005.
    """
    settings = few | {"steps": 4, "entropy_target": 7.0, "checkpoint_every": 2}
    whole = train(config(**settings))
    steps = [record for record in whole.metrics if "entropy_coef" in record]
    assert [record["entropy_coef"] for record in steps] == pytest.approx([0.0, 0.005, 0.01, 0.015])
    assert all(5 < record["entropy"] < 7 and 0 < record["step_time"] < 60 for record in steps)
    above = train(config(**(settings | {"entropy_target": 0.1, "entropy_coef": 0.01}), output=tmp_path / "above"))
    assert [record["entropy_coef"] for record in above.metrics if "entropy_coef" in record] == [0.0] * 4

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.open() if "exported" not in line))
    resumed = train(config_of_run(tmp_path / "run"))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_whose_rewards_never_differ_warns_and_ends(config, few, monkeypatch, capsys, tmp_path):
    """With --keep-zero-spread it continues."""
    monkeypatch.setattr(judging, "USELESS_GENERATIONS", 2)
    settings = few | {"steps": 3, "learning_rate": 1e-3}
    with pytest.raises(InputError, match=r"2 generations in a row had no prompt .* \(mean reward 1\): nothing can be"):
        train(config("constant", **settings))
    assert "100% of the prompts got equal rewards for all completions" in capsys.readouterr().out
    found = train(config("constant", **settings, keep_zero_spread=True, output=tmp_path / "kept")).metrics
    assert [record["frac_reward_zero_std"] for record in found if "reward" in record] == [1.0] * 3


def test_pass_at_k_is_the_share_of_prompts_that_one_completion_solves(config, few):
    """Of five tokens one must be even: of two completions, one in a thousand fails."""
    found = train(config("solves", **few, steps=1, pass_at=2, eval_every=1, keep_zero_spread=True)).metrics
    (validation,) = [record for record in found if "validation_pass@2" in record]
    assert validation["validation_pass@2"] > 0.9
    table = torch.tensor([0.0, 1.0, 0.5, 0.9, torch.nan, 2.0], dtype=torch.float64)
    assert pass_fraction(table, 2) == pytest.approx(2 / 3) and pass_fraction(table, 3) == 1


def test_logits_that_are_not_finite_end_a_generation_with_one_line(config, few):
    run = prepare(config(**few, steps=1, eval_every=1), World(torch.device("cpu")))
    model, objective = run.model.to_empty(device="cpu"), run.objective
    model.initialize(0)
    model.model.norm.weight.data.fill_(torch.nan)
    prompts = objective.data.training.prompts(0, 2, objective.world)
    with pytest.raises(InputError, match="token 1 of a completion was sampled from logits that are NaN") as error:
        objective.sampler.sample(model, prompts, objective.sampling_plan(1.0))
    assert str(error.value).startswith(prompts[0].place) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"loss": ("ppo",)}, "--loss ppo: must be one of grpo, dapo, bnpo, dr_grpo, luspo, cispo, sapo, vespo, gmpo"),
        ({"loss": ("grpo", "dapo")}, "--loss grpo dapo: reinforcement learning has one loss"),
        ({"loss": ("cispo",), "delta": 2.0}, "--delta has no effect with --loss cispo: leave it out"),
        ({"delta": 1.1}, r"--delta 1.1: must be above 1 \+ --epsilon-high, 1.2"),
        ({"reference": "model"}, "--reference model goes with --beta, which is missing"),
        ({"beta": 0.1, "reference": "precomputed"}, "--reference precomputed: completions are sampled during the run"),
        ({"lora_rank": 4, "lora_dropout": 0.1}, "--lora-dropout 0.1: would change the probabilities"),
        ({"sampler_clip": 2.0}, "--sampler-clip goes with --sampler-correction, which is missing"),
        ({"sampler_clip_min": 0.5}, "--sampler-clip-min goes with --sampler-correction, which is missing"),
        (
            {"sampler_correction": "token_mask", "sampler_clip_min": 3.0},
            "--sampler-clip-min 3: must be below --sampler-clip, 3",
        ),
        ({"kl_correction": False}, "--kl-correction off goes with --beta, which is missing"),
        ({"loss": ("rloo",), "beta": 0.1, "kl_correction": False}, "--kl-correction off has no effect with --loss"),
        (
            {"loss": ("rloo",), "reward_aggregation": "normalize_then_sum"},
            "--reward-aggregation normalize_then_sum has no effect with --loss rloo: leave it out",
        ),
    ],
)
def test_options_without_effect_are_refused(config, changes, message):
    with pytest.raises(InputError, match=message):
        grpo.GRPO(config(**changes), World(torch.device("cpu")))


def test_a_reward_gets_none_where_a_prompt_lacks_a_column(config, tmp_path):
    """TRL passes None, be the column null or absent, also where no prompt of a step has it."""
    (tmp_path / "asks.py").write_text("def asks(completions, answer): return [float(a is not None) for a in answer]\n")
    lines = [{"prompt": f"{i} + 1 =", **({"answer": "1"} if i % 3 == 1 else {"answer": None} if i % 3 else {})}
             for i in range(12)]  # fmt: skip
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = train(
        config(data=(f"{tmp_path / 'sums.jsonl'}",), reward=(f"{tmp_path / 'asks.py'}:asks",), prompts=1, generations=2,
               steps=6, keep_zero_spread=True)
    ).metrics  # fmt: skip
    assert {record["reward"] for record in found if "reward" in record} == {0.0, 1.0}
