"""Reinforcement learning: a run that learns, its rollouts, and a resume between two updates of a generation."""

import json

import pytest
import torch

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig, train
from ligermodels.training.objectives import grpo
from ligermodels.training.reinforcement.policy import policy_loss
from ligermodels.training.runs.settings import config_of_run

REWARD = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

def first(prompts, completions, answer, log_extra, log_metric):
    log_extra("answer", answer)
    log_metric("asked", len(prompts))
    return [None] * len(prompts)

"""


@pytest.fixture
def config(tmp_path):
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


def test_random_weights_learn_a_preference_in_twenty_steps(config, tmp_path):
    """The share of even token ids rises from chance to 0.85."""
    found = train(config("even", "first=3", steps=20, learning_rate=1e-2)).metrics
    rewards = [record["reward"] for record in found if "reward" in record]
    assert len(rewards) == 20 and 0.4 < rewards[0] < 0.6
    assert sum(rewards[-3:]) / 3 >= 0.85
    first = found[0]
    assert first["rewards/even/mean"] == pytest.approx(rewards[0]) and first["asked"] == 32
    assert first["frac_reward_zero_std"] == 0 and first["completions/clipped_ratio"] == 1
    assert first["completions/mean_length"] == first["completions/max_length"] == 8
    assert first["clip_ratio/region_mean"] == 0 and abs(first["loss"]) < 1e-6  # the ratios are 1
    assert first["sampling/sampling_logp_difference/max"] < 1e-4
    assert 6 < first["entropy"] < 7  # nearly uniform over 1024 tokens
    assert 0.7 < first["tokens_saved"] < 0.8

    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 20 * 32 and lines[-1]["step"] == 20
    assert lines[0]["prompt"][-1]["role"] == "user" and lines[0]["tokens"] == 8 and lines[0]["rewards/first"] is None
    assert lines[0]["answer"].endswith(".")
    group = torch.tensor([line["rewards/even"] for line in lines[:8]], dtype=torch.float64)
    expected = (group - group.mean()) / (group.std() + 1e-4)
    torch.testing.assert_close(torch.tensor([line["advantage"] for line in lines[:8]]), expected.float())


class Killed(Exception):
    pass


def test_a_run_that_is_killed_between_two_updates_resumes_to_the_bit(config, tmp_path, monkeypatch):
    """Of the second generation's four updates one is done: the resumed run must not sample anew.

    In the first update of a generation the ratios are exactly 1, in the others they are not.
    """
    settings = {
        "steps": 6, "iterations": 2, "steps_per_generation": 2, "prompts": 2, "beta": 0.1, "checkpoint_every": 1,
        "temperature": 0.7,
    }  # fmt: skip
    equal = []

    def watched(options, row, found):
        size = len(row.places)
        equal.append(torch.equal(row.old_logprobs[:size], found.logprobs.detach()[:size]))
        return policy_loss(options, row, found)

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
    ],
)
def test_options_without_effect_are_refused(config, changes, message):
    with pytest.raises(InputError, match=message):
        grpo.GRPO(config(**changes), World(torch.device("cpu")))
