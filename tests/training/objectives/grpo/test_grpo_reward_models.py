"""A reward model judges the completions of a run: its scores are those that transformers reads of its folder."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import ligermodels
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig, plan, train
from ligermodels.training.data.run_tokenizer import save_tokenizer, train_tokenizer
from ligermodels.training.reward_function import RewardModelFunction
from tests.training.small_models import RAW

PROMPTS = [{"prompt": f"{n} plus {n} is"} for n in range(40)]


@pytest.fixture
def folder(tmp_path):
    tokenizer = train_tokenizer([record["prompt"] for record in PROMPTS], vocab_size=RAW["vocab_size"])
    for name, is_reward in (("base", False), ("judge", True)):
        model = ligermodels.create(RAW, seed=3, reward_model=is_reward)
        with torch.no_grad():
            if is_reward:
                model.score.weight.normal_(std=3.0, generator=torch.Generator().manual_seed(0))
        ligermodels.export(model, tmp_path / name, also=lambda path: save_tokenizer(tokenizer, path))
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return tmp_path


def settings(folder, *reward):
    return TrainConfig(
        model=str(folder / "base"), objective="grpo", data=(str(folder / "prompts.jsonl"),), prompts=2, generations=4,
        max_completion_length=6, steps=1, temperature=1.5, learning_rate=1e-3, eval_every=1, no_export=True,
        reward=reward, output=folder / "run",
    )  # fmt: skip


@torch.no_grad()
def test_completions_have_the_scores_that_transformers_reads(folder):
    with torch.enable_grad():
        found = train(settings(folder, f"model:{folder / 'judge'}=2", "length:1")).metrics
    lines = [json.loads(line) for line in (folder / "run/completions.jsonl").read_text().splitlines()]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "judge").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "judge")
    scores = []
    for line in lines:
        ids = [*tokenizer(line["prompt"] + line["completion"]).input_ids, tokenizer.eos_token_id]
        scores.append(model(torch.tensor([ids])).logits.item())
        assert line["rewards/judge"] == pytest.approx(scores[-1], abs=1e-4)
    assert len(lines) == 8 and max(scores) - min(scores) > 0.1
    assert found[1]["rewards/judge/mean"] == pytest.approx(sum(scores) / 8, abs=1e-4)
    lengths = sum(line["rewards/length"] for line in lines)
    assert found[1]["reward"] == pytest.approx((2 * sum(scores) + lengths) / 8, abs=1e-4)
    assert found[1]["grad_norm"] > 0


def test_an_empty_completion_has_the_score_of_its_end(folder):
    reward = RewardModelFunction.load(folder / "judge")
    (score,) = reward(["3 plus 3 is"], [""])
    ids = torch.tensor([[*reward.tokenizer.tokenizer.encode("3 plus 3 is"), 0]])
    assert score == pytest.approx(reward.model(ids).logits.item(), abs=1e-5)


def test_the_plan_counts_the_reward_model_and_a_language_model_is_refused(folder):
    alone, beside = (plan(settings(folder, *names)) for names in (["length"], ["length", f"model:{folder / 'judge'}"]))
    weights = 4 * sum(p.numel() for p in ligermodels.load(folder / "judge").parameters())
    assert beside.memory.beside - alone.memory.beside == weights
    assert beside.phases["train"] - alone.phases["train"] == weights and "reward" in beside.phases
    with pytest.raises(InputError, match=r"--reward model:.*base: is a language model; train a reward model"):
        plan(settings(folder, f"model:{folder / 'base'}"))
